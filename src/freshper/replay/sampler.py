"""Draws: which items, with which probability, and the sampling weight that corrects the uneven draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ConfigError, SamplingError, UnknownNameError
from freshper.replay.freshness import Freshness, check_freshness
from freshper.replay.sum_tree import SumTree
from freshper.trajectory import Trajectory

Toward = Literal["uniform", "freshness"]
Normalization = Literal["batch_max", "mean", "none"]
TOWARD: tuple[Toward, ...] = ("uniform", "freshness")
NORMALIZATIONS: tuple[Normalization, ...] = ("batch_max", "mean", "none")
# Far more than anybody draws with, and small enough for every key to stay finite.
MAX_ALPHA = 1e6


@dataclass(frozen=True, slots=True, eq=False)
class SampledBatch:
    """The facts of one draw of B items, drawn with replacement. All arrays are (B,), in the order of the draw."""

    keys: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    """P(i): chance of the item per single draw, from the tree that it was drawn from."""
    base_priorities: NDArray[np.float64]
    """b_i, before freshness and alpha."""
    sampling_weights: NDArray[np.float64]
    """(Q_i / P_i)^beta, normalized as asked for; ones at beta 0."""
    ages: NDArray[np.int64]
    """Policy versions since the item's oldest turn was sampled."""
    trajectories: tuple[Trajectory, ...]

    def __len__(self) -> int:
        """Batch size B."""
        return len(self.keys)

    @property
    def mean_sampling_weight(self) -> float:
        """By how much the weights scale the mean gradient; always worth logging."""
        return float(self.sampling_weights.mean())


def check_correction(beta: float, toward: Toward, normalization: Normalization) -> None:
    """Raise :class:`ConfigError` for a sampling correction that does not exist."""
    if not (np.isfinite(beta) and beta >= 0):
        raise ConfigError(f"beta {beta} must be finite and >= 0 (0 is no correction, 1 is full)")
    if toward not in TOWARD:
        raise UnknownNameError("correction target (toward)", str(toward), TOWARD)
    if normalization not in NORMALIZATIONS:
        raise UnknownNameError("weight normalization", str(normalization), NORMALIZATIONS)


