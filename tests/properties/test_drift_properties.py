"""What every estimate of the drift must obey, whatever was measured, and what auto tau must not depend on."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from freshper.replay.auto_tau import AutoTau
from freshper.replay.diagnostics import DriftMonitor, drift, drift_by_age

PROPERTY = settings(deadline=None, derandomize=True, max_examples=150)

Floats = NDArray[np.float64]
Measured = tuple[Floats, NDArray[np.int64], Floats, Floats]


@st.composite
def measurements(draw: st.DrawFn, most: int = 400, oldest: int = 5000) -> Measured:
    """Log-ratios, ages, probabilities and clip fractions, (n,) each, from tame to wild."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(1, most))
    log_ratios = rng.normal(0, draw(st.sampled_from([1e-9, 0.1, 1.0, 20.0])), n) * rng.choice([1, 10], n, p=[0.9, 0.1])
    ages = rng.integers(0, draw(st.integers(1, oldest)), n)
    probabilities = rng.uniform(1e-6, 1, n) ** draw(st.sampled_from([0, 1, 4]))
    return log_ratios, ages, probabilities, rng.uniform(0, 1, n)


@PROPERTY
@given(measurements())
def test_every_bin_is_in_range_and_no_draw_is_lost(measured: Measured) -> None:
    log_ratios, ages, probabilities, shares = measured
    bins = drift_by_age(log_ratios, ages, probabilities, clip_fractions=shares)
    assert sum(each.n for each in bins) == len(ages)
    assert all(each.n >= 128 for each in bins) or len(bins) == 1
    assert (bins[0].age_low, bins[-1].age_high) == (ages.min(), ages.max())
    assert all(young.age_high < old.age_low for young, old in itertools.pairwise(bins))
    for each in bins:
        inside = (ages >= each.age_low) & (ages <= each.age_high)
        assert each.n == inside.sum()
        assert 0 < each.ess_fraction <= np.exp(-each.kl) * (1 + 1e-9)
        assert each.kl_reverse >= 0
        assert each.clip_fraction is not None
        assert shares[inside].min() <= each.clip_fraction * (1 + 1e-12)
        assert each.clip_fraction <= shares[inside].max() * (1 + 1e-12)


@PROPERTY
@given(measurements(most=100), st.floats(1e-6, 1.0), st.integers(2, 5))
def test_only_the_proportions_of_the_probabilities_matter_and_a_double_counts_twice(
    measured: Measured, scale: float, times: int
) -> None:
    """Drawn ``times`` times, or once with a probability so much smaller: both count as many stored items."""
    log_ratios, _, probabilities, _ = measured
    truth = drift(log_ratios, probabilities)
    assert drift(log_ratios, probabilities * scale) == pytest.approx(truth, rel=1e-9, abs=1e-12)
    repeated = np.append(log_ratios, np.repeat(log_ratios[0], times - 1))
    rarer = probabilities.copy()
    rarer[0] /= times
    chances = np.append(probabilities, np.repeat(probabilities[0], times - 1))
    assert drift(repeated, chances) == pytest.approx(drift(log_ratios, rarer), rel=1e-9, abs=1e-12)


@PROPERTY
@given(measurements(most=60), st.integers(0, 2**32))
def test_against_the_definitions_summed_one_by_one(measured: Measured, seed: int) -> None:
    """Two distributions over the draws: u in proportion to 1/P, and u rho; tame ratios, extended precision."""
    log_ratios, ages, probabilities, shares = measured
    log_ratios = np.clip(log_ratios, -5, 5)
    u = 1 / probabilities.astype(np.longdouble)
    u /= u.sum()
    pi = u * np.exp(log_ratios.astype(np.longdouble))
    pi /= pi.sum()
    truth = [1 / np.sum(pi**2 / u), np.sum(pi * np.log(pi / u)), np.sum(u * np.log(u / pi))]
    order = np.random.default_rng(seed).permutation(len(ages))
    (only,) = drift_by_age(
        log_ratios[order], ages[order], probabilities[order], edges=(0, 10_000), clip_fractions=shares[order]
    )
    got = (only.ess_fraction, only.kl, only.kl_reverse)
    assert got == pytest.approx([float(value) for value in truth], rel=1e-9, abs=1e-12)
    assert only.clip_fraction == pytest.approx(float(np.sum(u * shares)), rel=1e-9)
    assert only.ratio_max == np.exp(log_ratios.max())


