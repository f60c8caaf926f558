"""Advantages: what each sampled token is to be credited with. numpy, computed once, at collection.

An estimator takes the trajectories of a fresh batch and gives them back with advantages; replay uses those that are
stored. Of returns that are equal, up to the rounding of their sums, nothing can be learned: there every advantage is
exactly 0, never rounding errors divided by rounding errors.

Estimators over groups compare whole episodes that share a start. The return R_i of an episode is the return-to-go of
its first sampled token: with ``gamma`` below 1 the turn rewards discounted to the first turn. Every sampled token of
the episode gets the same advantage. A trajectory that is alone in its group has nothing to be compared with: 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ConfigError, TrajectoryError
from freshper.trajectory import Trajectory

Floats = NDArray[np.float64]

_ROUNDING = 1e-12  # of the rewards' size, at least 1: 0.1 + 0.2 and 0.3 differ, and that must not be blown up


class Estimator(Protocol):
    """From trajectories to trajectories with advantages; ``returns`` (T,) each replace those of the turn rewards."""

    def __call__(
        self, trajectories: Sequence[Trajectory], gamma: float = 1.0, returns: Sequence[Floats] | None = None
    ) -> list[Trajectory]:
        """The trajectories with their advantages, in the same order."""


def returns_to_go(trajectory: Trajectory, gamma: float = 1.0) -> Floats:
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


def token_rewards(trajectory: Trajectory, penalties: Floats | None = None) -> Floats:
    """Reward of every token, (T,): a turn's reward at the last token of its reply, minus ``penalties`` (T,).

    Penalties count on sampled tokens only. Raises :class:`TrajectoryError` where they do not fit or are not finite.
    """
    rewards = np.zeros(len(trajectory))
    for turn in trajectory.turns:
        rewards[turn.end - 1] = turn.reward
    if penalties is None:
        return rewards
    if penalties.shape != rewards.shape or not np.isfinite(penalties[trajectory.response_mask]).all():
        raise TrajectoryError(
            f"penalties of shape {penalties.shape} for {len(trajectory)} tokens: one finite number per token is needed"
        )
    return rewards - np.where(trajectory.response_mask, penalties, 0.0)


def penalized_returns(
    trajectories: Sequence[Trajectory], penalties: Sequence[Floats], weight: float, gamma: float = 1.0
) -> list[Floats]:
    """Returns-to-go (T,) of token rewards from which ``weight`` times a penalty (T,) was taken, such as a KL.

    G_t = r_t - weight kl_t + g_t G_{t+1} over sampled tokens, with g_t = ``gamma`` from the last token of a reply to
    the next reply and 1 within a reply (as arXiv 2501.03262 does in a single turn). At weight 0 they are those of
    :func:`returns_to_go`.
    """
    results = []
    for trajectory, penalty in zip(trajectories, penalties, strict=True):
        rewards = token_rewards(trajectory, weight * penalty)
        ahead = 0.0
        for turn in reversed(trajectory.turns):
            reply = rewards[turn.reply_start : turn.end]  # becomes its own returns
            reply[-1] += gamma * ahead
            reply[:] = np.cumsum(reply[::-1])[::-1]
            ahead = float(reply[0])
        results.append(rewards)
    return results


def reinforce_plus_plus(
    trajectories: Sequence[Trajectory], gamma: float = 1.0, returns: Sequence[Floats] | None = None
) -> list[Trajectory]:
    """The trajectories with REINFORCE++ advantages (arXiv 2501.03262): returns normalized over the whole batch.

    A_t = (G_t - mean G) / std G, with mean and standard deviation over all response tokens of the batch. When
    all returns are equal, up to the rounding of their sums, there is nothing to learn from: every advantage is
    exactly 0.
    """
    returns = _returns(trajectories, gamma, returns)
    if not trajectories:
        return []
    masks = [trajectory.response_mask for trajectory in trajectories]
    pooled = np.concatenate([values[mask] for values, mask in zip(returns, masks, strict=True)])
    if _equal(pooled, trajectories):
        return _credited(trajectories, np.zeros(len(trajectories)))
    mean, scale = pooled.mean(), pooled.std()
    return [
        trajectory.with_columns(advantages=np.where(mask, (values - mean) / scale, 0.0))
        for trajectory, values, mask in zip(trajectories, returns, masks, strict=True)
    ]


def reinforce_plus_plus_baseline(
    trajectories: Sequence[Trajectory], gamma: float = 1.0, returns: Sequence[Floats] | None = None
) -> list[Trajectory]:
    """REINFORCE++ with the group mean as baseline (arXiv 2501.03262, section 3.2): A_i = (R_i - mean_group R) / std.

    The standard deviation is that of R_i - mean_group R over the trajectories of the batch, whose mean is 0 as it
    is. No further mean is subtracted: a group whose returns are all equal would get an advantage from the others.
    """
    centered = _centered(trajectories, gamma, returns)
    scale = centered.std() if centered.any() else 1.0
    return _credited(trajectories, centered / scale)


def grpo(
    trajectories: Sequence[Trajectory], gamma: float = 1.0, returns: Sequence[Floats] | None = None
) -> list[Trajectory]:
    """GRPO (arXiv 2402.03300): A_i = (R_i - mean_group R) / std_group R.

    The standard deviation divides by n - 1, as TRL and verl do; nothing is added to it, equal returns are 0 before.
    """
    advantages = _centered(trajectories, gamma, returns)
    for rows in _groups(trajectories):
        if advantages[rows].any():
            advantages[rows] /= advantages[rows].std(ddof=1)
    return _credited(trajectories, advantages)


def grpo_no_std(
    trajectories: Sequence[Trajectory], gamma: float = 1.0, returns: Sequence[Floats] | None = None
) -> list[Trajectory]:
    """A_i = R_i - mean_group R: GRPO without the division, which favors groups that are nearly all right or wrong.

    Dr. GRPO (arXiv 2503.20783) is this estimator with the aggregation "fixed": the token losses are summed and
    divided by a constant length, so that a long wrong answer is not cheaper than a short one.
    """
    return _credited(trajectories, _centered(trajectories, gamma, returns))


def rloo(
    trajectories: Sequence[Trajectory], gamma: float = 1.0, returns: Sequence[Floats] | None = None
) -> list[Trajectory]:
    """REINFORCE leave-one-out (Kool et al. 2019; arXiv 2402.14740): A_i = R_i - mean of the others of its group.

    That is n / (n - 1) times the distance from the mean of all n.
    """
    advantages = _centered(trajectories, gamma, returns)
    for rows in _groups(trajectories):
        advantages[rows] *= len(rows) / max(1, len(rows) - 1)
    return _credited(trajectories, advantages)


ADVANTAGES: dict[str, Estimator] = {
    "reinforce++": reinforce_plus_plus,
    "reinforce++-baseline": reinforce_plus_plus_baseline,
    "grpo": grpo,
    "grpo-no-std": grpo_no_std,
    "dr-grpo": grpo_no_std,
    "rloo": rloo,
}
NEEDS_GROUPS = frozenset(ADVANTAGES) - {"reinforce++"}  # of at least 2 trajectories: all else earns no advantage


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What a batch offers to estimators over groups: all groups' names, and of those the useless ones.

    ``alone`` have one trajectory, ``equal`` several with equal returns; in both every advantage is 0.
    """

    names: tuple[str, ...]
    alone: tuple[str, ...]
    equal: tuple[str, ...]


