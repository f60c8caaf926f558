"""Batched multi-turn sampling with pictures: the key-value cache is kept across turns, and a picture is read once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from freshper.policies.cached import CachedConversations
from freshper.policies.vision import GridReader
from freshper.trajectory import SamplingParams


class SeeingConversations(CachedConversations):
    """Conversations of a model that places pictures in a grid, in lock step; see :class:`CachedConversations`.

    Only what is new is encoded, pictures included. Every row keeps its own next position, as a picture of h x w
    placeholders advances it by max(h, w), not by h w: the position ids (3, B, columns) of a pass are those that the
    whole conversation would have.
    """

    def __init__(
        self,
        model: nn.Module,
        reader: GridReader,
        end_tokens: Sequence[int],
        count: int,
        sampling: SamplingParams,
        *,
        seed: int,
        max_positions: int,
    ) -> None:
        super().__init__(model, end_tokens, count, sampling, seed=seed, max_positions=max_positions)
        self._reader = reader
        self._images: dict[int, tuple[bytes, ...]] = {}  # of prompts that have not been read yet, by row
        self._next = [0] * count  # the position of each row's next token

    def submit(self, row: int, prompt: Sequence[int], max_tokens: int, images: Sequence[bytes] = ()) -> None:
        """See :class:`freshper.policies.core.SeeingConversations`."""
        self._reader.spans(prompt, images)  # raises where they do not belong together
        super().submit(row, prompt, max_tokens)
        self._images[row] = tuple(images)

    def _inputs(
        self,
        tokens: Sequence[Sequence[int]],
        ids: Tensor,
        new: Tensor,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Tokens, position ids in three rows, and the pictures of the prompts among the tokens."""
        width = ids.shape[1]
        shown = [self._images.pop(row, ()) for row in self._rows]
        spans: list[list[tuple[int, int]]] = [[] for _ in shown]
        positions = np.zeros((3, *ids.shape), dtype=np.int64)
        for place, (row, some, images) in enumerate(zip(self._rows, tokens, shown, strict=True)):
            if not some:
                continue
            found = self._reader.spans(some, images)
            own = self._reader.positions(len(some), images, found)
            padding = width - len(some)
            positions[:, place, padding:] = own + self._next[row]
            self._next[row] += int(own.max()) + 1
            spans[place] = [(padding + start, padding + stop) for start, stop in found]
        given = {"input_ids": ids, "position_ids": torch.from_numpy(positions).to(ids.device)}
        return given | self._reader.seen(ids, shown, spans)
