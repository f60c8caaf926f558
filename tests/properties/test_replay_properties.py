"""The mathematics of replay over random histories, against a slow reference written from the definition."""

import decimal
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from freshper import Exponential, NoDecay, ReplayBuffer, SampledBatch, Trajectory
from freshper.errors import SamplingError
from freshper.replay.draw.sampler import METHODS, NORMALIZATIONS, TOWARD, PrioritySampler
from freshper.replay.draw.sum_tree import SumTree

Make = Callable[..., Trajectory]
PROPERTY = settings(deadline=None, derandomize=True, max_examples=200)
QUICK = settings(deadline=None, derandomize=True, max_examples=200)

# What doubles can promise. A key is alpha (log b + (v - epoch) / tau); where it matters each term is below 1500
# in size, so half a dozen roundings of 1.1e-16 times that leave an error under 1e-12 in the exponent, for alpha <= 2.
# A probability below 1e-290 may belong to a denormal weight or to one that underflowed: only its smallness is kept.
ACCURACY = Decimal("1e-12")
WEIGHT_ACCURACY = Decimal("2e-12")
FAINT = Decimal("1e-290")


@pytest.fixture(autouse=True, scope="module")
def decimals() -> Iterator[None]:
    """40 digits and no underflow: the exponents of 80-bit floats end at exp(-11356), those of decimals do not."""
    with decimal.localcontext(decimal.Context(prec=40, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)):
        yield


@dataclass
class Item:
    key: int
    base: float
    version: int


@dataclass
class Reference:
    """p_i = b_i exp(-age_i / tau), P(i) = p_i^alpha / sum_k p_k^alpha, word for word; the oldest item goes first."""

    capacity: int
    tau: float | None
    alpha: float
    items: list[Item] = field(default_factory=list)

    def powered(self, base: float, age: int) -> Decimal:
        if base == 0:
            return Decimal(0)
        fresh = Decimal(1) if self.tau is None else (Decimal(-age) / Decimal(self.tau)).exp()
        return (Decimal(base) * fresh) ** Decimal(self.alpha)

    def probabilities(self, now: int) -> dict[int, Decimal]:
        return _shares({item.key: self.powered(item.base, now - item.version) for item in self.items})

    def target(self, now: int, toward: str) -> dict[int, Decimal]:
        flat = {item.key: 1.0 if item.base > 0 else 0.0 for item in self.items}
        if toward == "uniform":
            return _shares({key: Decimal(value) for key, value in flat.items()})
        return _shares({item.key: self.powered(flat[item.key], now - item.version) for item in self.items})


def _shares(values: dict[int, Decimal]) -> dict[int, Decimal]:
    total = sum(values.values())
    return {key: value / total if total else value for key, value in values.items()}


def close(got: float, want: Decimal, accuracy: Decimal) -> bool:
    return Decimal(got) < 2 * FAINT if want < FAINT else abs(Decimal(got) - want) < accuracy * want


