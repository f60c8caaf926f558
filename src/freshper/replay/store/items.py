"""What is kept: items in slots, their keys, their order, and the records that hold their tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from heapq import merge
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.errors import SnapshotError
from freshper.replay.store.arena import Arena
from freshper.replay.store.columns import Columns, ColumnsBuffer
from freshper.replay.store.turns import at_turns


class ItemStore:
    """``capacity`` slots, each with an item: a trajectory, one of its turns, or a group of trajectories.

    A key is ``slot + capacity * generation``: it names one item for ever. When a slot gets a new tenant the
    generation rises, so a key held since before finds nothing instead of the new tenant. Items may share a
    record (the turns of an episode do): it is freed with the last of them.
    """

    def __init__(self, capacity: int, arena: Arena, owners: int = 1) -> None:
        self.capacity = capacity
        self.arena = arena
        self.keys = np.full(capacity, -1, dtype=np.int64)  # of the present tenant of every slot
        self.uses = np.zeros(capacity, dtype=np.int64)
        self.counts = np.zeros(owners, dtype=np.int64)  # items of each owner
        self.ranks = np.zeros(capacity, dtype=np.int64)  # order of arrival
        self.arrived = 0  # items ever added
        self.serials_given = 0  # trajectories ever added
        self._owners = np.zeros(capacity, dtype=np.int16)
        self._generations = np.zeros(capacity, dtype=np.int64)
        self._records = np.full(capacity, -1, dtype=np.int64)  # of an item with one record
        self._members: dict[int, NDArray[np.int64]] = {}  # of an item with several, by slot
        self._turns = np.full(capacity, -1, dtype=np.int32)  # of an item that is a turn: which
        self._serials = np.zeros(0, dtype=np.int64)  # by record: the number of the trajectory
        self._users = np.zeros(0, dtype=np.int64)  # by record: items that use it
        self._queues: list[deque[int]] = [deque() for _ in range(owners)]  # keys, oldest first; some are gone
        self._untouched = 0  # slots from here on never held an item
        self._freed: deque[int] = deque()  # slots whose item has left, in that order

    def __len__(self) -> int:
        """Number of items."""
        return int(self.counts.sum())

    def next_keys(self, count: int, leaving: NDArray[np.int64]) -> NDArray[np.int64]:
        """Keys (n,) for ``count`` new items once those in ``leaving`` (m,) have left; there is room for them then."""
        fresh = range(self._untouched, min(self._untouched + count, self.capacity))
        reused = islice(chain(self._freed, leaving.tolist()), count - len(fresh))
        slots = np.array([*fresh, *reused], dtype=np.int64)
        return slots + self.capacity * (self._generations[slots] + np.isin(slots, leaving))

    def add(
        self,
        keys: NDArray[np.int64],
        records: NDArray[np.int64],
        members: NDArray[np.int64],
        member_offsets: NDArray[np.int64],
        owners: NDArray[np.int16],
        *,
        turns: NDArray[np.int32] | None = None,
    ) -> NDArray[np.int64]:
        """Store n items under ``keys`` (n,), whose slots are free; returns the slots (n,).

        ``records`` are those of new trajectories in the arena. Item i is the trajectories
        ``members[member_offsets[i] : member_offsets[i + 1]]`` of them; where ``turns`` (n,) is given, that turn of
        its one trajectory.
        """
        self._grow(records)
        self._serials[records] = np.arange(self.serials_given, self.serials_given + len(records))
        self.serials_given += len(records)
        slots = keys % self.capacity
        self._occupy(slots)
        self._generations[slots] = keys // self.capacity
        self._fill(keys, records[members], member_offsets, owners, turns)
        self.ranks[slots] = np.arange(self.arrived, self.arrived + len(slots))
        self.arrived += len(slots)
        self.uses[slots] = 0
        self._enqueue(slots)
        return slots

    def _fill(
        self,
        keys: NDArray[np.int64],
        records: NDArray[np.int64],
        offsets: NDArray[np.int64],
        owners: NDArray[np.int16],
        turns: NDArray[np.int32] | None,
    ) -> None:
        slots = keys % self.capacity
        np.add.at(self._users, records, 1)
        single = np.diff(offsets) == 1
        self._records[slots[single]] = records[offsets[:-1][single]]
        for item in np.flatnonzero(~single).tolist():
            self._members[int(slots[item])] = records[offsets[item] : offsets[item + 1]]
        self._turns[slots] = -1 if turns is None else turns
        self._owners[slots] = owners
        self.counts += np.bincount(owners, minlength=len(self.counts))
        self.keys[slots] = keys

    def _enqueue(self, slots: NDArray[np.int64]) -> None:
        """Put the items in ``slots``, oldest first, at the end of their owners' queues."""
        for owner, queue in enumerate(self._queues):
            queue.extend(self.keys[slots[self._owners[slots] == owner]].tolist())
            if len(queue) > 2 * self.counts[owner] + 1024:  # most of it has left in another order
                live = np.fromiter(queue, dtype=np.int64)
                self._queues[owner] = deque(live[self.find(live) >= 0].tolist())

    def _grow(self, records: NDArray[np.int64]) -> None:
        needed = int(records.max()) + 1 if len(records) else 0
        if needed > len(self._serials):
            more = max(needed, 2 * len(self._serials)) - len(self._serials)
            self._serials = np.append(self._serials, np.zeros(more, dtype=np.int64))
            self._users = np.append(self._users, np.zeros(more, dtype=np.int64))

    def _occupy(self, slots: NDArray[np.int64]) -> None:
        """Take distinct free ``slots`` out of those that are free: mostly the next ones, in order."""
        for slot in slots.tolist():
            if slot >= self._untouched:
                self._freed.extend(range(self._untouched, slot))
                self._untouched = slot + 1
            elif self._freed[0] == slot:
                self._freed.popleft()
            else:
                self._freed.remove(slot)

    def remove(self, slots: NDArray[np.int64]) -> None:
        """Let the items in distinct occupied ``slots`` leave."""
        records = self.records(slots)[0]
        np.subtract.at(self._users, records, 1)
        records = np.unique(records)
        self.arena.free(records[self._users[records] == 0])
        for slot in slots.tolist():
            self._members.pop(slot, None)
        self._records[slots] = -1
        self.counts -= np.bincount(self._owners[slots], minlength=len(self.counts))
        self.keys[slots] = -1
        self._generations[slots] += 1
        self._freed.extend(slots.tolist())

    def find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slot of every key (n,); -1 where the item is gone or never was."""
        slots = keys % self.capacity
        return np.where((keys >= 0) & (self.keys[slots] == keys), slots, -1)

    def skip_generations(self) -> None:
        """From now on give keys that no item had, also none of those that were lost, however many."""
        self._generations += 1 << 20
        self._freed.extend(range(self._untouched, self.capacity))
        self._untouched = self.capacity

    def by_arrival(self, owner: int | None = None) -> Iterator[int]:
        """Slots of the items of all or of one owner, oldest first. Nothing may be added or removed meanwhile."""
        queues = self._queues if owner is None else [self._queues[owner]]
        return merge(*map(self._live, queues), key=self.ranks.__getitem__)

    def owner(self, slot: int) -> int:
        """The owner of the item in ``slot``."""
        return int(self._owners[slot])

    def users(self, record: int) -> int:
        """Number of items that use a record."""
        return int(self._users[record])

    def _live(self, queue: deque[int]) -> Iterator[int]:
        """Slots of the items of a queue that are still there, oldest first; drops those at its head that are not."""
        while queue and self.keys[queue[0] % self.capacity] != queue[0]:
            queue.popleft()
        for key in queue:
            slot = key % self.capacity
            if self.keys[slot] == key:
                yield slot

    def occupied(self) -> NDArray[np.int64]:
        """Slots in use, in order of arrival."""
        slots = np.flatnonzero(self.keys >= 0)
        return slots[np.argsort(self.ranks[slots])]

    def records(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The records of the items in ``slots`` (n,), one after the other, and the offsets of each item (n + 1,)."""
        if not self._members:
            return self._records[slots], np.arange(len(slots) + 1)
        parts = [self._members.get(slot, self._records[slot : slot + 1]) for slot in slots.tolist()]
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return np.concatenate([np.empty(0, dtype=np.int64), *parts]), offsets

    def read(self, slots: NDArray[np.int64], out: ColumnsBuffer | None = None) -> tuple[Columns, NDArray[np.int64]]:
        """Copies of the items in ``slots`` (n,): their trajectories, and the offsets of each item (n + 1,)."""
        records, offsets = self.records(slots)
        columns = self.arena.read(records, out)
        turns = self._turns[slots]
        return (at_turns(columns, turns) if len(turns) and turns[0] >= 0 else columns), offsets

    def serials(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the trajectories behind ``slots``, each once, ascending."""
        return np.unique(self._serials[self.records(slots)[0]])

    def in_order(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The records of all items and the numbers of their trajectories, each once, in the order of arrival."""
        records = np.unique(self.records(self.occupied())[0])
        records = records[np.argsort(self._serials[records])]
        return records, self._serials[records]

    def still_there(self, records: NDArray[np.int64], serials: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of ``records`` that still hold the trajectories numbered ``serials``."""
        there: NDArray[np.bool_] = (self._serials[records] == serials) & (self._users[records] > 0)
        return records[there]

    def trajectories(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], Columns]:
        """Numbers of the trajectories behind ``slots``, each once, ascending (n,), and copies of them."""
        records = np.unique(self.records(slots)[0])
        records = records[np.argsort(self._serials[records])]
        return self._serials[records], self.arena.read(records)

    def state(self, slots: NDArray[np.int64]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Facts (ready for JSON) and arrays for :meth:`restore`; ``slots`` are those of :meth:`occupied`."""
        records, offsets = self.records(slots)
        facts = {"arrived": self.arrived, "serials_given": self.serials_given, "untouched": self._untouched}
        return facts, {
            "keys": self.keys[slots],
            "uses": self.uses[slots],
            "arrivals": self.ranks[slots],
            "item_owners": self._owners[slots],
            "turns": self._turns[slots],
            "members": self._serials[records],
            "member_offsets": offsets,
            "generations": self._generations[: self._untouched].copy(),
            "freed": np.array(self._freed, dtype=np.int64),
        }

    def restore(
        self, facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], serials: NDArray[np.int64], columns: Columns
    ) -> NDArray[np.int64]:
        """Put back what :meth:`state` gave, with the trajectories ``serials`` (n,), ascending; returns the slots.

        Raises :class:`SnapshotError` where the parts do not belong together.
        """
        self._check(facts, arrays, serials, columns)
        records = self.arena.add(columns)
        self._grow(records)
        self._serials[records] = serials
        self.arrived, self.serials_given = facts["arrived"], facts["serials_given"]
        self._untouched = facts["untouched"]
        self._generations[: self._untouched] = arrays["generations"]
        self._freed.extend(arrays["freed"].tolist())
        slots: NDArray[np.int64] = arrays["keys"] % self.capacity
        places = np.searchsorted(serials, arrays["members"])
        turns = arrays["turns"]
        self._fill(arrays["keys"], records[places], arrays["member_offsets"], arrays["item_owners"], turns)
        self.uses[slots], self.ranks[slots] = arrays["uses"], arrays["arrivals"]
        self._enqueue(slots)
        self.arena.free(records[self._users[records] == 0])  # of items that could not be restored whole
        return slots

    def _check(
        self, facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], serials: NDArray[np.int64], columns: Columns
    ) -> None:
        keys, offsets, members = arrays["keys"], arrays["member_offsets"], arrays["members"]
        for name in ("uses", "arrivals", "item_owners", "turns"):
            if len(arrays[name]) != len(keys):
                raise SnapshotError(f"the snapshot holds {len(arrays[name])} values of {name} for {len(keys)} items")
        if len(serials) != len(columns) or len(offsets) != len(keys) + 1 or offsets[-1] != len(members):
            raise SnapshotError(
                f"the snapshot holds {len(columns)} trajectories under {len(serials)} numbers, {len(members)} members "
                "of items: they do not belong together"
            )
        missing = np.setdiff1d(members, serials)
        if len(missing):
            raise SnapshotError(f"{len(missing)} trajectories of the snapshot are missing, e.g. number {missing[0]}")
        slots = np.sort(np.concatenate([keys % self.capacity, arrays["freed"]]))
        if facts["untouched"] > self.capacity or not np.array_equal(slots, np.arange(facts["untouched"])):
            raise SnapshotError("the snapshot's keys do not fill the slots that were used: they do not belong together")
