"""What is known of the item in every slot, laid out so that a write touches one place of memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freshper.replay.draw.kernels import ITEM
from freshper.replay.draw.sum_tree import aligned_zeros


class ItemTable:
    """What is known of the item in every slot; all arrays are (capacity,)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.items = aligned_zeros(capacity, ITEM)  # the next two are its columns
        self.bases: NDArray[np.float64] = self.items["base"]
        self.factors: NDArray[np.float64] = self.items["factor"]  # what b^alpha is multiplied by to give the leaf
        self.versions = np.zeros(capacity, dtype=np.int64)
        self.owners = np.full(capacity, -1, dtype=np.int16)  # the index an item belongs to; -1 where there is none
        self.alive = np.zeros(capacity, dtype=np.bool_)  # whether it can be drawn
        self.ranks = np.zeros(capacity, dtype=np.int64)  # order of arrival


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
