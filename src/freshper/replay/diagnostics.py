"""How far the policy has drifted from replayed data: ESS and KL of whole trajectories, by age."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_BIN = 128  # fewer samples than this make the ESS fraction look too good
_LOG_LIMIT = 60.0  # log-ratios are clamped here before exp


@dataclass(frozen=True, slots=True)
class DriftBin:
    """Divergence of the current policy pi from the behavior policies mu of one range of ages.

    ``ess_fraction`` is 1 / E_mu[rho^2] in (0, 1], ``kl`` is KL(pi || mu) in nats per trajectory, for which
    ESS/n <= exp(-KL) holds, ``kl_reverse`` is KL(mu || pi). ``n`` counts the draws behind them.
    """

    age_low: int
    age_high: int
    n: int
    ess_fraction: float
    kl: float
    kl_reverse: float
    ratio_max: float


def drift(log_ratios: NDArray[np.float64], probabilities: NDArray[np.float64]) -> tuple[float, float, float]:
    """ESS fraction, KL(pi || mu) and KL(mu || pi) from trajectory-level log(pi/mu), all (n,).

    The draws came with probability P(i), so each counts 1/P(i): self-normalized importance sampling makes
    the averages those of the stored items. With u_i the normalized counts and rho = pi/mu,
    ESS/n = (sum u rho)^2 / sum u rho^2 (Kish), KL(pi||mu) = sum u rho log rho / sum u rho - log sum u rho,
    KL(mu||pi) = -sum u log rho + log sum u rho. Dividing by the estimated mean ratio keeps all three in
    their range at every n; E_mu[rho] is 1.
    """
    log_ratios = np.clip(log_ratios, -_LOG_LIMIT, _LOG_LIMIT)
    counts = probabilities.min() / probabilities
    counts = counts / counts.sum()
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
    edges: Sequence[int] = (0, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    min_bin: int = MIN_BIN,
) -> list[DriftBin]:
    """:func:`drift` in bins of age [edge, next edge); all arrays (n,).

    A bin with fewer than ``min_bin`` samples is merged with the next older ones; what is left over at the
    old end joins the last full bin. Empty input gives no bins; lengths that differ raise ValueError.
    """
    if not log_ratios.shape == ages.shape == probabilities.shape == (len(ages),):
        raise ValueError(
            f"log_ratios {log_ratios.shape}, ages {ages.shape} and probabilities {probabilities.shape} must all be (n,)"
        )
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
    return [_bin(log_ratios[group], ages[group], probabilities[group]) for group in groups]


def _bin(log_ratios: NDArray[np.float64], ages: NDArray[np.int64], probabilities: NDArray[np.float64]) -> DriftBin:
    ess_fraction, kl, kl_reverse = drift(log_ratios, probabilities)
    return DriftBin(
        age_low=int(ages.min()),
        age_high=int(ages.max()),
        n=len(ages),
        ess_fraction=ess_fraction,
        kl=kl,
        kl_reverse=kl_reverse,
        ratio_max=float(np.exp(np.clip(log_ratios.max(), -_LOG_LIMIT, _LOG_LIMIT))),
    )
