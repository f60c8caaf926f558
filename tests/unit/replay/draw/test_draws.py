"""How items are picked: places, mixtures, and draws without replacement against enumeration."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from freshper import Exponential, NoDecay
from freshper.errors import ConfigError, SamplingError
from freshper.replay.draw.draws import Mixture, positions_in_strata
from freshper.replay.draw.sampler import PrioritySampler, check_correction
from freshper.replay.draw.sum_tree import SumTree
from freshper.replay.freshness import Freshness

QUICK = settings(deadline=None, derandomize=True, max_examples=200)
NONE = math.nan


def sampler_of(
    bases: Any,
    versions: Any = None,
    *,
    freshness: Freshness | Sequence[Freshness] | None = None,
    owners: Any = None,
    seed: int = 0,
    alpha: float = 1.0,
    **parts: Any,
) -> PrioritySampler:
    bases = np.asarray(bases, dtype=np.float64)
    versions = np.zeros(len(bases), dtype=np.int64) if versions is None else np.asarray(versions, dtype=np.int64)
    sampler = PrioritySampler(len(bases), freshness or NoDecay(), alpha, seed, **parts)
    sampler.put(np.arange(len(bases)), bases, versions, None if owners is None else np.asarray(owners, dtype=np.int16))
    return sampler


def two_tasks(bases: Any, seed: int = 0, **parts: Any) -> PrioritySampler:
    owners = [0, 0, *[1] * (len(bases) - 2)]
    return sampler_of(bases, freshness=[NoDecay(), NoDecay()], owners=owners, seed=seed, **parts)


def plausible(counts: NDArray[Any], expected: NDArray[np.float64]) -> bool:
    """Pearson's chi-square at an error rate of 1e-4 (Wilson and Hilferty's approximation of the quantile)."""
    assert expected.min() > 5
    freedom = len(counts) - 1
    spread = 2 / (9 * freedom)
    return bool(np.sum((counts - expected) ** 2 / expected) < freedom * (1 - spread + 3.72 * np.sqrt(spread)) ** 3)


@pytest.mark.parametrize("systematic", [True, False])
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_one_place_in_every_stratum(systematic: bool, count: int) -> None:
    """Seen where it matters: of ``count`` equal items each is drawn once, from one task and from two."""
    rng = np.random.default_rng(0)
    for trees in (1, 2):
        built = [SumTree(2 * count) for _ in range(trees)]
        for number, tree in enumerate(built):
            tree.set(np.arange(count) * 2 + number, np.zeros(count))
        for _ in range(20):
            positions = positions_in_strata(rng, count, systematic=systematic)
            assert positions.shape == (count,)
            assert np.ptp(positions) == 0 if systematic else count == 1 or np.ptp(positions) > 0.01
            slots, _ = Mixture(built, np.full(trees, 1 / trees)).locate_strata(positions)
            _, often = np.unique(slots, return_counts=True)
            assert (often == 1).all()
            if trees == 1:
                np.testing.assert_array_equal(slots, np.arange(count) * 2)


def test_positions_in_strata_are_uniform_and_fresh() -> None:
    """Mean and variance of 5,000 positions within 4.5 standard errors: error rate 3e-5."""
    rng = np.random.default_rng(1)
    for systematic in (True, False):
        positions = [positions_in_strata(rng, 4, systematic=systematic)[2] for _ in range(5000)]
        assert abs(np.mean(positions) - 0.5) < 4.5 * math.sqrt(1 / 12 / 5000)
        assert abs(np.var(positions) - 1 / 12) < 4.5 * math.sqrt(1 / 180 / 5000)


weights = st.lists(st.just(0.0) | st.floats(1e-3, 1e3), min_size=1, max_size=9)


@QUICK
@given(st.lists(weights, min_size=1, max_size=4), st.lists(st.floats(0, 1), min_size=4, max_size=4), st.integers(0, 99))
def test_a_mixture_finds_the_item_whose_interval_holds_the_place(
    trees: list[list[float]], parts: list[float], seed: int
) -> None:
    """Items lie in order of their tasks. Within 1e-9 of a border either side is right; nothing without a part is."""
    shares = np.array(parts[: len(trees)]) * [max(leaves) > 0 for leaves in trees]
    if shares.sum() < 1e-3:
        trees[0][0], shares[0] = 1.0, 1.0
    shares /= shares.sum()
    chances = np.concatenate(
        [part * np.array(leaves) / (sum(leaves) or 1) for part, leaves in zip(shares, trees, strict=True)]
    )
    built = []
    for leaves in trees:
        built.append(SumTree(9))
        built[-1].restore(np.pad(leaves, (0, 9 - len(leaves))), 0.0)
    starts = np.cumsum([0, *map(len, trees)])
    places = np.sort(np.append(np.random.default_rng(seed).random(20), [0.0, np.nextafter(1.0, 0.0), 1.0]))
    slots, got = Mixture(built, shares).locate(places)
    upper = np.cumsum(chances)
    for place, slot, chance in zip(places, slots.tolist(), got.tolist(), strict=True):
        possible = [start + slot for start, leaves in zip(starts, trees, strict=False) if slot < len(leaves)]
        found = [item for item in possible if upper[item] - chances[item] - 1e-9 <= place <= upper[item] + 1e-9]
        assert any(chances[item] == pytest.approx(chance, rel=1e-12) for item in found), (place, slot)
        assert chance > 0


@pytest.mark.parametrize("method", ["stratified", "systematic", "without_replacement"])
@pytest.mark.parametrize("parts", [None, {"shares": [0.7, NONE], "caps": [1.0, 1.0]}])
def test_single_draws_have_the_frequencies_of_their_probabilities(method: Any, parts: Any) -> None:
    bases = [0.5, 3.0, 1.0, 0.0, 2.0, 0.2]
    sampler = sampler_of(bases, seed=3) if parts is None else two_tasks(bases, seed=3, **parts)
    chances = sampler.probabilities(np.arange(6))
    counts = np.zeros(6)
    for _ in range(2500):
        counts[sampler.draw(1, method)[0]] += 1
    assert counts[3] == 0
    assert plausible(counts[chances > 0], 2500 * chances[chances > 0])


@QUICK
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12), st.integers(1, 60), st.integers(0, 99))
def test_a_systematic_draw_takes_the_floor_or_the_ceiling(bases: list[float], count: int, seed: int) -> None:
    sampler = sampler_of(bases, seed=seed)
    expected = count * sampler.probabilities(np.arange(len(bases)))
    counts = np.bincount(sampler.draw(count, "systematic")[0], minlength=len(bases))
    assert np.all(counts >= np.floor(expected - 1e-9))
    assert np.all(counts <= np.ceil(expected + 1e-9))


def orders(chances: NDArray[np.float64], count: int) -> dict[tuple[int, ...], float]:
    """The chance of every order in which ``count`` items can come, each drawn from what the ones before it left."""
    found = {}
    for order in itertools.permutations(np.flatnonzero(chances).tolist(), count):
        left, chance = float(np.sum(chances)), 1.0
        for item in order:
            chance *= chances[item] / left
            left -= chances[item]
        found[order] = chance
    return found


CASES = {
    "skewed": (lambda seed: sampler_of([8.0, 4.0, 2.0, 1.0, 1.0], seed=seed), 3),
    "even": (lambda seed: sampler_of([1.0, 1.0, 0.0, 1.0, 1.0], seed=seed), 2),
    "all but one": (lambda seed: sampler_of([5.0, 1.0, 1.0, 3.0], seed=seed), 3),
    "aged": (lambda seed: sampler_of([1, 2, 3, 1], [0, 5, 9, 9], freshness=Exponential(6.0), seed=seed, alpha=0.6), 2),
    "shares": (lambda seed: two_tasks([1, 3, 2, 1, 1], seed=seed, shares=[0.5, 0.5], caps=[1.0, 1.0]), 3),
    "tasks": (lambda seed: two_tasks([5, 3, 2, 1], seed=seed, shares=[NONE, NONE], caps=[0.6, 1.0]), 3),
}


@pytest.mark.parametrize("case", CASES)
def test_draws_without_replacement_are_successive_draws(case: str) -> None:
    """Every order as often as its enumerated chance: chi-square over 3000 draws, error rate 1e-4 for each case."""
    make, count = CASES[case]
    sampler = make(11)
    chances = sampler.probabilities(np.arange(sampler.table.capacity))
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(3000):
        seen[tuple(sampler.draw(count, "without_replacement")[0].tolist())] += 1
    wanted = orders(chances, count)
    assert set(seen) <= set(wanted)
    common = [order for order, chance in wanted.items() if chance * 3000 > 6]
    counts = np.array([*(seen[order] for order in common), 3000 - sum(seen[order] for order in common)])
    expected = np.array([*(wanted[order] for order in common), 1 - math.fsum(wanted[order] for order in common)]) * 3000
    kept = expected > 6
    assert plausible(counts[kept], expected[kept])


def test_weights_without_replacement_are_unbiased_where_the_naive_one_is_not() -> None:
    """4 of 5 items, one with P = 0.86: its weight 1 / (N P) is 71 % too small, because it is almost always drawn.

    Three means over 5000 draws lie within 4.5 standard errors: error rate 2e-5. With the threshold taken at the B-th
    arrival in place of the next one the first lies 30 % off, 18 standard errors.
    """
    sampler = sampler_of([86.0, 5.0, 4.0, 3.0, 2.0], seed=2)
    values = np.array([[1, 0, 0, 0, 0], [0, 0, 0, 0, 1], [3, -1, 4, -1, 5]], dtype=np.float64)
    chances = sampler.probabilities(np.arange(5))
    estimates, naive = np.empty((5000, 3)), np.empty((5000, 3))
    for at in range(5000):
        slots, probabilities = sampler.draw(4, "without_replacement")
        weights = sampler.sampling_weights(slots, probabilities, 1.0, "uniform", "none")
        estimates[at] = values[:, slots] @ weights / 4
        naive[at] = values[:, slots] @ (1 / (5 * chances[slots])) / 4
    errors = estimates.std(axis=0) / math.sqrt(5000)
    assert np.all(np.abs(estimates.mean(axis=0) - values.mean(axis=1)) < 4.5 * errors)
    assert naive.mean(axis=0)[0] / values.mean(axis=1)[0] == pytest.approx(0.29, abs=0.01)


def test_weights_without_replacement_toward_freshness_are_unbiased_for_the_fresh_mean() -> None:
    """Within 4.5 standard errors over 2500 draws of two tasks with shares: error rate 7e-6."""
    versions, bases = 5000 + np.array([0, 9, 4, 9, 9, 2]), [9.0, 0.3, 1.0, 2.0, 0.5, 3.0]
    decays, owners = [Exponential(5.0), Exponential(20.0)], [0, 0, 1, 1, 1, 1]
    parts = {"shares": [0.4, 0.6], "caps": [1.0, 1.0]}
    sampler = sampler_of(bases, versions, freshness=decays, owners=owners, seed=5, **parts)
    sampler.advance(5009)
    values = np.array([1.0, -2.0, 3.0, 5.0, -1.0, 8.0])
    fresh = np.where(np.arange(6) < 2, np.exp((versions - 5009) / 5), np.exp((versions - 5009) / 20))
    target = np.concatenate([0.4 * fresh[:2] / fresh[:2].sum(), 0.6 * fresh[2:] / fresh[2:].sum()])
    estimates = np.empty(2500)
    for at in range(2500):
        slots, probabilities = sampler.draw(3, "without_replacement")
        weights = sampler.sampling_weights(slots, probabilities, 1.0, "freshness", "none")
        estimates[at] = np.mean(weights * values[slots])
    assert abs(estimates.mean() - target @ values) < 4.5 * estimates.std() / math.sqrt(2500)


def test_weights_of_items_that_underflow_are_unbiased_too() -> None:
    """Two items exp(-2000) and exp(-2001) beside one of weight 1; within 4.5 standard errors: error rate 7e-6."""
    sampler = sampler_of([1.0, 1.0, 1.0], [9000, 7000, 6999], freshness=Exponential(1.0), seed=1)
    estimates = np.empty((3000, 3))
    for at in range(3000):
        slots, probabilities = sampler.draw(2, "without_replacement")
        weights = sampler.sampling_weights(slots, probabilities, 1.0, "uniform", "none")
        estimates[at] = np.bincount(slots, weights / 2, minlength=3)
    errors = estimates.std(axis=0) / math.sqrt(3000)
    assert np.all(np.abs(estimates.mean(axis=0) - 1 / 3) < 4.5 * errors + 1e-9)


def test_all_items_are_drawn_when_there_are_no_more() -> None:
    for size in (1, 2, 5, 100):
        sampler = sampler_of(np.random.default_rng(size).exponential(size=size))
        slots, probabilities = sampler.draw(size, "without_replacement")
        np.testing.assert_array_equal(np.sort(slots), np.arange(size))
        np.testing.assert_array_equal(probabilities, np.full(size, 1 / size))
        weights = sampler.sampling_weights(slots, probabilities, 1.0, "uniform", "none")
        np.testing.assert_allclose(weights, np.ones(size), rtol=1e-14)


@pytest.mark.parametrize("count", [5, 8, 9, 10])
@pytest.mark.parametrize("seed", range(5))
def test_weights_that_underflow_are_still_drawn_last_and_in_order(count: int, seed: int) -> None:
    """Ages of up to 20,000 tau and bases of 1e-300 to 1e300: each outweighs the sum of all below by 1e40 or more."""
    versions = 30_000 - np.array([20_000, 0, 9_000, 100, 700, 1_500, 1_600, 19_000, 3_000, 12_000])
    bases = np.array([1e300, 1e300, 1e-300, 1e-300, 1e300, 1.0, 1e-300, 1.0, 1.0, 5e-324])
    sampler = sampler_of(bases, versions, freshness=Exponential(1.0), seed=seed)
    order = np.argsort(-(np.log(bases) + versions))
    slots, probabilities = sampler.draw(count, "without_replacement")
    np.testing.assert_array_equal(slots, order[:count])
    np.testing.assert_allclose(probabilities[:-1], 1 / count, rtol=1e-9)
    assert 0 < probabilities[-1] * count <= 1
    weights = sampler.sampling_weights(slots, probabilities, 1.0, "uniform", "none")
    assert np.all(np.isfinite(weights) & (weights > 0))


class Breaking:
    """A generator that fails at its n-th call."""

    def __init__(self, calls: int) -> None:
        self.calls, self.rng = calls, np.random.default_rng(0)

    def _next(self, name: str, count: int) -> Any:
        self.calls -= 1
        if self.calls < 0:
            raise KeyboardInterrupt
        return getattr(self.rng, name)(count)

    def random(self, count: int) -> Any:
        return self._next("random", count)

    def standard_exponential(self, count: int) -> Any:
        return self._next("standard_exponential", count)


def everything(sampler: PrioritySampler) -> list[Any]:
    trees = [tree for index in sampler.indexes for tree in index.sums.values()]
    table = sampler.table
    return [
        *[(tree.leaves().tobytes(), tree.total, tree.reference) for tree in trees],
        *[array.tobytes() for array in (table.bases, table.versions, table.owners, table.alive)],
        *[(index.drawable, index.keying) for index in sampler.indexes],
    ]


def draw_often(sampler: PrioritySampler) -> None:
    for _ in range(9):
        sampler.draw(40, "without_replacement")


@pytest.mark.parametrize("tasks", [1, 2])
@pytest.mark.parametrize("skew", [1.0, 400.0])
def test_the_trees_are_as_before_whatever_happens(tasks: int, skew: float) -> None:
    rng = np.random.default_rng(4)
    bases, versions = rng.exponential(size=40), (rng.random(40) * skew).astype(np.int64)
    owners = rng.integers(0, tasks, 40)
    parts = {"shares": [NONE] * tasks, "caps": [1.0] * tasks}
    sampler = sampler_of(bases, versions, freshness=[Exponential(0.5)] * tasks, owners=owners, **parts)
    sampler.indexes[0].freshness_tree()
    before = everything(sampler)
    for count in (1, 7, 39, 40):
        sampler.draw(count, "without_replacement")
        assert everything(sampler) == before
    for calls in range(6):
        sampler.rng = Breaking(calls)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            draw_often(sampler)
        assert everything(sampler) == before


def test_r31_too_few_items_are_named_and_nothing_is_drawn() -> None:
    sampler = sampler_of([1.0, 0.0, 2.0, 3.0, 1e-300, 0.0])
    state = sampler.rng.bit_generator.state
    with pytest.raises(SamplingError, match="a draw of 5 without replacement was asked for, but only 4 items can be"):
        sampler.draw(5, "without_replacement")
    assert sampler.rng.bit_generator.state == state
    assert sorted(sampler.draw(4, "without_replacement")[0].tolist()) == [0, 2, 3, 4]


def test_the_maximum_of_the_buffer_is_none_of_a_draw_without_replacement() -> None:
    sampler = sampler_of([1.0, 2.0])
    slots, probabilities = sampler.draw(2, "without_replacement")
    for normalization in ("batch_max", "mean", "none"):
        sampler.sampling_weights(slots, probabilities, 1.0, "uniform", normalization)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="buffer_max is the largest weight of a draw with replacement"):
        check_correction(0.5, "uniform", "buffer_max", "without_replacement")
