"""Auto tau in a closed loop: it draws by the tau that it has, and measures noisy log-ratios of what it drew.

The truth: KL(pi || mu) = 0.1 (age / AGE)^exponent nats and log(pi/mu) ~ Normal(-KL, 2 KL) under mu, so tau should
be alpha AGE. In a steady run the estimate has a relative standard deviation of about 4 %: 25 % is six of them,
so that a correct estimator fails a run with a chance below one in a million, however many looks it takes.
"""

import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freshper.errors import ClockError, ConfigError, SnapshotError
from freshper.replay.auto_tau import MIN_EVIDENCE, AutoTau, TauChange

Floats = NDArray[np.float64]
Draw = tuple[Floats, NDArray[np.int64], Floats]
AGE, ALPHA = 50.0, 0.6
SEEDS = range(20)


def divergence(ages: Floats | NDArray[np.int64], at: float = AGE, exponent: float = 1.0) -> Floats:
    return np.asarray(0.1 * (ages / at) ** exponent)


def recency_draw(rng: np.random.Generator, tau: float, n: int, *, at: float, exponent: float, alpha: float) -> Draw:
    """n draws by f^alpha alone, from a buffer that holds every age."""
    ages = np.floor(rng.exponential(tau / alpha, n)).astype(np.int64)
    kl = divergence(ages, at, exponent)
    return rng.normal(-kl, np.sqrt(2 * kl)), ages, np.exp(-alpha * ages / tau) / (1e4 * tau)


def priority_draw(rng: np.random.Generator, tau: float, n: int, priority: Callable[[Floats], Floats]) -> Draw:
    """n draws by (b f)^alpha from 4096 trajectories whose base priorities know the log-ratio."""
    ages = rng.integers(0, int(8 * tau / ALPHA) + 3, 4096)
    kl = divergence(ages)
    noise = rng.normal(0, 1, 4096)
    weights = (priority(noise) * np.exp(-ages / tau)) ** ALPHA
    drawn = rng.choice(4096, n, p=weights / weights.sum())
    return (np.sqrt(2 * kl) * noise - kl)[drawn], ages[drawn], weights[drawn] / weights.sum()


def loop(
    seed: int,
    first: float,
    updates: int,
    *,
    n: int = 32,
    exponent: float = 1.0,
    alpha: float = ALPHA,
    outliers: float = 0.0,
    change: tuple[int, float] = (0, 1.0),
) -> Floats:
    """tau / (alpha true age) after each update; the true age is multiplied by change[1] at update change[0]."""
    rng = np.random.default_rng(seed)
    auto = AutoTau(target=0.1, tau=first * alpha * AGE)
    errors = np.empty(updates)
    for update in range(updates):
        at = AGE * (change[1] if update >= change[0] else 1.0)
        log_ratios, ages, probabilities = recency_draw(rng, auto.tau, n, at=at, exponent=exponent, alpha=alpha)
        log_ratios[rng.random(n) < outliers] *= 10
        auto.observe(log_ratios, ages, probabilities, alpha=alpha, policy_version=update)
        errors[update] = auto.tau / (alpha * at)
    return errors


def outside(errors: Floats, limit: float = 0.25) -> int:
    """Runs (of the first axis) that are ever further than ``limit`` off."""
    return int(np.any(np.abs(errors - 1) > limit, axis=1).sum())


@pytest.mark.parametrize("first", [1 / 30, 1 / 5, 30.0])
@pytest.mark.parametrize(("n", "updates"), [(32, 60), (128, 20)])
def test_tau_is_found_from_any_first_value_and_kept(n: int, updates: int, first: float) -> None:
    """Within 60 updates of 32 or 20 of 128 (27 and 6 were the most needed), and for as long again; 0 of 20 fail."""
    errors = np.array([loop(seed, first, 2 * updates, n=n) for seed in SEEDS])
    assert outside(errors[:, updates:]) == 0
    assert abs(errors[:, -1].mean() - 1) < 0.06


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_tau_is_alpha_times_the_age_at_the_target(alpha: float) -> None:
    errors = np.array([loop(seed, 4.0, 80, alpha=alpha) for seed in SEEDS])
    assert outside(errors[:, 50:]) == 0


