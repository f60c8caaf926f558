"""A key-value cache whose columns are written in place. transformers copies the whole cache for every new column."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from freshper.errors import PolicyError


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the ``forward`` of a model takes: the name of its cache, and whether it takes positions and one logit."""

    cache: str
    position_ids: bool
    logits_to_keep: bool

    def cached(self, cache: Any | None) -> dict[str, Any]:
        """Arguments of a call that keeps a cache and wants the logits of the last column, where that can be asked.

        A ``cache`` of None lets the model make its own.
        """
        arguments: dict[str, Any] = {"use_cache": True}
        if cache is not None:
            arguments[self.cache] = cache
        if self.logits_to_keep:
            arguments["logits_to_keep"] = 1
        return arguments


def accepted_arguments(model: Any) -> Arguments:
    """Looked up in the signature of the model itself, beneath the wrappers of peft and torch.compile too."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner = getattr(inner, "_orig_mod", inner)
    accepted = inspect.signature(inner.forward).parameters
    # transformers 5.24 renamed the argument; releases before know only the old name.
    name = "cache" if "cache" in accepted else "past_key_values"
    return Arguments(name, "position_ids" in accepted, "logits_to_keep" in accepted)


def special_layers(config: Any) -> list[str]:
    """Kinds of the cache layers that are not plain attention over all columns: sliding windows, states, ..."""
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers} - {DynamicLayer.__name__}
    # GPT-Neo's local layers count columns back, whatever mask and positions say.
    local = {"local attention"} if "local" in (getattr(config, "attention_layers", None) or ()) else set()
    return sorted(kinds | local)


def growing_cache(config: Any) -> Any:
    """A ``DynamicCache`` for a model's config whose layers grow in place.

    Raises :class:`PolicyError` when a layer is not plain attention: it would take padding columns for tokens.
    """
    if special := special_layers(config):
        raise PolicyError(f"a cache with padding columns cannot serve this model: it has layers of {special}")
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() for _ in cache.layers]
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
        if self._buffers:
            self._buffers = [buffer[indices] for buffer in self._buffers]
            self._show()

    def batch_append(self, count: int) -> None:
        """Add rows whose columns so far are zeros, for a mask to hide."""
        if self._buffers and count:
            self._buffers = [
                torch.cat([buffer, buffer.new_zeros(count, *buffer.shape[1:])]) for buffer in self._buffers
            ]
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


@dataclass(slots=True)
class Placement:
    """Where the keys and values of the next forward pass belong in a cache of slots; shared by all layers.

    The pass has B rows of Q queries, of which n are real tokens, told row by row: token k stands in ``rows[k]``, at
    ``queries[k]`` (None: Q is 1), and goes to slot ``slots[k]``, column ``columns[k]``; all (n,) int64. The pass
    attends to the first ``width`` columns, of the first B slots, or of the slots ``chosen`` (B,).
    """

    rows: Tensor
    queries: Tensor | None
    slots: Tensor
    columns: Tensor
    width: int
    chosen: Tensor | None


class SlotLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """Keys and values in buffers (slots, room, heads, size): token p of a conversation in column p of its slot.

    So a slot has a length of its own and holds no padding. What lies beyond it are zeros or leftovers of the
    conversation before, always finite numbers, for a mask to hide. The room doubles when it is too small.
    """

    def __init__(self, slots: int, placements: list[Placement]) -> None:
        super().__init__()
        self._slots = slots
        self._placements = placements  # the last one is that of the present pass
        self._buffers: list[Tensor] = []

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,  # noqa: ARG002 - what special layers need
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Write the real tokens among the states (B, heads, Q, size); returns (B, heads, width, size)."""
        place = self._placements[-1]
        if not self._buffers:
            self.dtype, self.device = key_states.dtype, key_states.device
            self._buffers = [
                states.new_zeros(self._slots, 0, states.shape[1], states.shape[3])
                for states in (key_states, value_states)
            ]
            self.is_initialized = True
        count = len(key_states)
        written = place.slots, place.columns
        shown = []
        for number, states in enumerate((key_states, value_states)):
            buffer = self._with_room(number, place.width)
            by_token = states.transpose(1, 2)  # (B, Q, heads, size)
            if place.queries is not None:
                new = by_token[place.rows, place.queries]
            else:
                new = by_token[:, 0] if len(place.rows) == count else by_token[place.rows, 0]
            buffer.index_put_(written, new)
            seen = buffer.narrow(1, 0, place.width)
            seen = seen.narrow(0, 0, count) if place.chosen is None else seen[place.chosen]
            shown.append(seen.transpose(1, 2))
        self.keys: Tensor
        self.values: Tensor
        self.keys, self.values = shown
        return self.keys, self.values

    def move(self, source: int, target: int) -> None:
        """Copy what a slot holds to another one."""
        for buffer in self._buffers:
            buffer[target] = buffer[source]

    def copy(self, sources: Tensor, targets: Tensor, columns: int) -> None:
        """Copy the first ``columns`` of the slots ``sources`` to the slots ``targets``, both (n,)."""
        for buffer in self._buffers:
            buffer[targets, :columns] = buffer[sources, :columns]

    def _with_room(self, number: int, width: int) -> Tensor:
        old = self._buffers[number]
        slots, room, heads, size = old.shape
        if width > room:
            new = old.new_zeros(slots, max(2 * room, width), heads, size)
            new[:, :room] = old
            self._buffers[number] = new
        return self._buffers[number]
