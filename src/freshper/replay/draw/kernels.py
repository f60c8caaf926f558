"""The walks through the trees, one item at a time: what numba compiles for the twin of the numpy index.

They only walk: every logarithm and exponential is numpy's in both versions, because numba's differ in the last
bit. They are compiled without any licence to reorder arithmetic, so a compiled tree equals a numpy one bit for bit.

Trees are laid out as in :class:`~freshper.replay.draw.sum_tree.SumTree`: node 1 is the root, node i has the children
2i and 2i + 1, and the leaves are the second half of the nodes. All arrays are one-dimensional and contiguous.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def find_slots(nodes: Floats, masses: Floats, slots: Ints, weights: Floats) -> None:
    """Write to ``slots`` (n,) where each of ``masses`` (n,) falls, and to ``weights`` (n,) the leaves there.

    All walks go down together, level by level and without a branch: the reads of a level do not depend on each
    other, so the machine waits for many at once.
    """
    first_leaf = len(nodes) // 2
    count = len(masses)
    for number in range(count):
        slots[number] = 1
        weights[number] = masses[number]  # holds what remains of the mass until the leaf is reached
    width = 1
    while width < first_leaf:
        for number in range(count):
            at = slots[number] * 2
            left = nodes[at]
            remaining = weights[number]
            right = remaining >= left
            weights[number] = remaining - left if right else remaining
            slots[number] = at + right
        width *= 2
    for number in range(count):
        at = slots[number]
        if nodes[at] == 0.0:  # rounding led astray: once more, without entering an empty subtree
            remaining = masses[number]
            at = 1
            while at < first_leaf:
                at *= 2
                left = nodes[at]
                if remaining >= left and nodes[at + 1] > 0.0:
                    remaining -= left
                    at += 1
        slots[number] = at - first_leaf
        weights[number] = nodes[at]


def write_leaves(nodes: Floats, capacity: int, slots: Ints, weights: Floats, path: Ints) -> bool:
    """Give ``slots`` (n,) the leaves ``weights`` (n,) and recompute what lies above; ``path`` (n,) is scratch.

    False, and nothing written, when a slot lies outside [0, capacity): compiled code checks no index by itself.
    """
    first_leaf = len(nodes) // 2
    count = len(slots)
    for number in range(count):
        if slots[number] < 0 or slots[number] >= capacity:
            return False
    for number in range(count):
        at = slots[number] + first_leaf
        nodes[at] = weights[number]
        path[number] = at
    width = first_leaf // 2
    while width > count:
        for number in range(count):
            at = path[number] // 2
            nodes[at] = nodes[2 * at] + nodes[2 * at + 1]
        kept = 0
        last = 0
        for number in range(count):  # neighbors share a parent: of sorted slots few walks are left near the root
            at = path[number] // 2
            kept += at != last  # no branch, which the machine would often guess wrong
            path[kept - 1] = at
            last = at
        count = kept
        width //= 2
    for at in range(2 * width - 1, 0, -1):  # levels no wider than the batch cost less to sum whole
        nodes[at] = nodes[2 * at] + nodes[2 * at + 1]
    return True


def sum_all(nodes: Floats) -> None:
    """Recompute all inner nodes from the leaves."""
    for at in range(len(nodes) // 2 - 1, 0, -1):
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


def item_exponents(  # noqa: PLR0917 - a call of compiled code by keywords takes longer
    slots: Ints,
    log_bases: Floats,
    versions: Ints,
    alive: Bools,
    epoch: int,
    rate: float,
    alpha: float,
    reference: float,
    exponents: Floats,
) -> tuple[float, int]:
    """Write to ``exponents`` (n,) the logarithms of the leaves of ``slots`` (n,): key - reference.

    The key is alpha (log b_i + (v_i - epoch) rate), -inf where b_i is 0. ``log_bases``, ``versions`` and ``alive`` are
    (capacity,); ``alive`` is brought up to date. Returns the largest exponent and by how much the number of slots
    that are alive has grown. Of a slot that occurs twice nothing is counted twice.
    """
    largest = -np.inf
    grown = 0
    for number in range(len(slots)):
        slot = slots[number]
        exponent = -np.inf
        if log_bases[slot] > -np.inf:
            exponent = alpha * (log_bases[slot] + (versions[slot] - epoch) * rate) - reference
        exponents[number] = exponent
        largest = max(largest, exponent)
        lives = exponent > -np.inf
        grown += int(lives) - int(alive[slot])
        alive[slot] = lives
    return largest, grown
