"""What is kept: the trajectories, their slots and their keys. Oldest first out when full."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from freshper.errors import CapacityError
from freshper.trajectory import Trajectory


class TrajectoryStore:
    """A ring of ``capacity`` slots.

    A key is ``slot + capacity * generation``: it names one item for ever. When a slot gets a new tenant the
    generation rises, so a key held since before finds nothing instead of the new tenant.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys = np.full(capacity, -1, dtype=np.int64)  # of the present tenant of every slot
        self._items: list[Trajectory | None] = [None] * capacity
        self.added = 0  # trajectories ever added; the next one goes to slot added % capacity

    def __len__(self) -> int:
        """Number of stored trajectories."""
        return min(self.added, self.capacity)

    def add(self, trajectories: Sequence[Trajectory]) -> NDArray[np.int64]:
        """Store ``trajectories``, evicting the oldest where needed; returns their slots (n,)."""
        if len(trajectories) > self.capacity:
            raise CapacityError(
                f"{len(trajectories)} trajectories in one add, capacity {self.capacity}: the first ones would be "
                "evicted before anybody could draw them; nothing was added"
            )
        serials = np.arange(self.added, self.added + len(trajectories), dtype=np.int64)
        slots = serials % self.capacity
        for slot, trajectory in zip(slots.tolist(), trajectories, strict=True):
            self._items[slot] = trajectory
        self.keys[slots] = serials
        self.added += len(trajectories)
        return slots

    def find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slot of every key (n,); -1 where the item is gone or never was."""
        slots = keys % self.capacity
        return np.where((keys >= 0) & (self.keys[slots] == keys), slots, -1)

    def get(self, slots: NDArray[np.int64]) -> tuple[Trajectory, ...]:
        """The trajectories in occupied ``slots``."""
        found = tuple(self._items[slot] for slot in slots.tolist())
        return tuple(trajectory for trajectory in found if trajectory is not None)

    def occupied(self) -> NDArray[np.int64]:
        """Slots in use, oldest item first."""
        return np.arange(self.added - len(self), self.added, dtype=np.int64) % self.capacity

    def restore(self, trajectories: Sequence[Trajectory], added: int) -> None:
        """Put back what :meth:`get` of :meth:`occupied` gave, when :attr:`added` was ``added``."""
        self.added = added - len(trajectories)
        self.add(trajectories)
