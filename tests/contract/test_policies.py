"""Every policy engine keeps the contract, and check_policy catches one broken engine per clause."""

import pytest
import torch

from freshper.errors import PolicyError
from freshper.policies.core import Reply, check_policy
from freshper.policies.scripted import ScriptedPolicy
from freshper.policies.tiny import TinyPolicy, build_model, build_tokenizer
from freshper.trajectory import SamplingParams

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


def test_scripted_policy():
    policy = ScriptedPolicy(lambda observation: observation[::-1])
    check_policy(policy, policy.encode_turn("hello", "instructions"))
    assert policy.version == 0


class Sound:
    """An engine that samples from ten tokens: the contract in its shortest form. Broken ones change one method."""

    version = 0

    def encode_turn(self, observation, instructions):
        return [1, 2]

    def decode(self, tokens):
        return " ".join(map(str, tokens))

    def begin(self, count, sampling, seed):
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(seed)
        return self

    def token(self):
        return int(torch.randint(10, (1,), generator=self.generator)) if self.sampling.temperature else 3

    def one(self, limit):
        tokens = tuple(self.token() for _ in range(limit))
        return Reply(tokens, tuple(-2.3 if self.sampling.temperature else 0.0 for _ in tokens))

    def reply(self, rows, prompts, max_tokens):
        return [self.one(limit) for limit in max_tokens]

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
    """The longest limit of the batch counts for every row."""

    def reply(self, rows, prompts, max_tokens):
        return [self.one(max(max_tokens)) for _ in rows]


class NoLogprobs(Sound):
    def one(self, limit):
        return Reply(super().one(limit).tokens, ())


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
    """Drops the last row."""

    def reply(self, rows, prompts, max_tokens):
        return super().reply(rows, prompts, max_tokens)[:-1]


class RowsNeverLeave(Sound):
    def begin(self, count, sampling, seed):
        self.count = count
        return super().begin(count, sampling, seed)

    def reply(self, rows, prompts, max_tokens):
        return [self.one(1) for _ in range(self.count)]


class Mute(Sound):
    def decode(self, tokens):
        return None


BROKEN = {
    Unseeded: "same seed",
    SampledGreedily: "greedy",
    Silent: "holds 0 tokens",
    Talkative: "holds 7 tokens: it must be 1 to 6",
    OneLimitForAll: "holds 6 tokens: it must be 1 to 1",
    NoLogprobs: "6 tokens and 0 log-probs",
    Probabilities: "at most 0",
    NotANumber: "finite",
    Impossible: "finite",
    Deserter: "2 replies came for 3 rows",
    RowsNeverLeave: "3 replies came for 2 rows",
    Mute: "must return text",
}


def test_a_sound_engine_passes():
    policy = Sound()
    check_policy(policy, policy.encode_turn("hello", None))
    assert policy.sampling == SamplingParams(temperature=0.0)


@pytest.mark.parametrize("engine", BROKEN, ids=lambda engine: engine.__name__)
def test_a_broken_engine_is_named(engine):
    with pytest.raises(PolicyError, match=BROKEN[engine]):
        check_policy(engine(), [1, 2])
