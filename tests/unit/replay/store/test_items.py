"""Slots, and keys that name one item for ever; records that several items share."""

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from freshper import Trajectory, Turn
from freshper.errors import SnapshotError
from freshper.replay.store.arena import Arena
from freshper.replay.store.columns import Columns, pack
from freshper.replay.store.items import ItemStore

Make = Callable[..., Trajectory]
NONE = np.empty(0, dtype=np.int64)


class Shelf:
    """A store with its arena, and short ways to fill and to read it."""

    def __init__(self, make: Make, capacity: int, owners: int = 1) -> None:
        self.make = make
        self.store = ItemStore(capacity, Arena(), owners)
        self.given: list[int] = []  # every key, in order

    def add(self, *seeds: int, owner: int = 0) -> NDArray[np.int64]:
        """Trajectories with these seeds, as items of their own; there is room."""
        return self.put(pack([self.make(seed=seed) for seed in seeds]), [1] * len(seeds), owner=owner)

    def put(
        self, columns: Columns, sizes: list[int], *, turns: list[int] | None = None, owner: int = 0
    ) -> NDArray[np.int64]:
        keys = self.store.next_keys(len(sizes), NONE)
        records = self.store.arena.add(columns)
        members = np.arange(len(columns)) if turns is None else np.zeros(len(sizes), dtype=np.int64)
        owners = np.full(len(sizes), owner, dtype=np.int16)
        chosen = None if turns is None else np.array(turns, dtype=np.int32)
        slots = self.store.add(keys, records, members, np.cumsum([0, *sizes]), owners, turns=chosen)
        np.testing.assert_array_equal(self.store.keys[slots], keys)
        self.given += keys.tolist()
        return slots

    def add_fifo(self, seed: int) -> None:
        """One trajectory; the oldest leaves where there is no room."""
        if len(self.store) == self.store.capacity:
            self.store.remove(np.array([next(self.store.by_arrival())]))
        self.add(seed)

    def seeds(self) -> list[int]:
        return self.store.read(self.store.occupied())[0].seeds.tolist()


def test_an_empty_store_holds_nothing(make_trajectory: Make) -> None:
    store = Shelf(make_trajectory, 3).store
    assert len(store) == 0
    assert store.occupied().shape == (0,)
    assert list(store.by_arrival()) == []
    np.testing.assert_array_equal(store.find(np.array([-1, 0, 1, 2, 3])), [-1] * 5)
    columns, offsets = store.read(NONE)
    assert (len(columns), offsets.tolist()) == (0, [0])
    assert store.serials(NONE).shape == store.trajectories(NONE)[0].shape == (0,)


def test_slots_are_used_again_in_the_order_in_which_they_were_freed(make_trajectory: Make) -> None:
    shelf = Shelf(make_trajectory, 4)
    np.testing.assert_array_equal(shelf.add(0, 1, 2), [0, 1, 2])
    shelf.store.remove(np.array([2, 0]))
    np.testing.assert_array_equal(shelf.add(3, 4), [3, 2])
    np.testing.assert_array_equal(shelf.add(5), [0])
    assert shelf.seeds() == [1, 3, 4, 5]
    assert shelf.given == [0, 1, 2, 3, 2 + 4, 0 + 4]


def test_the_next_keys_count_on_what_is_about_to_leave(make_trajectory: Make) -> None:
    shelf = Shelf(make_trajectory, 3)
    shelf.add(0, 1, 2)
    shelf.store.remove(np.array([1]))
    leaving = np.array([2, 0])
    keys = shelf.store.next_keys(3, leaving)
    np.testing.assert_array_equal(keys, [1 + 3, 2 + 3, 0 + 3])
    shelf.store.remove(leaving)
    np.testing.assert_array_equal(shelf.store.next_keys(3, NONE), keys)


