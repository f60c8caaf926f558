"""How items are picked from the trees of one or several tasks, and the chance that each pick had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freshper.replay.draw.index import PriorityIndex
from freshper.replay.draw.sum_tree import SumTree


@dataclass(frozen=True, slots=True)
class Mixture:
    """Trees (k) and the part of a draw that each gets, (k,)."""

    trees: Sequence[SumTree]
    parts: NDArray[np.float64]

    def locate_strata(self, positions: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """One slot in each of n equal strata, at ``positions`` (n,) in [0, 1) inside them, and their P(i)."""
        return self.locate((positions + np.arange(len(positions))) / len(positions))

    def locate(self, places: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The slots at ``places`` (n,) of [0, 1), and their P(i)."""
        if len(self.trees) == 1:
            tree = self.trees[0]
            total = tree.total
            slots, weights = tree.locate(places * total)
            return slots, weights / total
        slots = np.empty(len(places), dtype=np.int64)
        probabilities = np.empty(len(places))
        ends = np.cumsum(self.parts)
        chosen = np.searchsorted(ends, places, side="right")
        chosen = np.minimum(chosen, np.flatnonzero(self.parts)[-1])  # rounding may leave the ends short of 1
        for number in np.unique(chosen).tolist():
            here = chosen == number
            tree, part = self.trees[number], self.parts[number]
            inside = (places[here] - (ends[number] - part)) / part
            slots[here], weights = tree.locate(np.clip(inside, 0.0, 1.0) * tree.total)
            probabilities[here] = part * weights / tree.total
        return slots, probabilities


def positions_in_strata(rng: np.random.Generator, count: int, *, systematic: bool) -> NDArray[np.float64]:
    """Where in each of ``count`` equal strata its place lies, from 0 to 1, (count,).

    Stratified: each at random. Systematic: all at the same position, so that an item of probability P is drawn
    floor(P count) or ceil(P count) times.
    """
    return np.full(count, rng.random()) if systematic else rng.random(count)


def without_replacement(
    indexes: Sequence[PriorityIndex], log_parts: NDArray[np.float64], rng: np.random.Generator, count: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """``count`` distinct slots by successive draws, each proportional to P among what is left, and pi_i / count.

    ``log_parts`` (k,): log of the part of a single draw that each index gets.
    pi_i = 1 - exp(-P_i T) is the inclusion probability given the threshold T, the (count + 1)-th arrival of the
    exponential race in which item i arrives at rate P_i: with it, sum_i x_i / pi_i over the draw is an unbiased
    estimate of the sum over all items (Horvitz-Thompson on the rank-conditioned bottom-k sketch, Cohen and
    Kaplan 2007). The trees are as before when this returns. ``count`` is at most the number of drawable items.

    A draw is made of rounds: independent picks, of which the first of every item counts, then these are removed
    from the trees. Repeats of an earlier pick are what a removal at once would have made impossible, so the
    order is that of one-by-one removal.
    """
    thinned = [_Thinned(index) for index in indexes]
    with np.errstate(invalid="ignore"):  # a task that has nothing, and gets nothing
        log_parts = log_parts - [index.tree.log_total for index in indexes]
    picks: list[NDArray[np.int64]] = []
    try:
        while (missing := count - sum(map(len, picks))) > 0:
            log_left = _log_left(log_parts, thinned)
            mixture = Mixture([one.tree for one in thinned], np.exp(log_left - np.logaddexp.reduce(log_left)))
            slots, _ = mixture.locate(rng.random(missing))
            picks.append(slots[np.sort(np.unique(slots, return_index=True)[1])])
            for one in thinned:
                one.take(picks[-1])
        log_rest = np.logaddexp.reduce(_log_left(log_parts, thinned))
    finally:
        for one in thinned:
            one.put_back()
    drawn = np.concatenate(picks)
    log_rates = _log_rates(indexes, log_parts, drawn)
    log_remaining = np.logaddexp.accumulate(np.append(log_rates, log_rest)[::-1])[::-1]
    log_gaps = np.log(rng.standard_exponential(count + 1)) - log_remaining
    with np.errstate(over="ignore"):
        expected = np.exp(log_rates + np.logaddexp.reduce(log_gaps))
    return drawn, -np.expm1(-expected) / count


def _log_left(log_parts: NDArray[np.float64], thinned: Sequence[_Thinned]) -> NDArray[np.float64]:
    """Log of the chance that each tree still has, (k,), as a part of the chance at the start."""
    with np.errstate(invalid="ignore"):  # a task that gets nothing, and has nothing
        left = log_parts + [one.tree.log_total for one in thinned]
    return np.where(np.isnan(left), -np.inf, left)


def _log_rates(
    indexes: Sequence[PriorityIndex], log_parts: NDArray[np.float64], slots: NDArray[np.int64]
) -> NDArray[np.float64]:
    """log P(i) of ``slots`` (n,) before anything was taken out."""
    rates = np.empty(len(slots))
    for index, log_part in zip(indexes, log_parts.tolist(), strict=True):
        here = index.holds(slots)
        rates[here] = index.keys(slots[here]) + log_part
    return rates


class _Thinned:
    """The tree of an index, from which drawn items are taken out for a while."""

    def __init__(self, index: PriorityIndex) -> None:
        self._index = index
        self._taken: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        self._left = index.drawable
        self.tree = index.tree

    def take(self, slots: NDArray[np.int64]) -> None:
        slots = slots[self._index.holds(slots)]
        self._taken.append((slots, self.tree.weights(slots)))
        self.tree.set_leaves(slots, np.zeros(len(slots)))
        self._left -= len(slots)
        if self._left and self.tree.underflowed:
            # What is left is too light for the reference that the whole tree has: go on in a tree of its own.
            taken = np.concatenate([part for part, _ in self._taken])
            self.put_back()
            self.tree = self._index.tree_without(taken)
            self._taken = [(taken, np.zeros(len(taken)))]

    def put_back(self) -> None:
        for slots, weights in self._taken:
            self.tree.set_leaves(slots, weights)
        self._taken = []
