"""More episodes than run at once, replies in any order, environments in threads: the result stays the same."""

import threading

import numpy as np
import pytest

from freshper.envs.core import Outcome
from freshper.errors import ConfigError, PolicyError
from freshper.policies.core import Reply
from freshper.policies.scripted import ScriptedPolicy
from freshper.rollout.collect import Limits, Start, collect
from freshper.trajectory import SamplingParams, StopReason

LIMITS = Limits(max_reply_tokens=9, max_episode_tokens=1000)


class Counting:
    """Ends after ``length`` replies; notes in a shared log when it begins and ends."""

    task = "counting"
    instructions = "Count."
    max_turns = 99

    def __init__(self, name, length, log):
        self.name, self.length, self.log = name, length, log

    def reset(self, seed):
        self.log.append(("begin", self.name))
        self.turn = 0
        return f"{self.name}0"

    def step(self, reply):
        self.turn += 1
        done = self.turn == self.length
        if done:
            self.log.append(("end", self.name))
        return Outcome(f"{self.name}{self.turn} {reply}", float(self.turn), done, done, True)


class Shuffled(ScriptedPolicy):
    """Answers some of the waiting rows, in random order; its replies depend on the prompt alone."""

    def __init__(self, seed):
        super().__init__(lambda observation: observation[:3])
        self.rng = np.random.default_rng(seed)
        self.most = 0

    def begin(self, count, sampling, seed):
        self.waiting = {}
        return self

    def submit(self, row, prompt, max_tokens):
        self.waiting[row] = (prompt, max_tokens)
        self.most = max(self.most, len(self.waiting))

    def finished(self):
        rows = self.rng.permutation(list(self.waiting))[: self.rng.integers(0, 3)].tolist()
        replies = []
        for row in rows:
            tokens = self._reply(*self.waiting.pop(row))
            replies.append((row, Reply(tokens, (0.0,) * len(tokens))))
        return replies

    def close_row(self, row):
        assert row not in self.waiting


LENGTHS = [2, 5, 1, 3, 4, 1, 2]


def play(policy, log, lengths=LENGTHS, **options):
    envs = [Counting("abcdefg"[row], length, log) for row, length in enumerate(lengths)]
    starts = [Start(row, f"g{row}") for row in range(len(envs))]
    return collect(envs, policy, starts, limits=LIMITS, sampling=SamplingParams(), seed=0, **options)


def everything(rollout):
    return [
        (t.tokens.tolist(), t.response_mask.tolist(), t.turns, t.group, t.seed, t.stop_reason)
        for t in rollout.trajectories
    ]


def running(log):
    """Most episodes that ran at once."""
    return max(np.cumsum([1 if kind == "begin" else -1 for kind, _ in log]))


@pytest.mark.parametrize("parallel", [1, 2, 3, 7, 100, None])
@pytest.mark.parametrize("seed", range(3))
def test_neither_the_order_of_replies_nor_the_number_at_once_changes_the_result(parallel, seed):
    log, plain = [], []
    policy = Shuffled(seed)
    rollout = play(policy, log, parallel=parallel)
    assert everything(rollout) == everything(play(ScriptedPolicy(lambda observation: observation[:3]), plain))
    assert [t.group for t in rollout.trajectories] == [f"g{row}" for row in range(7)]
    assert [name for kind, name in log if kind == "begin"] == list("abcdefg")
    bound = min(parallel or 7, 7)
    assert running(log) == policy.most == bound


def test_as_one_ends_the_next_begins():
    log = []
    play(ScriptedPolicy(str.upper), log, lengths=[9, 1, 1, 1], parallel=2)
    order = [("begin", "a"), ("begin", "b"), ("end", "b"), ("begin", "c"), ("end", "c"), ("begin", "d")]
    assert log[:6] == order


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_environments_in_threads_give_the_same(threads):
    log = []
    rollout = play(Shuffled(0), log, parallel=4, env_threads=threads)
    assert everything(rollout) == everything(play(Shuffled(0), []))
    assert running(log) <= 4


def test_sampling_goes_on_while_an_environment_thinks():
    """The environment of row 0 answers its first reply only when row 1 has played to its end."""
    over = threading.Event()

    class Slow(Counting):
        def step(self, reply):
            assert over.wait(30)
            return super().step(reply)

    class Quick(Counting):
        def step(self, reply):
            outcome = super().step(reply)
            if outcome.done:
                over.set()
            return outcome

    envs = [Slow("a", 2, []), Quick("b", 5, [])]
    starts = [Start(0, "g"), Start(1, "g")]
    options = {"limits": LIMITS, "sampling": SamplingParams(), "seed": 0, "env_threads": 2}
    rollout = collect(envs, ScriptedPolicy(str.upper), starts, **options)
    assert [len(t.turns) for t in rollout.trajectories] == [2, 5]


@pytest.mark.parametrize("threads", [0, 2])
def test_a_failing_environment_makes_room_for_the_next(threads):
    class Failing(Counting):
        def step(self, reply):
            raise ValueError("broken")

    log = []
    envs = [Failing("a", 1, log), Counting("b", 2, log), Failing("c", 1, log), Counting("d", 1, log)]
    starts = [Start(row, f"g{row}") for row in range(4)]
    options = {"limits": LIMITS, "sampling": SamplingParams(), "seed": 0, "parallel": 1, "env_threads": threads}
    rollout = collect(envs, ScriptedPolicy(str.upper), starts, **options)
    ends = [StopReason.ERROR, StopReason.TERMINATED] * 2
    assert [t.stop_reason for t in rollout.transcripts] == ends
    assert [t.group for t in rollout.trajectories] == ["g1", "g3"]
    assert rollout.errors[0].error == "ValueError: broken"


def test_a_request_to_stop_comes_out_of_a_thread():
    class Stopping(Counting):
        def step(self, reply):
            raise KeyboardInterrupt

    envs, starts = [Stopping("a", 1, [])], [Start(0, "g")]
    with pytest.raises(KeyboardInterrupt):
        collect(
            envs, ScriptedPolicy(str.upper), starts, limits=LIMITS, sampling=SamplingParams(), seed=0, env_threads=1
        )


def test_a_policy_hears_that_a_limit_cut_the_reply():
    """Replies of 3 bytes and an end are cut at 3 tokens, those of 2 bytes are whole."""
    told = []

    class Told(ScriptedPolicy):
        def encode_turn(self, observation, instructions, *, cut=False):
            told.append((observation, cut))
            return super().encode_turn(observation, instructions)

    policy = Told(lambda observation: "long" if observation.startswith("a0") else "ok")
    limits = Limits(max_reply_tokens=3, max_episode_tokens=1000)
    options = {"limits": limits, "sampling": SamplingParams(), "seed": 0}
    collect([Counting("a", 3, [])], policy, [Start(0, "g")], **options)
    assert told == [("a0", False), ("a1 lon", True), ("a2 ok", False)]


@pytest.mark.parametrize("bad", [{"parallel": 0}, {"parallel": -1}, {"env_threads": -1}])
def test_wrong_numbers_are_refused(bad):
    [(name, value)] = bad.items()
    log = []
    with pytest.raises(ConfigError, match=f"{name} {value} must be at least"):
        play(ScriptedPolicy(str.upper), log, **bad)
    assert log == []


def test_a_reply_that_nobody_asked_for_stops_the_run():
    class Confused(Shuffled):
        def finished(self):
            return [(6, Reply((1,), (0.0,)))]

    with pytest.raises(PolicyError, match="row 6, which did not ask"):
        play(Confused(0), [], parallel=2)