@pytest.mark.parametrize("capacity", [1, 3, 7])
def test_a_key_names_one_item_for_ever(make_trajectory: Make, capacity: int) -> None:
    """However items leave: 200 random adds and removals against a dictionary."""
    rng = np.random.default_rng(capacity)
    shelf = Shelf(make_trajectory, capacity)
    live: dict[int, int] = {}
    for seed in range(200):
        room = capacity - len(live)
        if room and rng.random() < 0.6:
            seeds = [1000 * seed + n for n in range(rng.integers(1, room + 1))]
            live |= dict(zip(shelf.store.keys[shelf.add(*seeds)].tolist(), seeds, strict=True))
        elif live:
            gone = rng.permutation(list(live))[: rng.integers(1, len(live) + 1)]
            shelf.store.remove(shelf.store.find(gone))
            for key in gone.tolist():
                del live[key]
        assert shelf.seeds() == list(live.values())
        assert shelf.store.keys[shelf.store.occupied()].tolist() == list(live)
        found = shelf.store.find(np.array(shelf.given, dtype=np.int64))
        assert [key for key, slot in zip(shelf.given, found, strict=True) if slot >= 0] == list(live)
    assert len(set(shelf.given)) == len(shelf.given)


def test_items_come_by_arrival_of_all_and_of_each_owner(make_trajectory: Make) -> None:
    shelf = Shelf(make_trajectory, 6, owners=2)
    for number, owner in enumerate([0, 1, 1, 0, 1, 0]):
        shelf.add(number, owner=owner)
    shelf.store.remove(np.array([1, 3]))
    slots = [shelf.add(6, owner=1)[0], shelf.add(7, owner=0)[0]]
    assert slots == [1, 3]
    assert list(shelf.store.by_arrival()) == [0, 2, 4, 5, 1, 3]
    assert list(shelf.store.by_arrival(0)) == [0, 5, 3]
    assert list(shelf.store.by_arrival(1)) == [2, 4, 1]
    assert shelf.store.counts.tolist() == [3, 3]
    assert [shelf.store.owner(slot) for slot in range(6)] == [0, 1, 1, 0, 1, 0]


def test_queues_do_not_grow_when_items_leave_in_another_order(make_trajectory: Make) -> None:
    """The oldest item stays, and 6,000 others come and go behind it."""
    shelf = Shelf(make_trajectory, 60)
    columns = pack([make_trajectory()] * 50)
    shelf.add(0)
    for _ in range(120):
        shelf.store.remove(shelf.put(columns, [1] * 50))
    assert len(shelf.store._queues[0]) <= 2 * 60 + 1024
    assert list(shelf.store.by_arrival()) == [0]
    assert isinstance(shelf.store._queues[0], deque)


def test_a_record_is_freed_with_the_last_item_that_uses_it(make_trajectory: Make) -> None:
    shelf = Shelf(make_trajectory, 4)
    whole = make_trajectory(seed=5, images=(b"picture",), turns=(Turn(0, 1, 2, 0.0, 1), Turn(2, 3, 4, 1.0)))
    first, second = shelf.put(pack([whole]), [1, 1], turns=[0, 1])
    arena = shelf.store.arena
    assert (len(arena), shelf.store.users(0)) == (1, 2)
    shelf.store.remove(np.array([first]))
    assert (len(arena), shelf.store.users(0), arena.image_bytes) == (1, 1, 7)
    (left,) = shelf.store.read(np.array([second]))[0].trajectories()
    assert left.tokens.tolist() == whole.at_turn(1).tokens.tolist()
    assert left.turns == whole.at_turn(1).turns
    shelf.store.remove(np.array([second]))
    assert (len(arena), arena.live_bytes) == (0, 0)


