"""ESS and KL of whole trajectories where the truth is known in closed form.

With log(pi/mu) ~ Normal(-s^2/2, s^2) under mu: E[rho] = 1, ESS/n = exp(-s^2), and both KLs are s^2/2.
"""

import itertools
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest
from numpy.typing import NDArray

from freshper.errors import ClockError, ConfigError, SnapshotError
from freshper.replay.diagnostics import MIN_BIN, ClippedDriftBin, DriftBin, DriftMonitor, drift, drift_by_age
from freshper.replay.draw.sampler import PrioritySampler
from freshper.replay.freshness import NoDecay

Floats = NDArray[np.float64]


def drifted(rng: np.random.Generator, n: int, s: float | Floats) -> Floats:
    return rng.normal(-np.square(s) / 2, s, n)


# Priorities that know the ratio: small ratios, none, large ratios, and almost only those above 1.
PRIORITIES: dict[str, Callable[[Floats], Floats]] = {
    "small": lambda log_ratios: np.exp(-0.7 * log_ratios),
    "uniform": np.ones_like,
    "large": lambda log_ratios: np.exp(0.7 * log_ratios),
    "above one": lambda log_ratios: np.where(log_ratios > 0, 1.0, 0.05),
}


def drawn_from(log_ratios: Floats, bases: Floats, count: int, seed: int) -> tuple[Floats, Floats]:
    """Log-ratios and probabilities of ``count`` draws."""
    sampler = PrioritySampler(len(bases), NoDecay(), 1.0, seed)
    sampler.put(np.arange(len(bases)), bases, np.zeros(len(bases), dtype=np.int64))
    slots, probabilities = sampler.draw(count)
    return log_ratios[slots], probabilities


@pytest.mark.parametrize("s", [0.0, 0.1, 0.5, 0.8])
def test_uniform_draws_measure_the_closed_form(s: float) -> None:
    log_ratios = drifted(np.random.default_rng(0), 400_000, s)
    ess_fraction, kl, kl_reverse = drift(log_ratios, np.full(len(log_ratios), 1e-6))
    assert ess_fraction == pytest.approx(np.exp(-(s**2)), rel=0.02)
    assert kl == pytest.approx(s**2 / 2, rel=0.03, abs=1e-12)
    assert kl_reverse == pytest.approx(s**2 / 2, rel=0.02, abs=1e-12)


@pytest.mark.parametrize("name", PRIORITIES)
def test_the_corrected_estimate_converges_whatever_the_priority(name: str) -> None:
    """Root mean square errors over 20 buffers shrink by more than half from 500 draws to 50,000."""
    s = 0.5
    truth = np.array([np.exp(-(s**2)), s**2 / 2, s**2 / 2])
    errors = []
    for n in (500, 50_000):
        got = []
        for seed in range(20):
            stored = drifted(np.random.default_rng(seed), n, s)
            got.append(drift(*drawn_from(stored, PRIORITIES[name](stored), n, seed)))
        errors.append(np.sqrt(((np.array(got) - truth) ** 2).mean(axis=0)))
    assert np.all(errors[1] < errors[0] / 2)
    assert np.all(errors[1] < 0.02 * truth + 0.002)


def test_without_the_correction_a_priority_that_knows_the_ratio_biases_every_measure() -> None:
    """20 buffers: the uncorrected error does not shrink with n, and is many times the corrected one."""
    s = 0.5
    truth = np.array([np.exp(-(s**2)), s**2 / 2, s**2 / 2])
    for n in (2_000, 50_000):
        plain, corrected = [], []
        for seed in range(20):
            stored = drifted(np.random.default_rng(seed), n, s)
            log_ratios, probabilities = drawn_from(stored, PRIORITIES["above one"](stored), n, seed)
            plain.append(drift(log_ratios, np.ones(n)))
            corrected.append(drift(log_ratios, probabilities))
        bias, rest = np.abs(np.mean(plain, axis=0) - truth), np.abs(np.mean(corrected, axis=0) - truth)
        assert np.all(bias > 0.1 * truth)
        assert np.all(rest < bias / 5)


