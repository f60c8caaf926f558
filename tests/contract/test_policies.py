"""Every policy engine keeps the contract, and check_policy catches one broken engine per clause."""

from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest
import torch

from freshper.errors import PolicyError
from freshper.policies.core import Reply, check_policy
from freshper.policies.engines import conversations_for
from freshper.policies.reencode import ReencodingConversations
from freshper.policies.scripted import ScriptedPolicy
from freshper.policies.slots import SlotConversations
from freshper.policies.tiny import TinyPolicy, build_model, build_tokenizer

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny():
    tokenizer = build_tokenizer(["####\n#P_#\n#_O#\n####", "<answer> Left </answer>"])
    size = {"hidden_size": 32, "layers": 2, "heads": 2, "context": 128}
    return TinyPolicy(build_model(tokenizer.get_vocab_size(), **size, seed=0), tokenizer)


@pytest.mark.parametrize("max_tokens", [1, 2, 6, 20])
def test_embedded_policy(tiny, max_tokens):
    check_policy(tiny, tiny.encode_turn("#P_#\n#_O#", None), max_tokens)
    assert tiny.version == 0


class WithEngine:
    """The embedded policy, sampled by another engine."""

    def __init__(self, policy, build):
        self.policy, self.build = policy, build

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def begin(self, count, sampling, seed):
        model, end = self.policy.model, self.policy.encode_reply("")
        return self.build(model, end, count, sampling, seed=seed, max_positions=128, slots=2)


ENGINES = {
    "slots": SlotConversations,
    "reading again": ReencodingConversations,
    "reading again by length": partial(ReencodingConversations, padded=False),
    "chosen": conversations_for,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("max_tokens", [1, 2, 20])
def test_every_engine(tiny, engine, max_tokens):
    check_policy(WithEngine(tiny, ENGINES[engine]), tiny.encode_turn("#P_#\n#_O#", None), max_tokens)


def test_scripted_policy():
    policy = ScriptedPolicy(lambda observation: observation[::-1])
    check_policy(policy, policy.encode_turn("hello", "instructions"))
    assert policy.version == 0


class Sound:
    """An engine that samples from ten tokens: the contract in its shortest form. Broken ones change one method."""

    version = 0
    temperatures: ClassVar = set()

    def encode_turn(self, observation, instructions, *, cut=False):
        return [1, 2]

    def decode(self, tokens):
        return " ".join(map(str, tokens))

    def begin(self, count, sampling, seed):
        self.sampling = sampling
        self.temperatures.add(sampling.temperature)
        self.generator = torch.Generator().manual_seed(seed)
        self.waiting, self.closed = {}, set()
        return self

    def token(self):
        return int(torch.randint(10, (1,), generator=self.generator)) if self.sampling.temperature else 3

    def one(self, limit):
        tokens = tuple(self.token() for _ in range(limit))
        return Reply(tokens, tuple(-2.3 if self.sampling.temperature else 0.0 for _ in tokens), cut=True)

    def submit(self, row, prompt, max_tokens):
        if row in self.waiting or row in self.closed:
            raise PolicyError("no")
        self.waiting[row] = max_tokens

    def finished(self):
        """One row at a time, the last first."""
        if not self.waiting:
            return []
        row, limit = self.waiting.popitem()
        return [(row, self.one(limit))]

    def close_row(self, row):
        self.closed.add(row)

    def publish(self, model, version):
        self.version = version


class Unseeded(Sound):
    count = 0

    def token(self):
        Unseeded.count += 1
        return Unseeded.count


class SampledGreedily(Sound):
    def token(self):
        return int(torch.randint(10, (1,), generator=self.generator))


class Silent(Sound):
    def one(self, limit):
        return Reply((), ())


class Talkative(Sound):
    def one(self, limit):
        return super().one(limit + 1)


class OneLimitForAll(Sound):
    """The longest limit that was ever asked for counts for every row."""

    longest = 0

    def one(self, limit):
        self.longest = max(self.longest, limit)
        return super().one(self.longest)


class CutShort(Sound):
    """Says that the limit ended a reply that had room left."""

    def one(self, limit):
        return replace(super().one(max(1, limit - 1)), cut=True)


class NoLogprobs(Sound):
    def one(self, limit):
        return replace(super().one(limit), logprobs=())


class WithLogprob(Sound):
    def one(self, limit):
        tokens = super().one(limit).tokens
        return Reply(tokens, (self.logprob,) * len(tokens))


class Probabilities(WithLogprob):
    logprob = 0.1


class NotANumber(WithLogprob):
    logprob = float("nan")


class Impossible(WithLogprob):
    logprob = float("-inf")


class Deserter(Sound):
    """Never answers row 2."""

    def submit(self, row, prompt, max_tokens):
        super().submit(row, prompt, max_tokens)
        if row == 2:
            del self.waiting[row]


class Echo(Sound):
    """Answers every row twice."""

    def finished(self):
        return super().finished() * 2


class Intruder(Sound):
    """A row that has left answers with the others."""

    def finished(self):
        return [*super().finished(), *((row, self.one(1)) for row in self.closed)]


class ClosedIsOpen(Sound):
    def close_row(self, row):
        pass


class WaitingIsFree(Sound):
    def submit(self, row, prompt, max_tokens):
        if row in self.closed:
            raise PolicyError("no")
        self.waiting[row] = max_tokens


class Mute(Sound):
    def decode(self, tokens):
        return None


BROKEN = {
    Unseeded: "same seed",
    SampledGreedily: "greedy",
    Silent: "holds 0 tokens",
    Talkative: "holds 7 tokens: it must be 1 to 6",
    OneLimitForAll: "holds 6 tokens: it must be 1 to 1",
    CutShort: "a reply of 5 tokens says that a limit of 6 cut it",
    NoLogprobs: "6 tokens and 0 log-probs",
    Probabilities: "at most 0",
    NotANumber: "finite",
    Impossible: "finite",
    Deserter: r"no reply came for rows \[2\]",
    Echo: "row 2, which did not ask",
    Intruder: "row 1, which did not ask",
    ClosedIsOpen: "row 1 is closed, and a prompt",
    WaitingIsFree: "row 0 still waits for a reply, and a prompt",
    Mute: "must return text",
}


def test_a_sound_engine_passes():
    policy = Sound()
    check_policy(policy, policy.encode_turn("hello", None))
    assert policy.temperatures == {0.0, 1.0}


@pytest.mark.parametrize("engine", BROKEN, ids=lambda engine: engine.__name__)
def test_a_broken_engine_is_named(engine):
    with pytest.raises(PolicyError, match=BROKEN[engine]):
        check_policy(engine(), [1, 2])
