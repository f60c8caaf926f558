"""The index: a binary sum-tree over weights that are given as logarithms."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# A write whose exponent exceeds the reference by this much asks for a re-base. Far inside the float range
# (exp(709) overflows), because the rounding error of a key grows with its size: 50 keeps it under 1e-14.
_EXPONENT_LIMIT = 50.0
# Below this total, old weights have lost bits to underflow: re-base from the logarithms.
_TOTAL_LIMIT = 1e-290


class SumTree:
    """Weights exp(key - reference) of ``capacity`` leaves, with all partial sums.

    Node 1 is the root and node i has the children 2i and 2i + 1; the leaves are the last level. A parent
    is always recomputed as left + right, never adjusted, so the root equals the sum of the leaves
    whatever has happened. Every operation takes whole batches and walks the levels together.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._first_leaf = 1 << max(capacity - 1, 1).bit_length()
        self._nodes = np.zeros(2 * self._first_leaf, dtype=np.float64)
        self.reference = 0.0

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return float(self._nodes[1])

    def leaves(self) -> NDArray[np.float64]:
        """The weights of all slots, (capacity,), a read-only view."""
        view = self._nodes[self._first_leaf : self._first_leaf + self.capacity]
        view.flags.writeable = False
        return view

    def accepts(self, keys: NDArray[np.float64]) -> bool:
        """Whether ``keys`` can be written exactly with the present reference."""
        return bool(keys.size == 0 or keys.max() - self.reference <= _EXPONENT_LIMIT)

    @property
    def underflowed(self) -> bool:
        """Whether what is left is so small against the reference that a re-base is due."""
        return self.total < _TOTAL_LIMIT

    def set(self, slots: NDArray[np.int64], keys: NDArray[np.float64]) -> None:
        """Give distinct ``slots`` (n,) the log-weights ``keys`` (n,); -inf empties a slot. O(n log capacity)."""
        nodes = self._nodes
        at = slots + self._first_leaf
        nodes[at] = np.exp(keys - self.reference)
        while at[0] > 1:  # all leaves lie on one level, so all walks reach the root together
            at = at >> 1
            left = at << 1
            nodes[at] = nodes[left] + nodes[left + 1]

    def rebuild(self, keys: NDArray[np.float64]) -> None:
        """Take the log-weights of all slots (capacity,) anew, with their maximum as the reference."""
        top = float(keys.max())
        self.reference = top if np.isfinite(top) else 0.0
        self.restore(np.exp(keys - self.reference), self.reference)

    def restore(self, leaves: NDArray[np.float64], reference: float) -> None:
        """Put back leaves (capacity,) and a reference that :meth:`leaves` and ``reference`` gave."""
        self.reference = reference
        self._nodes[:] = 0.0
        self._nodes[self._first_leaf : self._first_leaf + self.capacity] = leaves
        width = self._first_leaf
        while width > 1:
            level = self._nodes[width : 2 * width]
            self._nodes[width // 2 : width] = level[0::2] + level[1::2]
            width //= 2

    def weights(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """Weights of ``slots``, relative to the same reference as :attr:`total`."""
        return self._nodes[slots + self._first_leaf]

    def find(self, masses: NDArray[np.float64]) -> NDArray[np.int64]:
        """The slot whose part of [0, total) holds each mass, (n,). Never an empty slot, whatever the rounding.

        Needs ``total > 0``. A walk never enters an empty subtree: at the upper edge rounding may leave a
        mass beyond the last item, and then the empty right side is refused.
        """
        nodes = self._nodes
        remaining = masses.astype(np.float64)
        at = np.ones(len(masses), dtype=np.int64)
        for _ in range(self._first_leaf.bit_length() - 1):
            at <<= 1
            left = nodes[at]
            right = (remaining >= left) & (nodes[at + 1] > 0)
            remaining -= left * right
            at += right
        return at - self._first_leaf
