"""Collection: who plays how long, why an episode ends, and what is recorded of it."""

import numpy as np
import pytest

from freshper.envs.core import Outcome
from freshper.errors import ConfigError, PolicyError
from freshper.policies.core import Reply
from freshper.policies.scripted import ScriptedPolicy
from freshper.rollout.collect import Limits, Start, collect
from freshper.trajectory import SamplingParams, StopReason, Turn

END = 256
WIDE = Limits(max_reply_tokens=50, max_episode_tokens=10_000)


class Countdown:
    """Ends after ``length`` replies; turn k is shown as "k" and rewarded with k + 0.5. The first reply may be wrong."""

    task = "countdown"
    instructions = "Count."
    max_turns = 99

    def __init__(self, length=3, pad=""):
        self.length, self.pad, self.seeds, self.heard = length, pad, [], []

    def reset(self, seed):
        self.seeds.append(seed)
        self.turn = 0
        return f"0{self.pad}"

    def step(self, reply):
        self.heard.append(reply)
        self.turn += 1
        done = self.turn == self.length
        return Outcome(f"{self.turn}{self.pad}", self.turn - 0.5, done, done and self.length % 2 == 1, reply != "?")


class Listening(ScriptedPolicy):
    """Notes which rows spoke in each turn, how much room each reply had, and which rows were closed."""

    def __init__(self, answer=lambda observation: "ok", version=0):
        super().__init__(answer, version)
        self.rows, self.rooms, self.opened, self.told, self.closed = [], [], [], [], []

    def encode_turn(self, observation, instructions, *, cut=False):
        self.told.append((instructions, cut))
        return super().encode_turn(observation, instructions)

    def begin(self, count, sampling, seed):
        self.opened.append((count, sampling, seed))
        self.asked = {}
        self.conversations = super().begin(count, sampling, seed)
        return self

    def submit(self, row, prompt, max_tokens):
        self.asked[row] = max_tokens
        self.conversations.submit(row, prompt, max_tokens)

    def finished(self):
        self.rows.append(list(self.asked))
        self.rooms.append(list(self.asked.values()))
        self.asked = {}
        return self.conversations.finished()

    def close_row(self, row):
        self.closed.append(row)
        self.conversations.close_row(row)


def play(envs, policy=None, limits=WIDE, sampling=SamplingParams(), seed=0, **options):  # noqa: B008 - frozen
    starts = [Start(100 + row, f"g{row}") for row in range(len(envs))]
    return collect(envs, policy or Listening(), starts, limits=limits, sampling=sampling, seed=seed, **options)


def test_episodes_of_different_lengths_leave_one_by_one():
    policy = Listening()
    lengths = [2, 4, 1, 3]
    rollout = play([Countdown(length) for length in lengths], policy)
    assert policy.rows == [[0, 1, 2, 3], [0, 1, 3], [1, 3], [1]]
    assert policy.closed == [2, 0, 3, 1]
    assert [len(t.turns) for t in rollout.trajectories] == lengths
    assert [t.stop_reason for t in rollout.trajectories] == [StopReason.TERMINATED] * 4
    assert [t.success for t in rollout.trajectories] == [False, False, True, True]
    assert rollout.errors == ()


def test_everything_stands_where_it_was_said():
    policy = Listening(lambda observation: observation * 2, version=6)
    sampling = SamplingParams(temperature=0.7, top_p=0.9)
    rollout = play([Countdown(2)], policy, sampling=sampling, seed=11)
    [trajectory] = rollout.trajectories
    zero, one = b"01"
    assert trajectory.tokens.tolist() == [zero, END, zero, zero, END, one, END, one, one, END]
    assert trajectory.response_mask.tolist() == [False, False, True, True, True] * 2
    assert trajectory.behavior_logprobs.tolist() == [0.0] * 10
    assert trajectory.turns == (Turn(0, 2, 5, 0.5), Turn(5, 7, 10, 1.5))
    assert (trajectory.task, trajectory.group, trajectory.seed) == ("countdown", "g0", 100)
    assert trajectory.policy_version == 6
    assert trajectory.sampling == sampling
    assert policy.opened == [(1, sampling, 11)]
    assert policy.told == [("Count.", False), (None, False)]
    [transcript] = rollout.transcripts
    assert [(turn.observation, turn.reply, turn.reward, turn.valid) for turn in transcript.turns] == [
        ("0", "00", 0.5, True),
        ("1", "11", 1.5, True),
    ]
    assert (transcript.final_observation, transcript.success, transcript.error) == ("2", False, None)
    assert transcript.episode_return == trajectory.episode_return == 2.0


def test_each_environment_plays_its_own_start_and_hears_its_own_reply():
    envs = [Countdown(2), Countdown(1), Countdown(9)]
    policy = Listening(lambda observation: "?" if observation == "0" else observation)
    starts = [Start(5, "a"), Start(6, "a")]
    rollout = collect(envs, policy, starts, limits=WIDE, sampling=SamplingParams(), seed=0)
    assert [env.seeds for env in envs] == [[5], [6], []]
    assert [env.heard for env in envs] == [["?", "1"], ["?"], []]
    assert [t.group for t in rollout.trajectories] == ["a", "a"]
    assert [turn.valid for turn in rollout.transcripts[0].turns] == [False, True]


