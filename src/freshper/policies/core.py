"""What a policy engine is: it turns observations into tokens, samples replies, and reports their log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from freshper.errors import PolicyError
from freshper.trajectory import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Reply:
    """Sampled tokens, with the log-probs (nats) of the distribution that each was sampled from.

    ``cut`` says that the limit ended the reply: its last token is no end token.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cut: bool = False


class Conversations(Protocol):
    """Running conversations, one row each. A row that has its reply is given the next prompt, or closed.

    An engine may answer row by row, as replies end, or all rows at once.
    """

    def submit(self, row: int, prompt: Sequence[int], max_tokens: int) -> None:
        """Append ``prompt`` to conversation ``row`` and ask for a reply of 1 to ``max_tokens`` tokens.

        Raises :class:`PolicyError`, and changes nothing, when the row still waits for a reply, is closed or never
        was, when the prompt is empty, or when the conversation would outgrow the model.
        """
        ...

    def finished(self) -> list[tuple[int, Reply]]:
        """Sample on, and return the replies that have ended, with their rows.

        Every call moves the rows that wait for a reply forward by at least a token of one of them; the list may
        be empty. When no row waits nothing happens.
        """
        ...

    def close_row(self, row: int) -> None:
        """The conversation of ``row`` has ended: what is kept for it may go. It must not wait for a reply."""
        ...


class Policy(Protocol):
    """An engine that speaks: token in, token out."""

    @property
    def version(self) -> int:
        """Policy version of the weights it samples with: optimizer updates applied."""
        ...

    def encode_turn(self, observation: str, instructions: str | None, *, cut: bool = False) -> list[int]:
        """Tokens of one user message up to where the reply begins; ``instructions`` only in the first turn.

        ``cut`` says that the reply before was ended by a limit: its end-of-turn token is still missing.
        """
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


class SeeingConversations(Conversations, Protocol):
    """Conversations whose prompts show pictures."""

    def submit(self, row: int, prompt: Sequence[int], max_tokens: int, images: Sequence[bytes] = ()) -> None:
        """As in :class:`Conversations`; ``images`` are the pictures that the placeholders in ``prompt`` stand for."""
        ...


@runtime_checkable
class SeeingPolicy(Policy, Protocol):
    """An engine that reads pictures, too."""

    def encode_turn(
        self, observation: str, instructions: str | None, *, cut: bool = False, images: Sequence[bytes] = ()
    ) -> list[int]:
        """As in :class:`Policy`; the placeholder tokens of ``images`` (encoded) stand before the observation.

        Raises :class:`freshper.errors.EnvError` for a picture that cannot be decoded.
        """
        ...

    def begin(self, count: int, sampling: SamplingParams, seed: int) -> SeeingConversations:
        """Open ``count`` empty conversations whose sampling is decided by ``seed`` alone."""
        ...

    def picture_inputs(self, tokens: Tensor, images: Sequence[Sequence[bytes]]) -> dict[str, Tensor]:
        """What the model's forward is given beside ``tokens`` (b, T), right-padded, to see each row's ``images``."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt that waits for its reply."""

    prompt: tuple[int, ...]
    max_tokens: int


class RowBook:
    """Which conversations exist, how long they are and which wait for a reply: what every engine must keep.

    ``waiting`` holds the requests by row, in the order in which they came; ``lengths`` the tokens of every
    conversation that have been answered: prompts and replies.
    """

    def __init__(self, count: int, max_positions: int | None) -> None:
        self._max_positions = max_positions
        self.lengths = [0] * count
        self.waiting: dict[int, Request] = {}
        self.closed: set[int] = set()

    def submit(self, row: int, prompt: Sequence[int], max_tokens: int) -> None:
        """See :meth:`Conversations.submit`."""
        self._check_open(row)
        if not prompt or max_tokens < 1:
            raise PolicyError(f"row {row}: a turn needs at least one prompt token and room for one reply token")
        needed = self.lengths[row] + len(prompt) + max_tokens
        if self._max_positions is not None and needed > self._max_positions:
            raise PolicyError(
                f"row {row}: a conversation would reach {needed} tokens, the model's limit is {self._max_positions}"
            )
        self.waiting[row] = Request(tuple(prompt), max_tokens)

    def close(self, row: int) -> None:
        """See :meth:`Conversations.close_row`."""
        self._check_open(row)
        self.closed.add(row)

    def answer(
        self, row: int, tokens: Sequence[int], logprobs: Sequence[float], end_tokens: frozenset[int]
    ) -> tuple[int, Reply]:
        """The row's reply: from now on it may be given the next prompt."""
        self.lengths[row] += len(self.waiting.pop(row).prompt) + len(tokens)
        return row, Reply(tuple(tokens), tuple(logprobs), cut=tokens[-1] not in end_tokens)

    def _check_open(self, row: int) -> None:
        if not 0 <= row < len(self.lengths):
            raise PolicyError(f"row {row} never was: there are {len(self.lengths)} conversations")
        if row in self.closed:
            raise PolicyError(f"row {row} is closed: it must not come back")
        if row in self.waiting:
            raise PolicyError(f"row {row} still waits for a reply")