def test_steady_drift_keeps_tau_within_a_quarter_for_500_updates() -> None:
    """Also close on average: the fitted exponent and the deadband together cost less than 5 %."""
    errors = np.array([loop(seed, 1.0, 500) for seed in SEEDS])
    assert outside(errors) == 0
    assert abs(errors[:, 50:].mean() - 1) < 0.05


@pytest.mark.parametrize("factor", [1 / 4, 4.0])
@pytest.mark.parametrize(("n", "promised"), [(32, 96), (128, 24)])
def test_a_fourfold_change_of_the_drift_is_followed_within_three_memories(n: int, promised: int, factor: float) -> None:
    """0 of 20 fail; 80 updates of 32 and 19 of 128 were the most needed."""
    errors = np.array([loop(seed, 1.0, 60 + 2 * promised, n=n, change=(60, factor)) for seed in SEEDS])
    assert outside(errors[:, 60:61]) == len(SEEDS)  # there is something to follow
    assert outside(errors[:, 60 + promised :]) == 0


@pytest.mark.parametrize("exponent", [0.7, 1.3])
@pytest.mark.parametrize("first", [1 / 30, 30.0])
def test_a_drift_that_is_not_linear_in_age_is_found_too(first: float, exponent: float) -> None:
    errors = np.array([loop(seed, first, 100, exponent=exponent) for seed in SEEDS])
    assert outside(errors[:, 60:]) == 0


def test_one_wild_log_ratio_in_a_hundred_does_not_take_tau_along() -> None:
    """1 % of the log-ratios times ten, which doubles the mean square: tau falls by 8 % (unbounded: to a half)."""
    errors = np.array([loop(seed, 1.0, 200, outliers=0.01) for seed in SEEDS])
    assert outside(errors) == 0
    assert 0.85 < errors[:, 100:].mean() < 1.0


PRIORITIES: dict[str, Callable[[Floats], Floats]] = {
    "large ratios": np.exp,
    "ratios above one": lambda noise: np.where(noise > 0, 2.0, 0.1),
    "far from one": lambda noise: 0.1 + noise**2,
}


@pytest.mark.parametrize("name", PRIORITIES)
def test_priorities_that_know_the_log_ratio_do_not_bias_tau(name: str) -> None:
    """Uneven counts are worth less: the first 40 updates of 64 are left out, where 1 of 20 runs may be 40 % off."""
    final = []
    for seed in SEEDS:
        rng, auto = np.random.default_rng(seed), AutoTau(target=0.1, tau=ALPHA * AGE)
        for update in range(100):
            draw = priority_draw(rng, auto.tau, 64, PRIORITIES[name])
            auto.observe(*draw, alpha=ALPHA, policy_version=update)
            final.append(auto.tau / (ALPHA * AGE))
    errors = np.array(final).reshape(len(SEEDS), -1)[:, 40:]
    assert outside(errors) == 0
    assert abs(errors.mean() - 1) < 0.06


def test_without_the_correction_those_priorities_would_bias_it() -> None:
    """The same draws, given out as if they had come by age alone: so the test above can fail."""
    final = []
    for seed in range(5):
        rng, auto = np.random.default_rng(seed), AutoTau(target=0.1, tau=ALPHA * AGE)
        for update in range(80):
            log_ratios, ages, _ = priority_draw(rng, auto.tau, 64, PRIORITIES["far from one"])
            by_age = np.exp(-ALPHA * ages / auto.tau) / 1e5
            auto.observe(log_ratios, ages, by_age, alpha=ALPHA, policy_version=update)
        final.append(auto.tau / (ALPHA * AGE))
    assert max(final) < 0.6


