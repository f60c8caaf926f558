"""Replayed trajectories inside the fresh update: a bounded share of it, and groups that stand in for useless ones.

Both use the advantages that were stored at collection: siblings of a replayed trajectory are not there any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from freshper.errors import SamplingError
from freshper.replay.batch import SampledBatch
from freshper.replay.buffer import ReplayBuffer
from freshper.training.config import TrainConfig
from freshper.trajectory import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class FreshBatch:
    """What the fresh update learns from: n trajectories, and their sampling weights (n,) where some are replayed."""

    trajectories: tuple[Trajectory, ...]
    sampling_weights: NDArray[np.float64] | None = None
    backfilled: int = 0
    """Groups that a replayed one stands in for."""
    mixed: int = 0
    """Replayed trajectories beside the fresh ones."""


def groups_of(trajectories: Iterable[Trajectory]) -> list[tuple[Trajectory, ...]]:
    """Neighbors of one group together, in order."""
    return [tuple(members) for _, members in groupby(trajectories, key=lambda trajectory: trajectory.group)]


def fresh_batch(
    fresh: Sequence[Trajectory], buffer: ReplayBuffer, config: TrainConfig, *, policy_version: int, progress: float
) -> FreshBatch:
    """``fresh`` with what the settings mix into it; ``progress`` in [0, 1] of the run decides beta.

    A buffer that has too little to draw from leaves the batch as it is.
    """
    batch = FreshBatch(tuple(fresh))
    correction = config.replay.correction.arguments(progress)
    if config.mix.backfill:
        useless = [group for group in groups_of(fresh) if not _teaches(group)]
        # More than needed, because groups that teach nothing are stored too: what is left over is not used.
        wanted = min(2 * len(useless), buffer.drawable)
        if wanted and (drawn := _draw(buffer, wanted, policy_version, correction)):
            batch = _backfilled(fresh, drawn)
    count = round(len(fresh) * config.mix.share / (1 - config.mix.share) / _trajectories_per_item(buffer, config))
    if count and (drawn := _draw(buffer, count, policy_version, correction)):
        batch = FreshBatch(
            (*batch.trajectories, *drawn.trajectories),
            np.concatenate([_weights(batch), drawn.trajectory_weights]),
            batch.backfilled,
            len(drawn.trajectories),
        )
    return batch


def _draw(buffer: ReplayBuffer, count: int, policy_version: int, correction: dict[str, object]) -> SampledBatch | None:
    """Distinct items, as twice the same trajectory in one update would be an epoch; None where too few are left."""
    try:
        return buffer.sample(
            count,
            policy_version=policy_version,
            method="without_replacement",
            **correction,  # type: ignore[arg-type]
        )
    except SamplingError:
        return None


def _teaches(group: Sequence[Trajectory]) -> bool:
    """Whether any token of the group has an advantage other than 0."""
    return any(trajectory.advantages is not None and trajectory.advantages.any() for trajectory in group)


def _backfilled(fresh: Sequence[Trajectory], drawn: SampledBatch) -> FreshBatch:
    """The groups of ``fresh``, and for each that teaches nothing one of ``drawn`` that does, while there are any."""
    stand_ins = [
        (group, weight)
        for group, weight in zip(drawn.groups, drawn.sampling_weights.tolist(), strict=True)
        if _teaches(group)
    ]
    trajectories: list[Trajectory] = []
    weights: list[float] = []
    backfilled = 0
    for group in groups_of(fresh):
        if not _teaches(group) and backfilled < len(stand_ins):
            chosen, weight = stand_ins[backfilled]
            backfilled += 1
        else:
            chosen, weight = group, 1.0
        trajectories += chosen
        weights += [weight] * len(chosen)
    return FreshBatch(tuple(trajectories), np.array(weights), backfilled)


def _weights(batch: FreshBatch) -> NDArray[np.float64]:
    return np.ones(len(batch.trajectories)) if batch.sampling_weights is None else batch.sampling_weights


def _trajectories_per_item(buffer: ReplayBuffer, config: TrainConfig) -> int:
    return config.rollout.group_size if buffer.unit == "group" else 1
