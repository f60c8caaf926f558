"""The ring of slots, and keys that name one item for ever."""

from collections.abc import Callable

import numpy as np
import pytest

from freshper import Trajectory
from freshper.errors import CapacityError
from freshper.replay.store import TrajectoryStore

Make = Callable[..., Trajectory]


def numbered(make: Make, *numbers: int) -> list[Trajectory]:
    return [make(seed=number) for number in numbers]


def seeds(store: TrajectoryStore) -> list[int]:
    return [item.seed for item in store.get(store.occupied())]


def test_an_empty_store_holds_nothing() -> None:
    store = TrajectoryStore(3)
    assert len(store) == 0
    assert store.occupied().shape == (0,)
    np.testing.assert_array_equal(store.find(np.array([-1, 0, 1, 2, 3])), [-1] * 5)


def test_the_oldest_goes_first(make_trajectory: Make) -> None:
    store = TrajectoryStore(3)
    for number in range(8):
        store.add(numbered(make_trajectory, number))
        assert seeds(store) == list(range(max(0, number - 2), number + 1))
        assert len(store) == min(number + 1, 3)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 3), (1, 3, 2), (0, 3, 0, 1)])
def test_batches_wrap_around_the_end(make_trajectory: Make, sizes: tuple[int, ...]) -> None:
    store = TrajectoryStore(3)
    added: list[int] = []
    for size in sizes:
        numbers = list(range(len(added), len(added) + size))
        slots = store.add(numbered(make_trajectory, *numbers))
        added += numbers
        np.testing.assert_array_equal(slots, np.array(numbers, dtype=np.int64) % 3)
        assert [item.seed for item in store.get(slots)] == numbers
    assert seeds(store) == added[-3:]


def test_a_key_names_one_item_for_ever(make_trajectory: Make) -> None:
    store = TrajectoryStore(3)
    keys = [int(store.keys[store.add(numbered(make_trajectory, number))][0]) for number in range(10)]
    assert len(set(keys)) == 10
    found = store.find(np.array(keys))
    np.testing.assert_array_equal(found[:7], [-1] * 7)
    assert [item.seed for item in store.get(found[7:])] == [7, 8, 9]


def test_more_than_fits_is_refused_and_nothing_is_evicted(make_trajectory: Make) -> None:
    store = TrajectoryStore(2)
    store.add(numbered(make_trajectory, 0, 1))
    with pytest.raises(CapacityError, match=r"3 trajectories in one add, capacity 2.*nothing was added"):
        store.add(numbered(make_trajectory, 2, 3, 4))
    assert seeds(store) == [0, 1]
    assert store.added == 2


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 11])
def test_restore_gives_the_same_slots_and_keys(make_trajectory: Make, count: int) -> None:
    store, other = TrajectoryStore(3), TrajectoryStore(3)
    for number in range(count):
        store.add(numbered(make_trajectory, number))
    other.restore(store.get(store.occupied()), store.added)
    assert seeds(other) == seeds(store)
    assert (len(other), other.added) == (len(store), store.added)
    np.testing.assert_array_equal(other.keys, store.keys)
    np.testing.assert_array_equal(other.occupied(), store.occupied())