class PrioritySampler:
    """Keeps log b_i and the version v_i of every slot, and draws with P(i) proportional to (b_i f_i)^alpha.

    log (b_i f_i)^alpha = alpha (log b_i + v_i rate) - alpha v rate for the current version v. The last term
    is the same for all items, so the key alpha (log b_i + (v_i - epoch) rate) gives the exact distribution
    at any time, and passing time costs nothing. ``epoch`` and the tree's reference move together when an
    exponent leaves the range where it is exact: one vectorized pass from the raw values.
    """

    def __init__(self, capacity: int, freshness: Freshness, alpha: float, seed: int) -> None:
        if not 0 <= alpha <= MAX_ALPHA:
            raise ConfigError(f"alpha {alpha} must lie in [0, {MAX_ALPHA:g}] (0 is uniform replay)")
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
            raise ConfigError(f"seed {seed!r} must be an int >= 0")
        check_freshness(freshness)
        self.freshness = freshness
        self.alpha = float(alpha)
        self.rng = np.random.default_rng(seed)
        self.bases = np.zeros(capacity, dtype=np.float64)
        self.versions = np.zeros(capacity, dtype=np.int64)
        self.epoch = 0
        self.drawable = 0
        self.tree = SumTree(capacity)
        self._freshness_tree: SumTree | None = None  # Q_i for toward="freshness", made when first asked for

    def put(self, slots: NDArray[np.int64], bases: NDArray[np.float64], versions: NDArray[np.int64]) -> None:
        """Let distinct ``slots`` hold items with these base priorities and policy versions; all (n,)."""
        if len(slots) == 0:
            return
        self.drawable += int(np.count_nonzero(bases)) - int(np.count_nonzero(self.bases[slots]))
        self.bases[slots] = bases
        self.versions[slots] = versions
        self._write(slots)

    def set_bases(self, slots: NDArray[np.int64], bases: NDArray[np.float64]) -> None:
        """Change the base priorities of distinct occupied ``slots``; both (n,)."""
        self.put(slots, bases, self.versions[slots])

    def probabilities(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """P(i) of each slot; all zero when nothing is drawable."""
        return self.tree.weights(slots) / self.tree.total if self.drawable else np.zeros(len(slots))

    def draw(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """``count`` slots drawn with replacement, one from each of ``count`` equal strata, and their P(i)."""
        if self.drawable == 0:
            raise SamplingError(
                f"a draw of {count} was asked for, but no stored item has a positive priority (capacity "
                f"{self.tree.capacity})"
            )
        total = self.tree.total
        strata = (np.arange(count) + self.rng.random(count)) / count
        slots = self.tree.find(strata * total)
        return slots, self.tree.weights(slots) / total

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
        proportional to f_i^alpha, which corrects the base priority and keeps the freshness.
        """
        check_correction(beta, toward, normalization)
        if beta == 0:
            return np.ones(len(slots), dtype=np.float64)
        if toward == "uniform":
            log_target: NDArray[np.float64] = np.full(len(slots), -np.log(self.drawable))
        else:
            tree = self._freshness_index()
            log_target = self._freshness_keys(slots) - tree.reference - np.log(tree.total)
        log_weights = beta * (log_target - np.log(probabilities))
        if normalization == "none":
            return np.exp(log_weights)
        weights: NDArray[np.float64] = np.exp(log_weights - log_weights.max())  # the largest is exactly 1
        return weights / weights.mean() if normalization == "mean" else weights

    def _keys(self, slots: NDArray[np.int64] | slice) -> NDArray[np.float64]:
        bases = self.bases[slots]
        drawable = bases > 0
        log_bases = np.log(bases, where=drawable, out=np.zeros_like(bases))
        keys = self.alpha * (log_bases + (self.versions[slots] - self.epoch) * self.freshness.rate)
        return np.where(drawable, keys, -np.inf)

    def _freshness_keys(self, slots: NDArray[np.int64] | slice) -> NDArray[np.float64]:
        keys = self.alpha * self.freshness.rate * (self.versions[slots] - self.epoch)
        return np.where(self.bases[slots] > 0, keys, -np.inf)

    def _write(self, slots: NDArray[np.int64]) -> None:
        """Bring the trees in line with the raw values of ``slots``."""
        writes = [(self.tree, self._keys(slots))]
        if self._freshness_tree is not None:
            writes.append((self._freshness_tree, self._freshness_keys(slots)))
        if all(tree.accepts(keys) for tree, keys in writes):
            for tree, keys in writes:
                tree.set(slots, keys)
            if self.drawable == 0 or not any(tree.underflowed for tree, _ in writes):
                return
        self.rebase()

    def rebase(self) -> None:
        """Recompute every weight from the raw values, with the newest item as the epoch."""
        positive = self.bases > 0
        self.epoch = int(self.versions[positive].max()) if positive.any() else 0
        everything = slice(None)
        self.tree.rebuild(self._keys(everything))
        if self._freshness_tree is not None:
            self._freshness_tree.rebuild(self._freshness_keys(everything))

    def state(self, slots: NDArray[np.int64]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Facts (ready for JSON) and arrays (n,) over the occupied ``slots``, for :meth:`restore`.

        The leaves are kept as they are: recomputed ones could differ in the last bit on another machine.
        """
        trees = self._trees()
        facts = {
            "epoch": self.epoch,
            "references": {name: tree.reference for name, tree in trees.items()},
            "rng": self.rng.bit_generator.state,
        }
        return facts, {"bases": self.bases[slots], **{name: tree.weights(slots) for name, tree in trees.items()}}

    def restore(
        self,
        slots: NDArray[np.int64],
        versions: NDArray[np.int64],
        facts: Mapping[str, Any],
        arrays: Mapping[str, NDArray[Any]],
    ) -> None:
        """Put back what :meth:`state` gave for the items in ``slots`` (n,), written by ``versions`` (n,)."""
        self.bases[slots] = arrays["bases"]
        self.versions[slots] = versions
        self.drawable = int(np.count_nonzero(self.bases))
        self.epoch = facts["epoch"]
        if "freshness_leaves" in facts["references"]:
            self._freshness_tree = SumTree(self.tree.capacity)
        for name, tree in self._trees().items():
            leaves = np.zeros(tree.capacity)
            leaves[slots] = arrays[name]
            tree.restore(leaves, facts["references"][name])
        self.rng.bit_generator.state = facts["rng"]

    def _trees(self) -> dict[str, SumTree]:
        trees = {"leaves": self.tree}
        return trees if self._freshness_tree is None else trees | {"freshness_leaves": self._freshness_tree}

    def _freshness_index(self) -> SumTree:
        if self._freshness_tree is None:
            self._freshness_tree = SumTree(self.tree.capacity)
            self._freshness_tree.rebuild(self._freshness_keys(slice(None)))
        return self._freshness_tree
