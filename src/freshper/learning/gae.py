"""Generalized advantage estimation over the tokens of conversations (arXiv 1506.02438).

Only sampled tokens are actions: observations are skipped, so credit flows through them undiminished. With V_t the value
of the prefix before token t, and t + 1 the next **sampled** token:

    delta_t = r_t + g_t V_{t+1} - V_t            A_t = delta_t + g_t lambda A_{t+1}            target_t = A_t + V_t

r_t is the reward of the turn at the last token of its reply, 0 elsewhere (minus a KL penalty, if there is one). g_t is
``gamma`` where t ends a reply and 1 within a reply: the discount counts turns, so a long reply costs nothing.
``lambda`` counts tokens: credit fades by lambda per sampled token, by gamma lambda across a turn. At lambda 1, A_t is
the return-to-go minus V_t; at lambda 0 it is delta_t.

After the last token V is 0, also where an episode ended at a limit on turns or tokens. Pardo et al. (arXiv 1712.00378)
distinguish limits that belong to the task, which end an episode like any other end, from limits that only save time,
after which one bootstraps. Here limits belong to the task: evaluation stops at the same ones, the score counts what was
earned within them, and the conversation shows how far it has come. Whoever continues episodes elsewhere passes the
value of what follows as ``bootstrap``.

Delayed trajectories are not corrected for: on replayed ones the targets are those of the policy that wrote them, under
the present values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ConfigError, TrajectoryError
from freshper.learning.advantages import token_rewards
from freshper.trajectory import StopReason, Trajectory

Floats = NDArray[np.float64]

_ROUNDING = 1e-12  # of the advantages' terms: below it they differ by nothing but how sums were rounded


@dataclass(frozen=True, slots=True, eq=False)
class TokenCredit:
    """Advantages, TD errors and value targets of one trajectory, (T,) each, 0 off the mask."""

    advantages: Floats
    td_errors: Floats
    targets: Floats


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and standard deviation of advantages over the response tokens of a batch."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True, eq=False)
class GaeBatch:
    """Trajectories with normalized advantages and raw TD errors, value targets (T,) each, and what was divided by."""

    trajectories: list[Trajectory]
    targets: list[Floats]
    moments: Moments


def token_credit(
    trajectory: Trajectory,
    values: Floats,
    *,
    gamma: float,
    gae_lambda: float,
    rewards: Floats | None = None,
    bootstrap: float = 0.0,
) -> TokenCredit:
    """GAE of one trajectory from ``values`` (T,), read on sampled tokens only; see the module for the definition.

    ``rewards`` (T,) replace those of the turns. ``bootstrap`` is the value of the state in which the next reply would
    have begun. Raises :class:`ConfigError` for a gamma or lambda outside [0, 1] and for a bootstrap after an end that
    the environment made, :class:`TrajectoryError` for values or rewards that do not fit or are not finite.
    """
    if not (0 <= gamma <= 1 and 0 <= gae_lambda <= 1):
        raise ConfigError(f"gamma {gamma} and lambda {gae_lambda} must be in [0, 1]")
    if bootstrap != 0 and trajectory.stop_reason is StopReason.TERMINATED:
        raise ConfigError(f"bootstrap {bootstrap} after an episode that the environment ended: nothing follows it")
    mask = trajectory.response_mask
    rewards = token_rewards(trajectory) if rewards is None else rewards
    for name, column in (("values", values), ("rewards", rewards)):
        if column.shape != mask.shape or not np.isfinite(column[mask]).all():
            raise TrajectoryError(f"{name} of shape {column.shape}: one finite number per token of {mask.shape} needed")
    now = values[mask].astype(np.float64)
    discounts = np.ones(len(mask))
    discounts[[turn.end - 1 for turn in trajectory.turns]] = gamma
    discounts = discounts[mask]
    deltas = rewards[mask] + discounts * np.append(now[1:], bootstrap) - now
    advantages = np.empty(len(now))
    ahead = 0.0
    fades = (gae_lambda * discounts).tolist()
    for place, delta in zip(range(len(now) - 1, -1, -1), reversed(deltas.tolist()), strict=True):
        ahead = delta + fades[place] * ahead
        advantages[place] = ahead
    return TokenCredit(*(_spread(column, mask) for column in (advantages, deltas, advantages + now)))


def gae(
    trajectories: Sequence[Trajectory],
    values: Sequence[Floats],
    *,
    gamma: float,
    gae_lambda: float,
    rewards: Sequence[Floats] | None = None,
    moments: Moments | None = None,
) -> GaeBatch:
    """The trajectories with GAE advantages, normalized, and raw TD errors, which are what ``td_error`` replays by.

    Normalized is by mean and standard deviation over the batch's response tokens, or by those in ``moments``: give
    those of the latest fresh batch for a replayed one, whose own would depend on what was drawn. (Where that batch had
    advantages that were all equal it knows no scale, and the batch's own serves.) Advantages that are all equal up to
    rounding are exactly 0.
    """
    given = [None] * len(trajectories) if rewards is None else rewards
    credits = [
        token_credit(trajectory, value, gamma=gamma, gae_lambda=gae_lambda, rewards=reward)
        for trajectory, value, reward in zip(trajectories, values, given, strict=True)
    ]
    if not credits:
        raise ConfigError("GAE needs at least one trajectory")
    pairs = list(zip(trajectories, credits, strict=True))
    pooled = np.concatenate([credit.advantages[trajectory.response_mask] for trajectory, credit in pairs])
    if moments is None or moments.std == 0:
        size = max(
            max(float(np.abs(credit.targets).max()), sum(abs(turn.reward) for turn in trajectory.turns))
            for trajectory, credit in pairs
        )
        flat = float(np.ptp(pooled)) <= _ROUNDING * max(1.0, size)
        moments = Moments(float(pooled.mean()), 0.0 if flat else float(pooled.std()))
    normalized = [
        trajectory.with_columns(
            advantages=_normalized(credit.advantages, trajectory.response_mask, moments), td_errors=credit.td_errors
        )
        for trajectory, credit in pairs
    ]
    return GaeBatch(normalized, [credit.targets for credit in credits], moments)


def _normalized(advantages: Floats, mask: NDArray[np.bool_], moments: Moments) -> Floats:
    if moments.std == 0:
        return np.zeros(len(advantages))
    return np.where(mask, (advantages - moments.mean) / moments.std, 0.0)


def _spread(column: Floats, mask: NDArray[np.bool_]) -> Floats:
    """Values of sampled tokens (n,) at their places, (T,)."""
    whole = np.zeros(len(mask))
    whole[mask] = column
    return whole
