"""Auto tau: the decay of freshness, fitted to the drift that replay updates measure."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ClockError, ConfigError, SnapshotError
from freshper.replay.checks import checked_number
from freshper.replay.diagnostics import check_drift
from freshper.replay.freshness import MIN_TAU

logger = logging.getLogger("freshper.replay")

MIN_EVIDENCE = 256  # effective log-ratios before tau is first touched: a standard error of 9 % or so
_DEADBAND = 0.05  # a smaller relative change is not worth a rebuild of the tree
_SIGNIFICANT = 2.0  # nor is one of fewer standard errors
_REACH = 4.0  # the fit is trusted up to this factor beyond the ages that it has seen
_BOUND = 9.0  # a squared log-ratio counts as at most this many times its expectation: three standard deviations
_BATCH_BOUND = 8.0  # a whole batch counts as at most this many standard errors above its expectation
_BOUNDED_MEAN = 0.9950074  # E[min(z^2, 9)] for a standard normal z
_CHI_SQUARE_MEDIAN = 0.4549364  # of one degree of freedom
_TINY = 1e-8  # mean squared log-ratio that float32 log-probs alone can make
_NOTHING = 1e-16  # a squared log-ratio below it, of less than 1e-8 nats, is rounding of float32 log-probs: it is 0
_EVERYTHING = 1e200  # a squared log-ratio above it counts as this: products with counts and ages stay finite
_LARGEST_LOG = 700.0  # of an age: exp ends at 709
_STEEPEST = 1e100  # the largest alpha / tau that counts are computed with, for the same reason
_EXPONENT_SPREAD = 0.3  # prior standard deviation of the drift exponent around 1 (0.5 to 1.5 was measured)
_EXPONENT_RANGE = (0.25, 4.0)
_PER_OCTAVE = 2  # age bins
_BINS = 64


@dataclass(frozen=True, slots=True)
class TauChange:
    """A new tau with its evidence.

    ``age`` is the age, in policy versions, at which KL(pi || mu) per trajectory reaches the target, and
    ``drift`` the nats per version until there; ``exponent`` is how the divergence grows with age around it
    (1 is linear); ``n`` is the effective number of log-ratios behind the fit, and ``standard_error`` the
    relative one of ``age``. ``old`` and ``new`` are tau in policy versions.
    """

    policy_version: int
    old: float
    new: float
    age: float
    drift: float
    exponent: float
    n: float
    standard_error: float

    def __str__(self) -> str:
        """One line for the log."""
        return (
            f"tau {self.old:.4g} -> {self.new:.4g} at policy version {self.policy_version}: drift {self.drift:.3g} "
            f"nats per version, target reached at age {self.age:.4g} +- {100 * self.standard_error:.0f} % "
            f"(exponent {self.exponent:.2f}, n {self.n:.0f})"
        )


@dataclass(frozen=True, slots=True)
class _Fit:
    """log E[L^2] = level + exponent (log age - center), seen at log ages from ``low`` to ``high``."""

    center: float
    level: float
    exponent: float
    low: float
    high: float
    variances: tuple[float, float]

    def moments(self, ages: NDArray[np.float64]) -> NDArray[np.float64]:
        """E[L^2] at ``ages`` (n,)."""
        return np.asarray(np.exp(self.level + self.exponent * (np.log(ages) - self.center)), dtype=np.float64)

    def crossing(self, log_moment: float) -> float:
        """Log age at which the logarithm of E[L^2] reaches ``log_moment``."""
        return self.center + (log_moment - self.level) / self.exponent

    def error(self, log_age: float) -> float:
        """Standard error, in log age, of a crossing at ``log_age``."""
        return math.sqrt(self.variances[0] + (log_age - self.center) ** 2 * self.variances[1]) / self.exponent


class AutoTau:
    """Keeps tau such that the sampling weight f^alpha falls to 1/e at the age where the drift reaches ``target``.

    f^alpha = exp(-alpha age / tau) e-folds at age tau / alpha, so tau = alpha a*, where KL(pi || mu) at age a* is
    ``target`` nats per trajectory. Draws e-fold at the same age, so the fit sees most where it has to be right.

    **What is measured.** L = log(pi/mu) of a trajectory is a sum over many tokens, so about normal; E_mu[exp L] = 1
    then fixes its mean: L ~ N(-K, 2K) under mu, with K = KL(pi||mu) = KL(mu||pi). Hence E[L^2] = 2K + K^2, and the
    maximum likelihood estimate from draws of one age is K = sqrt(1 + mean L^2) - 1. For other shapes it is right to
    leading order: with the cumulants k of L, KL(pi||mu) = k2/2 + k3/3 + ... and KL(mu||pi) = k2/2 + k3/6 + ...
    The relative standard deviation of one term is sqrt(2), against sqrt(2/K) for -L: 1.4 and 4.5 at 0.1 nats
    (half the square is k2 of Schulman 2020, "Approximating KL divergence"). The direct form rho log rho - rho + 1
    needs no shape, but its influence is unbounded in rho, and ratios of 400 were seen.

    **Robust.** L^2 counts at most 9 times what the fit expects, divided by E[min(z^2, 9)] = 0.995 (Huber 1964): one
    trajectory in a hundred with ten times the log-ratio moves tau by 8 %, not 50 %. Until there is a fit, the median
    of L^2 / age takes its place. A whole batch counts as at most 8 standard errors above its expectation. The price:
    where the divergence itself lives in the tails it is underestimated (tau 9 % too large for Student's t with 5
    degrees of freedom, 40 % with 3), and where more than 8 in 9 log-ratios are 0 the others count as the outliers.

    **Fit.** E[L^2] = exp(level) age^exponent, as a generalized linear model (McCullagh and Nelder 1989, ch. 8): gamma,
    log link, over half-octaves of age, with the exponent held near 1 by a prior of 0.3. Fitting the exponent matters:
    with it held at 1, an exponent of 0.7 costs 20 % of tau. A crossing further than a factor 4 beyond the ages that
    were seen is approached in steps. Age 0 and batches with a mean L^2 under 1e-8 carry nothing and are left out; a
    log-ratio under 1e-8 nats counts as 0, and no expectation lies below its square, so that tau and everything behind
    it stay finite for every finite input.

    **Draws.** Within an age, items were drawn by b^alpha, so each counts f^alpha / P, which is b^-alpha up to a factor:
    1/P itself would add the spread of f for nothing, since a regression on age needs no correction across ages. The
    counts are truncated at 2 sqrt(n) times their geometric mean (after Ionides 2008: the bias goes with n, the variance
    stays bounded), then normalized by batch. Priorities that follow the log-ratio closely make the fit less precise.

    **Smoothing.** Evidence fades by exp(-n / memory) with every batch of n log-ratios. tau moves only when at least
    256 effective log-ratios (Kish) are there and it is off by 5 % and by two standard errors. A fourfold change of the
    drift is followed to within 25 % in 3 ``memory`` log-ratios, 96 updates of 32 or 24 of 128, where it changes at all
    ages at once; the log-ratio of a stored trajectory shows it only as it ages.

    ``target`` is 0.3 nats because that trained best where 0.1, 0.3 and 0.5 were compared (docs/log.md). Only drift
    is to be measured: a mismatch between sampler and trainer adds the same divergence at every age, and where it
    comes near the target, tau falls to its bound, which is logged as a warning.

    ``tau`` is the first one, in policy versions; it stays within [``low``, ``high``]. Raises :class:`ConfigError`.
    """

    def __init__(
        self, *, tau: float = 500.0, target: float = 0.3, low: float = 1.0, high: float = 1e5, memory: int = 1024
    ) -> None:
        tau, target = checked_number("tau", tau), checked_number("target", target)
        low, high = checked_number("low", low), checked_number("high", high)
        kept = checked_number("memory", memory)
        if not (MIN_TAU <= low <= tau <= high < math.inf):
            raise ConfigError(
                f"tau {tau} must lie within its bounds, {MIN_TAU:g} <= low {low} <= tau <= high {high}, all finite"
            )
        if not (0 < target < math.inf):
            raise ConfigError(f"target {target} must be finite and > 0 nats per trajectory; 0 would ask for tau 0")
        if not MIN_EVIDENCE <= kept < math.inf:
            raise ConfigError(
                f"memory {memory} must be >= {MIN_EVIDENCE} log-ratios and finite, or tau would never be changed"
            )
        self.tau, self.target, self.low, self.high = tau, target, low, high
        self.memory = int(memory)
        self._policy_version = 0
        # Sums over age bins of counts, counts times bounded squares, and counts times log age; sums over everything
        # of counts^2, and of these times the squared relative residual.
        self._sums = np.zeros((3, _BINS))
        self._squares, self._residuals = 0.0, 0.0
        self._fitted: _Fit | None = None  # of the present sums

    @property
    def evidence(self) -> float:
        """Effective number of log-ratios that are remembered (Kish): (sum u)^2 / sum u^2 of their counts u."""
        return float(self._sums[0].sum()) ** 2 / self._squares if self._squares else 0.0

    def observe(
        self,
        log_ratios: NDArray[np.float64],
        ages: NDArray[np.int64],
        probabilities: NDArray[np.float64],
        *,
        alpha: float,
        policy_version: int,
    ) -> TauChange | None:
        """Take the measurements of one replay update, all (n,), and return the change of tau if there is one.

        ``log_ratios`` are log(pi/mu) of whole trajectories, drawn with ``probabilities`` P(i) from an index with
        this ``alpha`` and the present tau (an index that lags behind costs precision, not correctness). Who gets
        a change re-keys the index with ``new``; it is logged too. At alpha 0 tau means nothing and stays.

        Raises as :func:`~freshper.replay.diagnostics.check_drift` does, :class:`ConfigError` for an alpha that
        is negative or not finite, and :class:`ClockError` for a policy version below the last one. Nothing has
        changed then.
        """
        check_drift(log_ratios, ages, probabilities)
        if not 0 <= alpha < math.inf:
            raise ConfigError(f"alpha {alpha} must be finite and >= 0")
        if policy_version < self._policy_version:
            raise ClockError(f"policy version {policy_version} lies before the last one, {self._policy_version}")
        self._policy_version = int(policy_version)
        aged = ages > 0
        if aged.any():
            self._learn(log_ratios[aged], ages[aged].astype(np.float64), probabilities[aged], alpha)
        return self._change(alpha) if alpha > 0 and self.evidence >= MIN_EVIDENCE else None

    def state(self) -> dict[str, Any]:
        """Everything, ready for JSON; floats come back from it exactly. For :meth:`restore`."""
        return {
            "tau": self.tau,
            "target": self.target,
            "low": self.low,
            "high": self.high,
            "memory": self.memory,
            "policy_version": self._policy_version,
            "sums": self._sums.tolist(),
            "squares": self._squares,
            "residuals": self._residuals,
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> AutoTau:
        """The one that :meth:`state` described, which goes on as that would have; else :class:`SnapshotError`."""
        try:
            auto = cls(**{name: state[name] for name in ("tau", "target", "low", "high", "memory")})
            auto._policy_version = int(state["policy_version"])
            auto._sums = np.array(state["sums"], dtype=np.float64).reshape(3, _BINS)
            auto._squares, auto._residuals = float(state["squares"]), float(state["residuals"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise SnapshotError(f"the saved auto tau is damaged: {error!r}") from error
        numbers = np.array([*auto._sums.flat, auto._squares, auto._residuals])
        if not (np.isfinite(numbers).all() and (numbers >= 0).all()):
            raise SnapshotError("the saved auto tau is damaged: a sum is negative or not finite")
        return auto

    def _learn(
        self,
        log_ratios: NDArray[np.float64],
        ages: NDArray[np.float64],
        probabilities: NDArray[np.float64],
        alpha: float,
    ) -> None:
        """Add one batch, all (n,), ages >= 1."""
        log_counts = -np.log(probabilities) - min(alpha / self.tau, _STEEPEST) * ages
        log_counts -= log_counts.max()  # far from 0 their mean would miss them all by its rounding
        # Relative to their geometric mean: the arithmetic one is set by the very counts that are to be truncated.
        counts = np.exp(np.minimum(log_counts - log_counts.mean(), math.log(2 * math.sqrt(len(ages)))))
        counts /= counts.mean()
        squares = np.minimum(np.abs(log_ratios), math.sqrt(_EVERYTHING)) ** 2
        squares = np.where(squares < _NOTHING, 0.0, squares)
        if float(counts @ squares) < _TINY * len(counts):
            return
        known = self.evidence >= MIN_EVIDENCE
        if known:
            expected = self._fit().moments(ages)
        else:
            slopes = squares / ages
            pilot = float(np.median(slopes)) / _CHI_SQUARE_MEDIAN
            expected = ages * (pilot if pilot > 0 else slopes.mean())
        expected = np.clip(expected, _NOTHING, _EVERYTHING)
        squares = np.minimum(squares, _BOUND * expected) / _BOUNDED_MEAN
        if known:  # the batch as a whole is bounded too
            most = 1 + _BATCH_BOUND * math.sqrt(2 / len(counts))
            squares *= min(1.0, most * float(counts @ expected) / float(counts @ squares))
        bins = np.minimum(_PER_OCTAVE * np.log2(ages), _BINS - 1).astype(np.int64)
        kept = math.exp(-len(counts) / self.memory)
        self._sums *= kept
        for row, values in enumerate((counts, counts * squares, counts * np.log(ages))):
            self._sums[row] += np.bincount(bins, values, minlength=_BINS)
        self._squares = self._squares * kept**2 + float(counts @ counts)
        self._residuals = self._residuals * kept**2 + float(counts**2 @ (squares / expected - 1) ** 2)
        self._fitted = None

    def _fit(self) -> _Fit:
        """Fisher scoring. With log ages centered, the information of level and exponent is diagonal."""
        if self._fitted is not None:
            return self._fitted
        seen = self._sums[0] > 1e-9 * self._sums[0].sum()
        counts, moments, log_ages = self._sums[:, seen]
        total = float(counts.sum())
        center = float(log_ages.sum()) / total
        offsets = log_ages / counts - center
        moments = moments / counts
        prior = _EXPONENT_SPREAD**-2
        information = (total / 2, float(counts @ offsets**2) / 2 + prior)
        lowest = math.log(_NOTHING)
        level, exponent = math.log(max(float(counts @ moments) / total, _NOTHING)), 1.0
        for _ in range(50):
            score = counts * (moments * np.exp(-level - exponent * offsets) - 1) / 2
            steps = (
                float(score.sum()) / information[0],
                (float(score @ offsets) - prior * (exponent - 1)) / information[1],
            )
            level = max(level + min(max(steps[0], -1.0), 1.0), lowest)
            exponent = min(max(exponent + steps[1], _EXPONENT_RANGE[0]), _EXPONENT_RANGE[1])
            if max(abs(steps[0]), abs(steps[1])) < 1e-9:
                break
        # Uneven counts, fading, and a spread that is not that of normal log-ratios (a squared one has variance 2).
        spread = total / self.evidence * max(1.0, self._residuals / (2 * self._squares))
        shares = np.cumsum(counts) / total
        low, high = (float(offsets[np.searchsorted(shares, q)]) + center for q in (0.05, 0.95))
        variances = (spread / information[0], spread / information[1])
        self._fitted = _Fit(center, level, exponent, low, high, variances)
        return self._fitted

    def _change(self, alpha: float) -> TauChange | None:
        fit = self._fit()
        crossing = fit.crossing(math.log(self.target) + math.log(2 + self.target))
        error, present, reach = fit.error(crossing), math.log(self.tau) - math.log(alpha), math.log(_REACH)
        # It is enough to know one of the two well: where the target is reached, or that here it is not.
        if abs(crossing - present) <= _SIGNIFICANT * min(error, fit.error(present)):
            return None
        log_age = min(max(crossing, min(fit.low - reach, present)), max(fit.high + reach, present))
        age = math.exp(min(log_age, _LARGEST_LOG))
        tau = min(max(alpha * age, self.low), self.high)
        if abs(math.log(tau / self.tau)) <= math.log1p(_DEADBAND):
            return None
        change = TauChange(
            self._policy_version, self.tau, tau, age, self.target / age, fit.exponent, self.evidence, error
        )
        self.tau = tau
        logger.info("%s", change)
        if tau in (self.low, self.high):
            logger.warning(
                "tau has reached its bound %g: the measured drift of %.3g nats per version does not fit a target of %g "
                "nats per trajectory. Raise the target, or look for a mismatch between sampler and trainer, which "
                "shows as KL at age 1",
                tau,
                change.drift,
                self.target,
            )
        return change
