"""Advantages: what each sampled token is to be credited with. numpy, computed once, at collection."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ConfigError
from freshper.trajectory import Trajectory

_ROUNDING = 1e-12  # of the rewards' size, at least 1: 0.1 + 0.2 and 0.3 differ, and that must not be blown up


def returns_to_go(trajectory: Trajectory, gamma: float = 1.0) -> NDArray[np.float64]:
    """Discounted reward still to come at every response token, (T,), 0 elsewhere.

    A turn's reward counts for all tokens of its reply and, discounted by ``gamma`` per turn, for all turns
    before: a terminal reward reaches the first turn.
    """
    values = np.zeros(len(trajectory))
    ahead = 0.0
    for turn in reversed(trajectory.turns):
        ahead = turn.reward + gamma * ahead
        values[turn.reply_start : turn.end] = ahead
    return values


def reinforce_plus_plus(trajectories: Sequence[Trajectory], gamma: float = 1.0) -> list[Trajectory]:
    """The trajectories with REINFORCE++ advantages (arXiv 2501.03262): returns normalized over the whole batch.

    A_t = (G_t - mean G) / std G, with mean and standard deviation over all response tokens of the batch. When
    all returns are equal, up to the rounding of their sums, there is nothing to learn from: every advantage is
    exactly 0.
    """
    if not 0 <= gamma <= 1:
        raise ConfigError(f"gamma {gamma} must be in [0, 1]")
    if not trajectories:
        return []
    returns = [returns_to_go(trajectory, gamma) for trajectory in trajectories]
    masks = [trajectory.response_mask for trajectory in trajectories]
    pooled = np.concatenate([values[mask] for values, mask in zip(returns, masks, strict=True)])
    largest = max(sum(abs(turn.reward) for turn in trajectory.turns) for trajectory in trajectories)
    if np.ptp(pooled) <= _ROUNDING * max(1.0, largest):
        return [trajectory.with_columns(advantages=np.zeros(len(trajectory))) for trajectory in trajectories]
    mean, scale = pooled.mean(), pooled.std()
    return [
        trajectory.with_columns(advantages=np.where(mask, (values - mean) / scale, 0.0))
        for trajectory, values, mask in zip(trajectories, returns, masks, strict=True)
    ]


ADVANTAGES = {"reinforce++": reinforce_plus_plus}
