"""A policy whose replies come from a function: for tests, baselines and people at a keyboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from freshper.policies.core import Conversations, Reply, RowBook
from freshper.trajectory import SamplingParams

if TYPE_CHECKING:
    from torch import nn

_END = 256  # after the 256 byte values
_ENDS = frozenset({_END})


class ScriptedPolicy:
    """Answers each observation with ``answer(observation)``. One token per UTF-8 byte, log-prob 0: it is certain."""

    def __init__(self, answer: Callable[[str], str], version: int = 0) -> None:
        self._answer = answer
        self._version = version

    @property
    def version(self) -> int:
        """The version it was last told."""
        return self._version

    def encode_turn(
        self,
        observation: str,
        instructions: str | None,  # noqa: ARG002
        *,
        cut: bool = False,  # noqa: ARG002
    ) -> list[int]:
        """The bytes of the observation and an end-of-turn token."""
        return [*observation.encode(), _END]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the bytes; what is no valid UTF-8 becomes a replacement character."""
        return bytes(token for token in tokens if token != _END).decode(errors="replace")

    def begin(self, count: int, sampling: SamplingParams, seed: int) -> Conversations:  # noqa: ARG002
        """Open ``count`` conversations; sampling and seed decide nothing."""
        return ScriptedConversations(self._reply, count)

    def _reply(self, prompt: Sequence[int], limit: int) -> tuple[int, ...]:
        """A reply that is too long is cut."""
        return tuple([*self._answer(self.decode(prompt)).encode(), _END][:limit])

    def publish(self, model: nn.Module, version: int) -> None:  # noqa: ARG002
        """Only the version changes: there are no weights."""
        self._version = version


class ScriptedConversations:
    """Conversations in which every submitted row is answered at the next call of :meth:`finished`."""

    def __init__(self, reply: Callable[[Sequence[int], int], tuple[int, ...]], count: int) -> None:
        self._reply = reply
        self._book = RowBook(count, max_positions=None)

    def submit(self, row: int, prompt: Sequence[int], max_tokens: int) -> None:
        """See :class:`freshper.policies.core.Conversations`."""
        self._book.submit(row, prompt, max_tokens)

    def finished(self) -> list[tuple[int, Reply]]:
        """See :class:`freshper.policies.core.Conversations`."""
        said = {row: self._reply(asked.prompt, asked.max_tokens) for row, asked in self._book.waiting.items()}
        return [self._book.answer(row, tokens, (0.0,) * len(tokens), _ENDS) for row, tokens in said.items()]

    def close_row(self, row: int) -> None:
        """See :class:`freshper.policies.core.Conversations`."""
        self._book.close(row)
