"""Early stop: the best score so far, and how many evaluations have passed without a better one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from freshper.errors import ConfigError, SnapshotError


class EarlyStop:
    """Watches the held-out score; higher is better.

    Args:
        patience: so many evaluations in a row without a better score end the run; 0 never does.
    """

    def __init__(self, patience: int = 0) -> None:
        if patience < 0:
            raise ConfigError(f"patience {patience} must be >= 0, where 0 never stops")
        self.patience = patience
        self.best: float | None = None
        self.without_gain = 0

    def update(self, score: float) -> bool:
        """Whether ``score`` is the best so far: then it counts from here. NaN never is."""
        if not math.isnan(score) and (self.best is None or score > self.best):
            self.best, self.without_gain = score, 0
            return True
        self.without_gain += 1
        return False

    @property
    def due(self) -> bool:
        """Whether patience is used up."""
        return 0 < self.patience <= self.without_gain

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` goes on from, as plain JSON values. The patience is a setting and not in it."""
        return {"best": self.best, "without_gain": self.without_gain}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`. Raises :class:`SnapshotError` where it is none, and changes nothing then."""
        try:
            best, without_gain = state["best"], int(state["without_gain"])
            best = None if best is None else float(best)
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotError(f"the saved early stop is damaged ({type(error).__name__}: {error})") from None
        self.best, self.without_gain = best, without_gain
