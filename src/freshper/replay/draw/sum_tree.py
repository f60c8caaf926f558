"""The index: a binary sum-tree over weights that are given as logarithms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.replay.draw import kernels
from freshper.replay.draw.compiled import twins

# A write whose exponent exceeds the reference by this much asks for a re-base. Far inside the float range
# (exp(709) overflows), because the rounding error of a key grows with its size: 50 keeps it under 1e-14.
EXPONENT_LIMIT = 50.0
# Below this total, what is left may have lost bits to underflow: re-base from the logarithms. With this limit
# every probability above 1e-290 belongs to a weight far enough from the denormal numbers to keep 12 digits.
TOTAL_LIMIT = math.exp(-EXPONENT_LIMIT)


CACHE_LINE = 64
"""Bytes that the machine reads at once."""
BLOCK = 8
"""Leaves whose sums are not stored but recomputed: a cache line of them."""


class SumTree:
    """Weights exp(key - reference) of ``capacity`` leaves, with partial sums.

    Eight leaves are a block. Node 1 is the root, node i has the children 2i and 2i + 1, and the last level holds the
    sums of the blocks. A sum is always recomputed as left + right, never adjusted, also inside a block, where pairs and
    fours are summed whenever they are needed: so the root equals the sum of the leaves whatever has happened. Every
    operation takes whole batches and walks the levels together.

    There are two versions with the same results, bit for bit: numpy, and compiled by numba (extra ``fast``).
    ``compiled`` chooses, or leaves the choice to :func:`~freshper.replay.draw.compiled.twins`, whose errors are raised.
    """

    def __init__(self, capacity: int, compiled: bool | None = None) -> None:
        self.capacity = capacity
        walks = (kernels.find_slots, kernels.write_leaves, kernels.sum_all)
        self._twins = twins(*walks, capacity=capacity, compiled=compiled)
        self._blocks = 1 << (-(-capacity // BLOCK) - 1).bit_length()
        self.nodes = np.zeros(2 * self._blocks, dtype=np.float64)
        self._pairs = self.nodes.reshape(-1, 2)  # a view: row i holds the children of node i
        self.cells = aligned_zeros(self._blocks * BLOCK, np.dtype(np.float64))  # the leaves, in whole blocks
        self._rows = self.cells.reshape(-1, BLOCK)  # a view: row i holds the leaves of block i
        self.reference = 0.0

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return float(self.nodes[1])

    @property
    def log_total(self) -> float:
        """Log of the sum of all leaves, whatever the reference; -inf when all are empty."""
        return math.log(self.total) + self.reference if self.total > 0 else -math.inf

    @property
    def compiled(self) -> bool:
        """Whether this tree runs compiled."""
        return self._twins is not None

    def leaves(self) -> NDArray[np.float64]:
        """The weights of all slots, (capacity,), a read-only view."""
        view = self.cells[: self.capacity]
        view.flags.writeable = False
        return view

    def accepts(self, keys: NDArray[np.float64]) -> bool:
        """Whether ``keys`` can be written exactly with the present reference."""
        return bool(keys.size == 0 or keys.max() - self.reference <= EXPONENT_LIMIT)

    @property
    def underflowed(self) -> bool:
        """Whether what is left is so small against the reference that a re-base is due."""
        return self.total < TOTAL_LIMIT

    def set(self, slots: NDArray[np.int64], keys: NDArray[np.float64]) -> None:
        """Give distinct ``slots`` (n,) the log-weights ``keys`` (n,); -inf empties a slot. O(n log capacity)."""
        self.set_leaves(slots, np.exp(keys - self.reference))

    def set_leaves(self, slots: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Give distinct ``slots`` (n,) the leaves ``weights`` (n,), relative to the present reference.

        Leaves that :meth:`weights` gave come back bit for bit, and so does the whole tree.
        """
        if self._twins is not None:
            slots = np.ascontiguousarray(slots, dtype=np.int64)
            weights = np.ascontiguousarray(weights, dtype=np.float64)
            if len(weights) != len(slots):
                raise ValueError(f"{len(weights)} weights for {len(slots)} slots: nothing was written")
            _, write_leaves, _ = self._twins
            if not write_leaves(self.nodes, self.cells, self.capacity, slots, weights):
                raise outside(slots, self.capacity)
            return
        self.cells[slots] = weights
        nodes = self.nodes
        at = slots // BLOCK
        nodes[self._blocks + at] = _block_sums(self._rows[at])
        at += self._blocks
        width = self._blocks
        while width > 1:  # all blocks lie on one level, so all walks reach the root together
            width //= 2
            if width > len(slots):
                at >>= 1
                children = self._pairs[at]
                nodes[at] = children[:, 0] + children[:, 1]
            else:  # a level no wider than the batch costs less to sum whole
                self._sum_level(width)

    def rebuild(self, keys: NDArray[np.float64]) -> None:
        """Take the log-weights of all slots (capacity,) anew, with their maximum as the reference."""
        reference = reference_of(keys)
        self.restore(np.exp(keys - reference), reference)

    def restore(self, leaves: NDArray[np.float64], reference: float) -> None:
        """Put back leaves (capacity,) and a reference that :meth:`leaves` and ``reference`` gave."""
        self.reference = reference
        self.cells[: self.capacity] = leaves
        if self._twins is not None:
            _, _, sum_all = self._twins
            sum_all(self.nodes, self.cells)
            return
        self.nodes[self._blocks :] = _block_sums(self._rows)
        width = self._blocks
        while width > 1:
            width //= 2
            self._sum_level(width)

    def _sum_level(self, width: int) -> None:
        """Recompute the ``width`` nodes of one level from the level below."""
        children = self._pairs[width : 2 * width]
        np.add(children[:, 0], children[:, 1], out=self.nodes[width : 2 * width])

    def weights(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """Weights of ``slots``, relative to the same reference as :attr:`total`."""
        return self.cells[slots]

    def find(self, masses: NDArray[np.float64]) -> NDArray[np.int64]:
        """The slot whose part of [0, total) holds each mass, (n,). Never an empty slot, whatever the rounding.

        Needs ``total > 0``.
        """
        return self.locate(masses)[0]

    def locate(self, masses: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """What :meth:`find` gives for ``masses`` (n,), and what :meth:`weights` gives for that, both (n,)."""
        if self._twins is not None:
            slots, weights = np.empty(len(masses), dtype=np.int64), np.array(masses, dtype=np.float64)
            if not self._twins[0](self.nodes, self.cells, weights, False, slots):
                return slots, weights
        slots = self._descend(masses, careful=False)
        weights = self.weights(slots)
        if not weights.all():
            astray = weights == 0
            slots[astray] = self._descend(masses[astray], careful=True)
            weights[astray] = self.weights(slots[astray])
        return slots, weights

    def locate_strata(self, positions: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """A slot in each of n equal parts of all mass, at ``positions`` (n,) in [0, 1) inside them, and its P.

        ``positions`` is contiguous and used up: P may be written to it.
        """
        if self._twins is not None:
            slots = np.empty(len(positions), dtype=np.int64)
            if not self._twins[0](self.nodes, self.cells, positions, True, slots):
                return slots, positions
        masses = positions + np.arange(len(positions))
        masses /= len(positions)
        masses *= self.total
        slots, chances = self.locate(masses)
        chances /= self.total
        return slots, chances

    def _descend(self, masses: NDArray[np.float64], *, careful: bool) -> NDArray[np.int64]:
        """Walk from the root to a leaf for each mass.

        Rounding may leave a mass beyond the last item of a subtree; then the walk ends in an empty leaf, the
        only place where an empty subtree can lead. A ``careful`` walk refuses to enter one.
        """
        remaining = masses.astype(np.float64)
        at = np.ones(len(masses), dtype=np.int64)
        for _ in range(self._blocks.bit_length() - 1):
            at <<= 1
            left = self.nodes[at]
            right = remaining >= left
            if careful:
                right &= self.nodes[at + 1] > 0
            remaining -= left * right
            at += right
        blocks = at - self._blocks
        rows = self._rows[blocks]
        pairs = rows[:, ::2] + rows[:, 1::2]
        fours = pairs[:, ::2] + pairs[:, 1::2]
        number, inside = np.arange(len(masses)), np.zeros(len(masses), dtype=np.int64)
        for sums in (fours, pairs, rows):
            inside <<= 1
            left = sums[number, inside]
            right = remaining >= left
            if careful:
                right &= sums[number, inside + 1] > 0
            remaining -= left * right
            inside += right
        return blocks * BLOCK + inside


def _block_sums(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of blocks (n, 8), added up as a tree, (n,)."""
    pairs = rows[:, ::2] + rows[:, 1::2]
    fours: NDArray[np.float64] = pairs[:, ::2] + pairs[:, 1::2]
    return fours[:, 0] + fours[:, 1]


def outside(slots: NDArray[np.int64], capacity: int) -> IndexError:
    """The error of slots that compiled code has refused."""
    return IndexError(f"slots run from {slots.min()} to {slots.max()}, capacity {capacity}: nothing was written")


def reference_of(keys: NDArray[np.float64]) -> float:
    """What the leaves of all ``keys`` (capacity,) are relative to: their maximum."""
    top = float(keys.max())
    return top if np.isfinite(top) else 0.0


def aligned_zeros(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Zeros (count,) that begin at a cache line, which numpy's own do not: what lies in one line is read at once."""
    spare = -(-CACHE_LINE // dtype.itemsize)
    room = np.zeros(count + spare, dtype=dtype).view(np.uint8)
    start = -room.ctypes.data % CACHE_LINE
    return room[start : start + count * dtype.itemsize].view(dtype)
