"""The walks through the trees and the items: what numba compiles for the twin of the numpy index.

They only walk, add, multiply and divide: every logarithm, exponential and power is numpy's in both versions, because
numba's differ in the last bit. They are compiled without any licence to reorder arithmetic, so a compiled tree equals
a numpy one bit for bit.

Where time counts, positions are unsigned: of others, compiled code looks first whether they count from the end.

Trees are laid out as in :class:`~freshper.replay.draw.sum_tree.SumTree` and
:class:`~freshper.replay.draw.min_tree.MinTree`. All arrays are one-dimensional and contiguous.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = NDArray[np.void]

# Unsigned, because together with a signed number an unsigned one becomes a float.
_0, _1, _2, _3, _4, _5, _6, _7, _8 = (np.uint64(number) for number in range(9))

ITEM = np.dtype([("base", np.float64), ("factor", np.float64)])
"""What a write reads and writes of an item, side by side."""

OUT_OF_RANGE, NOT_EXACT = -1.0, -2.0
"""Why :func:`write_items` wrote nothing."""
LEAST_FACTOR, LARGEST_FACTOR = 1e-290, 1e290
"""Beyond these a number has lost digits, or would lose those of its product."""
LARGEST_LEAF = math.exp(50.0)
"""From here on a tree has to be re-based."""


def find_slots(nodes: Floats, leaves: Floats, places: Floats, strata: bool, slots: Ints) -> bool:
    """Write to ``slots`` (n,) where each of ``places`` (n,) falls, and to ``places`` the leaves there.

    A place is a mass in [0, total), or with ``strata`` the position in [0, 1) inside the n-th part of all mass that it
    is about; the leaves are then told over the total. True, and the places are left, when rounding has led to an empty
    leaf.
    All walks go down together, level by level and without a branch: the reads of a level do not depend on each
    other, so the machine waits for many at once.
    """
    blocks = len(nodes) // 2
    count = len(places)
    total = nodes[1]
    weights = np.empty(count)  # what remains of the masses until the leaves are reached
    for number in range(count):
        slots[number] = 1
        weights[number] = (places[number] + number) / count * total if strata else places[number]
    width = 1
    while width < blocks:
        for number in range(count):
            at = np.uint64(slots[number]) << _1
            left = nodes[at]
            remaining = weights[number]
            right = remaining >= left
            weights[number] = remaining - left if right else remaining
            slots[number] = at | (_1 if right else _0)
        width *= 2
    astray = False
    for number in range(count):
        at = np.uint64(slots[number] - blocks) * _8
        remaining = weights[number]
        left = (leaves[at] + leaves[at + _1]) + (leaves[at + _2] + leaves[at + _3])
        right = remaining >= left
        remaining = remaining - left if right else remaining
        at += _4 if right else _0
        left = leaves[at] + leaves[at + _1]
        right = remaining >= left
        remaining = remaining - left if right else remaining
        at += _2 if right else _0
        at += _1 if remaining >= leaves[at] else _0
        slots[number] = at
        weights[number] = leaves[at]
        astray |= weights[number] == 0.0
    if astray:
        return True
    for number in range(count):
        places[number] = weights[number] / total if strata else weights[number]
    return False


def write_leaves(nodes: Floats, leaves: Floats, capacity: int, slots: Ints, weights: Floats) -> bool:
    """Give distinct ``slots`` (n,) the leaves ``weights`` (n,) and recompute what lies above.

    False, and nothing written, when a slot lies outside [0, capacity): compiled code checks no index by itself.
    """
    count = len(slots)
    for number in range(count):
        if slots[number] < 0 or slots[number] >= capacity:
            return False
    for number in range(count):
        leaves[np.uint64(slots[number])] = weights[number]
    sum_above(nodes, leaves, slots)
    return True


def write_items(  # noqa: PLR0917 - a call of compiled code by keywords takes longer
    nodes: Floats, leaves: Floats, items: Rows, slots: Ints, bases: Floats, powers: Floats
) -> tuple[float, int, int]:
    """Give ``slots`` (n,) the base priorities ``bases`` (n,) and the leaves ``powers`` (n,), b^alpha, x factor.

    ``items`` are those of all slots, (capacity,). Of a repeated slot the last value wins. Returns the total, and how
    many bases have risen from 0 and fallen to 0.

    The first is OUT_OF_RANGE, and nothing written, when a slot lies outside [0, capacity) or there is not one value
    for each: compiled code checks no index by itself; NOT_EXACT when a part of a product is out of the bounds within
    which it has all its digits.
    """
    all_bases, factors = items["base"], items["factor"]
    count = len(slots)
    if len(bases) != count or len(powers) != count:
        return OUT_OF_RANGE, 0, 0
    for number in range(count):
        if slots[number] < 0 or slots[number] >= len(items):
            return OUT_OF_RANGE, 0, 0
        factor = factors[np.uint64(slots[number])]
        exact = LEAST_FACTOR <= factor <= LARGEST_FACTOR and powers[number] >= LEAST_FACTOR
        exact = exact and powers[number] * factor <= LARGEST_LEAF
        if bases[number] > 0.0 and not exact:
            return NOT_EXACT, 0, 0
    risen = fallen = 0
    for number in range(count):
        slot = np.uint64(slots[number])
        lives = bases[number] > 0.0
        lived = all_bases[slot] > 0.0
        risen += lives > lived
        fallen += lives < lived
        all_bases[slot] = bases[number]
        leaves[slot] = powers[number] * factors[slot] if lives else 0.0
    sum_above(nodes, leaves, slots)
    return nodes[1], risen, fallen


def sum_above(nodes: Floats, leaves: Floats, slots: Ints) -> None:
    """Recompute what lies above the leaves of ``slots`` (n,)."""
    blocks = np.uint64(len(nodes) // 2)
    count = len(slots)
    for number in range(count):
        block = np.uint64(slots[number]) >> _3
        at = block << _3
        nodes[blocks + block] = ((leaves[at] + leaves[at + _1]) + (leaves[at + _2] + leaves[at + _3])) + (
            (leaves[at + _4] + leaves[at + _5]) + (leaves[at + _6] + leaves[at + _7])
        )
    width = len(nodes) // 4
    above = _1
    while width > count:  # a parent that two slots share is summed twice, which costs less than to find out
        for number in range(count):
            at = (blocks + (np.uint64(slots[number]) >> _3)) >> above
            nodes[at] = nodes[at << _1] + nodes[(at << _1) | _1]
        width //= 2
        above += _1
    for node in range(2 * width - 1, 0, -1):  # levels no wider than the batch cost less to sum whole
        nodes[node] = nodes[2 * node] + nodes[2 * node + 1]


def sum_all(nodes: Floats, leaves: Floats) -> None:
    """Recompute all nodes from the leaves."""
    blocks = len(nodes) // 2
    for block in range(blocks):
        at = block * 8
        nodes[blocks + block] = ((leaves[at] + leaves[at + 1]) + (leaves[at + 2] + leaves[at + 3])) + (
            (leaves[at + 4] + leaves[at + 5]) + (leaves[at + 6] + leaves[at + 7])
        )
    for at in range(blocks - 1, 0, -1):
        nodes[at] = nodes[2 * at] + nodes[2 * at + 1]


def replay_matches(winners: Ints, values: Floats, ranks: Ints, slots: Ints) -> None:
    """Play the matches of distinct ``slots`` (n,) again, each from its leaf up to the root.

    ``winners`` holds at every node the slot with the smallest (value, rank) below it. A walk ends early where
    somebody else has won before and wins again: above, nothing has changed.
    """
    first_leaf = len(winners) // 2
    for number in range(len(slots)):
        slot = slots[number]
        at = (slot + first_leaf) // 2
        while at > 0:
            left = winners[2 * at]
            right = winners[2 * at + 1]
            winner = left
            if values[right] < values[left] or (values[right] == values[left] and ranks[right] < ranks[left]):
                winner = right
            if winners[at] == winner and winner != slot:
                break
            winners[at] = winner
            at //= 2


def ratios_to_least(values: Floats, ratios: Floats) -> None:
    """Write to ``ratios`` (n,) the least of ``values`` (n,) over each of them."""
    least = np.inf
    for number in range(len(values)):
        least = min(least, values[number])
    for number in range(len(values)):
        ratios[number] = least / values[number]
