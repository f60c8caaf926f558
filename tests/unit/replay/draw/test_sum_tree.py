"""The sum-tree: partial sums, the walk to a slot, re-basing."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from freshper.replay.draw.sum_tree import SumTree


def filled(keys: list[float] | NDArray[np.float64]) -> SumTree:
    tree = SumTree(len(keys))
    tree.set(np.arange(len(keys)), np.asarray(keys, dtype=np.float64))
    return tree


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 5, 7, 8, 9, 1000, 1024, 1025])
def test_every_slot_is_found_in_the_middle_of_its_own_mass(capacity: int) -> None:
    weights = np.random.default_rng(capacity).uniform(0.1, 5.0, capacity)
    tree = filled(np.log(weights))
    middles = np.cumsum(tree.leaves()) - tree.leaves() / 2
    np.testing.assert_array_equal(tree.find(middles), np.arange(capacity))


@pytest.mark.parametrize("capacity", [1, 3, 64, 1000])
def test_leaves_are_the_exponentials_of_the_keys(capacity: int) -> None:
    keys = np.random.default_rng(0).normal(size=capacity)
    tree = filled(keys)
    np.testing.assert_array_equal(tree.leaves(), np.exp(keys))
    np.testing.assert_array_equal(tree.weights(np.arange(capacity)), np.exp(keys))
    assert tree.total == pytest.approx(math.fsum(np.exp(keys)), rel=1e-14)


@pytest.mark.parametrize("batch", [1, 2, 3, 15, 16, 17, 100])
def test_a_batched_write_makes_the_tree_that_a_rebuild_makes(batch: int) -> None:
    """Batches narrower and wider than a level take different ways to the same sums."""
    rng = np.random.default_rng(batch)
    tree = filled(np.zeros(100))
    for _ in range(50):
        tree.set(rng.permutation(100)[:batch], rng.normal(size=batch))
    again = SumTree(100)
    again.restore(tree.leaves(), tree.reference)
    assert tree.total == again.total
    masses = rng.random(1000) * tree.total
    np.testing.assert_array_equal(tree.find(masses), again.find(masses))


def test_writing_no_slots_changes_nothing() -> None:
    tree = filled([0.0, 1.0])
    before = tree.leaves().copy()
    tree.set(np.empty(0, dtype=np.int64), np.empty(0))
    np.testing.assert_array_equal(tree.leaves(), before)
    assert tree.find(np.empty(0)).shape == (0,)


def test_the_view_of_the_leaves_is_read_only() -> None:
    view = filled([0.0, 1.0]).leaves()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 7.0


def test_minus_infinity_empties_a_slot() -> None:
    tree = filled([0.0, -np.inf, 0.0])
    assert tree.total == 2.0
    np.testing.assert_array_equal(tree.find(np.array([0.0, 0.999, 1.0, 1.999])), [0, 0, 2, 2])
    tree.set(np.array([0, 2]), np.array([-np.inf, -np.inf]))
    assert tree.total == 0.0
    assert tree.underflowed


@pytest.mark.parametrize("empty", [[0], [4], [0, 1], [3, 4], [0, 2, 4], [0, 1, 2, 3]])
def test_no_mass_at_or_beyond_the_total_leads_to_an_empty_slot(empty: list[int]) -> None:
    keys = np.random.default_rng(1).normal(size=5)
    keys[empty] = -np.inf
    tree = filled(keys)
    edge = tree.total
    masses = np.array([0.0, np.nextafter(edge, 0), edge, np.nextafter(edge, np.inf), edge * (1 + 1e-9)])
    found = tree.find(masses)
    assert np.all(tree.weights(found) > 0)
    assert found[-1] == max(set(range(5)) - set(empty))


def test_a_single_tiny_weight_among_empty_slots_is_found_from_anywhere() -> None:
    keys = np.full(1000, -np.inf)
    keys[617] = -40.0
    tree = filled(keys)
    masses = np.array([0.0, tree.total / 2, tree.total, 1.0, 1e300])
    np.testing.assert_array_equal(tree.find(masses), [617] * 5)


def test_find_does_not_change_its_argument() -> None:
    masses = np.array([0.5, 1.5])
    filled([0.0, 0.0]).find(masses)
    np.testing.assert_array_equal(masses, [0.5, 1.5])


def test_keys_far_above_the_reference_are_not_accepted() -> None:
    tree = filled([0.0, 0.0])
    assert tree.accepts(np.array([50.0]))
    assert not tree.accepts(np.array([0.0, 50.1]))
    assert tree.accepts(np.array([-1e9, -np.inf]))
    assert tree.accepts(np.empty(0))
    tree.rebuild(np.array([300.0, 299.0]))
    assert tree.accepts(np.array([350.0]))
    assert not tree.accepts(np.array([350.1]))


@pytest.mark.parametrize("shift", [-1e6, -700.0, 0.0, 700.0, 1e6])
def test_a_rebuild_takes_the_largest_key_as_the_reference(shift: float) -> None:
    tree = SumTree(3)
    tree.rebuild(np.array([shift - 1.0, shift, -np.inf]))
    assert tree.reference == shift
    assert tree.total == pytest.approx(1 + math.exp(-1), rel=1e-15)
    assert not tree.underflowed


def test_a_rebuild_of_nothing_is_empty() -> None:
    tree = filled([3.0, 4.0])
    tree.rebuild(np.array([-np.inf, -np.inf]))
    assert tree.total == 0.0
    assert tree.reference == 0.0


def test_a_total_that_lost_its_large_weights_asks_for_a_rebase() -> None:
    tree = filled([0.0, -49.0, -60.0])
    tree.set(np.array([0]), np.array([-np.inf]))
    assert not tree.underflowed
    tree.set(np.array([1]), np.array([-np.inf]))
    assert tree.underflowed


def test_restore_puts_back_leaves_bit_for_bit_and_forgets_what_was_there() -> None:
    tree = filled(np.random.default_rng(3).normal(size=37))
    other = filled(np.full(37, 5.0))
    other.restore(tree.leaves(), 1.25)
    np.testing.assert_array_equal(other.leaves(), tree.leaves())
    assert other.total == tree.total
    assert other.reference == 1.25


def test_leaves_taken_out_and_put_back_leave_the_same_tree() -> None:
    """Sums are recomputed from the leaves, so nothing remembers that something was away."""
    tree = filled(np.random.default_rng(5).normal(scale=20, size=37))
    masses = np.random.default_rng(6).random(500) * tree.total
    total, found = tree.total, tree.find(masses)
    for count in (1, 5, 37):
        out = np.random.default_rng(count).permutation(37)[:count]
        kept = tree.weights(out)
        tree.set_leaves(out, np.zeros(count))
        assert not tree.weights(out).any()
        assert tree.total == pytest.approx(math.fsum(tree.leaves()), rel=1e-14)
        tree.set_leaves(out, kept)
    assert tree.total == total
    np.testing.assert_array_equal(tree.find(masses), found)


def test_a_located_slot_comes_with_its_weight() -> None:
    tree = filled([0.0, -np.inf, 1.0, -np.inf])
    slots, weights = tree.locate(np.array([0.0, 0.999, 1.0, tree.total, 1e9]))
    np.testing.assert_array_equal(slots, [0, 0, 2, 2, 2])
    np.testing.assert_array_equal(weights, [1, 1, math.e, math.e, math.e])


@pytest.mark.parametrize("shift", [-1e5, -3.0, 0.0, 1e5])
def test_the_log_of_the_total_does_not_depend_on_the_reference(shift: float) -> None:
    tree = filled([-np.inf] * 3)
    assert tree.log_total == -np.inf
    tree.rebuild(np.array([shift, shift, -np.inf]))
    assert tree.log_total == pytest.approx(shift + math.log(2), rel=1e-14)