class History:
    """A buffer and its reference that live through the same calls, compared after each."""

    def __init__(self, make: Make, path: Path, capacity: int, tau: float | None, alpha: float) -> None:
        self.make, self.path = make, path
        self.buffer = ReplayBuffer(
            capacity,
            priority=lambda item: item.episode_return,
            freshness=NoDecay() if tau is None else Exponential(tau),
            alpha=alpha,
        )
        self.reference = Reference(capacity, tau, alpha)
        self.now = 0
        self.dead: list[int] = [-1]

    def add(self, jump: int, parts: Sequence[tuple[float, int]]) -> None:
        self.now += jump
        parts = parts[: self.reference.capacity]
        items = [self.make(base, max(0, self.now - lag)) for base, lag in parts]
        keys = self.buffer.add(items, policy_version=self.now)
        for key, (base, lag) in zip(keys.tolist(), parts, strict=True):
            self.reference.items.append(Item(key, base, max(0, self.now - lag)))
        while len(self.reference.items) > self.reference.capacity:
            self.dead.append(self.reference.items.pop(0).key)

    def update(self, changes: Sequence[tuple[int, float]]) -> None:
        known = self.dead[-2:] + [item.key for item in self.reference.items]
        keys = [known[number % len(known)] for number, _ in changes]
        result = self.buffer.update_priorities(keys, [base for _, base in changes])
        last = dict(zip(keys, [base for _, base in changes], strict=True))
        live = [item for item in self.reference.items if item.key in last]
        for item in live:
            item.base = last[item.key]
        assert result.updated == len(live)
        assert result.refused.tolist() == [key for key in keys if key in self.dead]

    def sample(self, jump: int, size: int, correction: tuple[float, Any, Any]) -> None:
        self.now += jump
        beta, toward, normalization, method = correction
        arguments = {"beta": beta, "toward": toward, "normalization": normalization, "method": method}
        if not any(item.base > 0 for item in self.reference.items):
            with pytest.raises(SamplingError):
                self.buffer.sample(size, policy_version=self.now, **arguments)
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "normalization buffer_max")  # it is as bad as it says
            batch = self.buffer.sample(size, policy_version=self.now, **arguments)
        self.check_batch(batch, beta, toward, normalization)

    def check_batch(self, batch: SampledBatch, beta: float, toward: str, normalization: str) -> None:
        items = {item.key: item for item in self.reference.items}
        probabilities, target = self.reference.probabilities(self.now), self.reference.target(self.now, toward)
        keys = batch.keys.tolist()
        weights = [(target[key] / probabilities[key]) ** Decimal(beta) for key in keys]
        drawable = [(target[key] / probabilities[key]) ** Decimal(beta) for key in target if probabilities[key] > 0]
        scales = {"batch_max": max(weights), "mean": sum(weights) / len(weights), "buffer_max": max(drawable)}
        scale = Decimal(1) if normalization == "none" or beta == 0 else scales[normalization]
        for number, key in enumerate(keys):
            assert batch.base_priorities[number] == items[key].base > 0
            assert batch.ages[number] == self.now - items[key].version
            assert close(batch.probabilities[number], probabilities[key], ACCURACY)
            assert close(batch.sampling_weights[number], weights[number] / scale, WEIGHT_ACCURACY)

    def save(self) -> None:
        """Go on with the loaded buffer, after both have made the same draw."""
        with mock.patch("os.fsync"):  # nothing has to survive here, and a busy disk takes its time
            self.buffer.save(self.path)
        loaded = ReplayBuffer.load(self.path, priority=self.buffer.priority)
        if self.buffer.drawable:
            for toward in TOWARD:
                mine, theirs = (
                    each.sample(7, policy_version=self.now, beta=0.4, toward=toward) for each in (self.buffer, loaded)
                )
                for name in ("keys", "probabilities", "sampling_weights"):
                    np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
        self.buffer = loaded

    def check(self) -> None:
        want = self.reference.probabilities(self.now)
        got = dict(zip(self.buffer.keys().tolist(), self.buffer.probabilities().tolist(), strict=True))
        assert list(got) == list(want)
        assert all(close(got[key], want[key], ACCURACY) for key in want), (got, want)
        drawable = sum(item.base > 0 for item in self.reference.items)
        assert self.buffer.drawable == drawable
        assert sum(got.values()) == pytest.approx(1.0 if drawable else 0.0, abs=1e-14)
        tree = self.buffer._core.sampler.indexes[0].tree
        again = SumTree(tree.capacity)
        again.restore(tree.leaves(), tree.reference)
        assert tree.total == again.total == pytest.approx(math.fsum(tree.leaves()), rel=1e-14)

    def agrees(self, calls: Sequence[tuple[Any, ...]]) -> bool:
        for name, *arguments in calls:
            getattr(self, name)(*arguments)
            self.check()
        return True