def reply_all(
    conversations: Conversations, rows: Sequence[int], prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]
) -> list[Reply]:
    """Submit a turn of several rows and wait for all replies: one per row, in the order of ``rows``.

    Raises :class:`PolicyError` when an engine stops moving, or answers a row that did not ask.
    """
    for row, prompt, limit in zip(rows, prompts, max_tokens, strict=True):
        conversations.submit(row, prompt, limit)
    replies: dict[int, Reply] = {}
    # Every call moves a row by a token, so that many calls are enough.
    for _ in range(sum(max_tokens) + len(rows)):
        for row, reply in conversations.finished():
            if row not in rows or row in replies:
                raise PolicyError(f"a reply came for row {row}, which did not ask for one")
            replies[row] = reply
        if len(replies) == len(rows):
            return [replies[row] for row in rows]
    raise PolicyError(f"no reply came for rows {[row for row in rows if row not in replies]}")


def check_policy(policy: Policy, prompt: Sequence[int], max_tokens: int = 6) -> None:
    """Raise :class:`PolicyError` naming the first rule of the contract that ``policy`` breaks.

    ``prompt`` is any encoded turn. Checked: one reply per row, of 1 to that row's own limit of tokens, with one
    finite log-prob each, at most 0; only a reply of full length is cut; replies decode to text; rows may leave, and
    come later than others; the same seed gives the same replies; greedy replies repeat whatever the seed; a row
    that waits, or has left, is refused.
    """
    sampled = SamplingParams()
    first = _some_turns(policy, prompt, max_tokens, sampled, seed=1)
    for reply, limit in first:
        _check_reply(policy, reply, limit)
    if first != _some_turns(policy, prompt, max_tokens, sampled, seed=1):
        raise PolicyError("the same seed gave different replies: sampling must depend on the seed alone")
    greedy = SamplingParams(temperature=0.0)
    replies = _some_turns(policy, prompt, max_tokens, greedy, seed=1)
    if replies != _some_turns(policy, prompt, max_tokens, greedy, seed=2):
        raise PolicyError("greedy replies depend on the seed")
    _check_refusals(policy, prompt)


def _some_turns(
    policy: Policy, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams, seed: int
) -> list[tuple[Reply, int]]:
    """Two turns of some conversations, one of which leaves while another comes: every reply and its limit."""
    conversations = policy.begin(4, sampling, seed)
    first = [max_tokens, 1, max_tokens]
    replies = reply_all(conversations, [0, 1, 2], [prompt] * 3, first)
    conversations.close_row(1)
    second = [1, max_tokens, max_tokens]
    replies += reply_all(conversations, [0, 2, 3], [prompt] * 3, second)
    return list(zip(replies, first + second, strict=True))


def _check_reply(policy: Policy, reply: Reply, limit: int) -> None:
    if not 1 <= len(reply.tokens) <= limit:
        raise PolicyError(f"a reply holds {len(reply.tokens)} tokens: it must be 1 to {limit}")
    if len(reply.logprobs) != len(reply.tokens):
        raise PolicyError(f"a reply has {len(reply.tokens)} tokens and {len(reply.logprobs)} log-probs")
    if not all(math.isfinite(value) and value <= 1e-4 for value in reply.logprobs):
        raise PolicyError(f"log-probs {reply.logprobs} are not all finite and at most 0")
    if reply.cut and len(reply.tokens) < limit:
        raise PolicyError(f"a reply of {len(reply.tokens)} tokens says that a limit of {limit} cut it")
    text = policy.decode(reply.tokens)
    if not isinstance(text, str):
        raise PolicyError(f"decode() returned {text!r}: it must return text")


def _check_refusals(policy: Policy, prompt: Sequence[int]) -> None:
    conversations = policy.begin(2, SamplingParams(), 1)
    conversations.submit(0, prompt, 1)
    conversations.close_row(1)
    for row, state in ((0, "still waits for a reply"), (1, "is closed")):
        try:
            conversations.submit(row, prompt, 1)
        except PolicyError:
            continue
        raise PolicyError(f"row {row} {state}, and a prompt for it was taken all the same")
