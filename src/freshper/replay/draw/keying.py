"""How items become leaves: a decay, alpha, and what both are relative to."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from freshper.replay.draw import kernels
from freshper.replay.draw.sum_tree import EXPONENT_LIMIT
from freshper.replay.freshness import Freshness, log_freshness, max_age_of, static_rate

# How far log b f may lie above its value at the epoch: its rounding error stays under 1e-12.
REACH = 1e4


@dataclass(frozen=True, slots=True)
class Keying:
    """How items become keys: a decay, alpha, the version that keys are relative to, and the oldest one drawn."""

    freshness: Freshness
    alpha: float
    epoch: int = 0
    horizon: int = -1  # no version is below it
    rate: float | None = field(init=False)
    max_age: int | None = field(init=False)
    factored: bool = field(init=False)  # whether a leaf is b^alpha times a factor of its item's version
    plain: bool = field(init=False)  # and it is 0 for no item but those whose base is 0
    exponent: NDArray[np.float64] = field(init=False, repr=False, compare=False)  # alpha, ready for np.power
    near: bool = field(init=False)  # whether a key outgrows its reference before it loses digits

    def __post_init__(self) -> None:
        rate = static_rate(self.freshness)
        object.__setattr__(self, "rate", rate)
        # Only a common-factor decay needs its end kept apart: a recomputed one is simply 0 there.
        object.__setattr__(self, "max_age", None if rate is None else max_age_of(self.freshness))
        # An alpha above 1 could take b^alpha out of the float range.
        object.__setattr__(self, "factored", rate is not None and self.alpha <= 1)
        object.__setattr__(self, "plain", self.factored and self.horizon <= 0)
        object.__setattr__(self, "exponent", np.array(self.alpha, dtype=np.float64))
        object.__setattr__(self, "near", rate is None or self.alpha * REACH > EXPONENT_LIMIT)

    def log_fresh(self, versions: NDArray[np.int64]) -> NDArray[np.float64]:
        """log f of items by policy version (n,), up to what is common to all; -inf where it is 0."""
        if self.rate is None:
            return log_freshness(self.freshness, np.maximum(self.epoch - versions, 0))
        logs: NDArray[np.float64] = (versions - self.epoch).astype(np.float64) * self.rate
        return np.where(versions < self.horizon, -np.inf, logs) if self.horizon > 0 else logs

    def factors(self, log_fresh: NDArray[np.float64], reference: float) -> NDArray[np.float64]:
        """f^alpha e^-reference from log f (n,), up to what is common to all: what b^alpha is multiplied by."""
        with np.errstate(over="ignore", invalid="ignore"):  # beyond what is taken for exact; 0 * -inf
            factors: NDArray[np.float64] = np.exp(self.alpha * log_fresh - reference)
        return factors

    def leaves(
        self, bases: NDArray[np.float64], factors: NDArray[np.float64], keys: NDArray[np.float64], reference: float
    ) -> NDArray[np.float64] | None:
        """exp(keys - reference) (n,), as b^alpha times the factor wherever a plain product has all its digits.

        So the leaf of an item does not depend on what is written beside it. None where the reference is out of reach.
        """
        leaves, rest = np.zeros(len(keys)), keys > -np.inf
        if self.factored:
            with np.errstate(over="ignore", invalid="ignore"):  # 0 * inf
                powers = np.power(bases, self.exponent)
                products = powers * factors
            exact = (factors >= kernels.LEAST_FACTOR) & (factors <= kernels.LARGEST_FACTOR)
            exact &= (powers >= kernels.LEAST_FACTOR) & (products <= kernels.LARGEST_LEAF) & rest
            leaves[exact] = products[exact]
            rest &= ~exact
        if rest.any():
            exponents = keys[rest] - reference
            if exponents.max() > EXPONENT_LIMIT:
                return None
            leaves[rest] = np.exp(exponents)
        return leaves

    def keys(self, log_bases: NDArray[np.float64], log_fresh: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        """Values of tree ``name``, all (n,); of an item that cannot be drawn -inf, in "least..." +inf."""
        log_priorities: NDArray[np.float64] = log_bases + log_fresh  # -inf of an item that cannot be drawn
        if name == "lowest":
            return log_priorities
        if name == "weights" and self.alpha > 0:
            return self.alpha * log_priorities
        values = log_bases
        if name != "least_base":
            with np.errstate(invalid="ignore"):  # 0 * -inf
                values = self.alpha * (log_fresh if name == "freshness" else log_priorities)
        return np.where(log_priorities > -np.inf, values, np.inf if name.startswith("least") else -np.inf)
