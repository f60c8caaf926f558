"""Batched multi-turn sampling from a transformers causal LM: the key-value cache is kept across turns."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from freshper.errors import PolicyError
from freshper.policies.core import Reply
from freshper.policies.sampling import sample_tokens
from freshper.trajectory import SamplingParams


class CachedConversations:
    """Conversations of one model that grow together.

    Every forward pass appends the same number of columns to all rows of the cache. Rows of different lengths
    get padding columns in between, which the attention mask hides and the position ids skip, so each row sees
    exactly its own tokens at their true positions. Only new tokens are ever encoded.
    """

    def __init__(
        self,
        model: nn.Module,
        end_token: int,
        count: int,
        sampling: SamplingParams,
        *,
        seed: int,
        max_positions: int,
    ) -> None:
        from freshper.policies.growing import growing_cache

        self._model = model
        self._end_token = end_token
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(seed)
        self._max_positions = max_positions
        self._cache: Any = growing_cache(model.config)
        # transformers 5.24 renamed the argument; releases before know only the old name.
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._rows = list(range(count))
        self._visible = torch.zeros(count, 0, dtype=torch.long)  # (B, columns): 1 where a real token sits
        self._pending: list[list[int]] = [[] for _ in range(count)]  # sampled, but not yet in the cache

    @torch.inference_mode()
    def reply(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[Reply]:
        """See :class:`freshper.policies.core.Conversations`."""
        self._keep(rows, self._checked(rows, prompts, max_tokens))
        logits = self._append([[*old, *new] for old, new in zip(self._pending, prompts, strict=True)])
        tokens: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        running = list(range(len(rows)))
        while running:
            sampled, values = sample_tokens(logits[running], self._sampling, self._generator)
            for row, token, value in zip(running, sampled.tolist(), values.tolist(), strict=True):
                tokens[row].append(token)
                logprobs[row].append(value)
            running = [
                row for row in running if tokens[row][-1] != self._end_token and len(tokens[row]) < max_tokens[row]
            ]
            if running:  # rows that have ended get a padding column; their last token waits for the next turn
                speaking = set(running)
                logits = self._append([tokens[row][-1:] if row in speaking else [] for row in range(len(rows))])
        self._pending = [reply[-1:] for reply in tokens]
        return [Reply(tuple(t), tuple(v)) for t, v in zip(tokens, logprobs, strict=True)]

    def _checked(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[int]:
        """The places of ``rows`` in the cache. Raises :class:`PolicyError` before anything has changed."""
        place = {row: index for index, row in enumerate(self._rows)}
        if not rows or sorted({*rows} & place.keys()) != list(rows):
            raise PolicyError(f"rows {list(rows)} must be ascending and still running: {self._rows}")
        if not len(rows) == len(prompts) == len(max_tokens):
            raise PolicyError(f"{len(rows)} rows came with {len(prompts)} prompts and {len(max_tokens)} limits")
        encoded = self._visible.sum(1).tolist()
        lengths = [length + len(pending) for length, pending in zip(encoded, self._pending, strict=True)]
        for row, prompt, limit in zip(rows, prompts, max_tokens, strict=True):
            if not prompt or limit < 1:
                raise PolicyError(f"row {row}: a turn needs at least one prompt token and room for one reply token")
            needed = lengths[place[row]] + len(prompt) + limit
            if needed > self._max_positions:
                raise PolicyError(
                    f"row {row}: a conversation would reach {needed} tokens, the model's limit is {self._max_positions}"
                )
        return [place[row] for row in rows]

    def _keep(self, rows: Sequence[int], places: list[int]) -> None:
        """Drop the conversations that have ended."""
        if len(rows) == len(self._rows):
            return
        if self._visible.shape[1]:
            self._cache.batch_select_indices(torch.tensor(places))
        self._visible = self._visible[places]
        self._pending = [self._pending[index] for index in places]
        self._rows = list(rows)

    def _append(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Encode new tokens, one list per row; returns the logits (B, V) after the last column.

        Lists are padded on the left, so every row's last new token is in the last column; the logits of
        a row without new tokens mean nothing.
        """
        width = max(map(len, tokens))
        ids = torch.tensor([[0] * (width - len(row)) + [*row] for row in tokens])
        new = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in tokens])
        positions = self._visible.sum(1, keepdim=True) + new.cumsum(1) - 1
        self._visible = torch.cat([self._visible, new], 1)
        output = self._model(
            input_ids=ids,
            attention_mask=None if self._visible.all() else self._visible,  # without padding nothing needs hiding
            position_ids=positions.clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
        )
        logits: Tensor = output.logits[:, -1]
        return logits