EXTREME = [0.0, 5e-324, 1e-300, 1e-30, 0.1, 1.0, 11.0, 1e30, 1e300, 1.7e308]
JUMPS = [0, 1, 2, 50, 10**4, 10**12]
bases = st.sampled_from(EXTREME) | st.floats(0.0, 20.0) | st.floats(-300, 300).map(lambda power: 10.0**power)
jumps = st.sampled_from(JUMPS)
taus = st.sampled_from([None, 0.5, 3.7, 12.0, 500.0, 1e9])
alphas = st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.0])
methods = st.sampled_from(["stratified", "systematic"])
betas = st.sampled_from([0.0, 0.4, 1.0])
corrections = st.tuples(betas, st.sampled_from(TOWARD), st.sampled_from(NORMALIZATIONS), methods)
calls = st.one_of(
    st.tuples(st.just("add"), jumps, st.lists(st.tuples(bases, jumps), min_size=1, max_size=4)),
    st.tuples(st.just("update"), st.lists(st.tuples(st.integers(0, 9), bases), max_size=4)),
    st.tuples(st.just("sample"), jumps, st.integers(1, 12), corrections),
    st.tuples(st.just("save")),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("properties") / "buffer"


@PROPERTY
@given(st.tuples(st.integers(1, 7), taus, alphas), st.lists(calls, min_size=1, max_size=25))
def test_any_history_agrees_with_the_reference(
    make_trajectory: Make, path: Path, setting: tuple[int, float | None, float], history: list[tuple[Any, ...]]
) -> None:
    assert History(make_trajectory, path, *setting).agrees(history)


def random_call(rng: np.random.Generator) -> tuple[Any, ...]:
    def base() -> float:
        return float(rng.choice(EXTREME) if rng.random() < 0.2 else rng.exponential())

    def jump() -> int:
        return int(rng.choice(JUMPS[:4] if rng.random() < 0.9 else JUMPS))

    match rng.choice(["add", "update", "sample", "save"], p=[0.4, 0.35, 0.2, 0.05]):
        case "add":
            return "add", jump(), [(base(), jump()) for _ in range(rng.integers(1, 5))]
        case "update":
            return "update", [(int(rng.integers(0, 99)), base()) for _ in range(rng.integers(0, 8))]
        case "sample":
            correction = (
                rng.random(),
                TOWARD[rng.integers(2)],
                NORMALIZATIONS[rng.integers(4)],
                METHODS[rng.integers(2)],
            )
            return "sample", jump(), int(rng.integers(1, 40)), correction
        case _:
            return ("save",)


@pytest.mark.parametrize(("tau", "alpha"), [(3.0, 0.6), (12.0, 1.0), (500.0, 2.0), (None, 0.6)])
def test_a_long_history_agrees_with_the_reference(
    make_trajectory: Make, path: Path, tau: float | None, alpha: float
) -> None:
    rng = np.random.default_rng(0)
    assert History(make_trajectory, path, 13, tau, alpha).agrees([random_call(rng) for _ in range(600)])


def probabilities(
    bases: Sequence[float] | NDArray[np.float64], versions: Sequence[int], tau: float, alpha: float
) -> NDArray[np.float64]:
    sampler = PrioritySampler(len(bases), Exponential(tau), alpha, 0)
    for slot, (base, version) in enumerate(zip(bases, versions, strict=True)):
        sampler.put(np.array([slot]), np.array([base]), np.array([version]))
    return sampler.probabilities(np.arange(len(bases)))


some = st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(0, 10**6)), min_size=1, max_size=20)


@QUICK
@given(some, st.integers(0, 10**15), st.floats(0.1, 1e6), st.floats(0, 2))
def test_only_differences_of_versions_count(
    parts: list[tuple[float, int]], shift: int, tau: float, alpha: float
) -> None:
    bases, versions = zip(*parts, strict=True)
    early, late = (probabilities(bases, [version + by for version in versions], tau, alpha) for by in (0, shift))
    np.testing.assert_allclose(late, early, rtol=1e-12, atol=1e-290)