@pytest.mark.parametrize("power", [-0.7, 0.7])
def test_plain_means_of_biased_draws_belong_to_another_policy(power: float) -> None:
    """Draws by rho^a move log-ratios by a s^2; counted by 1/P their mean ratio is 1 again."""
    s = 0.5
    stored = drifted(np.random.default_rng(3), 50_000, s)
    log_ratios, probabilities = drawn_from(stored, np.exp(power * stored), 50_000, 3)
    assert -log_ratios.mean() == pytest.approx(s**2 / 2 - power * s**2, abs=0.01)
    assert float(np.exp(log_ratios).mean()) == pytest.approx(np.exp(power * s**2), rel=0.02)
    counts = 1 / probabilities
    assert float(counts @ np.exp(log_ratios) / counts.sum()) == pytest.approx(1.0, rel=0.02)


def test_the_two_directions_of_kl_differ_when_the_ratio_is_skewed() -> None:
    """Two outcomes under mu, chances 0.9 and 0.1, under pi 0.5 and 0.5."""
    mu, pi = np.array([0.9, 0.1]), np.array([0.5, 0.5])
    log_ratios = np.log(np.repeat(pi / mu, [9, 1]))
    ess_fraction, kl, kl_reverse = drift(log_ratios, np.full(10, 0.1))
    assert ess_fraction == pytest.approx(1 / np.sum(pi**2 / mu), rel=1e-12)
    assert kl == pytest.approx(np.sum(pi * np.log(pi / mu)), rel=1e-12)
    assert kl_reverse == pytest.approx(np.sum(mu * np.log(mu / pi)), rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_every_estimate_obeys_ess_at_most_exp_minus_kl(seed: int) -> None:
    """Also of small samples, skewed ratios and uneven draws: 1e-12 is rounding."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 200))
    log_ratios = rng.normal(0, rng.choice([1e-9, 0.1, 1.0, 10.0, 100.0]), n)
    ess_fraction, kl, kl_reverse = drift(log_ratios, rng.uniform(1e-9, 1.0, n) ** 4)
    assert ess_fraction <= np.exp(-kl) * (1 + 1e-12)
    assert 0 < ess_fraction <= 1
    assert kl >= 0
    assert kl_reverse >= 0


@pytest.mark.parametrize("n", [1, 2, 3, 7, 50, 1000])
@pytest.mark.parametrize("level", [0.0, 0.3, -0.3, 30.0])
def test_no_drift_is_an_ess_of_one_and_no_divergence(n: int, level: float) -> None:
    """A common level is a normalization error of the ratios, which the estimates do not see."""
    ess_fraction, kl, kl_reverse = drift(np.full(n, level), np.full(n, 1 / n))
    assert ess_fraction == pytest.approx(1.0, abs=1e-12)
    assert kl == pytest.approx(0.0, abs=1e-12)
    assert kl_reverse == pytest.approx(0.0, abs=1e-12)


def test_ratios_beyond_the_float_range_are_clamped_not_infinite() -> None:
    log_ratios = np.array([-np.inf, -1e4, 0.0, 1e4, np.inf])
    values = drift(log_ratios, np.full(5, 0.2))
    assert np.all(np.isfinite(values))
    assert values[0] == pytest.approx(2 / 5, rel=1e-9)


def test_nan_is_shown_not_hidden() -> None:
    assert np.all(np.isnan(drift(np.array([0.0, np.nan]), np.array([0.5, 0.5]))))


def test_no_samples_give_no_bins() -> None:
    nothing = np.empty(0)
    assert drift_by_age(nothing, np.empty(0, dtype=np.int64), nothing) == []


@pytest.mark.parametrize("lengths", [(3, 2, 2), (2, 3, 2), (2, 2, 3), (0, 1, 1)])
def test_lengths_that_differ_are_refused(lengths: tuple[int, int, int]) -> None:
    log_ratios, ages, probabilities = (np.ones(length) for length in lengths)
    with pytest.raises(ValueError, match=r"must all be \(n,\)"):
        drift_by_age(log_ratios, ages.astype(np.int64), probabilities)


def test_bins_under_128_samples_merge_with_older_ones_and_the_rest_with_the_last() -> None:
    ages = np.repeat([0, 1, 3, 5, 20, 5000], [100, 27, 1, 128, 127, 1])
    rng = np.random.default_rng(0)
    bins = drift_by_age(drifted(rng, len(ages), 0.3), rng.permutation(ages), np.full(len(ages), 0.1))
    assert [(each.age_low, each.age_high, each.n) for each in bins] == [(0, 3, 128), (5, 5, 128), (20, 5000, 128)]
    longer = np.append(ages, 9000)
    bins = drift_by_age(drifted(rng, len(longer), 0.3), longer, np.full(len(longer), 0.1))
    assert [(each.age_low, each.age_high, each.n) for each in bins][-1] == (20, 9000, 129)
    leftover = np.append(np.repeat([0, 3], [MIN_BIN, MIN_BIN]), [50, 60])
    bins = drift_by_age(np.zeros(len(leftover)), leftover, np.full(len(leftover), 0.1))
    assert [(each.age_low, each.age_high, each.n) for each in bins] == [(0, 0, 128), (3, 60, 130)]


@pytest.mark.parametrize("n", [1, 5, MIN_BIN - 1])
def test_too_few_samples_for_one_bin_are_one_bin_that_says_so(n: int) -> None:
    ages = np.arange(n) * 100
    (only,) = drift_by_age(np.zeros(n), ages, np.full(n, 0.1))
    assert (only.n, only.age_low, only.age_high) == (n, 0, 100 * (n - 1))


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_bins_measure_the_drift_of_their_own_ages(power: float) -> None:
    """KL grows linearly with age, as s^2 = age / 500; the draws know the ratio."""
    rng = np.random.default_rng(7)
    n = 200_000
    ages = rng.integers(0, 256, n)
    stored = drifted(rng, n, np.sqrt(ages / 500))
    numbers, probabilities = drawn_from(np.arange(n, dtype=np.float64), np.exp(power * stored), n, 0)
    drawn = numbers.astype(np.int64)
    bins = drift_by_age(stored[drawn], ages[drawn], probabilities)
    assert [each.age_low for each in bins] == [0, 2, 4, 8, 16, 32, 64, 128]
    assert sum(each.n for each in bins) == n
    for each in bins[2:]:
        middle = (each.age_low + each.age_high) / 2
        assert each.kl == pytest.approx(middle / 1000, rel=0.15)
        assert each.kl_reverse == pytest.approx(middle / 1000, rel=0.15)
        assert each.ess_fraction <= np.exp(-each.kl)
        inside = (ages[drawn] >= each.age_low) & (ages[drawn] <= each.age_high)
        assert each.ratio_max == np.exp(stored[drawn][inside].max())
    assert np.all(np.diff([each.ess_fraction for each in bins]) < 0)


def test_the_order_of_the_samples_does_not_matter() -> None:
    rng = np.random.default_rng(1)
    ages, log_ratios, probabilities = rng.integers(0, 99, 900), rng.normal(size=900), rng.uniform(0.1, 1, 900)
    order = rng.permutation(900)
    plain = drift_by_age(log_ratios, ages, probabilities)
    mixed = drift_by_age(log_ratios[order], ages[order], probabilities[order])
    assert [each.n for each in plain] == [each.n for each in mixed]
    np.testing.assert_allclose([each.kl for each in plain], [each.kl for each in mixed], rtol=1e-12)


def every_trajectory(version: float, length: int = 5) -> Floats:
    """Log-probs of all 4^length trajectories of a softmax policy whose logits drift linearly with its version."""
    logits = np.array([0.4, 0.0, -0.3, 0.1]) + version * np.array([0.02, -0.01, 0.005, -0.015])
    tokens = logits - np.log(np.exp(logits).sum())
    return np.array([sum(chosen) for chosen in itertools.product(tokens, repeat=length)])


NOW, AGES = 100, (8, 16, 32)


def exact_drift(age: int) -> Floats:
    pi, mu = np.exp(every_trajectory(NOW)), np.exp(every_trajectory(NOW - age))
    return np.array([1 / np.sum(pi**2 / mu), np.sum(pi * np.log(pi / mu)), np.sum(mu * np.log(mu / pi))])


def estimates(n: int, seed: int) -> tuple[Floats, Floats]:
    """Corrected and uncorrected estimates (ages, 3) from n draws per age of a buffer too large to run out.

    Priorities are high for a trajectory that the policy has come to like, as rewards are.
    """
    rng = np.random.default_rng(seed)
    log_ratios, ages, probabilities = [], [], []
    for age in AGES:
        behavior = every_trajectory(NOW - age)
        each = every_trajectory(NOW) - behavior
        bases = 0.1 + (each > 0)
        drawn = rng.choice(len(each), n, p=np.exp(behavior) * bases / (np.exp(behavior) @ bases))
        log_ratios.append(each[drawn])
        probabilities.append(bases[drawn] / (1e6 * float(np.exp(behavior) @ bases)))
        ages.append(np.full(n, age))
    order = rng.permutation(n * len(AGES))
    logs, old, chances = (np.concatenate(parts)[order] for parts in (log_ratios, ages, probabilities))
    both = [drift_by_age(logs, old, given) for given in (chances, np.ones_like(chances))]
    assert [[(b.age_low, b.age_high, b.n) for b in bins] for bins in both] == [[(age, age, n) for age in AGES]] * 2
    corrected, plain = (np.array([[b.ess_fraction, b.kl, b.kl_reverse] for b in bins]) for bins in both)
    return corrected, plain


def test_of_a_drifting_softmax_policy_the_error_halves_with_four_times_the_draws() -> None:
    """Against exact enumeration of all trajectories, over 200 runs at n, 4n and 16n.

    A root mean square error of 200 runs has a relative standard error of 5 %, the ratio of two 7 %: a ratio of
    1/2 stays within (0.36, 0.64) but for one in 10,000, and 18 are looked at. Without 1/P nothing shrinks.
    """
    truth = np.array([exact_drift(age) for age in AGES])
    assert np.all(truth[:, 1] > 0.01)  # something to measure
    errors, plain_errors = [], []
    for n in (256, 1024, 4096):
        runs = np.array([estimates(n, seed) for seed in range(200)]) - truth
        corrected, plain = np.sqrt((runs**2).mean(axis=0))
        errors.append(corrected)
        plain_errors.append(plain)
    for more, less in itertools.pairwise(errors):
        assert np.all((less / more > 0.36) & (less / more < 0.64)), less / more
    assert np.all(plain_errors[2] > 0.7 * plain_errors[0])
    assert np.all(plain_errors[2] > 4 * errors[2])


def test_the_clip_fraction_is_that_of_the_stored_trajectories_not_of_the_drawn_ones() -> None:
    """Clipped trajectories are drawn four times as often: half of 20,000 draws, a fifth of what is stored."""
    rng = np.random.default_rng(5)
    clipped = rng.random(20_000) < 0.5
    probabilities = np.where(clipped, 4e-4, 1e-4)
    shares = np.where(clipped, 0.5, 0.0)
    (only,) = drift_by_age(np.zeros(20_000), np.full(20_000, 3), probabilities, clip_fractions=shares)
    assert only.clip_fraction == pytest.approx(0.5 * 0.2, rel=0.05)  # 5 standard errors
    (plain,) = drift_by_age(np.zeros(20_000), np.full(20_000, 3), np.ones(20_000), clip_fractions=shares)
    assert plain.clip_fraction == pytest.approx(0.5 * 0.5, rel=0.05)


def test_a_clip_fraction_that_nobody_reported_is_none_and_not_written() -> None:
    ages, flat = np.repeat([0, 5], 128), np.full(256, 0.1)
    assert [each.clip_fraction for each in drift_by_age(np.zeros(256), ages, flat)] == [None, None]
    shares = np.where(ages == 0, np.nan, 0.0)
    shares[255] = 1.0
    young, old = drift_by_age(np.zeros(256), ages, flat, clip_fractions=shares)
    assert type(young) is DriftBin
    assert young.clip_fraction is None
    assert "clip_fraction" not in asdict(young)
    assert type(old) is ClippedDriftBin
    assert asdict(old)["clip_fraction"] == pytest.approx(1 / 128)
    shares[128:192] = np.nan  # the mean is over those that were reported
    assert drift_by_age(np.zeros(256), ages, flat, clip_fractions=shares)[1].clip_fraction == pytest.approx(1 / 64)


def measured(rng: np.random.Generator, n: int) -> tuple[NDArray[np.int64], Floats, Floats, Floats]:
    return rng.integers(0, 50, n), drifted(rng, n, 0.4), rng.uniform(0.01, 0.5, n), rng.uniform(0, 1, n)


def test_the_monitor_shows_the_drift_of_its_window() -> None:
    rng = np.random.default_rng(2)
    monitor = DriftMonitor(window=3)
    assert monitor.by_age() == []
    seen = [measured(rng, n) for n in (70, 90, 0, 160)]
    for number, (ages, log_ratios, probabilities, shares) in enumerate(seen):
        monitor.observe(ages, log_ratios, probabilities, None if number == 1 else shares)
        assert len(monitor) == min(number + 1, 3)
    seen[1][3][:] = np.nan
    ages, log_ratios, probabilities, shares = (np.concatenate(column) for column in zip(*seen[1:], strict=True))
    assert monitor.by_age() == drift_by_age(log_ratios, ages, probabilities, clip_fractions=shares)
    before = monitor.by_age()
    for column in seen[3]:
        column[:] = 0  # the caller may reuse its arrays
    assert monitor.by_age() == before


def test_the_monitor_comes_back_from_flat_arrays() -> None:
    rng = np.random.default_rng(3)
    monitor = DriftMonitor(window=4)
    for n in (200, 0, 128, 64, 32):
        monitor.observe(*measured(rng, n))
    again = DriftMonitor(window=4)
    again.restore(monitor.state())
    assert {name: (array.dtype, array.ndim) for name, array in again.state().items()} == {
        "lengths": (np.int64, 1),
        "ages": (np.int64, 1),
        "log_ratios": (np.float64, 1),
        "probabilities": (np.float64, 1),
        "clip_fractions": (np.float64, 1),
    }
    more = measured(rng, 150)
    for one in (monitor, again):
        one.observe(*more)
    assert again.by_age() == monitor.by_age()
    shorter = DriftMonitor(window=2)
    shorter.restore(monitor.state())
    assert shorter.state()["lengths"].tolist() == [32, 150]
    np.testing.assert_array_equal(shorter.state()["log_ratios"][32:], more[1])


def test_an_empty_monitor_comes_back_empty() -> None:
    monitor = DriftMonitor()
    monitor.observe(*measured(np.random.default_rng(0), 5))
    monitor.restore(DriftMonitor().state())
    assert (len(monitor), monitor.by_age()) == (0, [])


@pytest.mark.parametrize(
    ("column", "value", "error", "message"),
    [
        (1, np.nan, ConfigError, "log-ratio nan of trajectory 2 is refused"),
        (1, -np.inf, ConfigError, "log-ratio -inf"),
        (2, 0.0, ConfigError, r"probability 0.0 .* \(0, 1\]"),
        (2, 1.5, ConfigError, "probability 1.5"),
        (2, np.nan, ConfigError, "probability nan"),
        (3, 1.01, ConfigError, "clip fraction 1.01"),
        (3, -0.5, ConfigError, "clip fraction -0.5"),
        (0, -1, ClockError, "age -1 is below 0"),
    ],
)
def test_a_bad_number_is_refused_and_the_monitor_keeps_what_it_has(
    column: int, value: float, error: type[Exception], message: str
) -> None:
    monitor = DriftMonitor()
    monitor.observe(*measured(np.random.default_rng(0), 130))
    before = monitor.by_age()
    bad = measured(np.random.default_rng(1), 9)
    bad[column][2] = value
    with pytest.raises(error, match=message):
        monitor.observe(*bad)
    assert monitor.by_age() == before
    damaged = monitor.state()
    damaged[("ages", "log_ratios", "probabilities", "clip_fractions")[column]][2] = value
    with pytest.raises(SnapshotError, match="is damaged"):
        monitor.restore(damaged)
    assert monitor.by_age() == before


def test_what_does_not_fit_together_is_refused() -> None:
    ages, log_ratios, probabilities, shares = measured(np.random.default_rng(1), 9)
    monitor = DriftMonitor()
    with pytest.raises(ConfigError, match=r"must all be \(n,\)"):
        monitor.observe(ages, log_ratios, probabilities, shares[:-1])
    with pytest.raises(ConfigError, match="must be integers"):
        monitor.observe(ages.astype(np.float64), log_ratios, probabilities)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="window 0 must be >= 1"):
        DriftMonitor(window=0)
    monitor.observe(ages, log_ratios, probabilities, shares)
    state = monitor.state()
    for name in state:
        with pytest.raises(SnapshotError, match=f"lacks {name}"):
            monitor.restore({other: array for other, array in state.items() if other != name})
        with pytest.raises(SnapshotError, match="lengths"):
            monitor.restore(state | {name: state[name][:-1]})
    assert len(monitor) == 1
