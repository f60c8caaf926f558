"""What a policy engine is: it turns observations into tokens, samples replies, and reports their log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from freshper.errors import PolicyError
from freshper.trajectory import SamplingParams

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Reply:
    """Sampled tokens, with the log-probs (nats) of the distribution that each was sampled from."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Conversations(Protocol):
    """A batch of running conversations, one row each, that move forward together."""

    def reply(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[Reply]:
        """Append ``prompts[k]`` to conversation ``rows[k]`` and sample a reply of 1 to ``max_tokens[k]`` tokens.

        ``rows`` is ascending. A row that is left out has ended: it must not come back.
        """
        ...


class Policy(Protocol):
    """An engine that speaks: token in, token out."""

    @property
    def version(self) -> int:
        """Policy version of the weights it samples with: optimizer updates applied."""
        ...

    def encode_turn(self, observation: str, instructions: str | None) -> list[int]:
        """Tokens of one user message up to where the reply begins; ``instructions`` only in the first turn."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of reply tokens, without the end-of-turn token."""
        ...

    def begin(self, count: int, sampling: SamplingParams, seed: int) -> Conversations:
        """Open ``count`` empty conversations whose sampling is decided by ``seed`` alone."""
        ...

    def publish(self, model: nn.Module, version: int) -> None:
        """Sample with the weights of ``model`` from now on."""
        ...


def check_policy(policy: Policy, prompt: Sequence[int], max_tokens: int = 6) -> None:
    """Raise :class:`PolicyError` naming the first rule of the contract that ``policy`` breaks.

    ``prompt`` is any encoded turn. Checked: one reply per row, of 1 to that row's own limit of tokens, with one
    finite log-prob each, at most 0; replies decode to text; rows may leave the batch; the same seed gives the same
    replies; greedy replies repeat whatever the seed.
    """
    sampled = SamplingParams()
    first = _two_turns(policy, prompt, max_tokens, sampled, seed=1)
    for reply, limit in first:
        _check_reply(policy, reply, limit)
    if first != _two_turns(policy, prompt, max_tokens, sampled, seed=1):
        raise PolicyError("the same seed gave different replies: sampling must depend on the seed alone")
    greedy = SamplingParams(temperature=0.0)
    replies = _two_turns(policy, prompt, max_tokens, greedy, seed=1)
    if replies != _two_turns(policy, prompt, max_tokens, greedy, seed=2):
        raise PolicyError("greedy replies depend on the seed")


def _two_turns(
    policy: Policy, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams, seed: int
) -> list[tuple[Reply, int]]:
    """Three conversations for a turn, then the outer two for another: every reply and its limit."""
    conversations = policy.begin(3, sampling, seed)
    replies: list[tuple[Reply, int]] = []
    for rows, limits in (([0, 1, 2], [max_tokens, 1, max_tokens]), ([0, 2], [1, max_tokens])):
        turn = conversations.reply(rows, [prompt] * len(rows), limits)
        if len(turn) != len(rows):
            raise PolicyError(f"{len(turn)} replies came for {len(rows)} rows")
        replies += zip(turn, limits, strict=True)
    return replies


def _check_reply(policy: Policy, reply: Reply, limit: int) -> None:
    if not 1 <= len(reply.tokens) <= limit:
        raise PolicyError(f"a reply holds {len(reply.tokens)} tokens: it must be 1 to {limit}")
    if len(reply.logprobs) != len(reply.tokens):
        raise PolicyError(f"a reply has {len(reply.tokens)} tokens and {len(reply.logprobs)} log-probs")
    if not all(math.isfinite(value) and value <= 1e-4 for value in reply.logprobs):
        raise PolicyError(f"log-probs {reply.logprobs} are not all finite and at most 0")
    text = policy.decode(reply.tokens)
    if not isinstance(text, str):
        raise PolicyError(f"decode() returned {text!r}: it must return text")
