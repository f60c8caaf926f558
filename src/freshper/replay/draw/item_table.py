"""What is known of the item in every slot, laid out so that a write touches one place of memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freshper.replay.draw.sum_tree import aligned_zeros

_ITEM = np.dtype(
    [
        ("base", np.float64),
        ("log_base", np.float64),
        ("version", np.int64),
        ("owner", np.int16),
        ("alive", np.bool_),
    ],
    align=True,
)


class ItemTable:
    """What is known of the item in every slot; all arrays are (capacity,).

    What a draw and an update touch lies together, half a cache line for each slot.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        items = aligned_zeros(capacity, _ITEM)
        items["log_base"], items["owner"] = -np.inf, -1
        self.bases: NDArray[np.float64] = items["base"]
        self.log_bases: NDArray[np.float64] = items["log_base"]
        self.versions: NDArray[np.int64] = items["version"]
        self.owners: NDArray[np.int16] = items["owner"]  # the index an item belongs to; -1 where there is none
        self.alive: NDArray[np.bool_] = items["alive"]  # whether it can be drawn
        self.ranks = np.zeros(capacity, dtype=np.int64)  # order of arrival

    def put_bases(self, slots: NDArray[np.int64], bases: NDArray[np.float64]) -> None:
        """Set the base priorities of ``slots`` (n,) to ``bases`` (n,), with their logarithms: taken once."""
        self.bases[slots] = bases
        self.log_bases[slots] = logarithms(bases)


def logarithms(bases: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of base priorities (n,); -inf of 0."""
    if np.count_nonzero(bases) == len(bases):
        return np.log(bases)
    with np.errstate(divide="ignore"):  # log 0 is -inf: never drawn
        return np.log(bases)


def last_of_each(
    slots: NDArray[np.int64], values: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """``slots`` and ``values`` (n,) without repeats: of a slot that occurs several times the last value stays."""
    rises = slots[1:] > slots[:-1]
    if rises.all():
        return slots, values
    if (slots[1:] >= slots[:-1]).all():  # as a stratified draw comes
        last = np.append(rises, True)
        return slots[last], values[last]
    unique, first = np.unique(slots[::-1], return_index=True)
    return unique, values[::-1][first]