def test_of_a_softmax_policy_tau_is_where_the_exact_divergence_reaches_the_target() -> None:
    """64 tokens whose logits walk at random, with KL known token by token; no normal log-ratio is assumed."""
    rng = np.random.default_rng(11)
    logits = np.cumsum(rng.normal(0, 0.008, (600, 64, 8)), axis=0)
    logprobs = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    now = logprobs[-1]
    exact = np.array([np.sum(np.exp(now) * (now - logprobs[-1 - age])) for age in range(600)])
    auto = AutoTau(target=0.1, tau=200.0)
    for update in range(80):
        ages = np.minimum(np.floor(rng.exponential(auto.tau / ALPHA, 64)).astype(np.int64), 599)
        then = logprobs[-1 - ages]  # (n, 64, 8)
        tokens = (np.exp(then).cumsum(axis=2) < rng.random((64, 64, 1))).sum(axis=2).clip(max=7)
        log_ratios = np.take_along_axis(now - then, tokens[:, :, None], axis=2).sum(axis=(1, 2))
        auto.observe(log_ratios, ages, np.exp(-ALPHA * ages / auto.tau) / 1e5, alpha=ALPHA, policy_version=update)
    reached = exact[round(auto.tau / ALPHA)]
    assert reached == pytest.approx(0.1, rel=0.25)


def feed(auto: AutoTau, updates: int, *, n: int = 32, at: float = AGE, seed: int = 0) -> list[TauChange]:
    """Changes in ``updates`` updates that follow the last one that ``auto`` saw."""
    rng, changes, begin = np.random.default_rng(seed), [], auto.state()["policy_version"]
    for version in range(begin, begin + updates):
        draw = recency_draw(rng, auto.tau, n, at=at, exponent=1.0, alpha=ALPHA)
        if (change := auto.observe(*draw, alpha=ALPHA, policy_version=version)) is not None:
            changes.append(change)
    return changes


def test_before_enough_evidence_tau_stays_however_wrong_it_is() -> None:
    """Every trajectory counts the same here, so evidence is their number; age 0 counts for nothing."""
    auto = AutoTau(target=0.1, tau=1000 * ALPHA * AGE)
    rng = np.random.default_rng(0)
    for update in range(8):
        kl = divergence(np.full(32, 5))
        draw = rng.normal(-kl, np.sqrt(2 * kl)), np.full(32, 5), np.full(32, 0.01)
        kept = auto.evidence
        assert kept < MIN_EVIDENCE
        assert auto.tau == 1000 * ALPHA * AGE
        auto.observe(draw[0], np.zeros(32, dtype=np.int64), draw[2], alpha=ALPHA, policy_version=update)
        assert auto.evidence == kept
        for _ in range(2 if update == 7 else 1):
            auto.observe(*draw, alpha=ALPHA, policy_version=update)
    assert auto.evidence == pytest.approx(9 * 32, rel=0.02)
    assert auto.tau < 1000 * ALPHA * AGE


def test_a_change_carries_its_evidence_and_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="freshper.replay")
    auto = AutoTau(target=0.1, tau=300.0)
    changes = feed(auto, 60)
    assert changes
    assert [record.getMessage() for record in caplog.records] == [str(change) for change in changes]
    assert {(record.name, record.levelname) for record in caplog.records} == {("freshper.replay", "INFO")}
    assert [change.old for change in changes] == [300.0, *(change.new for change in changes[:-1])]
    assert changes[-1].new == auto.tau
    for change in changes:
        assert abs(np.log(change.new / change.old)) > np.log(1.05)
        assert 0.01 < change.standard_error < 0.5
        assert change.new == pytest.approx(ALPHA * change.age, rel=1e-12)
        assert change.drift == pytest.approx(0.1 / change.age, rel=1e-12)
        assert change.n >= MIN_EVIDENCE
    line = str(TauChange(640, 500.0, 31.25, 52.08, 0.00192, 1.04, 812.3, 0.058))
    assert line == (
        "tau 500 -> 31.25 at policy version 640: drift 0.00192 nats per version, "
        "target reached at age 52.08 +- 6 % (exponent 1.04, n 812)"
    )


