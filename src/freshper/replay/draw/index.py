"""The index of one task: sum-trees over (b_i f_i)^alpha, exact at any policy version.

log (b_i f_i)^alpha = alpha (log b_i + v_i rate) - alpha v rate for a common-factor decay at the current version v. The
last term is the same for all items, so the key alpha (log b_i + (v_i - epoch) rate) gives the exact distribution
at any time, and passing time costs nothing. Any other decay has its keys recomputed for a new version, its
``epoch``; until then the index gives the distribution of that version, whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from freshper.replay.draw import kernels
from freshper.replay.draw.compiled import twins
from freshper.replay.draw.item_table import ItemTable, last_of_each, logarithms
from freshper.replay.draw.keying import REACH, Keying
from freshper.replay.draw.min_tree import MinTree
from freshper.replay.draw.sum_tree import TOTAL_LIMIT, SumTree, outside, reference_of
from freshper.replay.freshness import Freshness

Slots = NDArray[np.int64] | slice


@dataclass(frozen=True, slots=True)
class Trees:
    """All trees of an index, computed together."""

    keying: Keying
    alive: NDArray[np.bool_]
    sums: Mapping[str, SumTree]
    minima: Mapping[str, MinTree]


class PriorityIndex:
    """Draw weights of the items that ``table`` gives to index ``number``.

    Sum-trees: "weights" holds (b f)^alpha; "freshness" f^alpha of the drawable items, made when first asked for.
    Minimum-trees, made when first asked for: "lowest" priority b f (undrawable items first, then the oldest of
    equals), "least" weight and "least_base" of the drawable ones.
    """

    def __init__(self, table: ItemTable, number: int, freshness: Freshness, alpha: float) -> None:
        self._table, self._number = table, number
        self.keying = Keying(freshness, alpha)
        self.drawable = 0
        self._sums: dict[str, SumTree] = {"weights": SumTree(table.capacity)}
        self._minima: dict[str, MinTree] = {}
        self._twins = twins(kernels.write_items, capacity=table.capacity)
        self._expiring: list[tuple[int, int]] = []  # a heap of (version, slot), where the decay has a max_age
        self._all_alive = True  # whether every item with a base above 0 is alive, as with a plain decay it should be
        self._dirty: list[NDArray[np.int64]] | None = None  # slots written while trees are computed aside

    @property
    def tree(self) -> SumTree:
        """The tree that is drawn from."""
        return self._sums["weights"]

    @property
    def sums(self) -> Mapping[str, SumTree]:
        """The sum-trees that exist, by name."""
        return self._sums

    def freshness_tree(self) -> SumTree:
        """f^alpha of the drawable items."""
        if "freshness" not in self._sums:
            self._sums["freshness"] = self._sum_tree(
                "freshness", self.keying, self._log_fresh(self.keying, slice(None))
            )
        return self._sums["freshness"]

    def tree_without(self, slots: NDArray[np.int64]) -> SumTree:
        """A tree of its own like :attr:`tree`, but for ``slots`` (n,), which are empty."""
        keys = np.where(self._mine(), self.keys(slice(None)), -np.inf)
        keys[slots] = -np.inf
        tree = SumTree(self._table.capacity)
        tree.rebuild(keys)
        return tree

    def holds(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of ``slots`` (n,) belong to this index."""
        held: NDArray[np.bool_] = self._table.owners[slots] == self._number
        return held

    def keys(self, slots: Slots, name: str = "weights") -> NDArray[np.float64]:
        """What :meth:`Keying.keys` gives for ``slots``, which belong to this index, with the present settings."""
        return self.keying.keys(logarithms(self._table.bases[slots]), self._log_fresh(self.keying, slots), name)

    def _log_fresh(self, keying: Keying, slots: Slots) -> NDArray[np.float64]:
        """log f in ``slots``. A user's function is asked only about items that this index has."""
        versions = self._table.versions[slots]
        if keying.rate is not None:
            return keying.log_fresh(versions)
        held = self._table.owners[slots] == self._number
        logs = np.full(len(held), -np.inf)
        if held.any():
            logs[held] = keying.log_fresh(versions[held])
        return logs

    def smallest(self, name: str) -> tuple[int, float] | None:
        """Slot and value of the minimum-tree ``name``; None where it is empty."""
        if name not in self._minima:
            self._minima[name] = self._min_tree(name, self.keying, self._log_fresh(self.keying, slice(None)))
        return self._minima[name].smallest()

    def aging(self, now: int) -> float:
        """What log f of every item has lost since the epoch; 0 where freshness is recomputed."""
        return 0.0 if self.keying.rate is None else (now - self.keying.epoch) * self.keying.rate

    def log_mass(self, tree: SumTree, now: int) -> float:
        """Log of the sum of all weights of ``tree`` at policy version ``now``; -inf when nothing is drawable."""
        if self.drawable == 0:
            return -np.inf
        return tree.log_total - self.keying.alpha * self.aging(now)

    def watch(self, slots: NDArray[np.int64]) -> None:
        """Expect the items that have come into ``slots`` (n,), which belong to this index, to outlive ``max_age``."""
        for item in zip(self._table.versions[slots].tolist(), slots.tolist(), strict=True):
            heapq.heappush(self._expiring, item)
        if len(self._expiring) > 2 * self._table.capacity + 1024:  # most of these items have left
            self._watch_ages()

    def put(self, slots: NDArray[np.int64], bases: NDArray[np.float64]) -> None:
        """Take in the items that the table has got in distinct ``slots`` (n,), with ``bases`` (n,) for priorities."""
        self._set_factors(slots)
        self.set_bases(np.ascontiguousarray(slots, dtype=np.int64), np.ascontiguousarray(bases, dtype=np.float64))

    def set_bases(self, slots: NDArray[np.int64], bases: NDArray[np.float64]) -> None:
        """Give ``slots`` (n,), which belong to this index, the base priorities ``bases`` (n,). Both are contiguous.

        Of a repeated slot the last value wins.
        """
        if not self._write_compiled(slots, bases):
            slots, bases = last_of_each(slots, bases)
            self._table.bases[slots] = bases
            self.write(slots)

    def _set_factors(self, slots: Slots) -> None:
        if self.keying.factored:
            log_fresh = self._log_fresh(self.keying, slots)
            self._table.factors[slots] = self.keying.factors(log_fresh, self.tree.reference)

    def _write_compiled(self, slots: NDArray[np.int64], bases: NDArray[np.float64]) -> bool:
        """:meth:`set_bases`, compiled: where the drawn tree is the only one and all products are exact.

        Otherwise False, and nothing was written.
        """
        keying, table = self.keying, self._table
        if self._twins is None or not keying.plain or self._minima or len(self._sums) > 1 or not self._all_alive:
            return False
        (write_items,) = self._twins
        tree = self._sums["weights"]
        powers = np.power(bases, keying.exponent)
        total, risen, fallen = write_items(tree.nodes, tree.cells, table.items, slots, bases, powers)
        if total < 0:
            if len(bases) != len(slots):
                raise ValueError(f"{len(bases)} base priorities for {len(slots)} slots: nothing was written")
            if total == kernels.OUT_OF_RANGE:
                raise outside(slots, table.capacity)
            return False  # NOT_EXACT
        if self._dirty is not None:
            self._dirty.append(slots)
        if risen or fallen:
            self.drawable += risen - fallen
            table.alive[slots] = bases > 0
        if (total < TOTAL_LIMIT and self.drawable) or not (keying.near or self._reached(slots)):
            self.rebuild()
        return True

    def write(self, slots: NDArray[np.int64]) -> None:
        """Bring all trees in line with the table in distinct ``slots`` (n,), which belong to this index."""
        if self._dirty is not None:
            self._dirty.append(slots)
        table, keying = self._table, self.keying
        log_bases, log_fresh = logarithms(table.bases[slots]), self._log_fresh(keying, slots)
        keys = {name: keying.keys(log_bases, log_fresh, name) for name in self._sums}
        self._count(slots, keys["weights"] > -np.inf)
        leaves = keying.leaves(table.bases[slots], table.factors[slots], keys["weights"], self.tree.reference)
        others = [(tree, keys[name]) for name, tree in self._sums.items() if tree is not self.tree]
        if leaves is None or not self._reached(slots) or not all(tree.accepts(own) for tree, own in others):
            self.rebuild()
            return
        self.tree.set_leaves(slots, leaves)
        for tree, own in others:
            tree.set(slots, own)
        if self.drawable and any(tree.underflowed for tree in self._sums.values()):
            self.rebuild()
            return
        for name, minima in self._minima.items():
            minima.set(slots, keying.keys(log_bases, log_fresh, name), table.ranks[slots])

    def _reached(self, slots: NDArray[np.int64]) -> bool:
        """Whether log b f keeps its digits so far from the epoch, which a small alpha hides from the weights."""
        keying, table = self.keying, self._table
        if keying.near or keying.rate is None:
            return True
        lead = (table.versions[slots] - keying.epoch) * keying.rate
        return bool(np.all(lead[table.alive[slots]] <= REACH))

    def erase(self, slots: NDArray[np.int64]) -> None:
        """Forget distinct ``slots`` (n,): their items have left."""
        if self._dirty is not None:
            self._dirty.append(slots)
        self._count(slots, np.zeros(len(slots), dtype=np.bool_))
        self._empty(slots)
        if self.drawable and any(tree.underflowed for tree in self._sums.values()):
            self.rebuild()

    def _empty(self, slots: NDArray[np.int64]) -> None:
        for tree in self._sums.values():
            tree.set_leaves(slots, np.zeros(len(slots)))
        for minima in self._minima.values():
            minima.clear(slots)

    def _count(self, slots: NDArray[np.int64], alive: NDArray[np.bool_]) -> None:
        self.drawable += int(np.count_nonzero(alive)) - int(np.count_nonzero(self._table.alive[slots]))
        self._table.alive[slots] = alive

    def expire(self, now: int) -> None:
        """Let items beyond the decay's ``max_age`` at policy version ``now`` be drawn no more. O(log N) an item."""
        max_age = self.keying.max_age
        if max_age is None or now - max_age <= self.keying.horizon:
            return
        self.keying = replace(self.keying, horizon=now - max_age)
        old = set()
        while self._expiring and self._expiring[0][0] < self.keying.horizon:
            version, slot = heapq.heappop(self._expiring)
            if self._table.owners[slot] == self._number and self._table.versions[slot] == version:
                old.add(slot)
        if old:
            self.write(np.array(sorted(old), dtype=np.int64))

    def rebuild(self) -> None:
        """Recompute every tree from the table; the newest drawable item becomes the epoch of a common-factor decay."""
        if self.keying.rate is not None:
            alive = self._table.versions[self._table.alive & self._mine()]
            self.keying = replace(self.keying, epoch=int(alive.max()) if len(alive) else 0)
        self._take(self.compute(self.keying))

    def refresh(self, now: int) -> None:
        """Recompute the freshness of all items for policy version ``now``, where it is no common factor. O(N)."""
        if self.keying.rate is None and now != self.keying.epoch:
            self._take(self.compute(replace(self.keying, epoch=now)))

    def change(self, freshness: Freshness, alpha: float, now: int) -> None:
        """Take another decay or alpha: one rebuild from the raw values. An error leaves everything as it was."""
        keying = Keying(freshness, alpha, epoch=now)
        drawable = self._mine() & (self._table.bases > 0)
        if keying.rate is not None and drawable.any():
            keying = replace(keying, epoch=int(self._table.versions[drawable].max()))
        if keying.max_age is not None:
            keying = replace(keying, horizon=max(now - keying.max_age, -1))
        self._take(self.compute(keying))
        self._watch_ages()

    def _watch_ages(self) -> None:
        mine = np.flatnonzero(self._mine() & (self._table.versions >= self.keying.horizon))
        watched = self.keying.max_age is not None
        self._expiring = sorted(zip(self._table.versions[mine].tolist(), mine.tolist(), strict=True)) if watched else []

    def restore(
        self,
        slots: NDArray[np.int64],
        epoch: int,
        horizon: int,
        references: Mapping[str, float],
        leaves: Mapping[str, NDArray[np.float64]],
    ) -> None:
        """Put back the trees over ``slots`` (n,) as they were saved, the table being restored already."""
        self.keying = replace(self.keying, epoch=epoch, horizon=horizon)
        for name, reference in references.items():
            everything = np.zeros(self._table.capacity)
            everything[slots] = leaves[name]
            self._sums[name] = SumTree(self._table.capacity)
            self._sums[name].restore(everything, reference)
        mine = slots[self.holds(slots)]
        self._set_factors(mine)
        self.drawable = int(np.count_nonzero(self._table.alive[mine]))
        # Not where the saved decay was another one.
        self._all_alive = bool(np.array_equal(self._table.alive[mine], self._table.bases[mine] > 0))
        self._watch_ages()
        if self.drawable and any(tree.underflowed for tree in self._sums.values()):
            self.rebuild()  # damage has taken what outweighed the rest

    def compute(self, keying: Keying) -> Trees:
        """All trees that exist, computed aside from the table. O(N). Needs no lock while :meth:`begin` is in force."""
        log_fresh = self._log_fresh(keying, slice(None))
        alive = keying.keys(logarithms(self._table.bases), log_fresh, "weights") > -np.inf
        sums = {name: self._sum_tree(name, keying, log_fresh) for name in tuple(self._sums)}
        minima = {name: self._min_tree(name, keying, log_fresh) for name in tuple(self._minima)}
        return Trees(keying, alive, sums, minima)

    def begin(self) -> None:
        """From now on remember what is written, until :meth:`adopt`."""
        self._dirty = []

    def adopt(self, trees: Trees | None) -> None:
        """Take trees that were computed aside since :meth:`begin`, with everything written meanwhile; None: nothing.

        Trees of settings that have changed meanwhile, or older than those in use, are dropped.
        """
        dirty, self._dirty = self._dirty, None
        if trees is None or trees.keying.epoch < self.keying.epoch:
            return
        if (trees.keying.freshness, trees.keying.alpha) != (self.keying.freshness, self.keying.alpha):
            return
        if not (self._sums.keys() <= trees.sums.keys() and self._minima.keys() <= trees.minima.keys()):
            trees = self.compute(trees.keying)  # a tree was first asked for meanwhile
        self._take(trees)
        slots = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *(dirty or [])]))
        mine = self.holds(slots)
        self._empty(slots[~mine])
        if mine.any():
            self.write(slots[mine])

    def _sum_tree(self, name: str, keying: Keying, log_fresh: NDArray[np.float64]) -> SumTree:
        table, mine = self._table, self._mine()
        tree = SumTree(table.capacity)
        keys = np.where(mine, keying.keys(logarithms(table.bases), log_fresh, name), -np.inf)
        leaves = None
        if name == "weights":
            reference = reference_of(keys)
            leaves = keying.leaves(table.bases, keying.factors(log_fresh, reference), keys, reference)
        if leaves is None:
            tree.rebuild(keys)
        else:
            tree.restore(leaves, reference)
        return tree

    def _min_tree(self, name: str, keying: Keying, log_fresh: NDArray[np.float64]) -> MinTree:
        tree = MinTree(self._table.capacity)
        values = np.where(self._mine(), keying.keys(logarithms(self._table.bases), log_fresh, name), np.inf)
        tree.rebuild(values, self._table.ranks)
        return tree

    def _mine(self) -> NDArray[np.bool_]:
        mine: NDArray[np.bool_] = self._table.owners == self._number
        return mine

    def _take(self, trees: Trees) -> None:
        mine = self._mine()
        self.keying = trees.keying
        self._table.alive[mine] = trees.alive[mine]
        self.drawable = int(np.count_nonzero(trees.alive & mine))
        self._all_alive = True
        self._sums.update(trees.sums)
        self._minima.update(trees.minima)
        self._set_factors(np.flatnonzero(mine))
