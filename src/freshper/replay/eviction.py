"""What leaves a buffer: whose turn it is when room is needed, and what has grown too old."""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from freshper.errors import CapacityError
from freshper.replay.arrivals import Arrivals
from freshper.replay.columns import Columns
from freshper.replay.sampler import PrioritySampler
from freshper.replay.store import ItemStore

Evict = Literal["fifo", "lowest", "group"]
EVICT: tuple[Evict, ...] = ("fifo", "lowest", "group")


class Evictor:
    """Takes items out of store and sampler together.

    ``evict``: the oldest item first, the lowest present priority first (what cannot be drawn before all, then the
    oldest of equals), or the oldest item with all others of its group. ``quotas`` (k,) are the most items of each
    index, ``max_bytes`` bounds what the store is charged, ``max_age`` is in policy versions.
    """

    def __init__(
        self,
        store: ItemStore,
        sampler: PrioritySampler,
        evict: Evict,
        *,
        quotas: NDArray[np.int64],
        max_bytes: int | None,
        max_age: int | None,
    ) -> None:
        self._store, self._sampler, self._evict = store, sampler, evict
        self._quotas, self._max_bytes, self._max_age = quotas, max_bytes, max_age
        self._groups: defaultdict[tuple[str, str], set[int]] = defaultdict(set)  # slots by group, where they matter
        self._ages: list[tuple[int, int]] = []  # a heap of (version, key), where there is a max_age

    def admit(self, slots: NDArray[np.int64]) -> None:
        """Watch the items in ``slots`` (n,), which have just come."""
        if self._evict == "group":
            for slot, name in zip(slots.tolist(), self._names(slots), strict=True):
                self._groups[name].add(slot)
        if self._max_age is not None:
            versions = self._sampler.versions[slots].tolist()
            for item in zip(versions, self._store.keys[slots].tolist(), strict=True):
                heapq.heappush(self._ages, item)

    def remove(self, slots: NDArray[np.int64]) -> None:
        """Take the items in distinct occupied ``slots`` (n,) out."""
        if len(slots) == 0:
            return
        if self._evict == "group":
            for slot, name in zip(slots.tolist(), self._names(slots), strict=True):
                self._groups[name].discard(slot)
                if not self._groups[name]:
                    del self._groups[name]
        self._sampler.remove(slots)
        self._store.remove(slots)

    def expire(self, now: int) -> int:
        """Take out what is older than ``max_age`` at policy version ``now``; returns how many items. O(log N) each."""
        if self._max_age is None:
            return 0
        keys = []
        while self._ages and self._ages[0][0] < now - self._max_age:
            keys.append(heapq.heappop(self._ages)[1])
        slots = self._store.find(np.array(keys, dtype=np.int64))
        slots = slots[slots >= 0]
        self.remove(slots)
        return len(slots)

    def check_fits(self, arrivals: Arrivals) -> None:
        """Raise :class:`CapacityError` where no eviction could make room for ``arrivals``."""
        counts = np.bincount(arrivals.owners, minlength=len(self._quotas))
        limits = np.minimum(self._quotas, self._store.capacity)
        if len(arrivals) > self._store.capacity or (counts > limits).any():
            limit = self._store.capacity if len(arrivals) > self._store.capacity else int(limits[counts > limits][0])
            raise CapacityError(
                f"{len(arrivals)} items in one add, room for {limit} (capacity {self._store.capacity}): the first ones "
                "would be evicted before anybody could draw them; nothing was added"
            )
        if self._max_bytes is None or len(arrivals) == 0:
            return
        costs = self._store.arena.cost(arrivals.columns)
        images = _image_bytes(arrivals.columns)
        worst = int(costs.argmax())
        if costs[worst] > self._max_bytes:
            raise CapacityError(
                f"trajectory {worst} of {arrivals.columns.lengths[worst]} tokens takes {costs[worst]} bytes, the "
                f"budget is max_bytes {self._max_bytes}: it is refused, and nothing was evicted for it"
            )
        if costs.sum() + images > self._max_bytes:
            raise CapacityError(
                f"{len(costs)} trajectories in one add take {costs.sum()} bytes and {images} of images, the budget is "
                f"max_bytes {self._max_bytes}; nothing was added"
            )

    def make_room(self, arrivals: Arrivals) -> int:
        """Evict until ``arrivals`` fit, as :meth:`check_fits` has promised; returns how many items left."""
        before = len(self._store)
        counts = np.bincount(arrivals.owners, minlength=len(self._quotas))
        for owner in np.flatnonzero(counts).tolist():
            while (excess := int(self._store.counts[owner] + counts[owner] - self._quotas[owner])) > 0:
                self.remove(self._victims(excess, owner))
        while (excess := len(self._store) + len(arrivals) - self._store.capacity) > 0:
            self.remove(self._victims(excess))
        if self._max_bytes is not None:
            needed = int(self._store.arena.cost(arrivals.columns).sum())
            while self._taken(arrivals.columns) + needed > self._max_bytes:
                self.remove(self._victims(1))
        return before - len(self._store)

    def _taken(self, columns: Columns) -> int:
        """Bytes of what is kept, and of the images that would come with ``columns``."""
        arena = self._store.arena
        return arena.live_bytes + arena.new_image_bytes(columns)

    def _victims(self, count: int, owner: int | None = None) -> NDArray[np.int64]:
        """Slots of at most ``count`` items whose turn it is, and at least one; with a group all its members."""
        if self._evict == "fifo":
            return self._store.oldest(count, owner)
        if self._evict == "lowest":
            return np.array([self._lowest(owner)], dtype=np.int64)
        oldest = self._store.oldest(1, owner)
        slots = sorted(self._groups[self._names(oldest)[0]], key=lambda slot: self._store.ranks[slot])
        return np.array(slots, dtype=np.int64)

    def _lowest(self, owner: int | None) -> int:
        candidates = []
        for number, index in enumerate(self._sampler.indexes):
            if owner in (None, number) and (smallest := index.smallest("lowest")) is not None:
                slot, log_priority = smallest
                candidates.append((log_priority - index.aging(self._sampler.now), int(self._store.ranks[slot]), slot))
        return min(candidates)[2]

    def _names(self, slots: NDArray[np.int64]) -> list[tuple[str, str]]:
        """Task and group of the items in ``slots`` (n,)."""
        records, offsets = self._store.records(slots)
        first = records[offsets[:-1]]
        tasks, groups = self._store.arena.fact("tasks")[first], self._store.arena.fact("groups")[first]
        return list(zip(tasks.tolist(), groups.tolist(), strict=True))


def _image_bytes(columns: Columns) -> int:
    return sum(len(image) for image in {image for images in columns.images for image in images})