@QUICK
@given(some, st.integers(-900, 900), st.floats(0.1, 1e6), st.floats(0, 2))
def test_only_ratios_of_bases_count(parts: list[tuple[float, int]], power: int, tau: float, alpha: float) -> None:
    bases, versions = zip(*parts, strict=True)
    plain, scaled = (probabilities(np.array(bases) * 2.0**by, versions, tau, alpha) for by in (0, power))
    np.testing.assert_allclose(scaled, plain, rtol=1e-12, atol=1e-290)


@QUICK
@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=20), st.floats(1e-3, 1e3), taus, st.floats(0, 2))
def test_of_equal_bases_the_older_is_never_likelier(
    versions: list[int], base: float, tau: float | None, alpha: float
) -> None:
    got = probabilities([base] * len(versions), sorted(versions), tau or 1e12, alpha)
    assert np.all(got[:-1] <= got[1:] * (1 + 1e-15))
    assert got.sum() == pytest.approx(1.0, abs=1e-14)


@QUICK
@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=20), st.integers(0, 99), taus, st.floats(0, 2))
def test_of_equal_ages_the_larger_base_is_never_less_likely(
    bases: list[float], version: int, tau: float | None, alpha: float
) -> None:
    got = probabilities(sorted(bases), [version] * len(bases), tau or 1e12, alpha)
    assert np.all(got[:-1] <= got[1:] * (1 + 1e-15))


@QUICK
@given(some, st.floats(0.1, 1e6), st.floats(0, 2), st.integers(1, 300), st.integers(0, 99))
def test_each_item_is_drawn_as_often_as_its_share_to_within_two_strata(
    parts: list[tuple[float, int]], tau: float, alpha: float, size: int, seed: int
) -> None:
    sampler = PrioritySampler(len(parts), Exponential(tau), alpha, seed)
    bases, versions = zip(*parts, strict=True)
    sampler.put(np.arange(len(parts)), np.array(bases), np.array(versions))
    for _ in range(3):
        counts = np.bincount(sampler.draw(size)[0], minlength=len(parts))
        assert np.all(np.abs(counts - size * sampler.probabilities(np.arange(len(parts)))) < 2)


@QUICK
@given(st.lists(st.just(0.0) | st.floats(1e-6, 1e6), min_size=1, max_size=70), st.data())
def test_a_mass_finds_the_item_whose_interval_holds_it(weights: list[float], data: st.DataObject) -> None:
    """The intervals are cumulative sums in extended precision; within 1e-12 of a border either side is right."""
    weights[data.draw(st.integers(0, len(weights) - 1))] = 1.0
    tree = SumTree(len(weights))
    tree.restore(np.array(weights), 0.0)
    borders = np.cumsum(np.array(weights, dtype=np.longdouble))
    masses = np.array(data.draw(st.lists(st.floats(0, 1), min_size=1, max_size=20))) * tree.total
    found = tree.find(masses)
    lower = np.concatenate([[0], borders])[found]
    slack = 1e-12 * tree.total
    assert np.all((masses >= lower - slack) & (masses <= borders[found] + slack))
    assert np.all(tree.weights(found) > 0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 3])
def test_draws_are_as_frequent_as_their_probabilities(seed: int, size: int) -> None:
    """Chi-square at an error rate of 1e-4 for each of the eight; strata of a batch only make counts more even."""
    rng = np.random.default_rng(seed)
    sampler = PrioritySampler(12, Exponential(10.0), 0.6, seed)
    sampler.put(np.arange(12), rng.exponential(size=12) + 0.1, rng.integers(0, 40, 12))
    counts = np.zeros(12)
    for _ in range(6000):
        counts += np.bincount(sampler.draw(size)[0], minlength=12)
    expected = 6000 * size * sampler.probabilities(np.arange(12))
    assert expected.min() > 20
    assert np.sum((counts - expected) ** 2 / expected) < 37.4  # the quantile of 11 degrees of freedom
