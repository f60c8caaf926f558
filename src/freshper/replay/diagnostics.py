"""How far the policy has drifted from replayed data: ESS, KL and clipping of whole trajectories, by age."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ClockError, ConfigError, SnapshotError

MIN_BIN = 128  # fewer samples than this make the ESS fraction look too good
AGE_EDGES = (0, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_LOG_LIMIT = 60.0  # log-ratios are clamped here before exp
_COLUMNS: dict[str, type[Any]] = {
    "ages": np.int64,
    "log_ratios": np.float64,
    "probabilities": np.float64,
    "clip_fractions": np.float64,
}


@dataclass(frozen=True, slots=True)
class DriftBin:
    """Divergence of the current policy pi from the behavior policies mu of one range of ages.

    ``ess_fraction`` is 1 / E_mu[rho^2] in (0, 1], ``kl`` is KL(pi || mu) in nats per trajectory, for which
    ESS/n <= exp(-KL) holds, ``kl_reverse`` is KL(mu || pi). ``n`` counts the draws behind them, ``ratio_max``
    is the largest ratio among these. ``clip_fraction`` is None here; see :class:`ClippedDriftBin`.
    """

    age_low: int
    age_high: int
    n: int
    ess_fraction: float
    kl: float
    kl_reverse: float
    ratio_max: float

    @property
    def clip_fraction(self) -> float | None:
        """None: no clip fraction was reported for any of these trajectories, which is not the same as 0."""
        return None


@dataclass(frozen=True, slots=True)
class ClippedDriftBin(DriftBin):
    """A :class:`DriftBin` whose trajectories came with clip fractions.

    ``clip_fraction`` in [0, 1] is the mean over trajectories of the share of response tokens whose ratio lies
    outside the clip range. It is a field only where it was measured: a row of drift.jsonl without it says so.
    """

    clip_fraction: float = field(kw_only=True)


def drift(log_ratios: NDArray[np.float64], probabilities: NDArray[np.float64]) -> tuple[float, float, float]:
    """ESS fraction, KL(pi || mu) and KL(mu || pi) from trajectory-level log(pi/mu), all (n,).

    The draws came with probability P(i), so each counts 1/P(i): self-normalized importance sampling (Owen,
    Monte Carlo theory, methods and examples, ch. 9.2) makes the averages those of the stored items, consistent
    as n grows, with a bias of order 1/n. With u_i the normalized counts and rho = pi/mu,

        ESS/n       = (sum u rho)^2 / sum u rho^2                 (Kish 1965, Survey Sampling; Owen, ch. 9.3)
        KL(pi||mu)  = sum u rho log rho / sum u rho - log sum u rho
        KL(mu||pi)  = log sum u rho - sum u log rho

    Dividing by the estimated mean ratio keeps all three in their range at every n; E_mu[rho] is 1. The
    estimates are those of an exact pair of distributions, u and u rho / sum u rho, so what holds for those holds
    for every sample: ESS/n = exp(-D_2(pi||mu)) <= exp(-KL(pi||mu)), because the Renyi divergence D_2 is never
    below KL = D_1 (Jensen: log E_pi[rho] >= E_pi[log rho]; van Erven and Harremoes 2014, theorem 3).
    """
    log_ratios = np.clip(log_ratios, -_LOG_LIMIT, _LOG_LIMIT)
    counts = _counts(probabilities)
    ratios = np.exp(log_ratios)
    mean_ratio = float(counts @ ratios)
    ess_fraction = mean_ratio**2 / float(counts @ ratios**2)
    kl = float(counts @ (ratios * log_ratios)) / mean_ratio - np.log(mean_ratio)
    kl_reverse = np.log(mean_ratio) - float(counts @ log_ratios)
    # Rounding alone can leave the range, by a few units in the last place. NaN passes through clip and maximum.
    return float(np.clip(ess_fraction, 0.0, 1.0)), float(np.maximum(kl, 0.0)), float(np.maximum(kl_reverse, 0.0))


def drift_by_age(
    log_ratios: NDArray[np.float64],
    ages: NDArray[np.int64],
    probabilities: NDArray[np.float64],
    edges: Sequence[int] = AGE_EDGES,
    min_bin: int = MIN_BIN,
    *,
    clip_fractions: NDArray[np.float64] | None = None,
) -> list[DriftBin]:
    """:func:`drift` in bins of age [edge, next edge); all arrays (n,).

    ``clip_fractions`` are the shares of each trajectory's response tokens whose ratio lies outside the clip
    range, as the learner reports them, NaN where it reported none. A bin's value is their mean sum u c / sum u
    with u = 1/P over the reported ones, and None where there is none.

    A bin with fewer than ``min_bin`` samples is merged with the next older ones; what is left over at the
    old end joins the last full bin. Empty input gives no bins; lengths that differ raise :class:`ConfigError`.
    """
    _check_lengths(log_ratios, ages, probabilities, clip_fractions)
    if len(ages) == 0:
        return []
    order = np.argsort(ages, kind="stable")
    cuts = np.searchsorted(ages[order], edges[1:])
    groups: list[NDArray[np.int64]] = []
    pending = np.empty(0, dtype=np.int64)
    for part in np.split(order, cuts):
        pending = np.concatenate([pending, part])
        if len(pending) >= min_bin:
            groups.append(pending)
            pending = pending[:0]
    if len(pending):
        tail = [groups.pop()] if groups else []
        groups.append(np.concatenate([*tail, pending]))
    return [
        _bin(log_ratios[g], ages[g], probabilities[g], None if clip_fractions is None else clip_fractions[g])
        for g in groups
    ]


def check_drift(
    log_ratios: NDArray[np.float64],
    ages: NDArray[np.int64],
    probabilities: NDArray[np.float64],
    clip_fractions: NDArray[np.float64] | None = None,
) -> None:
    """Refuse measurements that one bad number would spoil for a whole window; all arrays (n,).

    Raises :class:`ConfigError` for lengths that differ, a log-ratio that is not finite, a probability outside
    (0, 1], ages that are no integers or a clip fraction outside [0, 1] (NaN: not reported), and
    :class:`ClockError` for a negative age.
    """
    _check_lengths(log_ratios, ages, probabilities, clip_fractions)
    if ages.dtype.kind not in "iu":
        raise ConfigError(f"ages are {ages.dtype}, they must be integers: whole policy versions")
    _refuse(log_ratios, ~np.isfinite(log_ratios), "log-ratio", "it must be finite, or every average of it is lost")
    low = ~((probabilities > 0) & (probabilities <= 1))  # also NaN
    _refuse(probabilities, low, "probability", "a trajectory that was drawn had one in (0, 1]")
    if clip_fractions is not None:
        outside = (clip_fractions < 0) | (clip_fractions > 1)
        _refuse(clip_fractions, outside, "clip fraction", "a share of tokens lies in [0, 1]")
    if len(ages) and ages.min() < 0:
        raise ClockError(f"age {ages.min()} is below 0: a trajectory cannot be newer than the policy")


class DriftMonitor:
    """The measurements of the last ``window`` replay updates, and the drift by age that they show.

    A window forgets: the drift is that of the present policy, not of the whole run.
    """

    def __init__(self, window: int = 64) -> None:
        if window < 1:
            raise ConfigError(f"window {window} must be >= 1 replay update, or nothing is ever measured")
        self._observations: deque[dict[str, NDArray[Any]]] = deque(maxlen=window)

    def __len__(self) -> int:
        """Number of observations held, at most ``window``."""
        return len(self._observations)

    def observe(
        self,
        ages: NDArray[np.int64],
        log_ratios: NDArray[np.float64],
        probabilities: NDArray[np.float64],
        clip_fractions: NDArray[np.float64] | None = None,
    ) -> None:
        """Add one replay update: see :func:`drift_by_age` for the arrays, all (n,), which are copied.

        Raises as :func:`check_drift` does, before anything changes.
        """
        check_drift(log_ratios, ages, probabilities, clip_fractions)
        shares = np.full(len(ages), np.nan) if clip_fractions is None else clip_fractions
        values = dict(zip(_COLUMNS, (ages, log_ratios, probabilities, shares), strict=True))
        self._observations.append({name: np.array(values[name], dtype) for name, dtype in _COLUMNS.items()})

    def by_age(self) -> list[DriftBin]:
        """:func:`drift_by_age` of everything in the window; empty before the first observation."""
        held = self._columns()
        return drift_by_age(
            held["log_ratios"], held["ages"], held["probabilities"], clip_fractions=held["clip_fractions"]
        )

    def state(self) -> dict[str, NDArray[Any]]:
        """Flat arrays for :meth:`restore`: the columns end to end (n,), and the ``lengths`` (m,) that cut them."""
        lengths = np.array([len(one["ages"]) for one in self._observations], dtype=np.int64)
        return {"lengths": lengths, **self._columns()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what :meth:`state` gave; of more observations than ``window`` the latest are kept.

        Raises :class:`SnapshotError` when the arrays do not fit together, and changes nothing then.
        """
        missing = {"lengths", *_COLUMNS} - set(arrays)
        if missing:
            raise SnapshotError(f"the saved drift lacks {', '.join(sorted(missing))}: it cannot be restored")
        lengths = np.asarray(arrays["lengths"], dtype=np.int64)
        columns = {name: np.array(arrays[name], dtype) for name, dtype in _COLUMNS.items()}
        sizes = {len(column) for column in columns.values()}
        if (lengths < 0).any() or sizes != {int(lengths.sum())}:
            raise SnapshotError(
                f"the saved drift has lengths {lengths.tolist()} but columns of {sorted(sizes)} numbers"
            )
        try:
            check_drift(columns["log_ratios"], columns["ages"], columns["probabilities"], columns["clip_fractions"])
        except ValueError as error:
            raise SnapshotError(f"the saved drift is damaged: {error}") from error
        cuts = np.cumsum(lengths)[:-1]
        parts = {name: np.split(column, cuts) if len(lengths) else [] for name, column in columns.items()}
        self._observations.clear()
        self._observations.extend({name: parts[name][i] for name in parts} for i in range(len(lengths)))

    def _columns(self) -> dict[str, NDArray[Any]]:
        held = self._observations
        return {name: np.concatenate([np.empty(0, t), *(one[name] for one in held)]) for name, t in _COLUMNS.items()}


