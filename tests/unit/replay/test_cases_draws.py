"""Cases of draws and weights that broke other systems (shared/cases/replay.md), with their neighbors."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freshper import Exponential, NoDecay, ReplayBuffer, Trajectory
from freshper.replay.draw.sampler import NORMALIZATIONS, PrioritySampler
from freshper.replay.draw.sum_tree import SumTree
from freshper.replay.freshness import Freshness

Make = Callable[..., Trajectory]
Filled = Callable[..., ReplayBuffer]


class Edge:
    """A random generator that only gives the largest number below 1."""

    def random(self, count: int) -> NDArray[np.float64]:
        return np.full(count, np.nextafter(1.0, 0.0))


def equal(capacity: int, items: int | None = None) -> PrioritySampler:
    sampler = PrioritySampler(capacity, NoDecay(), 1.0, 0)
    count = capacity if items is None else items
    sampler.put(np.arange(count), np.ones(count), np.zeros(count, dtype=np.int64))
    return sampler


def chi_square_is_plausible(counts: NDArray[Any], expected: NDArray[np.float64]) -> bool:
    """Pearson's test at an error rate of 1e-4 (Wilson and Hilferty's approximation of the quantile)."""
    freedom = len(counts) - 1
    spread = 2 / (9 * freedom)
    limit = freedom * (1 - spread + 3.72 * np.sqrt(spread)) ** 3
    return bool(np.sum((counts - expected) ** 2 / expected) < limit)


def test_r2_a_full_power_of_two_has_no_edge() -> None:
    sampler = equal(4096)
    for _ in range(100):
        slots, probabilities = sampler.draw(10_000)
        assert slots.min() >= 0
        assert slots.max() < 4096
        assert np.all(probabilities == 1 / 4096)
    singles = np.array([sampler.draw(1)[0][0] for _ in range(10_000)])
    assert singles.min() >= 0
    assert singles.max() < 4096


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 5, 4095, 4096, 4097])
@pytest.mark.parametrize("filled", [1.0, 0.6])
@pytest.mark.parametrize("count", [1, 3, 128])
def test_r2_the_upper_edge_of_any_capacity_is_a_live_item(capacity: int, filled: float, count: int) -> None:
    items = max(1, int(capacity * filled))
    sampler = equal(capacity, items)
    sampler.rng = Edge()  # type: ignore[assignment]
    slots, probabilities = sampler.draw(count)
    assert slots.max() == items - 1
    assert np.all(probabilities == 1 / items)


@pytest.mark.parametrize("toward", ["uniform", "freshness"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_r3_one_item_is_drawn_with_probability_one(make_buffer: Filled, toward: Any, normalization: Any) -> None:
    buffer = make_buffer([0.3], [5], capacity=10, freshness=Exponential(2.0))
    for size in (1, 1, 7):
        batch = buffer.sample(size, policy_version=100, beta=1.0, toward=toward, normalization=normalization)
        np.testing.assert_array_equal(batch.keys, buffer.keys()[[0] * size])
        np.testing.assert_array_equal(batch.probabilities, np.ones(size))
        np.testing.assert_array_equal(batch.sampling_weights, np.ones(size))


@pytest.mark.parametrize(("size", "draws"), [(1, 10_000), (3, 33_333), (7, 14_285), (1000, 100)])
def test_r4_every_equal_item_is_drawn_equally_often(size: int, draws: int) -> None:
    """Four passes of up to 1e5 draws. One draw per stratum can only make the counts more even."""
    sampler = equal(4)
    sampler.rng = np.random.default_rng(size)
    counts = np.zeros(4)
    for _ in range(draws):
        counts += np.bincount(sampler.draw(size)[0], minlength=4)
    assert chi_square_is_plausible(counts, np.full(4, size * draws / 4))


@pytest.mark.parametrize("size", [1, 5])
def test_r5_alpha_zero_is_uniform(make_buffer: Filled, size: int) -> None:
    buffer = make_buffer([1.0, 2.0, 3.0, 4.0, 5.0], alpha=0.0)
    np.testing.assert_array_equal(buffer.probabilities(), np.full(5, 0.2))
    counts = np.zeros(5)
    for _ in range(4000):
        counts += np.bincount(buffer.sample(size, policy_version=0).keys, minlength=5)
    assert chi_square_is_plausible(counts, np.full(5, size * 800.0))


def test_r5_alpha_zero_is_uniform_over_extreme_bases_and_ages_but_not_over_zero(make_buffer: Filled) -> None:
    buffer = make_buffer([1e-300, 0.0, 1e300, 1.0], [0, 5, 10**12, 7], alpha=0.0, freshness=Exponential(1e-6))
    np.testing.assert_array_equal(buffer.probabilities(), [1 / 3, 0, 1 / 3, 1 / 3])


def test_r6_weights_toward_uniform_are_those_of_the_formula(make_buffer: Filled) -> None:
    buffer = make_buffer([1.0, 2.0, 4.0])
    want = {"none": [7 / 3, 7 / 6, 7 / 12], "batch_max": [1, 0.5, 0.25], "mean": [12 / 7, 6 / 7, 3 / 7]}
    for normalization, weights in want.items():
        batch = buffer.sample(7, policy_version=0, beta=1.0, normalization=normalization)  # strata: 1, 2 and 4 times
        expected = np.repeat(weights, [1, 2, 4])
        if normalization == "mean":
            expected = expected / expected.mean()
        np.testing.assert_allclose(batch.sampling_weights, expected, rtol=1e-14)


def test_r6_empty_and_zero_slots_are_not_in_the_set(make_buffer: Filled) -> None:
    buffer = make_buffer([1.0, 0.0, 2.0, 4.0, 0.0], capacity=64)
    batch = buffer.sample(7, policy_version=0, beta=1.0, normalization="none")
    np.testing.assert_allclose(batch.sampling_weights, np.repeat([7 / 3, 7 / 6, 7 / 12], [1, 2, 4]), rtol=1e-14)


@pytest.mark.parametrize("toward", ["uniform", "freshness"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_r7_unfilled_slots_do_not_spoil_the_weights(make_buffer: Filled, toward: Any, normalization: Any) -> None:
    buffer = make_buffer([1.0, 2.0, 3.0], [0, 1, 2], capacity=100, freshness=Exponential(3.0))
    batch = buffer.sample(50, policy_version=2, beta=1.0, toward=toward, normalization=normalization)
    assert np.all(np.isfinite(batch.sampling_weights))
    assert batch.sampling_weights.min() > 0.05
    assert batch.sampling_weights.max() < 20


@pytest.mark.parametrize("tiny", [1e-30, 1e-300, 5e-324])
@pytest.mark.parametrize("normalization", ["batch_max", "mean"])
def test_r10_a_tiny_priority_does_not_crush_the_weights_of_others(
    make_buffer: Filled, tiny: float, normalization: Any
) -> None:
    buffer = make_buffer([1.0] * 99 + [tiny])
    last = buffer.keys()[-1]
    for _ in range(20):
        batch = buffer.sample(32, policy_version=0, beta=1.0, normalization=normalization)
        assert last not in batch.keys
        np.testing.assert_allclose(batch.sampling_weights, 1.0, rtol=0.01)


@pytest.mark.parametrize("toward", ["uniform", "freshness"])
def test_r11_every_normalization_keeps_its_promise_with_an_item_20_tau_old(make_buffer: Filled, toward: Any) -> None:
    tau, versions = 10.0, np.arange(0, 201, 2)
    buffer = make_buffer(np.linspace(0.1, 2.0, 101), versions, freshness=Exponential(tau), alpha=1.0)
    fresh = np.exp((versions - 200) / tau)
    target = np.full(101, 1 / 101) if toward == "uniform" else fresh / fresh.sum()
    by_key = dict(zip(buffer.keys().tolist(), target / buffer.probabilities(), strict=True))
    for normalization in ("none", "batch_max", "mean"):
        batch = buffer.sample(64, policy_version=200, beta=1.0, toward=toward, normalization=normalization)
        want = np.array([by_key[key] for key in batch.keys.tolist()])
        assert batch.mean_sampling_weight == batch.sampling_weights.mean()
        if normalization == "none":
            np.testing.assert_allclose(batch.sampling_weights, want, rtol=1e-12)
        elif normalization == "batch_max":
            assert batch.sampling_weights.max() == 1.0
            np.testing.assert_allclose(batch.sampling_weights, want / want.max(), rtol=1e-12)
        else:
            assert batch.mean_sampling_weight == pytest.approx(1.0, rel=1e-15)
            np.testing.assert_allclose(batch.sampling_weights, want / want.mean(), rtol=1e-12)


@pytest.mark.parametrize(("toward", "crushed"), [("uniform", True), ("freshness", False)])
def test_r11_the_maximum_of_the_whole_buffer_is_that_of_its_rarest_item_and_says_what_it_does(
    make_buffer: Filled, toward: Any, crushed: bool
) -> None:
    """Toward uniform the mean falls under 0.1, which is said once, where the caller stands; toward freshness not."""
    tau, versions, bases = 10.0, np.arange(0, 201, 2), np.linspace(0.5, 2.0, 101)
    buffer = make_buffer(bases, versions, freshness=Exponential(tau), alpha=1.0)
    fresh = np.exp((versions - 200) / tau)
    target = np.full(101, 1 / 101) if toward == "uniform" else fresh / fresh.sum()
    ratios = target / (bases * fresh / np.sum(bases * fresh))
    by_key = dict(zip(buffer.keys().tolist(), ratios / ratios.max(), strict=True))
    arguments = {"policy_version": 200, "beta": 1.0, "toward": toward, "normalization": "buffer_max"}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        batches = [buffer.sample(64, **arguments) for _ in range(3)]
    for batch in batches:
        want = [by_key[key] for key in batch.keys.tolist()]
        np.testing.assert_allclose(batch.sampling_weights, want, rtol=1e-12)
        assert (batch.mean_sampling_weight < 0.1) == crushed
    assert len(said) == crushed
    for warning in said:
        assert "normalization buffer_max: the mean sampling weight is" in str(warning.message)
        assert warning.filename == __file__


@pytest.mark.parametrize("factor", [0.9, 0.5, 1.1])
def test_r15_a_scaled_tree_never_gives_a_zero_leaf_at_the_upper_edge(factor: float) -> None:
    rng = np.random.default_rng(0)
    keys = np.where(rng.random(100) < 0.5, rng.normal(size=100), -np.inf)
    keys[-7:] = -np.inf
    tree = SumTree(100)
    for _ in range(1000):
        keys = keys + np.log(factor)
        if tree.accepts(keys):
            tree.set(np.arange(100), keys)
        if tree.underflowed:
            tree.rebuild(keys)
        edge = np.array([tree.total, np.nextafter(tree.total, 0), np.nextafter(tree.total, np.inf)])
        assert np.all(tree.weights(tree.find(edge)) > 0)


def test_r17_alpha_is_applied_once() -> None:
    sampler = PrioritySampler(2, NoDecay(), 0.5, 0)
    sampler.put(np.arange(2), np.array([16.0, 1.0]), np.zeros(2, dtype=np.int64))
    np.testing.assert_allclose(sampler.indexes[0].tree.leaves(), [4.0, 1.0], rtol=1e-15)
    sampler.set_bases(np.array([1]), np.array([16.0]))
    np.testing.assert_allclose(sampler.indexes[0].tree.leaves(), [4.0, 4.0], rtol=1e-15)
    sampler.indexes[0].rebuild()
    np.testing.assert_allclose(sampler.probabilities(np.arange(2)), [0.5, 0.5], rtol=1e-15)


@pytest.mark.parametrize("now", [10**7, 2**53 + 1, 2**62 + 1])
def test_r18_ages_are_exact_after_any_number_of_updates(make_buffer: Filled, now: int) -> None:
    buffer = make_buffer([1.0, 1.0], [0, 1], freshness=Exponential(1e3))
    before = buffer.probabilities()
    batch = buffer.sample(2, policy_version=now)
    np.testing.assert_array_equal(batch.ages, [now, now - 1])
    np.testing.assert_array_equal(buffer.probabilities(), before)


def test_r18_the_clock_takes_no_fractions(make_buffer: Filled) -> None:
    buffer = make_buffer([1.0])
    for fraction in (0.001, np.float64(1.0), "1"):
        with pytest.raises(TypeError, match="must be an int: optimizer updates applied"):
            buffer.sample(1, policy_version=fraction)
    assert buffer.policy_version == 0


@pytest.mark.parametrize("taus", [5000, 10**9])
def test_r19_passing_time_alone_changes_no_distribution(make_buffer: Filled, taus: int) -> None:
    settings = {"freshness": Exponential(4.0), "seed": 3}
    buffer, other = (make_buffer([1.0, 2.0, 3.0], [0, 4, 8], **settings) for _ in range(2))
    old = buffer.probabilities()
    late = buffer.sample(100, policy_version=8 + 4 * taus, beta=0.5, toward="freshness")
    early = other.sample(100, policy_version=8, beta=0.5, toward="freshness")
    np.testing.assert_array_equal(buffer.probabilities(), old)
    for name in ("keys", "probabilities", "sampling_weights"):
        np.testing.assert_array_equal(getattr(late, name), getattr(early, name))
    np.testing.assert_array_equal(late.ages, early.ages + 4 * taus)


@pytest.mark.parametrize("gap", [200, 10_000, 10**9])
def test_r20_old_items_come_back_exactly_when_the_new_ones_are_gone(
    make_buffer: Filled, make_trajectory: Make, gap: int
) -> None:
    """The newer items stand in older slots, so that they are evicted first."""
    new = [10 * gap, 10 * gap + 1]
    buffer = make_buffer([1.0, 2.0], new, capacity=5, freshness=Exponential(1.0))
    late = [(1.0, 0), (2.0, 3), (0.5, 1), (1.0, 2), (3.0, 3)]
    for base, version in late:
        buffer.add([make_trajectory(base, version)], policy_version=10 * gap + 1)
    want = np.array([base * np.exp(version) for base, version in late])
    np.testing.assert_allclose(buffer.probabilities(), want / want.sum(), rtol=1e-13)


def test_r20_the_same_when_the_new_ones_are_set_to_zero(make_buffer: Filled) -> None:
    buffer = make_buffer([1.0, 2.0, 1.0, 1.0], [0, 1, 5000, 9000], freshness=Exponential(1.0))
    assert buffer.probabilities()[0] == 0.0
    for key in buffer.keys()[[3, 2]]:
        buffer.update_priorities([key], [0.0])
    want = np.array([1.0, 2.0 * np.e, 0.0, 0.0])
    np.testing.assert_allclose(buffer.probabilities(), want / want.sum(), rtol=1e-14)


def test_r20_every_step_down_a_ladder_of_ages_is_exact(make_buffer: Filled) -> None:
    """What is left after each step lies near or far below the range of floats: 12 digits each time."""
    ages = np.array([0, 40, 90, 160, 300, 640, 690, 720, 735, 744, 750, 1400])
    buffer = make_buffer(np.ones(12), 2000 - ages, freshness=Exponential(1.0))
    for step, key in enumerate(buffer.keys()):
        left = np.exp(np.longdouble(-1) * (ages[step:] - ages[step]))
        want = left / left.sum()
        shown = np.asarray(want > 1e-290)
        np.testing.assert_allclose(buffer.probabilities()[step:][shown], want[shown].astype(np.float64), rtol=1e-12)
        if step < 11:
            buffer.update_priorities([key], [0.0])


@pytest.mark.parametrize("corner", [24, 5, 100])
def test_r24_masses_map_to_items_in_order(corner: int) -> None:
    tree = SumTree(3)
    tree.set(np.arange(3), np.zeros(3))
    np.testing.assert_array_equal(tree.find(np.array([0.5, 1.5, 2.5])), [0, 1, 2])
    wide = SumTree(corner)
    wide.set(np.arange(corner), np.zeros(corner))
    np.testing.assert_array_equal(wide.find(np.arange(corner) + 0.5), np.arange(corner))


@pytest.mark.parametrize("freshness", [NoDecay(), Exponential(3.0)])
def test_r30_a_seed_fixes_every_batch(make_buffer: Filled, freshness: Freshness) -> None:
    first, second, third = (
        make_buffer(np.linspace(0.1, 3.0, 40), range(40), freshness=freshness, seed=seed) for seed in (7, 7, 8)
    )
    differs = False
    for version in range(40, 70):
        batches = [each.sample(16, policy_version=version, beta=0.4).keys for each in (first, second, third)]
        np.testing.assert_array_equal(batches[0], batches[1])
        differs |= not np.array_equal(batches[0], batches[2])
    assert differs


def test_r30_the_global_generators_are_left_alone(make_buffer: Filled) -> None:
    torch = pytest.importorskip("torch")
    before = (random.getstate(), str(np.random.get_state()), torch.get_rng_state())  # noqa: NPY002 - the global one
    buffer = make_buffer([1.0, 2.0, 3.0])
    batch = buffer.sample(64, policy_version=0, beta=1.0)
    buffer.update_priorities(batch.keys, np.ones(64))
    assert random.getstate() == before[0]
    assert str(np.random.get_state()) == before[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])


def test_r30_seeding_the_global_generators_changes_nothing(make_buffer: Filled) -> None:
    draws = []
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        draws.append(make_buffer([1.0, 2.0, 3.0]).sample(64, policy_version=0).keys)
    np.testing.assert_array_equal(*draws)
