"""The index: a binary sum-tree over weights that are given as logarithms."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from freshper.replay.draw import kernels
from freshper.replay.draw.compiled import Kernel, twins

# A write whose exponent exceeds the reference by this much asks for a re-base. Far inside the float range
# (exp(709) overflows), because the rounding error of a key grows with its size: 50 keeps it under 1e-14.
EXPONENT_LIMIT = 50.0
# Below this total, what is left may have lost bits to underflow: re-base from the logarithms. With this limit
# every probability above 1e-290 belongs to a weight far enough from the denormal numbers to keep 12 digits.
_TOTAL_LIMIT = math.exp(-EXPONENT_LIMIT)


class SumTree:
    """Weights exp(key - reference) of ``capacity`` leaves, with all partial sums.

    Node 1 is the root and node i has the children 2i and 2i + 1; the leaves are the last level. A parent
    is always recomputed as left + right, never adjusted, so the root equals the sum of the leaves
    whatever has happened. Every operation takes whole batches and walks the levels together.

    There are two versions with the same results, bit for bit: numpy, and compiled by numba (extra ``fast``).
    ``compiled`` chooses, or leaves the choice to :func:`~freshper.replay.draw.compiled.twins`, whose errors are raised.
    """

    def __init__(self, capacity: int, compiled: bool | None = None) -> None:
        self.capacity = capacity
        walks = (kernels.find_slots, kernels.write_leaves, kernels.sum_all)
        self._twins = twins(*walks, capacity=capacity, compiled=compiled)
        self._first_leaf = 1 << max(capacity - 1, 1).bit_length()
        self._nodes = np.zeros(2 * self._first_leaf, dtype=np.float64)
        self._pairs = self._nodes.reshape(-1, 2)  # a view: row i holds the children of node i
        self.reference = 0.0

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return float(self._nodes[1])

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
        view = self._nodes[self._first_leaf : self._first_leaf + self.capacity]
        view.flags.writeable = False
        return view

    def accepts(self, keys: NDArray[np.float64]) -> bool:
        """Whether ``keys`` can be written exactly with the present reference."""
        return bool(keys.size == 0 or keys.max() - self.reference <= EXPONENT_LIMIT)

    @property
    def underflowed(self) -> bool:
        """Whether what is left is so small against the reference that a re-base is due."""
        return self.total < _TOTAL_LIMIT

    def set(self, slots: NDArray[np.int64], keys: NDArray[np.float64]) -> None:
        """Give distinct ``slots`` (n,) the log-weights ``keys`` (n,); -inf empties a slot. O(n log capacity)."""
        self.set_leaves(slots, np.exp(keys - self.reference))

    def set_leaves(self, slots: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Give distinct ``slots`` (n,) the leaves ``weights`` (n,), relative to the present reference.

        Leaves that :meth:`weights` gave come back bit for bit, and so does the whole tree.
        """
        if self._twins is not None:
            _, write_leaves, _ = self._twins
            self._write(write_leaves, slots, weights)
            return
        nodes = self._nodes
        at = slots + self._first_leaf
        nodes[at] = weights
        width = self._first_leaf
        while width > 1:  # all leaves lie on one level, so all walks reach the root together
            width //= 2
            if width > len(slots):
                at >>= 1
                children = self._pairs[at]
                nodes[at] = children[:, 0] + children[:, 1]
            else:  # a level no wider than the batch costs less to sum whole
                self._sum_level(width)

    def _write(self, write_leaves: Kernel, slots: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        slots = np.ascontiguousarray(slots, dtype=np.int64)
        weights = np.ascontiguousarray(weights, dtype=np.float64)
        if len(weights) != len(slots):
            raise ValueError(f"{len(weights)} weights for {len(slots)} slots: nothing was written")
        if not write_leaves(self._nodes, self.capacity, slots, weights, np.empty_like(slots)):
            raise IndexError(
                f"slots run from {slots.min()} to {slots.max()}, capacity {self.capacity}: nothing was written"
            )

    def rebuild(self, keys: NDArray[np.float64]) -> None:
        """Take the log-weights of all slots (capacity,) anew, with their maximum as the reference."""
        top = float(keys.max())
        self.reference = top if np.isfinite(top) else 0.0
        self.restore(np.exp(keys - self.reference), self.reference)

    def restore(self, leaves: NDArray[np.float64], reference: float) -> None:
        """Put back leaves (capacity,) and a reference that :meth:`leaves` and ``reference`` gave."""
        self.reference = reference
        self._nodes[self._first_leaf : self._first_leaf + self.capacity] = leaves
        if self._twins is not None:
            _, _, sum_all = self._twins
            sum_all(self._nodes)
            return
        width = self._first_leaf
        while width > 1:
            width //= 2
            self._sum_level(width)

    def _sum_level(self, width: int) -> None:
        """Recompute the ``width`` nodes of one level from the level below."""
        children = self._pairs[width : 2 * width]
        np.add(children[:, 0], children[:, 1], out=self._nodes[width : 2 * width])

    def weights(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """Weights of ``slots``, relative to the same reference as :attr:`total`."""
        return self._nodes[slots + self._first_leaf]

    def find(self, masses: NDArray[np.float64]) -> NDArray[np.int64]:
        """The slot whose part of [0, total) holds each mass, (n,). Never an empty slot, whatever the rounding.

        Needs ``total > 0``.
        """
        return self.locate(masses)[0]

    def locate(self, masses: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """What :meth:`find` gives for ``masses`` (n,), and what :meth:`weights` gives for that, both (n,)."""
        if self._twins is not None:
            find_slots, _, _ = self._twins
            masses = np.ascontiguousarray(masses, dtype=np.float64)
            slots, weights = np.empty(len(masses), dtype=np.int64), np.empty(len(masses), dtype=np.float64)
            find_slots(self._nodes, masses, slots, weights)
            return slots, weights
        slots = self._descend(masses, careful=False)
        weights = self.weights(slots)
        astray = weights == 0
        if astray.any():
            slots[astray] = self._descend(masses[astray], careful=True)
            weights = self.weights(slots)
        return slots, weights

    def _descend(self, masses: NDArray[np.float64], *, careful: bool) -> NDArray[np.int64]:
        """Walk from the root to a leaf for each mass.

        Rounding may leave a mass beyond the last item of a subtree; then the walk ends in an empty leaf, the
        only place where an empty subtree can lead. A ``careful`` walk refuses to enter one.
        """
        nodes = self._nodes
        remaining = masses.astype(np.float64)
        at = np.ones(len(masses), dtype=np.int64)
        for _ in range(self._first_leaf.bit_length() - 1):
            at <<= 1
            left = nodes[at]
            right = remaining >= left
            if careful:
                right &= nodes[at + 1] > 0
            remaining -= left * right
            at += right
        return at - self._first_leaf
