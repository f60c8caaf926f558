"""The walks through the trees and the items: what numba compiles for the twin of the numpy index.

They only walk: every logarithm and exponential is numpy's in both versions, because numba's differ in the last
bit. They are compiled without any licence to reorder arithmetic, so a compiled tree equals a numpy one bit for bit.

Where time counts, positions are unsigned: of others, compiled code looks first whether they count from the end.

Trees are laid out as in :class:`~freshper.replay.draw.sum_tree.SumTree` and
:class:`~freshper.replay.draw.min_tree.MinTree`. All arrays are one-dimensional, and contiguous but for the columns of
the item table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Unsigned, because together with a signed number an unsigned one becomes a float.
_0, _1, _2, _3, _4, _5, _6, _7, _8 = (np.uint64(number) for number in range(9))

OUT_OF_ORDER, OUT_OF_RANGE = -1, -2
"""Why :func:`keep_items` wrote nothing."""


def find_slots(  # noqa: PLR0917 - a call of compiled code by keywords takes longer
    nodes: Floats, leaves: Floats, places: Floats, strata: bool, slots: Ints, weights: Floats
) -> bool:
    """Write to ``slots`` (n,) where each of ``places`` (n,) falls, and to ``weights`` (n,) the leaves there.

    A place is a mass in [0, total), or with ``strata`` the position in [0, 1) inside the n-th part of all mass that it
    is about; the weights are then those over the total. True when rounding has led to an empty leaf.
    All walks go down together, level by level and without a branch: the reads of a level do not depend on each
    other, so the machine waits for many at once.
    """
    blocks = len(nodes) // 2
    count = len(places)
    total = nodes[1]
    for number in range(count):
        slots[number] = 1
        # The weight holds what remains of the mass until the leaf is reached.
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
    if strata:
        for number in range(count):
            weights[number] /= total
    return astray


def write_leaves(nodes: Floats, leaves: Floats, capacity: int, slots: Ints, weights: Floats) -> float:
    """Give distinct ``slots`` (n,) the leaves ``weights`` (n,) and recompute what lies above; returns the total.

    -1, and nothing written, when a slot lies outside [0, capacity): compiled code checks no index by itself.
    """
    blocks = np.uint64(len(nodes) // 2)
    count = len(slots)
    for number in range(count):
        if slots[number] < 0 or slots[number] >= capacity:
            return -1.0
    for number in range(count):
        leaves[np.uint64(slots[number])] = weights[number]
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
    return float(nodes[1])


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


def keep_items(  # noqa: PLR0917 - a call of compiled code by keywords takes longer
    slots: Ints,
    bases: Floats,
    logs: Floats,
    distinct: bool,
    all_bases: Floats,
    all_logs: Floats,
    versions: Ints,
    alive: Bools,
    epoch: int,
    rate: float,
    alpha: float,
    reference: float,
    kept: Ints,
    exponents: Floats,
) -> tuple[int, float, int]:
    """Put ``bases`` (n,) and their logarithms ``logs`` (n,) into ``slots`` (n,) of the columns of all, (capacity,).

    ``slots`` are distinct, or they rise and the last value of a repeated one counts. Writes to ``kept`` (n,) the slots
    without repeats and to ``exponents`` (n,) the logarithms of their leaves: key - reference, with the key
    alpha (log b_i + (v_i - epoch) rate), -inf where b_i is 0. ``alive`` is brought up to date.

    Returns how many slots were kept, the largest exponent, and by how much the number of slots that are alive has
    grown. The first is OUT_OF_ORDER, and nothing written, when the slots neither are distinct nor rise; OUT_OF_RANGE
    when one lies outside [0, capacity): compiled code checks no index by itself.
    """
    count = len(slots)
    for number in range(count):
        if slots[number] < 0 or slots[number] >= len(versions):
            return OUT_OF_RANGE, 0.0, 0
        if not distinct and number > 0 and slots[number] < slots[number - 1]:
            return OUT_OF_ORDER, 0.0, 0
    size = 0
    for number in range(count):  # without a branch, which the machine would often guess wrong
        kept[size] = number
        repeated = not distinct and number + 1 < count and slots[number + 1] == slots[number]
        size += not repeated
    largest = -np.inf
    grown = 0
    for place in range(size):
        item = np.uint64(kept[place])
        slot = np.uint64(slots[item])
        log_base = logs[item]
        exponent = -np.inf
        if log_base > -np.inf:
            exponent = alpha * (log_base + (versions[slot] - epoch) * rate) - reference
        lives = exponent > -np.inf
        grown += int(lives) - int(alive[slot])
        largest = max(largest, exponent)
        all_bases[slot] = bases[item]
        all_logs[slot] = log_base
        alive[slot] = lives
        kept[place] = slot
        exponents[place] = exponent
    return size, largest, grown


def weight_logarithms(logs: Floats, log_target: float, beta: float) -> None:
    """Turn ``logs`` (n,), log P(i), into beta (log_target - log P(i)), less the largest of these."""
    largest = -np.inf
    for number in range(len(logs)):
        logs[number] = (log_target - logs[number]) * beta
        largest = max(largest, logs[number])
    for number in range(len(logs)):
        logs[number] -= largest
