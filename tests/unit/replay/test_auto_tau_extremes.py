"""Auto tau stays finite: whatever finite numbers it is told, and whatever its settings are."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper.errors import ConfigError
from freshper.replay.auto_tau import AutoTau
from freshper.replay.freshness import Exponential


def check_finite(auto: AutoTau) -> None:
    assert auto.low <= auto.tau <= auto.high
    Exponential(auto.tau)
    AutoTau.restore(auto.state())  # refuses a sum that is negative or not finite


def observe(auto: AutoTau, log_ratios: Any, ages: Any, probabilities: Any, *, alpha: float, version: int) -> None:
    change = auto.observe(
        np.asarray(log_ratios, dtype=np.float64),
        np.asarray(ages, dtype=np.int64),
        np.asarray(probabilities, dtype=np.float64),
        alpha=alpha,
        policy_version=version,
    )
    check_finite(auto)
    if change is not None:
        numbers = (change.old, change.new, change.age, change.exponent, change.n, change.standard_error)
        assert all(math.isfinite(number) for number in numbers)
        assert change.new == auto.tau


@pytest.mark.parametrize("tiny", [0.0, 5e-324, 1e-160, 1e-12, 1.1e-8])
@pytest.mark.parametrize("places", [1, 5, 150])
def test_one_large_log_ratio_among_tiny_ones(tiny: float, places: int) -> None:
    """``places`` of 300 are 1, the others next to nothing."""
    auto = AutoTau()
    log_ratios = np.full(300, tiny)
    log_ratios[:places] = 1.0
    for version in range(4):
        observe(auto, log_ratios, np.arange(300) + 1, np.full(300, 1 / 300), alpha=0.6, version=version)


def test_a_log_ratio_that_is_rounding_counts_as_zero() -> None:
    rng = np.random.default_rng(0)
    log_ratios = np.where(rng.random(512) < 0.3, 0.0, rng.normal(0, 0.5, 512))
    dusted = np.where(log_ratios == 0, 1e-9 * rng.random(512), log_ratios)
    states = []
    for values in (log_ratios, dusted):
        auto = AutoTau(tau=20.0)
        observe(auto, values, rng.permutation(512) * 0 + np.arange(512), np.full(512, 1e-3), alpha=0.6, version=1)
        states.append(auto.state())
    assert states[0] == states[1]


def test_a_fit_that_sees_only_zeros_is_made() -> None:
    """All that is not 0 lies in a bin whose counts are a billionth of the others'."""
    auto = AutoTau()
    ages = np.array([1] * 299 + [1000])
    log_ratios = np.array([0.0] * 299 + [1e6])
    probabilities = np.array([1e-12] * 299 + [1.0])
    for version in range(3):
        observe(auto, log_ratios, ages, probabilities, alpha=0.6, version=version)


def test_evidence_that_one_batch_fades_away() -> None:
    """A batch of 300,000 leaves nothing of what 256 log-ratios of memory held before it."""
    rng, auto = np.random.default_rng(1), AutoTau(memory=256)
    for version, scale in enumerate([1e90, 1e-3, 1e90, 1e-3]):
        n = 300_000
        observe(auto, rng.normal(0, scale, n), rng.integers(1, 2**62, n), np.full(n, 1e-6), alpha=1.0, version=version)


magnitudes = st.floats(-300, 300).map(lambda power: 10.0**power)
log_ratio = st.one_of(st.just(0.0), st.builds(lambda m, s: m * s, magnitudes, st.sampled_from([-1.0, 1.0])))
age = st.one_of(st.integers(0, 20), st.integers(0, 62).map(lambda power: 2**power))
probability = st.floats(-320, 0).map(lambda power: max(10.0**power, 5e-324))
rows = st.lists(st.tuples(log_ratio, age, probability), min_size=1, max_size=12)
alphas = st.one_of(st.sampled_from([0.0, 5e-324, 0.6, 1.0, 1e6, 1e308]), st.floats(0, 4))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(rows, st.integers(1, 400), alphas), min_size=1, max_size=5),
    st.sampled_from([{}, {"low": 1e-6, "tau": 1e-6}, {"high": 1e308, "tau": 1e308}, {"memory": 256}]),
    st.sampled_from([5e-324, 1e-6, 0.3, 1e3, 1e308]),
)
def test_tau_and_its_state_are_finite_for_any_finite_input(batches: Any, arguments: Any, target: float) -> None:
    """Each batch repeats its rows as often as it says, so that small and large ones fade each other."""
    auto = AutoTau(target=target, **arguments)
    for version, (batch, times, alpha) in enumerate(batches):
        log_ratios, ages, probabilities = zip(*batch, strict=True)
        repeats = [np.tile(np.array(column), times) for column in (log_ratios, ages, probabilities)]
        observe(auto, *repeats, alpha=alpha, version=version)


@pytest.mark.parametrize("name", ["tau", "target", "low", "high", "memory"])
@pytest.mark.parametrize("value", ["x", "500", None, True, np.ones(2), [1.0], 1j, 10**400, 10**4000, np.nan, np.inf])
def test_a_setting_of_another_type_or_size_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        AutoTau(**{name: value})


def test_a_bound_below_every_tau_that_a_decay_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1e-06 <= low 1e-07"):
        AutoTau(low=1e-7)


@pytest.mark.parametrize("alpha", [1e6, 1e308])
def test_counts_of_equal_ages_are_equal_however_steep_the_draw(alpha: float) -> None:
    auto = AutoTau(tau=1e-6, low=1e-6)
    observe(auto, np.full(96, 0.3), np.full(96, 19), np.ones(96), alpha=alpha, version=0)
    assert auto.evidence == pytest.approx(96)