@pytest.mark.parametrize("n", [32, 128])
def test_one_update_of_nothing_but_noise_moves_tau_little(n: int) -> None:
    """All log-ratios of one update times ten: less than 15 %, and forgotten again."""
    for seed in SEEDS:
        auto = AutoTau(target=0.1, tau=ALPHA * AGE)
        feed(auto, 4096 // n, n=n, seed=seed)
        before = auto.tau
        rng = np.random.default_rng(seed)
        log_ratios, ages, probabilities = recency_draw(rng, auto.tau, n, at=AGE, exponent=1.0, alpha=ALPHA)
        auto.observe(10 * log_ratios, ages, probabilities, alpha=ALPHA, policy_version=10_000)
        assert auto.tau > 0.85 * before
        feed(auto, 4096 // n, n=n, seed=seed + 100)
        assert auto.tau == pytest.approx(ALPHA * AGE, rel=0.25)


def test_a_rebuild_must_be_worth_it() -> None:
    """Off by 3 % and sure of it: stays. Off by 8 %: moves.

    In 500 updates of steady drift: 4 rebuilds, 11 if noise were believed.
    """
    for off, moves in ((0.97, False), (1.03, False), (0.92, True), (1.09, True)):
        auto = AutoTau(target=0.1, tau=off * ALPHA * AGE, memory=10**9)
        rng = np.random.default_rng(0)
        ages = np.full(10**6, 50)
        log_ratios = rng.normal(-0.1, np.sqrt(0.2), 10**6)
        change = auto.observe(log_ratios, ages, np.full(10**6, 1e-6), alpha=ALPHA, policy_version=0)
        assert (change is not None) == moves
    assert np.mean([len(feed(AutoTau(target=0.1, tau=ALPHA * AGE), 500, seed=seed)) for seed in range(8)]) < 8


def test_one_rare_draw_does_not_outweigh_all_others() -> None:
    auto = AutoTau(target=0.1, tau=ALPHA * AGE)
    feed(auto, 64)
    before = auto.evidence, auto.tau
    log_ratios, ages, probabilities = recency_draw(
        np.random.default_rng(1), auto.tau, 64, at=AGE, exponent=1, alpha=ALPHA
    )
    probabilities[0] = 1e-15
    auto.observe(log_ratios, ages, probabilities, alpha=ALPHA, policy_version=64)
    assert auto.evidence > 0.6 * before[0]
    assert auto.tau == pytest.approx(before[1], rel=0.15)


def test_age_zero_and_rounding_teach_nothing() -> None:
    auto = AutoTau(target=0.1, tau=10.0)
    feed(auto, 50)
    before, ages, flat = auto.state(), np.arange(64), np.full(64, 0.01)
    assert auto.observe(np.full(64, 3.0), np.zeros(64, np.int64), flat, alpha=ALPHA, policy_version=60) is None
    assert auto.observe(np.zeros(64), ages, flat, alpha=ALPHA, policy_version=61) is None
    assert auto.observe(np.full(64, 5e-5), ages, flat, alpha=ALPHA, policy_version=62) is None
    nothing = np.empty(0)
    assert auto.observe(nothing, nothing.astype(np.int64), nothing, alpha=ALPHA, policy_version=63) is None
    assert auto.state() == before | {"policy_version": 63}


def test_tau_stays_within_its_bounds() -> None:
    low, high = AutoTau(target=0.1, tau=30.0, low=20.0), AutoTau(target=0.1, tau=30.0, high=40.0)
    feed(low, 60, at=2.0)
    feed(high, 60, at=5000.0)
    assert (low.tau, high.tau) == (20.0, 40.0)


def test_a_crossing_far_beyond_the_ages_seen_is_approached_in_steps() -> None:
    """1,000 trajectories of age 10 and almost no drift: not further than age 40 at once."""
    auto = AutoTau(target=0.1, tau=6.0)
    kl = divergence(np.full(1000, 10), 1e5)
    log_ratios = np.random.default_rng(0).normal(-kl, np.sqrt(2 * kl))
    change = auto.observe(log_ratios, np.full(1000, 10), np.full(1000, 0.01), alpha=1.0, policy_version=1)
    assert change is not None
    assert change.age == pytest.approx(40.0)
    away = AutoTau(target=0.1, tau=1e4)  # nor does a tau that lies further out come back for that
    assert away.observe(log_ratios, np.full(1000, 10), np.full(1000, 0.01), alpha=1.0, policy_version=1) is None


def test_at_alpha_zero_tau_stays_and_learning_goes_on() -> None:
    rng, auto = np.random.default_rng(0), AutoTau(target=0.1, tau=900.0)
    for update in range(20):
        log_ratios, ages, _ = recency_draw(rng, 30.0, 64, at=AGE, exponent=1.0, alpha=ALPHA)
        assert auto.observe(log_ratios, ages, np.full(64, 0.01), alpha=0.0, policy_version=update) is None
    assert auto.evidence > MIN_EVIDENCE
    assert feed(auto, 1)


def test_saved_as_json_it_goes_on_as_if_nothing_had_happened() -> None:
    auto = AutoTau(tau=7.0, target=0.2, low=0.5, high=1e4, memory=700)
    feed(auto, 23)
    again = AutoTau.restore(json.loads(json.dumps(auto.state())))
    assert again.state() == auto.state()
    assert feed(auto, 50, seed=1) == feed(again, 50, seed=1)
    assert again.state() == auto.state()


@pytest.mark.parametrize(
    "damage",
    [
        {"tau": -1.0},
        {"tau": "much"},
        {"sums": [[0.0] * 64] * 2},
        {"sums": [[-1.0] * 64] * 3},
        {"squares": float("nan")},
        {"residuals": float("inf")},
        {"policy_version": None},
    ],
)
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    state = AutoTau(target=0.1).state()
    with pytest.raises(SnapshotError, match="auto tau is damaged"):
        AutoTau.restore(state | damage)
    with pytest.raises(SnapshotError, match="auto tau is damaged"):
        AutoTau.restore({name: value for name, value in state.items() if name not in damage})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau": 0.5}, "tau 0.5 must lie within"),
        ({"tau": float("nan")}, "tau nan"),
        ({"high": float("inf")}, "high inf"),
        ({"low": 0.0}, "low 0.0"),
        ({"target": 0.0}, "target 0.0"),
        ({"target": float("inf")}, "target inf"),
        ({"memory": 255}, "memory 255 must be >= 256"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AutoTau(**settings)


def test_bad_measurements_are_refused_and_change_nothing() -> None:
    auto = AutoTau(target=0.1, tau=30.0)
    feed(auto, 30)
    before = auto.state()
    good: tuple[Any, ...] = (np.full(4, -0.1), np.arange(4), np.full(4, 0.1))
    for column, value, error in (
        (0, [0.1, np.nan, 0.1, 0.1], ConfigError),
        (0, [0.1, -np.inf, 0.1, 0.1], ConfigError),
        (1, [1, 2, -3, 4], ClockError),
        (2, [0.1, 0.0, 0.1, 0.1], ConfigError),
        (2, [0.1, 0.1, 0.1], ConfigError),
    ):
        bad = [*good]
        bad[column] = np.array(value)
        with pytest.raises(error):
            auto.observe(*bad, alpha=ALPHA, policy_version=40)
    for alpha in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="alpha"):
            auto.observe(*good, alpha=alpha, policy_version=40)
    with pytest.raises(ClockError, match="policy version 28 lies before the last one, 29"):
        auto.observe(*good, alpha=ALPHA, policy_version=28)
    assert auto.state() == before
