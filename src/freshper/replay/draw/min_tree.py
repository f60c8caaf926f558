"""Which item has the smallest value: a tournament over the slots, ties broken by rank."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.errors import PriorityError
from freshper.replay.draw import kernels
from freshper.replay.draw.compiled import twins

# Up to this many slots a walk in plain Python costs less than a numpy call per level.
_FEW = 16


class MinTree:
    """The slot with the smallest (value, rank) of ``capacity``, kept up to date in O(log capacity) per change.

    Node 1 is the root, node i has the children 2i and 2i + 1, the leaves are the slots themselves; a node
    holds the slot that wins below it. Values are float64, -inf included; +inf is an empty slot. Of equal
    values the lowest rank (int64) wins, of equal ranks the lowest slot.

    ``compiled`` chooses the version as in :class:`~freshper.replay.draw.sum_tree.SumTree`; the winners are the same.
    """

    def __init__(self, capacity: int, compiled: bool | None = None) -> None:
        self.capacity = capacity
        self._twins = twins(kernels.replay_matches, capacity=capacity, compiled=compiled)
        self._first_leaf = 1 << max(capacity - 1, 1).bit_length()
        self._values = np.full(self._first_leaf, np.inf, dtype=np.float64)
        self._ranks = np.zeros(self._first_leaf, dtype=np.int64)
        self._winners = np.zeros(2 * self._first_leaf, dtype=np.int64)
        self._winners[self._first_leaf :] = np.arange(self._first_leaf)
        self._play_all()

    @property
    def compiled(self) -> bool:
        """Whether this tree runs compiled."""
        return self._twins is not None

    def smallest(self) -> tuple[int, float] | None:
        """The slot with the smallest value and that value; None when every slot is empty. O(1)."""
        slot = int(self._winners[1])
        value = float(self._values[slot])
        return None if value == np.inf else (slot, value)

    def set(self, slots: NDArray[np.int64], values: NDArray[np.float64], ranks: NDArray[np.int64]) -> None:
        """Give distinct ``slots`` (n,) these values (n,) and ranks (n,). O(n log capacity).

        Raises :class:`PriorityError` for a NaN, which has no place in an order, and :class:`IndexError` for a
        slot that is none; then nothing has changed.
        """
        slots = self._checked(slots)
        _check_values(values, slots)
        self._values[slots] = values
        self._ranks[slots] = ranks
        self._replay(slots)

    def clear(self, slots: NDArray[np.int64]) -> None:
        """Empty distinct ``slots`` (n,). Raises :class:`IndexError` for a slot that is none."""
        slots = self._checked(slots)
        self._values[slots] = np.inf
        self._replay(slots)

    def rebuild(self, values: NDArray[np.float64], ranks: NDArray[np.int64]) -> None:
        """Take the values and ranks of all slots anew, both (capacity,). Raises :class:`PriorityError` for a NaN."""
        _check_values(values, np.arange(self.capacity))
        self._values[: self.capacity] = values
        self._ranks[: self.capacity] = ranks
        self._play_all()

    def _checked(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        slots = np.ascontiguousarray(slots, dtype=np.int64)
        if slots.size and not (slots.min() >= 0 and slots.max() < self.capacity):
            raise IndexError(f"slots run from {slots.min()} to {slots.max()}, capacity {self.capacity}")
        return slots

    def _replay(self, slots: NDArray[np.int64]) -> None:
        if self._twins is not None:
            (replay_matches,) = self._twins
            replay_matches(self._winners, self._values, self._ranks, slots)
        elif len(slots) <= _FEW:
            arrays: tuple[Any, ...] = (self._winners, self._values, self._ranks, slots)
            views: list[Any] = [memoryview(array) for array in arrays]  # single items of a view are read faster
            kernels.replay_matches(*views)
        else:
            at = slots + self._first_leaf
            width = self._first_leaf
            while width > 1:
                width //= 2
                at = at >> 1 if width > len(slots) else np.arange(width, 2 * width)
                self._play(at)

    def _play_all(self) -> None:
        width = self._first_leaf
        while width > 1:
            width //= 2
            self._play(np.arange(width, 2 * width))

    def _play(self, at: NDArray[np.int64]) -> None:
        """One match at each of these nodes (n,)."""
        left, right = self._winners[2 * at], self._winners[2 * at + 1]
        left_values, right_values = self._values[left], self._values[right]
        tie = right_values == left_values
        wins = (right_values < left_values) | (tie & (self._ranks[right] < self._ranks[left]))
        self._winners[at] = np.where(wins, right, left)


def _check_values(values: NDArray[np.float64], slots: NDArray[np.int64]) -> None:
    bad = np.isnan(values)
    if bad.any():
        raise PriorityError(f"the value of slot {slots[bad][0]} is NaN: it has no place in an order; nothing changed")