def test_an_item_of_several_trajectories_is_read_and_freed_whole(make_trajectory: Make) -> None:
    shelf = Shelf(make_trajectory, 4)
    columns = pack([make_trajectory(seed=seed) for seed in range(6)])
    slots = shelf.put(columns, [3, 1, 2])
    read, offsets = shelf.store.read(slots[::-1])
    assert read.seeds.tolist() == [4, 5, 3, 0, 1, 2]
    assert offsets.tolist() == [0, 2, 3, 6]
    np.testing.assert_array_equal(shelf.store.serials(slots[[2, 0]]), [0, 1, 2, 4, 5])
    shelf.store.remove(slots[:1])
    assert len(shelf.store.arena) == 3
    again = shelf.put(pack([make_trajectory(seed=9)]), [1])  # a fresh slot
    back = shelf.put(pack([make_trajectory(seed=10)]), [1])  # the slot in which the group was
    assert (again.tolist(), back.tolist()) == ([3], [0])
    assert shelf.store.read(back)[0].seeds.tolist() == [10]
    np.testing.assert_array_equal(shelf.store.serials(np.concatenate([back, slots[1:2]])), [3, 7])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 11])
def test_restore_gives_the_same_slots_keys_and_order(make_trajectory: Make, count: int) -> None:
    shelf, other = Shelf(make_trajectory, 3), Shelf(make_trajectory, 3)
    for number in range(count):
        shelf.add_fifo(number)
    if count > 2:
        shelf.store.remove(np.array([1]))
    shelf.store.uses[shelf.store.occupied()] = 7
    slots = shelf.store.occupied()
    facts, arrays = shelf.store.state(slots)
    serials, columns = shelf.store.trajectories(slots)
    assert (np.diff(serials) > 0).all()
    other.store.restore(facts, arrays, serials, columns)
    for _ in range(2):  # and they go on alike
        assert other.seeds() == shelf.seeds()
        for name in ("keys", "uses", "counts"):
            np.testing.assert_array_equal(getattr(other.store, name), getattr(shelf.store, name))
        assert list(other.store.by_arrival()) == list(shelf.store.by_arrival())
        assert (other.store.arrived, other.store.serials_given) == (shelf.store.arrived, shelf.store.serials_given)
        np.testing.assert_array_equal(other.store.serials(slots), shelf.store.serials(slots))
        for each in (shelf, other):
            each.add_fifo(100)
            each.add_fifo(101)


def test_what_a_state_holds_does_not_change_with_the_store(make_trajectory: Make) -> None:
    shelf = Shelf(make_trajectory, 3)
    shelf.add(0, 1)
    _, arrays = shelf.store.state(shelf.store.occupied())
    before = {name: array.copy() for name, array in arrays.items()}
    shelf.store.remove(np.array([0, 1]))
    shelf.add(2, 3, 4)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


@pytest.mark.parametrize(
    ("name", "value"),
    [("keys", [0, 0]), ("keys", [0, 2]), ("keys", [0, 1, 2]), ("members", [0, 7]), ("member_offsets", [0, 1, 3])],
)
def test_parts_that_do_not_fit_are_refused_before_anything_changes(
    make_trajectory: Make, name: str, value: list[int]
) -> None:
    shelf, other = Shelf(make_trajectory, 3), Shelf(make_trajectory, 3)
    shelf.add(0, 1)
    facts, arrays = shelf.store.state(shelf.store.occupied())
    parts = arrays | {name: np.array(value)}
    with pytest.raises(SnapshotError, match=r"belong together|missing|values of"):
        other.store.restore(facts, parts, *shelf.store.trajectories(shelf.store.occupied()))
    assert len(other.store) == len(other.store.arena) == 0


@pytest.mark.parametrize("count", [0, 2, 4])
def test_skipped_generations_are_skipped_in_every_slot_also_after_a_restore(make_trajectory: Make, count: int) -> None:
    shelf, other = Shelf(make_trajectory, 4), Shelf(make_trajectory, 4)
    shelf.add(*range(count))
    keys = shelf.store.keys[shelf.store.occupied()]
    shelf.store.skip_generations()
    slots = shelf.store.occupied()
    np.testing.assert_array_equal(shelf.store.keys[slots], keys)  # who is there keeps its key
    other.store.restore(*shelf.store.state(slots), *shelf.store.trajectories(slots))
    for each in (shelf, other):
        for seed in range(9):
            each.add_fifo(seed)
        assert each.store.keys.min() > 1 << 20
