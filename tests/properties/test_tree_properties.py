"""The trees over long random histories: compiled equals numpy bit for bit, and both equal a slow reference."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from freshper.replay.draw import kernels
from freshper.replay.draw.compiled import twins
from freshper.replay.draw.min_tree import MinTree
from freshper.replay.draw.sum_tree import SumTree

pytest.importorskip("numba", reason="the compiled trees need the extra fast")

MANY = settings(deadline=None, derandomize=True, max_examples=150)

# Full and not full last levels, the smallest trees, and one where a batch is narrower than most levels.
capacities = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 100, 1000])
seeds = st.integers(0, 2**32 - 1)
# How far the exponents spread: 800 reaches the denormal numbers and zero below, and 1e301 above.
spreads = st.sampled_from([0.0, 1.0, 50.0, 800.0])
emptied = st.sampled_from([0.0, 0.3, 0.9])


def keys_of(rng: np.random.Generator, count: int, spread: float, empty: float) -> NDArray[np.float64]:
    keys = np.clip(rng.normal(scale=spread, size=count), -np.inf, 690.0)
    keys[rng.random(count) < empty] = -np.inf
    return keys


def masses_of(rng: np.random.Generator, tree: SumTree) -> NDArray[np.float64]:
    """Masses inside, at the edges of every slot, one bit beside them, and beyond both ends."""
    sums = np.cumsum(tree.leaves())
    edges = np.concatenate([sums, np.nextafter(sums, 0), np.nextafter(sums, np.inf)])
    total = tree.total
    ends = [0.0, -0.0, 5e-324, total, np.nextafter(total, 0), np.nextafter(total, np.inf), 2 * total, np.inf]
    return np.concatenate([rng.permutation(edges)[:200], rng.random(50) * total, ends])


def bits(tree: SumTree) -> bytes:
    return tree.nodes.tobytes() + tree.cells.tobytes()


class Pair:
    """A numpy tree and a compiled one that live through the same calls, compared in every bit after each."""

    def __init__(self, capacity: int) -> None:
        self.trees = [SumTree(capacity, compiled=compiled) for compiled in (False, True)]
        assert [tree.compiled for tree in self.trees] == [False, True]

    def each(self, call: str, *arguments: Any) -> None:
        for tree in self.trees:
            getattr(tree, call)(*arguments)
        plain, compiled = self.trees
        assert plain.reference == compiled.reference
        assert bits(plain) == bits(compiled)

    def locate(self, masses: NDArray[np.float64]) -> NDArray[np.int64]:
        (slots, weights), (compiled_slots, compiled_weights) = (tree.locate(masses) for tree in self.trees)
        np.testing.assert_array_equal(compiled_slots, slots)
        assert compiled_weights.tobytes() == weights.tobytes() == self.trees[0].weights(slots).tobytes()
        for tree in self.trees:
            np.testing.assert_array_equal(tree.find(masses), slots)
        return slots


@MANY
@given(capacities, seeds, spreads, emptied)
def test_compiled_and_numpy_agree_in_every_bit_through_any_history(
    capacity: int, seed: int, spread: float, empty: float
) -> None:
    rng = np.random.default_rng(seed)
    pair = Pair(capacity)
    for _ in range(25):
        slots = rng.permutation(capacity)[: rng.integers(0, capacity + 1)]
        if rng.random() < 0.5:
            slots.sort()
        match rng.integers(0, 8):
            case 0:
                pair.each("rebuild", keys_of(rng, capacity, spread, empty))
            case 1:
                pair.each("restore", pair.trees[0].leaves().copy(), rng.normal())
            case 2:
                kept = pair.trees[0].weights(slots)
                pair.each("set_leaves", slots, np.zeros(len(slots)))
                pair.each("set_leaves", slots, kept)
            case _:
                pair.each("set", slots, keys_of(rng, len(slots), spread, empty) + pair.trees[0].reference)
        if pair.trees[0].total > 0:
            found = pair.locate(masses_of(rng, pair.trees[0]))
            assert np.all(pair.trees[0].weights(found) > 0)


@MANY
@given(capacities, seeds, st.booleans())
def test_removed_leaves_come_back_bit_for_bit(capacity: int, seed: int, compiled: bool) -> None:
    rng = np.random.default_rng(seed)
    tree = SumTree(capacity, compiled=compiled)
    tree.rebuild(keys_of(rng, capacity, 50.0, 0.2))
    before = bits(tree)
    out = rng.permutation(capacity)[: rng.integers(1, capacity + 1)]
    kept = tree.weights(out)
    for slot in out:
        tree.set_leaves(np.array([slot]), np.zeros(1))
    assert not tree.weights(out).any()
    tree.set_leaves(out, kept)
    assert bits(tree) == before


weights = arrays.arrays(
    np.float64,
    st.integers(1, 40),
    elements=st.one_of(st.just(0.0), st.floats(1e-3, 1e3), st.integers(0, 3).map(float)),
)


@MANY
@given(weights, st.lists(st.floats(0, 1, exclude_max=True), max_size=20), st.booleans())
def test_the_slot_of_a_mass_is_that_of_exact_sums(
    leaves: NDArray[np.float64], fractions: list[float], compiled: bool
) -> None:
    """Against fractions: off by no more than what rounding moves an edge."""
    tree = SumTree(len(leaves), compiled=compiled)
    tree.restore(leaves, 0.0)
    assert tree.total == pytest.approx(math.fsum(leaves), rel=1e-15 * len(leaves))
    if tree.total == 0:
        return
    exact = [Fraction(0)]
    for leaf in leaves.tolist():
        exact.append(exact[-1] + Fraction(leaf))
    masses = np.array(fractions) * tree.total
    slack = Fraction(tree.total) * Fraction(1, 10**14)
    for mass, slot in zip(masses.tolist(), tree.find(masses).tolist(), strict=True):
        assert leaves[slot] > 0
        assert exact[slot] - slack <= Fraction(mass) <= exact[slot + 1] + slack


def _kernel(capacity: int, *, compiled: bool) -> Any:
    if not compiled:
        return kernels.write_items
    twin = twins(kernels.write_items, capacity=capacity, compiled=True)
    assert twin is not None
    return twin[0]


@MANY
@given(seeds, st.sampled_from([0.0, 0.6, 1.0]), st.booleans(), st.booleans())
def test_items_are_written_as_a_dict_would_keep_them(seed: int, alpha: float, repeats: bool, compiled: bool) -> None:
    """Of a repeated slot the last value counts; the tree is that of its leaves."""
    rng = np.random.default_rng(seed)
    capacity, count = 50, int(rng.integers(0, 50))
    tree = SumTree(capacity, compiled=False)
    items = np.zeros(capacity, dtype=kernels.ITEM)
    items["base"] = rng.integers(0, 2, capacity) * rng.lognormal(size=capacity)
    items["factor"] = rng.lognormal(sigma=5, size=capacity)
    held = dict(enumerate(items["base"].tolist()))
    tree.restore(np.where(items["base"] > 0, items["base"] ** alpha * items["factor"], 0.0), 0.0)
    slots = rng.integers(0, capacity, count) if repeats else rng.permutation(capacity)[:count]
    bases = rng.integers(0, 3, count) * rng.lognormal(sigma=3, size=count)
    new = (slots, bases, np.power(bases, alpha))
    total, risen, fallen = _kernel(capacity, compiled=compiled)(tree.nodes, tree.cells, items, *new)
    lived = sum(base > 0 for base in held.values())
    held |= dict(zip(slots.tolist(), bases.tolist(), strict=True))
    assert items["base"].tolist() == list(held.values())
    assert risen - fallen == sum(base > 0 for base in held.values()) - lived
    powers = np.power(items["base"], alpha)
    expected = SumTree(capacity, compiled=False)
    expected.restore(np.where(items["base"] > 0, powers * items["factor"], 0.0), 0.0)
    np.testing.assert_allclose(tree.leaves(), expected.leaves(), rtol=1e-15)
    assert total == tree.total == pytest.approx(expected.total, rel=1e-14)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("slots", "factor", "base", "reason"),
    [
        ([3], 1.0, 1.0, kernels.OUT_OF_RANGE),
        ([0, -1], 1.0, 1.0, kernels.OUT_OF_RANGE),
        ([1, 2**62], 1.0, 1.0, kernels.OUT_OF_RANGE),
        ([0, 1], 1e-300, 1.0, kernels.NOT_EXACT),
        ([0, 1], 1e300, 1e-300, kernels.NOT_EXACT),
        ([0, 1], math.nan, 1.0, kernels.NOT_EXACT),
        ([0, 1], 10.0, math.exp(50) / 9, kernels.NOT_EXACT),
    ],
)
def test_items_that_cannot_be_written_are_refused_before_anything_is(
    slots: list[int], factor: float, base: float, reason: float, compiled: bool
) -> None:
    tree, items = SumTree(3, compiled=False), np.zeros(3, dtype=kernels.ITEM)
    items["factor"] = factor
    before = tree.nodes.tobytes() + tree.cells.tobytes() + items.tobytes()
    bases = np.full(len(slots), base)
    assert _kernel(3, compiled=compiled)(tree.nodes, tree.cells, items, np.array(slots), bases, bases)[0] == reason
    assert tree.nodes.tobytes() + tree.cells.tobytes() + items.tobytes() == before


# Few distinct values and ranks, so that ties are the rule.
values = st.one_of(st.sampled_from([-np.inf, -1.0, 0.0, -0.0, 2.0, np.inf]), st.floats(allow_nan=False))
ranks = st.one_of(st.integers(-2, 2), st.integers(-(2**63), 2**63 - 1))


@st.composite
def min_histories(draw: st.DrawFn) -> tuple[int, list[tuple[str, list[tuple[int, float, int]]]]]:
    capacity = draw(st.sampled_from([1, 2, 3, 5, 8, 33, 50]))
    item = st.tuples(st.integers(0, capacity - 1), values, ranks)
    batch = st.lists(item, max_size=capacity, unique_by=lambda entry: entry[0])
    return capacity, draw(st.lists(st.tuples(st.sampled_from(["set", "set", "clear", "rebuild"]), batch), max_size=20))


@MANY
@given(min_histories())
def test_the_smallest_is_that_of_a_sorted_list(
    history: tuple[int, list[tuple[str, list[tuple[int, float, int]]]]],
) -> None:
    capacity, changes = history
    trees = [MinTree(capacity, compiled=compiled) for compiled in (False, True)]
    held: dict[int, tuple[float, int]] = {}
    for change, batch in changes:
        slots = np.array([slot for slot, _, _ in batch], dtype=np.int64)
        new_values, new_ranks = np.array([value for _, value, _ in batch]), np.array([rank for *_, rank in batch], int)
        if change == "rebuild":
            held = {}
            every_value, every_rank = np.full(capacity, np.inf), np.zeros(capacity, dtype=np.int64)
            every_value[slots], every_rank[slots] = new_values, new_ranks
        for tree in trees:
            if change == "set":
                tree.set(slots, new_values, new_ranks)
            elif change == "clear":
                tree.clear(slots)
            else:
                tree.rebuild(every_value, every_rank)
        for slot, value, rank in batch:
            held[slot] = (np.inf if change == "clear" else value, rank)
        there = [(value, rank, slot) for slot, (value, rank) in held.items() if value < np.inf]
        expected = (min(there)[2], min(there)[0]) if there else None
        assert [tree.smallest() for tree in trees] == [expected, expected]


@MANY
@given(seeds, st.sampled_from([40, 100, 130]))
def test_long_batches_play_the_same_matches(seed: int, capacity: int) -> None:
    """Batches wide enough for the numpy version's whole levels; drained to the end, in order."""
    rng = np.random.default_rng(seed)
    trees = [MinTree(capacity, compiled=compiled) for compiled in (False, True)]
    held = np.full(capacity, np.inf)
    order = rng.permutation(capacity)
    for _ in range(6):
        slots = rng.permutation(capacity)[: rng.integers(17, capacity)]
        held[slots] = rng.integers(0, 4, len(slots))
        for tree in trees:
            tree.set(slots, held[slots], order[slots])
    assert trees[0]._winners[1] == trees[1]._winners[1]
    expected = sorted((held[slot], order[slot], slot) for slot in range(capacity) if held[slot] < np.inf)
    for tree in trees:
        drained = []
        while (smallest := tree.smallest()) is not None:
            drained.append(smallest[0])
            tree.clear(np.array(smallest[:1]))
        assert drained == [slot for *_, slot in expected]