@PROPERTY
@given(st.lists(measurements(most=150), max_size=6), st.integers(1, 4), st.booleans())
def test_the_monitor_is_the_drift_of_its_last_observations_and_survives_saving(
    observations: list[Measured], window: int, reported: bool
) -> None:
    monitor = DriftMonitor(window)
    for log_ratios, ages, probabilities, shares in observations:
        monitor.observe(ages, log_ratios, probabilities, shares if reported else None)
    again = DriftMonitor(window)
    again.restore(monitor.state())
    assert again.by_age() == monitor.by_age()
    if not observations:
        assert monitor.by_age() == []
        return
    log_ratios, ages, probabilities, shares = (
        np.concatenate(column) for column in zip(*observations[-window:], strict=True)
    )
    truth = drift_by_age(log_ratios, ages, probabilities, clip_fractions=shares if reported else None)
    assert monitor.by_age() == truth
    assert all((each.clip_fraction is None) != reported for each in truth)


def history(
    auto: AutoTau, batches: list[Measured], *, alpha: float = 0.6, scale: int = 1, sign: int = 1
) -> list[float]:
    """tau after each batch, with ages and tau in units of ``scale`` versions."""
    taus = []
    for version, (log_ratios, ages, probabilities, _) in enumerate(batches):
        auto.observe(sign * log_ratios, ages * scale, probabilities, alpha=alpha, policy_version=version)
        taus.append(auto.tau / scale)
    return taus


BATCHES = st.lists(measurements(most=300, oldest=400), min_size=1, max_size=5)


@PROPERTY
@given(BATCHES, st.sampled_from([2, 4, 64]))
def test_tau_is_in_the_units_of_the_ages(batches: list[Measured], scale: int) -> None:
    """Twice the optimizer updates for the same drift: twice the tau. Half-octave bins move as one."""
    plain = history(AutoTau(tau=50.0, low=1.0, high=1e4), batches)
    scaled = history(AutoTau(tau=50.0 * scale, low=1.0 * scale, high=1e4 * scale), batches, scale=scale)
    assert scaled == pytest.approx(plain, rel=1e-6)


@PROPERTY
@given(BATCHES, st.floats(0.1, 5.0))
def test_tau_over_alpha_is_a_property_of_the_drift(batches: list[Measured], alpha: float) -> None:
    plain = history(AutoTau(tau=50.0, low=1.0, high=1e4), batches, alpha=1.0)
    other = AutoTau(tau=50.0 * alpha, low=alpha, high=1e4 * alpha)
    assert np.array(history(other, batches, alpha=alpha)) / alpha == pytest.approx(plain, rel=1e-6)


@PROPERTY
@given(BATCHES, st.floats(1e-3, 1.0))
def test_neither_the_sign_nor_the_scale_of_the_probabilities_nor_the_order_matters(
    batches: list[Measured], scale: float
) -> None:
    plain = history(AutoTau(tau=50.0), batches)
    assert history(AutoTau(tau=50.0), batches, sign=-1) == plain
    scaled = [(logs[::-1], ages[::-1], chances[::-1] * scale, shares) for logs, ages, chances, shares in batches]
    assert history(AutoTau(tau=50.0), scaled) == pytest.approx(plain, rel=1e-6)


@PROPERTY
@given(BATCHES)
def test_tau_is_finite_within_bounds_and_reproducible_after_any_save(batches: list[Measured]) -> None:
    auto = AutoTau(tau=50.0, low=2.0, high=800.0)
    taus = history(auto, batches)
    assert all(2 <= tau <= 800 for tau in taus)
    again = AutoTau.restore(auto.state())
    for one in (auto, again):
        log_ratios, ages, probabilities, _ = batches[0]
        one.observe(log_ratios, ages, probabilities, alpha=0.6, policy_version=len(batches))
    assert again.state() == auto.state()


@PROPERTY
@given(st.integers(0, 2**32), st.floats(-1e12, 1e12), st.integers(1, 10_000))
def test_no_single_log_ratio_moves_tau_by_more_than_a_few_percent(seed: int, wild: float, age: int) -> None:
    """One of 64 draws replaced by anything of any age, after 2,000 ordinary ones."""
    rng = np.random.default_rng(seed)
    taus = []
    ages = np.floor(rng.exponential(50, (32, 64))).astype(np.int64)
    noise = rng.normal(size=(32, 64))
    for replaced in (False, True):
        auto = AutoTau(tau=30.0, target=0.1)
        for update in range(32):
            old, kl = ages[update].copy(), 0.1 * ages[update] / 50
            log_ratios = np.sqrt(2 * kl) * noise[update] - kl
            if replaced and update == 31:
                log_ratios[0], old[0] = wild, age
            auto.observe(log_ratios, old, np.exp(-0.02 * old) / 1e3 + 1e-12, alpha=0.6, policy_version=update)
        taus.append(auto.tau)
    assert taus[1] == pytest.approx(taus[0], rel=0.15)
