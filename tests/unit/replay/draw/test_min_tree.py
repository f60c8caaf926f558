"""The tournament: the smallest value, ties by rank, and what it refuses."""

import numpy as np
import pytest

from freshper.errors import PriorityError
from freshper.replay.draw.min_tree import MinTree


@pytest.fixture(params=[False, True], ids=["numpy", "compiled"])
def compiled(request: pytest.FixtureRequest) -> bool:
    if request.param:
        pytest.importorskip("numba", reason="the compiled trees need the extra fast")
    return bool(request.param)


def filled(values: list[float], ranks: list[int] | None = None, *, compiled: bool) -> MinTree:
    tree = MinTree(len(values), compiled=compiled)
    tree.set(np.arange(len(values)), np.array(values), np.array(ranks or [0] * len(values)))
    return tree


def drained(tree: MinTree) -> list[int]:
    """All slots, smallest first."""
    order = []
    while (smallest := tree.smallest()) is not None:
        order.append(smallest[0])
        tree.clear(np.array([smallest[0]]))
    return order


@pytest.mark.parametrize("capacity", [1, 2, 3, 64, 1000])
def test_an_empty_tree_has_no_smallest(capacity: int, compiled: bool) -> None:
    tree = MinTree(capacity, compiled=compiled)
    assert tree.compiled is compiled
    assert tree.smallest() is None
    tree.clear(np.arange(capacity))
    assert tree.smallest() is None


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 5, 17, 64, 100])
def test_every_slot_can_be_the_smallest(capacity: int, compiled: bool) -> None:
    for slot in range(capacity):
        values = np.ones(capacity)
        values[slot] = 0.5
        assert filled(values.tolist(), compiled=compiled).smallest() == (slot, 0.5)


def test_of_equal_values_the_lowest_rank_comes_first(compiled: bool) -> None:
    assert drained(filled([1.0] * 5, [3, 1, 4, 0, 2], compiled=compiled)) == [3, 1, 4, 0, 2]
    assert drained(filled([2.0, 1.0, 2.0, 1.0], [0, 9, -1, 8], compiled=compiled)) == [3, 1, 2, 0]


def test_of_equal_ranks_the_lowest_slot_comes_first(compiled: bool) -> None:
    assert drained(filled([1.0] * 6, compiled=compiled)) == list(range(6))


def test_ranks_at_the_ends_of_their_range_are_kept_whole(compiled: bool) -> None:
    """Doubles would take 2^62 and 2^62 + 1 for one number."""
    ranks = [2**62 + 1, 2**62, -(2**63), 2**63 - 1]
    assert drained(filled([0.0] * 4, ranks, compiled=compiled)) == [2, 1, 0, 3]


def test_minus_infinity_is_a_value_and_infinity_is_none(compiled: bool) -> None:
    tree = filled([np.inf, -np.inf, 0.0, -np.inf], [0, 2, 0, 1], compiled=compiled)
    assert tree.smallest() == (3, -np.inf)
    assert drained(tree) == [3, 1, 2]


def test_a_value_that_rises_makes_way_and_one_that_falls_comes_first(compiled: bool) -> None:
    tree = filled([1.0, 2.0, 3.0], compiled=compiled)
    tree.set(np.array([0]), np.array([5.0]), np.array([0]))
    assert tree.smallest() == (1, 2.0)
    tree.set(np.array([2]), np.array([-1.0]), np.array([0]))
    assert tree.smallest() == (2, -1.0)


def test_a_changed_rank_alone_changes_the_order(compiled: bool) -> None:
    tree = filled([1.0, 1.0], [0, 1], compiled=compiled)
    tree.set(np.array([0]), np.array([1.0]), np.array([2]))
    assert tree.smallest() == (1, 1.0)


def test_a_rebuild_forgets_what_was_there(compiled: bool) -> None:
    tree = filled([1.0, 0.0, 1.0], compiled=compiled)
    tree.rebuild(np.array([2.0, np.inf, 2.0]), np.array([5, 0, 4]))
    assert drained(tree) == [2, 0]


def test_changing_no_slots_changes_nothing(compiled: bool) -> None:
    tree = filled([3.0, 2.0], compiled=compiled)
    tree.set(np.empty(0, dtype=np.int64), np.empty(0), np.empty(0, dtype=np.int64))
    tree.clear(np.empty(0, dtype=np.int64))
    assert tree.smallest() == (1, 2.0)


@pytest.mark.parametrize("batch", [1, 5, 16, 17, 64, 300])
def test_narrow_and_wide_batches_agree_with_a_sort(batch: int, compiled: bool) -> None:
    """The numpy version walks few slots one by one, and many level by level."""
    rng = np.random.default_rng(batch)
    tree, values = MinTree(300, compiled=compiled), np.full(300, np.inf)
    ranks = rng.permutation(300)
    for _ in range(20):
        slots = rng.permutation(300)[:batch]
        values[slots] = rng.integers(0, 5, batch)
        tree.set(slots, values[slots], ranks[slots])
        best = np.lexsort((ranks, values))[0]
        assert tree.smallest() == (best, values[best])


@pytest.mark.parametrize("count", [2, 40])
def test_a_nan_is_refused_and_changes_nothing(count: int, compiled: bool) -> None:
    tree = filled([1.0] * 50, list(range(50)), compiled=compiled)
    values = np.zeros(count)
    values[1] = np.nan
    slots = np.arange(7, 7 + count)
    with pytest.raises(PriorityError, match="slot 8 is NaN"):
        tree.set(slots, values, slots)
    with pytest.raises(PriorityError, match="slot 3 is NaN"):
        tree.rebuild(np.where(np.arange(50) == 3, np.nan, 0.0), np.arange(50))
    assert drained(tree) == list(range(50))


@pytest.mark.parametrize("slots", [[3], [-1], [0, 3], [0, -1], [2**62]])
def test_a_slot_outside_is_refused_and_changes_nothing(slots: list[int], compiled: bool) -> None:
    tree = filled([3.0, 2.0, 1.0], compiled=compiled)
    with pytest.raises(IndexError, match="capacity 3"):
        tree.set(np.array(slots), np.full(len(slots), -1.0), np.zeros(len(slots), dtype=np.int64))
    with pytest.raises(IndexError, match="capacity 3"):
        tree.clear(np.array(slots))
    assert drained(tree) == [2, 1, 0]
