"""A key-value cache whose columns are written in place. transformers copies the whole cache for every new column."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def growing_cache(config: Any) -> Any:
    """A ``DynamicCache`` for a model's config whose plain layers grow in place; special ones stay as they are."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """Keys and values (B, heads, columns, size) as views into buffers that double when they are full."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[Tensor] = []
        self._columns = 0

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,  # noqa: ARG002 - what special layers need
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Append columns; returns all of them."""
        if not self._buffers:
            self.dtype, self.device = key_states.dtype, key_states.device
            self._buffers = [
                states.new_empty(*states.shape[:2], 0, states.shape[3]) for states in (key_states, value_states)
            ]
            self.is_initialized = True
        first, self._columns = self._columns, self._columns + key_states.shape[2]
        for number, states in enumerate((key_states, value_states)):
            self._make_room(number, first)
            self._buffers[number][:, :, first : self._columns] = states
        self._show()
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self._show()

    def _make_room(self, number: int, used: int) -> None:
        old = self._buffers[number]
        if self._columns > old.shape[2]:
            rows, heads, room, size = old.shape
            new = old.new_empty(rows, heads, max(2 * room, self._columns), size)
            new[:, :, :used] = old[:, :, :used]
            self._buffers[number] = new

    def _show(self) -> None:
        self.keys: Tensor
        self.values: Tensor
        self.keys, self.values = (buffer[:, :, : self._columns] for buffer in self._buffers)
