"""Sampling from models whose cache cannot be appended to: the whole conversation is read again in every turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from freshper.errors import ConfigError
from freshper.policies.core import Reply, Request, RowBook
from freshper.policies.growing import Arguments, accepted_arguments
from freshper.policies.sampling import check_finite, draw_tokens, row_stream
from freshper.trajectory import SamplingParams

Sight = Callable[[Tensor, Tensor], dict[str, Tensor]]
"""From the tokens (B, Q) and positions of a pass to arguments that are put in the place of these, or beside them."""


class ReencodingConversations:
    """Conversations of a transformers causal LM with any layers: sliding windows, states, convolutions, ALiBi.

    In a turn up to ``slots`` rows are read from their beginning, padded on the left, and decode together with the
    cache that the model makes for itself; then it is dropped. With ``padded=False``, for models that take padding
    for text, only rows of equal length go together. Each row has its own stream of random numbers, decided by
    ``seed`` and the row: the replies are those of :class:`freshper.policies.slots.SlotConversations`.
    """

    def __init__(
        self,
        model: nn.Module,
        end_tokens: Sequence[int],
        count: int,
        sampling: SamplingParams,
        *,
        seed: int,
        max_positions: int | None,
        slots: int,
        padded: bool = True,
    ) -> None:
        """Raises :class:`ConfigError` without slots."""
        if slots < 1:
            raise ConfigError(f"slots {slots} must be at least 1: no conversation could run")
        self._model: Any = model
        self._end_tokens = frozenset(end_tokens)
        self._sampling = sampling
        self._seed = seed
        self._book = RowBook(count, max_positions)
        self._capacity = slots
        self._padded = padded
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._streams = [row_stream(seed, row) for row in range(count)]
        self._names = accepted_arguments(model)
        self._device = next(model.parameters()).device

    def submit(self, row: int, prompt: Sequence[int], max_tokens: int) -> None:
        """See :class:`freshper.policies.core.Conversations`."""
        self._book.submit(row, prompt, max_tokens)

    def close_row(self, row: int) -> None:
        """See :class:`freshper.policies.core.Conversations`."""
        self._book.close(row)
        self._tokens[row] = []

    def finished(self) -> list[tuple[int, Reply]]:
        """See :class:`freshper.policies.core.Conversations`; a call answers a batch of rows."""
        asked = {row: self._book.waiting[row] for row in self._together()}
        if not asked:
            return []
        whole = [[*self._tokens[row], *request.prompt] for row, request in asked.items()]
        said, logprobs = self._sample(whole, list(asked), list(asked.values()))
        for row, read, tokens in zip(asked, whole, said, strict=True):
            self._tokens[row] = [*read, *tokens]
        return [
            self._book.answer(row, tokens, values, self._end_tokens)
            for row, tokens, values in zip(asked, said, logprobs, strict=True)
        ]

    def _sight(self, rows: Sequence[int], whole: Sequence[Sequence[int]]) -> Sight | None:  # noqa: ARG002
        """For models that see: what a batch of conversations looks at."""
        return None

    def _together(self) -> list[int]:
        """Rows of the next batch, in the order in which they came."""
        rows = list(self._book.waiting)
        if rows and not self._padded:
            length = {row: self._book.lengths[row] + len(self._book.waiting[row].prompt) for row in rows}
            rows = [row for row in rows if length[row] == length[rows[0]]]
        return rows[: self._capacity]

    @torch.inference_mode()
    def _sample(
        self, whole: Sequence[Sequence[int]], rows: Sequence[int], requests: Sequence[Request]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Replies to whole conversations, each up to its prompt: tokens and log-probs."""
        run = _Run(self._model, self._names, whole, self._sight(rows, whole))
        uniform = [self._streams[row].random(request.max_tokens) for row, request in zip(rows, requests, strict=True)]
        tokens: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        running = list(range(len(rows)))
        logits = run.first()
        while True:
            numbers = [[uniform[place][len(tokens[place])]] for place in running]
            drawn = torch.tensor(numbers, dtype=torch.float64, device=self._device)
            some = logits if len(running) == len(rows) else logits[running]
            chosen, values = draw_tokens(some, self._sampling, drawn)
            said, likely = torch.stack([chosen.double(), values.double()]).tolist()
            check_finite(all(map(math.isfinite, likely)))
            for place, token, value in zip(running, said, likely, strict=True):
                tokens[place].append(int(token))
                logprobs[place].append(value)
            running = [
                place
                for place in running
                if tokens[place][-1] not in self._end_tokens and len(tokens[place]) < requests[place].max_tokens
            ]
            if not running:
                return tokens, logprobs
            # A row that has ended repeats its last token: nobody looks at it again.
            logits = run.next([reply[-1] for reply in tokens])


class _Run:
    """One batch through the model: its prompts, then token by token; left padding is masked, positions skip it."""

    def __init__(self, model: Any, names: Arguments, whole: Sequence[Sequence[int]], sight: Sight | None) -> None:
        self._model = model
        self._names = names
        self._sight = sight
        self._keep: dict[str, Any] = {"logits_to_keep": 1} if names.logits_to_keep else {}
        self._device = next(model.parameters()).device
        width = max(map(len, whole))
        self._ids = torch.tensor([[0] * (width - len(row)) + [*row] for row in whole], device=self._device)
        self._mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in whole], device=self._device)
        self._even = all(len(row) == width for row in whole)
        self._cache: Any = None

    def first(self) -> Tensor:
        """Logits (B, V) after the prompts."""
        return self._call(self._ids, (self._mask.cumsum(1) - 1).clamp(min=0))

    def next(self, tokens: Sequence[int]) -> Tensor:
        """Logits (B, V) after one more token of every row."""
        column = torch.tensor(tokens, device=self._device)[:, None]
        self._mask = torch.cat([self._mask, torch.ones_like(column)], 1)
        if self._cache is None:  # a model without any cache reads everything again
            self._ids = torch.cat([self._ids, column], 1)
            return self.first()
        return self._call(column, self._mask.sum(1, keepdim=True) - 1)

    def _call(self, ids: Tensor, positions: Tensor) -> Tensor:
        arguments = self._keep | {"input_ids": ids}
        if not self._even:  # without padding nothing needs hiding
            arguments["attention_mask"] = self._mask
        if self._names.position_ids:
            arguments["position_ids"] = positions
        if self._sight is not None:
            arguments |= self._sight(ids, positions)
        if self._cache is not None:
            arguments[self._names.cache] = self._cache
        output = self._model(use_cache=True, **arguments)
        self._cache = getattr(output, self._names.cache, None)
        logits: Tensor = output.logits[:, -1]
        return logits
