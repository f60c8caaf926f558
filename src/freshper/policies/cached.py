"""Batched multi-turn sampling from a transformers causal LM: the key-value cache is kept across turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from freshper.policies.core import Reply, RowBook
from freshper.policies.sampling import sample_tokens
from freshper.trajectory import SamplingParams


class CachedConversations:
    """Conversations of one model that grow together, in lock step: replies are handed out when all have ended.

    Every forward pass appends the same number of columns to all rows of the cache. Rows of different lengths
    get padding columns in between, which the attention mask hides and the position ids skip, so each row sees
    exactly its own tokens at their true positions. Only new tokens are ever encoded. For small models and short
    replies: nothing is moved, and one stream of random numbers, decided by ``seed``, serves all rows.

    Raises :class:`PolicyError` for a model with layers other than plain attention: they do not know padding columns.
    """

    def __init__(
        self,
        model: nn.Module,
        end_tokens: Sequence[int],
        count: int,
        sampling: SamplingParams,
        *,
        seed: int,
        max_positions: int,
    ) -> None:
        from freshper.policies.growing import accepted_arguments, growing_cache

        self._model = model
        self._end_tokens = frozenset(end_tokens)
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(seed)
        self._book = RowBook(count, max_positions)
        self._cache: Any = growing_cache(model.config)
        self._device = next(model.parameters()).device
        self._arguments = accepted_arguments(model).cached(self._cache)
        self._rows: list[int] = []  # the conversation in each row of the cache
        self._visible = torch.zeros(0, 0, dtype=torch.long, device=self._device)  # (B, columns): 1 at a real token
        self._pending: list[list[int]] = []  # sampled, but not yet in the cache

    def submit(self, row: int, prompt: Sequence[int], max_tokens: int) -> None:
        """See :class:`freshper.policies.core.Conversations`."""
        self._book.submit(row, prompt, max_tokens)

    def close_row(self, row: int) -> None:
        """See :class:`freshper.policies.core.Conversations`."""
        self._book.close(row)

    @torch.inference_mode()
    def finished(self) -> list[tuple[int, Reply]]:
        """See :class:`freshper.policies.core.Conversations`; all rows that wait are answered at once."""
        waiting = self._book.waiting
        if not waiting:
            return []
        self._keep()
        self._join()
        asked = [waiting.get(row) for row in self._rows]
        logits = self._append(
            [[*old, *new.prompt] if new else [] for old, new in zip(self._pending, asked, strict=True)]
        )
        limits = [new.max_tokens if new else 0 for new in asked]
        tokens: list[list[int]] = [[] for _ in asked]
        logprobs: list[list[float]] = [[] for _ in asked]
        speakers = running = [place for place, limit in enumerate(limits) if limit]
        while running:
            sampled, values = sample_tokens(logits[running], self._sampling, self._generator)
            for place, token, value in zip(running, sampled.tolist(), values.tolist(), strict=True):
                tokens[place].append(token)
                logprobs[place].append(value)
            running = [
                place
                for place in running
                if tokens[place][-1] not in self._end_tokens and len(tokens[place]) < limits[place]
            ]
            if running:  # rows that have ended get a padding column; their last token waits for the next turn
                speaking = set(running)
                logits = self._append([tokens[p][-1:] if p in speaking else [] for p in range(len(asked))])
        for place in speakers:
            self._pending[place] = tokens[place][-1:]
        return [
            self._book.answer(self._rows[place], tokens[place], logprobs[place], self._end_tokens) for place in speakers
        ]

    def _keep(self) -> None:
        """Drop the conversations that have ended."""
        places = [place for place, row in enumerate(self._rows) if row not in self._book.closed]
        if len(places) == len(self._rows):
            return
        self._cache.batch_select_indices(torch.tensor(places, dtype=torch.long, device=self._device))
        self._visible = self._visible[places]
        self._pending = [self._pending[place] for place in places]
        self._rows = [self._rows[place] for place in places]

    def _join(self) -> None:
        """Open rows in the cache for conversations that speak for the first time: padding columns so far."""
        new = sorted(self._book.waiting.keys() - set(self._rows))
        for layer in self._cache.layers:
            layer.batch_append(len(new))
        self._visible = torch.cat([self._visible, self._visible.new_zeros(len(new), self._visible.shape[1])])
        self._pending += [[] for _ in new]
        self._rows += new

    def _append(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Encode new tokens, one list per row; returns the logits (B, V) after the last column.

        Lists are padded on the left, so every row's last new token is in the last column; the logits of
        a row without new tokens mean nothing.
        """
        width = max(map(len, tokens))
        ids = torch.tensor([[0] * (width - len(row)) + [*row] for row in tokens], device=self._device)
        new = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in tokens], device=self._device)
        inputs = self._inputs(tokens, ids, new)
        self._visible = torch.cat([self._visible, new], 1)
        output = self._model(
            attention_mask=None if self._visible.all() else self._visible,  # without padding nothing needs hiding
            **inputs,
            **self._arguments,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _inputs(
        self,
        tokens: Sequence[Sequence[int]],  # noqa: ARG002 - what pictures need
        ids: Tensor,
        new: Tensor,
    ) -> dict[str, Tensor]:
        """What a pass reads: ``ids`` (B, columns) are ``tokens`` padded, ``new`` (B, columns) is 1 at the real ones."""
        positions = self._visible.sum(1, keepdim=True) + new.cumsum(1) - 1
        return {"input_ids": ids, "position_ids": positions.clamp(min=0)}
