"""Several tasks in one buffer: what each may keep, and how a draw is shared between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ConfigError
from freshper.replay.auto_tau import AutoTau
from freshper.replay.freshness import Freshness


@dataclass(frozen=True, slots=True)
class TaskReplay:
    """How one task is kept and drawn in a buffer of several tasks.

    ``freshness``: its own decay, "auto" or an :class:`AutoTau`, or None for the buffer's. ``share``: the part of a
    draw that it gets, in (0, 1]; None leaves it to the priorities. ``max_share``: a cap on that part; it yields
    only where nothing else could be drawn. ``quota``: the part of the buffer's items that it may keep; beyond it
    the task's own items are evicted.
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
            if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 < value <= 1:
                raise ConfigError(f"{name} {value!r} of a task must lie in (0, 1]")
            object.__setattr__(self, name, float(value))
        if self.share is not None and self.share > self.max_share:
            raise ConfigError(f"share {self.share} of a task exceeds its max_share {self.max_share}")


def task_probabilities(
    log_masses: NDArray[np.float64], shares: NDArray[np.float64], caps: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The part of a draw that each task gets, (k,), summing to 1.

    ``log_masses``: log of the sum of a task's weights, -inf where nothing is drawable; at least one is finite.
    ``shares``: fixed parts, NaN where there is none. Tasks without one divide the rest by their masses; a share
    that cannot be drawn goes to the others. ``caps``: what exceeds a cap is divided among the others in
    proportion; where all are at their caps, the caps are the proportion.
    """
    drawable = log_masses > -np.inf
    masses = np.exp(log_masses - log_masses.max())
    fixed = drawable & ~np.isnan(shares)
    parts = np.where(fixed, shares, 0.0)
    free = np.where(drawable & ~fixed, masses, 0.0)
    rest = 1.0 - parts.sum()
    if free.sum() > 0 and rest > 0:
        parts = parts + free * (rest / free.sum())
    elif parts.sum() == 0:  # rounding left no room for the only ones there are
        parts = free
    return _capped(parts / parts.sum(), np.where(drawable, caps, 0.0))


def _capped(parts: NDArray[np.float64], caps: NDArray[np.float64]) -> NDArray[np.float64]:
    """``parts`` (k,) with nothing above ``caps``, as far as that can be."""
    if caps.sum() <= 1:
        whole: NDArray[np.float64] = caps / caps.sum()
        return whole
    full = np.zeros(len(parts), dtype=np.bool_)
    while (over := (parts > caps) & ~full).any():
        full |= over
        room = 1.0 - caps[full].sum()
        open_parts = np.where(full, 0.0, parts)
        if open_parts.sum() == 0:  # what has no part of its own takes the rest by its cap
            open_parts = np.where(full, 0.0, caps)
        parts = np.where(full, caps, open_parts * (room / open_parts.sum()))
    return parts