def group_facts(
    trajectories: Sequence[Trajectory], gamma: float = 1.0, returns: Sequence[Floats] | None = None
) -> GroupFacts:
    """The groups of a batch in order of appearance: which of them no estimator over groups can learn from."""
    totals = _totals(trajectories, _returns(trajectories, gamma, returns))
    groups = {trajectories[rows[0]].group: rows for rows in _groups(trajectories)}
    alone = tuple(name for name, rows in groups.items() if len(rows) == 1)
    equal = (
        name
        for name, rows in groups.items()
        if len(rows) > 1 and _equal(totals[rows], [trajectories[row] for row in rows])
    )
    return GroupFacts(tuple(groups), alone, tuple(equal))


def _returns(trajectories: Sequence[Trajectory], gamma: float, given: Sequence[Floats] | None) -> Sequence[Floats]:
    if not 0 <= gamma <= 1:
        raise ConfigError(f"gamma {gamma} must be in [0, 1]")
    if given is None:
        return [returns_to_go(trajectory, gamma) for trajectory in trajectories]
    if [values.shape for values in given] != [(len(trajectory),) for trajectory in trajectories]:
        raise TrajectoryError(
            f"returns were given for {len(given)} of {len(trajectories)} trajectories, or with another length than "
            "theirs: one number per token is needed"
        )
    return given


def _totals(trajectories: Sequence[Trajectory], returns: Sequence[Floats]) -> Floats:
    """Return of every episode, (n,)."""
    firsts = [trajectory.turns[0].reply_start for trajectory in trajectories]
    return np.array([values[first] for values, first in zip(returns, firsts, strict=True)], dtype=np.float64)


def _groups(trajectories: Sequence[Trajectory]) -> list[NDArray[np.int64]]:
    """Rows of every group, in order of appearance."""
    rows: dict[str, list[int]] = {}
    for row, trajectory in enumerate(trajectories):
        rows.setdefault(trajectory.group, []).append(row)
    return [np.array(members, dtype=np.int64) for members in rows.values()]


def _equal(returns: Floats, trajectories: Sequence[Trajectory]) -> bool:
    """Whether the returns of these trajectories differ by no more than their sums can be rounded."""
    largest = max(sum(abs(turn.reward) for turn in trajectory.turns) for trajectory in trajectories)
    return bool(np.ptp(returns) <= _ROUNDING * max(1.0, largest))


def _centered(trajectories: Sequence[Trajectory], gamma: float, returns: Sequence[Floats] | None) -> Floats:
    """R_i minus the mean of its group, (n,); exactly 0 where a group's returns are all equal."""
    totals = _totals(trajectories, _returns(trajectories, gamma, returns))
    centered = np.zeros(len(totals))
    for rows in _groups(trajectories):
        if not _equal(totals[rows], [trajectories[row] for row in rows]):
            centered[rows] = totals[rows] - totals[rows].mean()
    return centered


def _credited(trajectories: Sequence[Trajectory], advantages: Floats) -> list[Trajectory]:
    """The same advantage for every sampled token of a trajectory; ``advantages`` (n,)."""
    return [
        trajectory.with_columns(advantages=np.where(trajectory.response_mask, advantage, 0.0))
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
    ]
