"""Draws: which items, with which probability, and the sampling weight that corrects the uneven draw."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ConfigError, SamplingError
from freshper.replay.checks import check_name, checked_number, shown
from freshper.replay.draw import kernels
from freshper.replay.draw.compiled import twins
from freshper.replay.draw.draws import Mixture, positions_in_strata, without_replacement
from freshper.replay.draw.index import PriorityIndex
from freshper.replay.draw.item_table import ItemTable
from freshper.replay.draw.tasks import log_task_parts
from freshper.replay.freshness import Freshness, check_freshness

Toward = Literal["uniform", "freshness"]
Normalization = Literal["batch_max", "mean", "buffer_max", "none"]
Method = Literal["stratified", "systematic", "without_replacement"]
TOWARD: tuple[Toward, ...] = ("uniform", "freshness")
NORMALIZATIONS: tuple[Normalization, ...] = ("batch_max", "mean", "buffer_max", "none")
METHODS: tuple[Method, ...] = ("stratified", "systematic", "without_replacement")
# Far more than anybody draws with, and small enough for every key to stay finite.
MAX_ALPHA = 1e6
_SMALL_MEAN = 0.1  # a mean weight that divides the learning rate by ten without a word


def check_correction(beta: float, toward: Toward, normalization: Normalization, method: Method = "stratified") -> None:
    """Raise :class:`ConfigError` for a draw or a sampling correction that does not exist."""
    number = checked_number("beta", beta)
    if not (np.isfinite(number) and number >= 0):
        raise ConfigError(f"beta {beta} must be finite and >= 0 (0 is no correction, 1 is full)")
    check_name("correction target (toward)", toward, TOWARD)
    check_name("weight normalization", normalization, NORMALIZATIONS)
    check_name("method of drawing", method, METHODS)
    if beta > 0 and normalization == "buffer_max" and method == "without_replacement":
        raise ConfigError(
            "buffer_max is the largest weight of a draw with replacement; without replacement use batch_max, mean or "
            "none"
        )


def check_alpha(alpha: float) -> float:
    """``alpha`` as a float. Raises :class:`ConfigError` unless it lies in [0, 1e6]."""
    number = checked_number("alpha", alpha)
    if not 0 <= number <= MAX_ALPHA:
        raise ConfigError(f"alpha {alpha} must lie in [0, {MAX_ALPHA:g}] (0 is uniform replay)")
    return number


class PrioritySampler:
    """Draws slots with P(i) proportional to (b_i f_i)^alpha, from one index or from one for each task.

    With several indexes, ``shares`` (NaN: by priority) and ``caps``, both (k,), say how a draw is divided.
    """

    def __init__(
        self,
        capacity: int,
        freshness: Freshness | Sequence[Freshness],
        alpha: float,
        seed: int,
        *,
        shares: Sequence[float] = (np.nan,),
        caps: Sequence[float] = (1.0,),
    ) -> None:
        alpha = check_alpha(alpha)
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
            raise ConfigError(f"seed {shown(seed)} must be an int >= 0")
        decays = freshness if isinstance(freshness, Sequence) else [freshness]
        for decay in decays:
            check_freshness(decay)
        self.rng = np.random.default_rng(seed)
        self.table = ItemTable(capacity)
        self.indexes = [PriorityIndex(self.table, number, decay, alpha) for number, decay in enumerate(decays)]
        self.now = 0
        self._twins = twins(kernels.ratios_to_least, capacity=capacity)
        self._warned_small_mean = False
        self._shares, self._caps = np.array(shares, dtype=np.float64), np.array(caps, dtype=np.float64)

    @property
    def alpha(self) -> float:
        """The exponent on priorities."""
        return self.indexes[0].keying.alpha

    @property
    def bases(self) -> NDArray[np.float64]:
        """Base priority of every slot, (capacity,)."""
        return self.table.bases

    @property
    def versions(self) -> NDArray[np.int64]:
        """Policy version of every slot, (capacity,)."""
        return self.table.versions

    @property
    def drawable(self) -> int:
        """Number of items with a positive weight."""
        if len(self.indexes) == 1:
            return self.indexes[0].drawable
        return sum(index.drawable for index in self.indexes)

    def put(
        self,
        slots: NDArray[np.int64],
        bases: NDArray[np.float64],
        versions: NDArray[np.int64],
        owners: NDArray[np.int16] | None = None,
        ranks: NDArray[np.int64] | None = None,
    ) -> None:
        """Let distinct ``slots`` hold items with these base priorities, policy versions, indexes and ranks; all (n,).

        A slot that another index holds has to be removed first. Raises as :meth:`check_arrivals`; then nothing
        has changed.
        """
        self.check_arrivals(versions, owners)
        table = self.table
        table.versions[slots] = versions
        table.owners[slots] = 0 if owners is None else owners
        table.ranks[slots] = slots if ranks is None else ranks
        for index in self.indexes:
            here = slice(None) if len(self.indexes) == 1 else index.holds(slots)
            if len(mine := slots[here]):
                if index.keying.max_age is not None:
                    index.watch(mine)
                index.put(mine, bases[here])

    def check_arrivals(self, versions: NDArray[np.int64], owners: NDArray[np.int16] | None = None) -> None:
        """Raise what the freshness raises for items of these policy versions and indexes, (n,), were they put now."""
        for number, index in enumerate(self.indexes):
            if index.keying.rate is None:
                index.keying.log_fresh(versions if owners is None else versions[owners == number])

    def set_bases(self, slots: NDArray[np.int64], bases: NDArray[np.float64]) -> None:
        """Change the base priorities of occupied ``slots``; both (n,), contiguous. The last value of a slot wins."""
        if len(self.indexes) == 1:
            self.indexes[0].set_bases(slots, bases)
            return
        for index in self.indexes:
            if (here := index.holds(slots)).any():
                index.set_bases(slots[here], bases[here])

    def remove(self, slots: NDArray[np.int64]) -> None:
        """Forget the items in distinct ``slots`` (n,)."""
        for index in self.indexes:
            if len(here := slots[index.holds(slots)]):
                self.table.bases[here] = 0.0
                self.table.owners[here] = -1
                index.erase(here)

    def advance(self, now: int) -> None:
        """Let the clock show policy version ``now``."""
        self.now = now
        for index in self.indexes:
            index.expire(now)

    def refresh(self) -> None:
        """Recompute every freshness that is no common factor, for the present policy version."""
        for index in self.indexes:
            index.refresh(self.now)

    def probabilities(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """P(i) of each slot; all zero when nothing is drawable."""
        chances = np.zeros(len(slots))
        if self.drawable == 0:
            return chances
        for index, part in zip(self.indexes, np.exp(self.log_parts()).tolist(), strict=True):
            here = index.holds(slots)
            if part > 0:
                chances[here] = part * index.tree.weights(slots[here]) / index.tree.total
        return chances

    def log_parts(self, name: Literal["weights", "freshness"] = "weights") -> NDArray[np.float64]:
        """Log of the part of a draw that every index gets, (k,); -inf is none at all."""
        if len(self.indexes) == 1:
            return np.zeros(1)
        trees = [index.tree if name == "weights" else index.freshness_tree() for index in self.indexes]
        masses = [index.log_mass(tree, self.now) for index, tree in zip(self.indexes, trees, strict=True)]
        return log_task_parts(np.array(masses), self._shares, self._caps)

    def _available(self, log_parts: NDArray[np.float64]) -> int:
        """Number of items with a positive chance: a task that gets no part of a draw has none."""
        shared = zip(self.indexes, log_parts.tolist(), strict=True)
        return sum(index.drawable for index, log_part in shared if log_part > -np.inf)

    def draw(self, count: int, method: Method = "stratified") -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """``count`` slots and the P(i) of each; without replacement its inclusion probability over ``count``.

        Raises :class:`SamplingError` when nothing is drawable, or too little for a draw without replacement.
        """
        if self.drawable == 0:
            raise SamplingError(
                f"a draw of {count} was asked for, but no stored item has a positive priority (capacity "
                f"{self.table.capacity})"
            )
        if method != "without_replacement":
            positions = positions_in_strata(self.rng, count, systematic=method == "systematic")
            if len(self.indexes) == 1:
                return self.indexes[0].tree.locate_strata(positions)
            return Mixture([index.tree for index in self.indexes], np.exp(self.log_parts())).locate_strata(positions)
        log_parts = self.log_parts()
        available = self._available(log_parts)
        if count > available:
            raise SamplingError(
                f"a draw of {count} without replacement was asked for, but only {available} items can be drawn"
            )
        return without_replacement(self.indexes, log_parts, self.rng, count)

    def sampling_weights(
        self,
        slots: NDArray[np.int64],
        probabilities: NDArray[np.float64],
        beta: float,
        toward: Toward,
        normalization: Normalization,
    ) -> NDArray[np.float64]:
        """(Q_i / P_i)^beta, (B,).

        Q is the distribution corrected toward: uniform over the drawable items (Schaul et al. 2016), or
        proportional to f_i^alpha, which corrects the base priority and keeps the freshness. ``buffer_max``
        divides by the largest weight that any drawable item could have. The arguments are those that
        :func:`check_correction` lets pass.
        """
        if beta == 0:
            return np.ones(len(slots), dtype=np.float64)
        if toward == "uniform" and normalization == "batch_max":  # Q is the same for all, and so cancels
            if self._twins is None:
                return np.asarray(np.power(probabilities.min() / probabilities, float(beta)))
            (ratios_to_least,) = self._twins
            ratios = np.empty(len(probabilities))
            ratios_to_least(probabilities, ratios)
            return np.power(ratios, float(beta), out=ratios)
        log_weights = np.log(probabilities)
        log_target = self._log_uniform() if toward == "uniform" else self._log_fresh(slots)
        np.subtract(log_target, log_weights, out=log_weights)
        log_weights *= beta
        if normalization == "none":
            return np.exp(log_weights)
        if normalization == "buffer_max":
            return self._watched(np.exp(log_weights - beta * self._log_largest(toward)))
        weights: NDArray[np.float64] = np.exp(log_weights - log_weights.max())  # the largest is exactly 1
        return weights / weights.mean() if normalization == "mean" else weights

    def _log_uniform(self) -> float:
        """log of Q, the same for all drawable items."""
        available = self.drawable if len(self.indexes) == 1 else self._available(self.log_parts())
        return -math.log(available)

    def _log_fresh(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """log of Q proportional to f^alpha, (n,), shared between tasks as a draw is."""
        log_target = np.full(len(slots), -np.inf)
        for index, log_part in zip(self.indexes, self.log_parts("freshness").tolist(), strict=True):
            here = index.holds(slots)
            if log_part > -np.inf:
                log_target[here] = index.keys(slots[here], "freshness") - index.freshness_tree().log_total + log_part
        return log_target

    def _log_largest(self, toward: Toward) -> float:
        """log of the largest Q_i / P_i of all drawable items."""
        largest = -np.inf
        parts = self.log_parts()
        fresh = self.log_parts("freshness") if toward == "freshness" else parts
        for index, log_part, log_fresh in zip(self.indexes, parts.tolist(), fresh.tolist(), strict=True):
            least = index.smallest("least" if toward == "uniform" else "least_base")
            if least is None or log_part == -np.inf:
                continue
            if toward == "uniform":
                log_ratio = -np.log(self._available(parts)) - least[1]
            else:
                log_ratio = log_fresh - index.freshness_tree().log_total - self.alpha * least[1]
            largest = max(largest, log_ratio + index.tree.log_total - log_part)
        return float(largest)

    def _watched(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Says once what a division by the whole buffer's largest weight has done."""
        mean = float(weights.mean())
        if mean < _SMALL_MEAN and not self._warned_small_mean:
            self._warned_small_mean = True
            warnings.warn(
                f"normalization buffer_max: the mean sampling weight is {mean:.2g}, which scales the learning rate "
                "down as much; with decayed priorities use batch_max or mean",
                stacklevel=5,  # the caller of ReplayBuffer.sample
            )
        return weights

    def state(self, slots: NDArray[np.int64]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Facts (ready for JSON) and arrays (n,) over the occupied ``slots``, for :meth:`restore`.

        The leaves are kept as they are: recomputed ones could differ in the last bit on another machine.
        """
        names = ("bases", "versions", "owners", "ranks", "alive")
        facts = {
            "now": self.now,
            "rng": self.rng.bit_generator.state,
            "indexes": [
                {
                    "epoch": index.keying.epoch,
                    "horizon": index.keying.horizon,
                    "references": {name: tree.reference for name, tree in index.sums.items()},
                }
                for index in self.indexes
            ],
        }
        leaves = {
            f"leaves/{number}/{name}": tree.weights(slots)
            for number, index in enumerate(self.indexes)
            for name, tree in index.sums.items()
        }
        return facts, {name: getattr(self.table, name)[slots] for name in names} | leaves

    def restore(self, slots: NDArray[np.int64], facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what :meth:`state` gave for the items in ``slots`` (n,), into an empty sampler."""
        for name in ("bases", "versions", "owners", "ranks", "alive"):
            getattr(self.table, name)[slots] = arrays[name]
        for number, (index, fact) in enumerate(zip(self.indexes, facts["indexes"], strict=True)):
            leaves = {name: arrays[f"leaves/{number}/{name}"] for name in fact["references"]}
            index.restore(slots, fact["epoch"], fact["horizon"], fact["references"], leaves)
        self.now = facts["now"]
        self.rng.bit_generator.state = facts["rng"]