def test_the_version_is_that_of_the_first_turn():
    policy = Listening(version=3)

    class Publishing(Countdown):
        def step(self, reply):
            policy.publish(None, policy.version + 1)
            return super().step(reply)

    [trajectory] = play([Publishing(3)], policy).trajectories
    assert trajectory.policy_version == 3
    assert policy.version == 6


@pytest.mark.parametrize(("max_turns", "turns"), [(1, 1), (2, 2), (3, 3), (4, 3), (None, 3)])
def test_the_limit_on_turns(max_turns, turns):
    [trajectory] = play([Countdown(3)], limits=Limits(9, 999, max_turns)).trajectories
    assert len(trajectory.turns) == turns
    reason = StopReason.TERMINATED if turns == 3 else StopReason.TURN_LIMIT
    assert trajectory.stop_reason is reason
    assert trajectory.success == (turns == 3)


def test_an_episode_cut_by_the_turn_limit_still_shows_its_last_observation():
    [transcript] = play([Countdown(3)], limits=Limits(9, 999, 2)).transcripts
    assert transcript.final_observation == "2"
    assert transcript.stop_reason is StopReason.TURN_LIMIT


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_the_limit_on_reply_tokens(limit):
    """The reply "ok" and its end are three tokens."""
    [trajectory] = play([Countdown(2)], limits=Limits(limit, 999)).trajectories
    assert [turn.end - turn.reply_start for turn in trajectory.turns] == [min(limit, 3)] * 2


def test_the_limit_on_episode_tokens():
    """A turn takes five tokens: two are shown, three are said. The last reply gets the room that is left."""
    for limit in range(3, 25):
        policy = Listening()
        [trajectory] = play([Countdown(4)], policy, Limits(9, limit)).trajectories
        assert len(trajectory) <= limit
        whole, rest = divmod(limit, 5)
        turns = min(4, whole + (rest >= 3))
        assert len(trajectory.turns) == turns
        reason = StopReason.TERMINATED if turns == 4 else StopReason.TOKEN_LIMIT
        assert trajectory.stop_reason is reason
        assert [room for [room] in policy.rooms] == [min(9, limit - 5 * turn - 2) for turn in range(turns)]


def test_a_first_turn_without_room_is_an_error_that_names_the_limit():
    rollout = play([Countdown(3, pad="x" * 20), Countdown(1)], limits=Limits(9, 22))
    assert rollout.transcripts[0].error == "ConfigError: the first turn has 22 tokens, max_episode_tokens is 22"
    assert len(rollout.trajectories) == 1
    assert len(rollout.errors) == 1


def test_a_reply_may_be_cut_in_the_middle_of_a_character():
    [trajectory] = play([Countdown(1)], Listening(lambda observation: "\u20ac"), Limits(2, 99)).trajectories
    assert trajectory.response_length == 2


def test_the_number_of_episodes_is_checked():
    for count, available in ((0, 2), (3, 2)):
        starts = [Start(0, "g")] * count
        with pytest.raises(ConfigError, match=f"{count} episodes"):
            collect(
                [Countdown() for _ in range(available)],
                Listening(),
                starts,
                limits=WIDE,
                sampling=SamplingParams(),
                seed=0,
            )


def test_one_environment_cannot_play_two_episodes():
    env = Countdown()
    with pytest.raises(ConfigError, match="share an environment"):
        play([env, Countdown(), env])
    assert env.seeds == []


@pytest.mark.parametrize("bad", [{"max_reply_tokens": 0}, {"max_episode_tokens": -1}, {"max_turns": 0}])
def test_limits_are_at_least_one(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Limits(**({"max_reply_tokens": 1, "max_episode_tokens": 1} | bad))


BAD_REPLIES = {
    "nothing": Reply((), ()),
    "too much": Reply((1,) * 51, (0.0,) * 51),
    "too few log-probs": Reply((1, 2), (0.0,)),
}


@pytest.mark.parametrize("case", BAD_REPLIES)
def test_a_policy_that_breaks_its_contract_stops_the_run(case):
    class Broken(Listening):
        def finished(self):
            return [(row, BAD_REPLIES[case]) for row, _ in super().finished()]

    with pytest.raises(PolicyError, match="a reply has"):
        play([Countdown()], Broken())


def test_a_failing_policy_is_no_environment_error():
    class Broken(Listening):
        def encode_turn(self, observation, instructions, *, cut=False):
            raise MemoryError("tokenizer")

    with pytest.raises(MemoryError):
        play([Countdown()], Broken())


def test_logprobs_are_recorded_as_they_were_sampled():
    class Unsure(Listening):
        def finished(self):
            return [
                (row, Reply(r.tokens, tuple(-0.1 * (k + 1) for k in range(len(r.tokens)))))
                for row, r in super().finished()
            ]

    [trajectory] = play([Countdown(2)], Unsure()).trajectories
    want = np.array([0, 0, -0.1, -0.2, -0.3] * 2, np.float32)
    np.testing.assert_array_equal(trajectory.behavior_logprobs, want)
