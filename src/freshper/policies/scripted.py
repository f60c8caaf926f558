"""A policy whose replies come from a function: for tests, baselines and people at a keyboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from freshper.policies.core import Reply
from freshper.trajectory import SamplingParams

if TYPE_CHECKING:
    from torch import nn

_END = 256  # after the 256 byte values


class ScriptedPolicy:
    """Answers each observation with ``answer(observation)``. One token per UTF-8 byte, log-prob 0: it is certain."""

    def __init__(self, answer: Callable[[str], str], version: int = 0) -> None:
        self._answer = answer
        self._version = version

    @property
    def version(self) -> int:
        """The version it was last told."""
        return self._version

    def encode_turn(self, observation: str, instructions: str | None) -> list[int]:  # noqa: ARG002
        """The bytes of the observation and an end-of-turn token."""
        return [*observation.encode(), _END]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the bytes; what is no valid UTF-8 becomes a replacement character."""
        return bytes(token for token in tokens if token != _END).decode(errors="replace")

    def begin(self, count: int, sampling: SamplingParams, seed: int) -> ScriptedPolicy:  # noqa: ARG002
        """It keeps no state between turns: one object serves all conversations."""
        return self

    def reply(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[Reply]:
        """See :class:`freshper.policies.core.Conversations`; a reply that is too long is cut."""
        replies = []
        for _, prompt, limit in zip(rows, prompts, max_tokens, strict=True):
            tokens = tuple([*self._answer(self.decode(prompt)).encode(), _END][:limit])
            replies.append(Reply(tokens, (0.0,) * len(tokens)))
        return replies

    def publish(self, model: nn.Module, version: int) -> None:  # noqa: ARG002
        """Only the version changes: there are no weights."""
        self._version = version
