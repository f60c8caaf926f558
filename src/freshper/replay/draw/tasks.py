"""Several tasks in one buffer: what each may keep, and how a draw is shared between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ConfigError
from freshper.replay.auto_tau import AutoTau
from freshper.replay.checks import shown
from freshper.replay.freshness import Freshness, check_freshness

_ROUNDING = 1e-9  # shares or caps that miss a sum of 1 by less are meant to sum to 1


@dataclass(frozen=True, slots=True)
class TaskReplay:
    """How one task is kept and drawn in a buffer of several tasks.

    ``freshness``: its own decay, "auto" or an :class:`AutoTau`, or None for the buffer's. ``share``: the part of a
    draw that it gets, in (0, 1], more only where the others cannot take theirs; None leaves it to the priorities.
    ``max_share``: a cap on that part; it yields only where nothing else could be drawn. ``quota``: the part of the
    buffer's items that it may keep; beyond it the task's own items are evicted.

    Raises :class:`ConfigError` for a value out of range.
    """

    freshness: Freshness | AutoTau | Literal["auto"] | None = None
    share: float | None = None
    max_share: float = 1.0
    quota: float = 1.0

    def __post_init__(self) -> None:
        for name in ("share", "max_share", "quota"):
            value = getattr(self, name)
            if value is None and name == "share":
                continue
            number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
            if not (number and 0 < value <= 1):
                raise ConfigError(f"{name} {shown(value)} of a task must lie in (0, 1]")
            object.__setattr__(self, name, float(value))
        if self.share is not None and self.share > self.max_share:
            raise ConfigError(f"share {self.share} of a task exceeds its max_share {self.max_share}")
        if self.freshness is not None:
            check_decay(self.freshness)


def check_decay(decay: object) -> None:
    """Raise :class:`ConfigError` unless ``decay`` is a freshness, an :class:`AutoTau`, or "auto"."""
    if isinstance(decay, AutoTau) or (isinstance(decay, str) and decay == "auto"):
        return
    if isinstance(decay, str):
        raise ConfigError(
            f"freshness {decay!r}: the only one by name is 'auto'; others are objects, Exponential(tau=500)"
        )
    check_freshness(decay)


def log_task_parts(
    log_masses: NDArray[np.float64], shares: NDArray[np.float64], caps: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Log of the part of a draw that each task gets, (k,); the parts sum to 1. -inf is none at all.

    ``log_masses``: log of the sum of a task's weights, -inf where nothing is drawable; at least one is finite.
    ``shares``: fixed parts, NaN where there is none; none exceeds its cap. Tasks without one divide the rest by their
    masses, and get nothing where the shares leave none; a share that cannot be drawn goes to them. ``caps``: what
    exceeds a cap is divided among the others in proportion, first among those without a share; where all are at
    their caps, the caps are the proportion.

    Logarithms, because a part too small for a float still has its turn in a draw without replacement.
    """
    drawable = log_masses > -np.inf
    parts = np.full(len(shares), -np.inf)
    if caps[drawable].sum() <= 1:
        parts[drawable] = np.log(caps[drawable] / caps[drawable].sum())
        return parts
    fixed = drawable & ~np.isnan(shares)
    free = drawable & ~fixed
    rest = min(1.0 - shares[fixed].sum(), caps[free].sum())
    if rest > _ROUNDING:
        parts[free] = _fill(log_masses[free], caps[free], rest)
    else:
        rest = 0.0
    if fixed.any():
        parts[fixed] = _fill(np.log(shares[fixed]), caps[fixed], 1.0 - rest)
    return parts


def _fill(logs: NDArray[np.float64], caps: NDArray[np.float64], whole: float) -> NDArray[np.float64]:
    """Log of parts (k,) that sum to ``whole``, in proportion to exp(``logs``) but not above ``caps``."""
    if caps.sum() <= whole:
        full_parts: NDArray[np.float64] = np.log(caps * (whole / caps.sum()))
        return full_parts
    parts: NDArray[np.float64] = _normalized(logs) + np.log(whole)
    full = np.zeros(len(caps), dtype=np.bool_)
    while (over := (np.exp(parts) > caps * (1 + _ROUNDING / 2)) & ~full).any():
        full |= over
        rest = np.where(full, -np.inf, logs)
        parts = np.where(full, np.log(caps), _normalized(rest) + np.log(whole - caps[full].sum()))
    return parts


def _normalized(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log of parts (k,) that sum to 1, in proportion to exp(``logs``): exact however far these are from 0."""
    lower = logs - logs.max()
    parts: NDArray[np.float64] = lower - np.logaddexp.reduce(lower)
    return parts