def _counts(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """1/P, normalized to sum 1. The smallest P is divided by first: 1/P alone may overflow."""
    counts = probabilities.min() / probabilities
    return np.asarray(counts / counts.sum(), dtype=np.float64)


def _bin(
    log_ratios: NDArray[np.float64],
    ages: NDArray[np.int64],
    probabilities: NDArray[np.float64],
    clip_fractions: NDArray[np.float64] | None,
) -> DriftBin:
    ess_fraction, kl, kl_reverse = drift(log_ratios, probabilities)
    ratio_max = float(np.exp(np.clip(log_ratios.max(), -_LOG_LIMIT, _LOG_LIMIT)))
    facts = (int(ages.min()), int(ages.max()), len(ages), ess_fraction, kl, kl_reverse, ratio_max)
    reported = np.zeros(len(ages), bool) if clip_fractions is None else ~np.isnan(clip_fractions)
    if clip_fractions is None or not reported.any():
        return DriftBin(*facts)
    share = float(_counts(probabilities[reported]) @ clip_fractions[reported])
    return ClippedDriftBin(*facts, clip_fraction=min(max(share, 0.0), 1.0))


def _check_lengths(
    log_ratios: NDArray[np.float64],
    ages: NDArray[np.int64],
    probabilities: NDArray[np.float64],
    clip_fractions: NDArray[np.float64] | None,
) -> None:
    if not log_ratios.shape == ages.shape == probabilities.shape == (len(ages),):
        raise ConfigError(
            f"log_ratios {log_ratios.shape}, ages {ages.shape} and probabilities {probabilities.shape} must all be (n,)"
        )
    if clip_fractions is not None and clip_fractions.shape != ages.shape:
        raise ConfigError(f"clip_fractions {clip_fractions.shape} and ages {ages.shape} must all be (n,)")


def _refuse(values: NDArray[np.float64], bad: NDArray[np.bool_], name: str, why: str) -> None:
    """Raise for the first ``bad`` value, (n,)."""
    if bad.any():
        first = int(np.argmax(bad))
        raise ConfigError(f"{name} {values[first]} of trajectory {first} is refused: {why}")
