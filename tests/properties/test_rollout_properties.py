"""Token in, token out over random conversations: only sampled tokens carry loss (T2, T13, T14)."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper.envs.core import Outcome
from freshper.policies.core import Reply
from freshper.policies.tiny import TinyPolicy, build_model, build_tokenizer
from freshper.rollout.collect import Limits, Start, collect
from freshper.trajectory import SamplingParams, StopReason

torch.set_num_threads(1)


@dataclass
class Story:
    """An environment that tells its texts and gives its rewards one after the other, and may break at the end."""

    texts: list
    rewards: list
    breaks: bool
    task: str = "story"
    instructions: str = "Listen."
    max_turns: int = 99

    def reset(self, seed):
        self.turn = 0
        return self.texts[0]

    def step(self, reply):
        reward = self.rewards[self.turn]
        self.turn += 1
        if self.turn < len(self.rewards):
            return Outcome(self.texts[self.turn], reward, False, False, True)
        if self.breaks:
            raise RuntimeError("the story breaks off")
        return Outcome("the end", reward, True, True, True)


@dataclass
class Recorder:
    """Wraps an engine and writes down, row by row and turn by turn, what it was shown and what it said."""

    policy: object
    heard: dict = field(default_factory=dict)
    shown: dict = field(default_factory=dict)

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def begin(self, count, sampling, seed):
        self.heard = {row: [] for row in range(count)}
        self.conversations = self.policy.begin(count, sampling, seed)
        return self

    def submit(self, row, prompt, max_tokens):
        self.shown[row] = list(prompt)
        self.conversations.submit(row, prompt, max_tokens)

    def finished(self):
        replies = self.conversations.finished()
        for row, reply in replies:
            self.heard[row].append((self.shown.pop(row), reply))
        return replies

    def close_row(self, row):
        self.conversations.close_row(row)


class Babbler:
    """Says random tokens, of which two spell the same text, with random log-probs; some rows at a time."""

    version = 4

    def encode_turn(self, observation, instructions, *, cut=False):
        return [*observation.encode(), 300 + cut]

    def decode(self, tokens):
        return "".join(chr(97 + token % 5) for token in tokens)

    def begin(self, count, sampling, seed):
        self.rng = np.random.default_rng(seed)
        self.waiting = {}
        return self

    def submit(self, row, prompt, max_tokens):
        self.waiting[row] = max_tokens

    def finished(self):
        rows = self.rng.permutation(list(self.waiting))[: self.rng.integers(0, len(self.waiting) + 1)].tolist()
        return [(row, self.say(self.waiting.pop(row))) for row in rows]

    def say(self, limit):
        n = self.rng.integers(1, limit + 1)
        logprobs = tuple((-self.rng.exponential(size=n)).tolist())
        return Reply(tuple(self.rng.integers(0, 10, n).tolist()), logprobs, cut=bool(n == limit))

    def close_row(self, row):
        assert row not in self.waiting


stories = st.lists(
    st.tuples(
        st.lists(st.tuples(st.text("ab \n<|end|>", max_size=12), st.floats(-1e3, 1e3)), min_size=1, max_size=6),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


def build(told):
    return [Story([text for text, _ in turns], [reward for _, reward in turns], breaks) for turns, breaks in told]


def play(envs, policy, seed, limits, sampling=None, **options):
    starts = [Start(row, f"g{row}") for row in range(len(envs))]
    return collect(envs, policy, starts, limits=limits, sampling=sampling or SamplingParams(), seed=seed, **options)


def check_record(trajectory, heard, env):
    """The trajectory against the notes of what was shown and said, from the definitions."""
    shown_and_said = [
        (token, said) for prompt, reply in heard for said, part in enumerate((prompt, reply.tokens)) for token in part
    ]
    assert trajectory.tokens.tolist() == [token for token, _ in shown_and_said]
    assert trajectory.response_mask.tolist() == [bool(said) for _, said in shown_and_said]
    logprobs = [value for prompt, reply in heard for value in ([0.0] * len(prompt) + list(reply.logprobs))]
    np.testing.assert_array_equal(trajectory.behavior_logprobs, np.array(logprobs, np.float32))
    position = 0
    for turn, (prompt, reply), reward in zip(trajectory.turns, heard, env.rewards, strict=False):
        assert turn.start == position
        assert turn.reply_start == position + len(prompt)
        assert turn.end == turn.reply_start + len(reply.tokens)
        assert turn.reward == reward
        position = turn.end
    assert position == len(trajectory)
    assert len(trajectory.turns) == len(heard)


@settings(max_examples=150, deadline=None)
@given(
    told=stories,
    seed=st.integers(0, 2**31),
    limits=st.builds(Limits, st.integers(1, 9), st.integers(1, 80), st.one_of(st.none(), st.integers(1, 6))),
    parallel=st.one_of(st.none(), st.integers(1, 6)),
)
def test_the_record_is_what_was_shown_and_said(told, seed, limits, parallel):
    envs, policy = build(told), Recorder(Babbler())
    rollout = play(envs, policy, seed, limits, parallel=parallel)
    whole = [
        row for row, transcript in enumerate(rollout.transcripts) if transcript.stop_reason is not StopReason.ERROR
    ]
    assert [trajectory.seed for trajectory in rollout.trajectories] == whole
    assert len(rollout.trajectories) + len(rollout.errors) == len(envs)
    for row, trajectory in zip(whole, rollout.trajectories, strict=True):
        check_record(trajectory, policy.heard[row], envs[row])
        assert len(trajectory) <= limits.max_episode_tokens
        assert len(trajectory.turns) <= (limits.max_turns or 99)
        assert all(turn.end - turn.reply_start <= limits.max_reply_tokens for turn in trajectory.turns)
        assert trajectory.policy_version == 4
        finished = len(trajectory.turns) == len(envs[row].rewards)
        assert (trajectory.stop_reason is StopReason.TERMINATED) == finished == trajectory.success
    for row, transcript in enumerate(rollout.transcripts):
        says = [policy.decode(reply.tokens) for _, reply in policy.heard[row]]
        assert [turn.reply for turn in transcript.turns] == says[: len(transcript.turns)]
        assert [turn.reward for turn in transcript.turns] == envs[row].rewards[: len(transcript.turns)]


@pytest.fixture(scope="module")
def tiny():
    tokenizer = build_tokenizer(["####\n#P_#\n#_O#\n####", "<answer> Left </answer>"])
    size = {"hidden_size": 32, "layers": 2, "heads": 2, "context": 256}
    return TinyPolicy(build_model(tokenizer.get_vocab_size(), **size, seed=0), tokenizer)


LIMITS = Limits(max_reply_tokens=8, max_episode_tokens=200)


def tell():
    rng = np.random.default_rng(0)
    words = ["####", "#P_#", "#_O#", "Left", "new!"]
    lengths = rng.integers(1, 7, 12)
    return [
        Story([" ".join(rng.choice(words, 1 + k % 4)) for k in range(n)], rng.normal(size=n).tolist(), False)
        for n in lengths
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_embedded_policy_is_recorded_as_it_sampled(tiny, temperature):
    envs, policy = tell(), Recorder(tiny)
    rollout = play(envs, policy, 3, LIMITS, SamplingParams(temperature=temperature))
    retokenized = 0
    for row, trajectory in enumerate(rollout.trajectories):
        check_record(trajectory, policy.heard[row], envs[row])
        for _, reply in policy.heard[row]:
            assert all(-20 < value < 0 for value in reply.logprobs)
            retokenized += tiny.encode_reply(tiny.decode(reply.tokens)) != list(reply.tokens)
    assert len(rollout.trajectories) == len(envs)
    assert retokenized > len(envs)  # reading the text again would have given other tokens


def everything(rollout):
    return [
        (t.tokens.tolist(), t.response_mask.tolist(), t.behavior_logprobs.tolist(), t.turns, t.stop_reason)
        for t in rollout.trajectories
    ]


def test_the_seed_decides_the_whole_rollout(tiny):
    one, again, other = (play(tell(), tiny, seed, LIMITS) for seed in (1, 1, 2))
    assert everything(one) == everything(again)
    assert one.transcripts == again.transcripts
    assert everything(one) != everything(other)
