"""What leaves a buffer: whose turn it is when room is needed, and what has grown too old."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from freshper.errors import CapacityError
from freshper.replay.draw.sampler import PrioritySampler
from freshper.replay.store.arrivals import Arrivals
from freshper.replay.store.columns import Columns
from freshper.replay.store.items import ItemStore

Evict = Literal["fifo", "lowest", "group"]
EVICT: tuple[Evict, ...] = ("fifo", "lowest", "group")
_SPARE = 1024  # entries of items that have left, which a heap may hold beyond as many as there are items


@dataclass(slots=True)
class Leaving:
    """Items that are about to leave, by slot in the order of leaving; the sampler has them no more."""

    expired: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    taken: list[dict[str, NDArray[Any]]] = field(default_factory=list)

    @property
    def slots(self) -> NDArray[np.int64]:
        """All of them, (n,)."""
        return np.array(self.expired + self.evicted, dtype=np.int64)


class _Ledger:
    """What would be left if items left."""

    def __init__(self, store: ItemStore, *, count_bytes: bool) -> None:
        self._store, self._count_bytes = store, count_bytes
        self.counts: list[int] = store.counts.tolist()
        self.items = len(store)
        self.bytes = store.arena.live_bytes
        self.gone: set[int] = set()
        self.queues: dict[int | None, Iterator[int]] = {}
        self._users: dict[int, int] = {}  # of records, and of images, that have lost some
        self._image_users: dict[bytes, int] = {}

    def oldest(self, owner: int | None) -> int:
        """The slot of the oldest item, of all or of one owner, that is still there."""
        queue = self.queues.setdefault(owner, self._store.by_arrival(owner))
        return next(slot for slot in queue if slot not in self.gone)

    def take(self, slots: list[int]) -> None:
        self.gone.update(slots)
        self.items -= len(slots)
        for slot in slots:
            self.counts[self._store.owner(slot)] -= 1
        if not self._count_bytes or not slots:
            return
        arena = self._store.arena
        for record in self._store.records(np.array(slots, dtype=np.int64))[0].tolist():
            self._users[record] = left = self._users.get(record, self._store.users(record)) - 1
            if left == 0:
                self.bytes -= int(arena.fact("costs")[record])
                for image in arena.fact("images")[record]:
                    self._image_users[image] = others = self._image_users.get(image, arena.images.users(image)) - 1
                    self.bytes -= len(image) if others == 0 else 0


class Evictor:
    """Takes items out of store and sampler together.

    ``evict``: the oldest item first, the lowest present priority first (what cannot be drawn before all, then the
    oldest of equals; a decay that is recomputed is, where ``refresh``), or the oldest item with all others of its
    group. ``quotas`` (k,) are the most items of each
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
        refresh: bool = True,
    ) -> None:
        self._store, self._sampler, self._evict = store, sampler, evict
        self._quotas, self._max_bytes, self._max_age = quotas, max_bytes, max_age
        self._refresh = refresh  # whether a decay that is no common factor is brought up to date before it ranks
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
            if len(self._ages) > 2 * len(self._store) + _SPARE:  # most of them have left in another way
                live = self._store.find(np.array([key for _, key in self._ages], dtype=np.int64)) >= 0
                self._ages = [item for item, there in zip(self._ages, live.tolist(), strict=True) if there]
                heapq.heapify(self._ages)

    def remove(self, slots: NDArray[np.int64]) -> None:
        """Take the items in distinct occupied ``slots`` (n,) out."""
        if len(slots):
            self._sampler.remove(slots)
            self._forget(slots)

    def _forget(self, slots: NDArray[np.int64]) -> None:
        if self._evict == "group":
            for slot, name in zip(slots.tolist(), self._names(slots), strict=True):
                self._groups[name].discard(slot)
                if not self._groups[name]:
                    del self._groups[name]
        self._store.remove(slots)

    def expire(self, now: int) -> int:
        """Take out what is older than ``max_age`` at policy version ``now``; returns how many items. O(log N) each."""
        slots = self._overdue(now)
        self.remove(slots)
        return len(slots)

    def expiring(self, now: int) -> NDArray[np.int64]:
        """The slots of the items that :meth:`expire` would take out."""
        slots = self._overdue(now)
        for slot in slots.tolist():
            heapq.heappush(self._ages, (int(self._sampler.versions[slot]), int(self._store.keys[slot])))
        return slots

    def _overdue(self, now: int) -> NDArray[np.int64]:
        keys = []
        while self._max_age is not None and self._ages and self._ages[0][0] < now - self._max_age:
            keys.append(heapq.heappop(self._ages)[1])
        slots = self._store.find(np.array(keys, dtype=np.int64))
        return slots[slots >= 0]

    def check_fits(self, arrivals: Arrivals) -> None:
        """Raise :class:`CapacityError` where no eviction could make room for ``arrivals``."""
        if len(arrivals) > self._store.capacity:
            raise CapacityError(
                f"{len(arrivals)} items in one add, capacity {self._store.capacity}: the first ones would be evicted "
                "before anybody could draw them; nothing was added"
            )
        counts = np.bincount(arrivals.owners, minlength=len(self._quotas))
        if (over := counts > self._quotas).any():
            raise CapacityError(
                f"{counts[over][0]} items of one task in one add, its quota is {self._quotas[over][0]} of "
                f"{self._store.capacity}: the first ones would be evicted before anybody could draw them; nothing was "
                "added"
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

    def choose(self, owners: NDArray[np.int16], now: int) -> Leaving:
        """What has to leave for items of these ``owners`` (n,), whose trajectories the arena already holds.

        :meth:`check_fits` has promised that it is enough. Then either :meth:`dismiss` or :meth:`keep` it.
        """
        if self._evict == "lowest" and self._refresh:
            for index in self._sampler.indexes:
                index.refresh(now)
        leaving = Leaving(expired=self._overdue(now).tolist())
        self._take(leaving, leaving.expired)
        ledger = _Ledger(self._store, count_bytes=self._max_bytes is not None)
        ledger.take(leaving.expired)
        counts: list[int] = np.bincount(owners, minlength=len(self._quotas)).tolist()
        for owner, count in enumerate(counts):
            while count and ledger.counts[owner] + count > self._quotas[owner]:
                self._evict_next(leaving, ledger, owner, now)
        while ledger.items + len(owners) > self._store.capacity:
            self._evict_next(leaving, ledger, None, now)
        while self._max_bytes is not None and ledger.bytes > self._max_bytes:
            self._evict_next(leaving, ledger, None, now)
        if self._evict != "lowest":
            self._take(leaving, leaving.evicted)
        return leaving

    def _evict_next(self, leaving: Leaving, ledger: _Ledger, owner: int | None, now: int) -> None:
        """Choose the item, of all or of one owner, whose turn it is; with a group all its members."""
        if self._evict == "lowest":
            slots = [self._lowest(owner, now)]
            self._take(leaving, slots)  # at once, or it would be the lowest again
        else:
            slots = [ledger.oldest(owner)]
            if self._evict == "group":
                members = self._groups[self._names(np.array(slots, dtype=np.int64))[0]] - ledger.gone
                slots = sorted(members, key=self._store.ranks.__getitem__)
        ledger.take(slots)
        leaving.evicted += slots

    def _take(self, leaving: Leaving, slots: list[int]) -> None:
        """Out of the sampler."""
        if slots:
            chosen = np.array(slots, dtype=np.int64)
            table = self._sampler.table
            names = ("bases", "versions", "owners", "ranks")
            leaving.taken.append({"slots": chosen, **{name: getattr(table, name)[chosen] for name in names}})
            self._sampler.remove(chosen)

    def dismiss(self, leaving: Leaving) -> None:
        """Let them go for good."""
        if len(leaving.slots):
            self._forget(leaving.slots)

    def keep(self, leaving: Leaving) -> None:
        """Let them stay after all."""
        for facts in leaving.taken:
            self._sampler.put(**facts)
        for slot in leaving.expired:
            heapq.heappush(self._ages, (int(self._sampler.versions[slot]), int(self._store.keys[slot])))

    def _lowest(self, owner: int | None, now: int) -> int:
        candidates = []
        for number, index in enumerate(self._sampler.indexes):
            if owner in (None, number) and (smallest := index.smallest("lowest")) is not None:
                slot, log_priority = smallest
                candidates.append((log_priority - index.aging(now), int(self._store.ranks[slot]), slot))
        return min(candidates)[2]

    def _names(self, slots: NDArray[np.int64]) -> list[tuple[str, str]]:
        """Task and group of the items in ``slots`` (n,)."""
        records, offsets = self._store.records(slots)
        first = records[offsets[:-1]]
        tasks, groups = self._store.arena.fact("tasks")[first], self._store.arena.fact("groups")[first]
        return list(zip(tasks.tolist(), groups.tolist(), strict=True))


def _image_bytes(columns: Columns) -> int:
    return sum(len(image) for image in {image for images in columns.images for image in images})
