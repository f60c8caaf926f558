"""ReplayBuffer: a store and a sampler that share a slot number. Four verbs: add, sample, update, save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freshper.errors import ClockError, ConfigError, SnapshotError, TrajectoryError
from freshper.replay import journal
from freshper.replay.freshness import Freshness, NoDecay, describe_freshness, freshness_from
from freshper.replay.priority import Priority, base_priorities, check_priority, checked_priorities
from freshper.replay.sampler import Normalization, PrioritySampler, SampledBatch, Toward, check_correction
from freshper.replay.store import TrajectoryStore
from freshper.trajectory import MAX_POLICY_VERSION, StopReason, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class PriorityUpdate:
    """What an update of priorities did: how many items it changed, and the keys it refused as gone or unknown."""

    updated: int
    refused: NDArray[np.int64]


class ReplayBuffer:
    """Prioritized experience replay of trajectories, with freshness.

    The chance of item i per draw is proportional to (b_i f(age_i))^alpha (Freshness-Aware PER,
    arXiv 2604.16918), with b_i the base priority, f the freshness, and age_i the given policy version minus the
    one that wrote the item.

    Args:
        capacity: trajectories kept; when full the oldest goes first.
        priority: "reward", "advantage", "td_error", "uniform", "success", or a function of a trajectory.
        freshness: decay of priorities with age; :class:`NoDecay` is standard PER.
        alpha: how strongly priorities matter; 0 is uniform replay.
        eps: added to the named measures so that a measure of zero stays drawable.
        seed: of the buffer's own random generator; the global ones are never touched.
    """

    def __init__(
        self,
        capacity: int,
        *,
        priority: Priority = "reward",
        freshness: Freshness | None = None,
        alpha: float = 0.6,
        eps: float = 0.1,
        seed: int = 0,
    ) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer)) or capacity < 1:
            raise ConfigError(f"capacity {capacity!r} must be an int >= 1")
        check_priority(priority, eps)
        self.priority = priority
        self.eps = float(eps)
        self._store = TrajectoryStore(int(capacity))
        self._sampler = PrioritySampler(int(capacity), freshness or NoDecay(), alpha, seed)
        self._policy_version = 0  # the newest version any caller has told us

    def __len__(self) -> int:
        """Number of stored trajectories."""
        return len(self._store)

    def __repr__(self) -> str:
        """Size and settings in a line."""
        return (
            f"ReplayBuffer({len(self)} of {self.capacity}, priority={self.priority!r}, "
            f"freshness={self.freshness}, alpha={self.alpha})"
        )

    @property
    def capacity(self) -> int:
        """The most trajectories that are kept."""
        return self._store.capacity

    @property
    def drawable(self) -> int:
        """Number of stored trajectories with a positive priority."""
        return self._sampler.drawable

    @property
    def freshness(self) -> Freshness:
        """The decay of priorities with age."""
        return self._sampler.freshness

    @property
    def alpha(self) -> float:
        """The exponent on priorities."""
        return self._sampler.alpha

    @property
    def policy_version(self) -> int:
        """The newest policy version that :meth:`add` or :meth:`sample` was told."""
        return self._policy_version

    def keys(self) -> NDArray[np.int64]:
        """Keys of all stored items, oldest first."""
        return self._store.keys[self._store.occupied()]

    def probabilities(self) -> NDArray[np.float64]:
        """P(i) of all stored items, in the order of :meth:`keys`."""
        return self._sampler.probabilities(self._store.occupied())

    def base_priorities(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float64]:
        """The base priorities (n,) that this buffer gives to these trajectories, stored or not."""
        return base_priorities(trajectories, self.priority, self.eps)

    def add(self, trajectories: Sequence[Trajectory], *, policy_version: int) -> NDArray[np.int64]:
        """Store finished trajectories, each with its own base priority; returns their keys (n,).

        All or nothing. Raises :class:`ClockError` for a trajectory newer than ``policy_version`` or a version
        older than an earlier call's, :class:`TrajectoryError` for an episode that ended in an error,
        :class:`PriorityError` for a priority that is no finite number >= 0, :class:`CapacityError` for more
        trajectories than fit.
        """
        if isinstance(trajectories, Trajectory):
            raise TypeError("add takes a sequence of trajectories: write buffer.add([trajectory], ...)")
        trajectories = tuple(trajectories)
        version = self._checked_version(policy_version)
        for number, trajectory in enumerate(trajectories):
            _check_storable(number, trajectory, version)
        bases = self.base_priorities(trajectories)
        versions = np.array([trajectory.policy_version for trajectory in trajectories], dtype=np.int64)
        slots = self._store.add(trajectories)  # the first change: nothing after it can fail
        self._sampler.put(slots, bases, versions)
        self._policy_version = version
        return self._store.keys[slots]

    def sample(
        self,
        batch_size: int,
        *,
        policy_version: int,
        beta: float = 0.0,
        toward: Toward = "uniform",
        normalization: Normalization = "batch_max",
    ) -> SampledBatch:
        """Draw ``batch_size`` items with replacement, one per stratum of the priority mass. O(B log N).

        ``beta`` > 0 weighs item i by (Q_i / P_i)^beta; ``toward`` chooses Q. Toward "uniform" undoes the
        freshness as well as the priority; toward "freshness" corrects the priority only. ``normalization``
        divides by the batch's largest weight, by its mean, or not at all.

        Raises :class:`ClockError` when ``policy_version`` is older than an earlier call's,
        :class:`SamplingError` when nothing is drawable.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
            raise ConfigError(f"batch_size {batch_size!r} must be an int >= 1")
        version = self._checked_version(policy_version)
        check_correction(beta, toward, normalization)  # before the draw: a refused call must leave no trace
        slots, probabilities = self._sampler.draw(int(batch_size))
        weights = self._sampler.sampling_weights(slots, probabilities, beta, toward, normalization)
        self._policy_version = version
        return SampledBatch(
            keys=self._store.keys[slots],
            probabilities=probabilities,
            base_priorities=self._sampler.bases[slots],
            sampling_weights=weights,
            ages=version - self._sampler.versions[slots],
            trajectories=self._store.get(slots),
        )

    def update_priorities(self, keys: ArrayLike, base_priorities: ArrayLike) -> PriorityUpdate:
        """Set the base priorities of ``keys`` (n,) to ``base_priorities`` (n,): final values, no eps is added.

        Of a key that occurs twice the last value wins. Keys of evicted or unknown items are refused one by one
        and returned. Raises :class:`TypeError` for keys that are no integers and :class:`PriorityError` for
        a bad value or a length mismatch; then nothing has changed.
        """
        asked = np.asarray(keys)
        if asked.size == 0:
            asked = asked.astype(np.int64)
        if not np.issubdtype(asked.dtype, np.integer):
            raise TypeError(f"keys have dtype {asked.dtype}: pass the integer keys of a draw or an add")
        if asked.ndim != 1:
            raise TypeError(f"keys have shape {asked.shape}: they must be (n,)")
        values = checked_priorities(base_priorities, len(asked), lambda at: f"key {asked[at]}")
        slots = self._store.find(asked.astype(np.int64))
        live = slots >= 0
        # Of duplicates the last wins: unique() keeps the first, so look from behind.
        unique, first = np.unique(slots[live][::-1], return_index=True)
        self._sampler.set_bases(unique, values[live][::-1][first])
        return PriorityUpdate(updated=len(unique), refused=asked[~live].astype(np.int64))

    def save(self, path: str | Path) -> None:
        """Write everything to one file, atomically: after a crash the old file or the new one is there, whole.

        A priority that is a function is not written: pass it to :meth:`load` again.
        """
        slots = self._store.occupied()
        facts, arrays = self._sampler.state(slots)
        meta = {
            "capacity": self.capacity,
            "priority": self.priority if isinstance(self.priority, str) else None,
            "freshness": describe_freshness(self.freshness),
            "alpha": self.alpha,
            "eps": self.eps,
            "policy_version": self._policy_version,
            "added": self._store.added,
            "sampler": facts,
        }
        journal.write_snapshot(Path(path), meta, arrays, self._store.get(slots))

    @classmethod
    def load(cls, path: str | Path, *, priority: Priority | None = None) -> ReplayBuffer:
        """The buffer that :meth:`save` wrote: same contents, and bit for bit the same next draws.

        ``priority`` must be given when the saved one was a function, and only then.
        Raises :class:`SnapshotError` when the file is damaged or of an unknown format.
        """
        meta, arrays, trajectories = journal.read_snapshot(Path(path))
        if (meta["priority"] is None) != (priority is not None):
            was = "a function: pass it to load" if meta["priority"] is None else repr(meta["priority"])
            raise ConfigError(f"the saved buffer's priority was {was}; load was given {priority!r}")
        buffer = cls(
            meta["capacity"],
            priority=meta["priority"] if priority is None else priority,
            freshness=freshness_from(meta["freshness"]),
            alpha=meta["alpha"],
            eps=meta["eps"],
        )
        buffer._restore(meta, arrays, trajectories)
        return buffer

    def _restore(
        self, meta: dict[str, Any], arrays: dict[str, NDArray[Any]], trajectories: Sequence[Trajectory]
    ) -> None:
        self._store.restore(trajectories, meta["added"])
        slots = self._store.occupied()
        for name, count in [("trajectories", len(trajectories)), *((name, len(arrays[name])) for name in arrays)]:
            if count != len(slots):
                raise SnapshotError(f"the snapshot holds {count} {name} of {len(slots)} items")
        versions = np.array([trajectory.policy_version for trajectory in trajectories], dtype=np.int64)
        self._sampler.restore(slots, versions, meta["sampler"], arrays)
        self._policy_version = meta["policy_version"]

    def _checked_version(self, policy_version: int) -> int:
        if isinstance(policy_version, bool) or not isinstance(policy_version, (int, np.integer)):
            raise TypeError(f"policy_version {policy_version!r} must be an int: optimizer updates applied")
        if policy_version < self._policy_version:
            raise ClockError(
                f"policy_version {policy_version} is older than {self._policy_version}, which an earlier call gave: "
                "the clock counts optimizer updates and never runs backwards"
            )
        if policy_version > MAX_POLICY_VERSION:
            raise ClockError(f"policy_version {policy_version} must be < 2^63: versions are kept as int64")
        return int(policy_version)


def _check_storable(number: int, trajectory: Trajectory, version: int) -> None:
    if not isinstance(trajectory, Trajectory):
        raise TypeError(f"item {number} is a {type(trajectory).__name__}: a flat sequence of Trajectory is needed")
    if trajectory.policy_version > version:
        raise ClockError(
            f"trajectory {number} was written by policy version {trajectory.policy_version}, but the policy is at "
            f"{version}: its freshness would exceed 1; nothing was added"
        )
    if trajectory.stop_reason is StopReason.ERROR:
        raise TrajectoryError(f"trajectory {number} ended in an error: such an episode is never replayed")
