"""Advantages of fresh and of replayed trajectories: stored at collection, or from the present critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freshper.errors import DivergedError
from freshper.learning.advantages import ADVANTAGES, NEEDS_GROUPS, group_facts, penalized_returns, token_rewards
from freshper.learning.critic import Critic
from freshper.learning.gae import GaeBatch, Moments, gae
from freshper.learning.kl import kl_penalties
from freshper.learning.learner import Learner
from freshper.training.config import TrainConfig
from freshper.trajectory import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """What the critic will be fitted to."""

    batch: GaeBatch
    values: list[NDArray[np.float64]]


class Estimator:
    """Turns trajectories into trajectories with advantages.

    Without a critic replayed trajectories keep the advantages that they were stored with: their siblings and their
    batch are gone. With one, GAE is computed anew from the present values, normalized as the latest fresh batch was.
    """

    def __init__(self, config: TrainConfig, learner: Learner, critic: Critic | None) -> None:
        self._config, self._learner = config, learner
        self.critic = critic
        self.moments: Moments | None = None
        self._pending: _Pending | None = None
        self._failures = 0

    def fresh(self, trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], dict[str, float]]:
        """With advantages, as they will be stored; and what there is to say about the batch."""
        algorithm, kl = self._config.algorithm, self._config.kl
        penalties = self._penalties(trajectories)
        facts: dict[str, float] = {}
        if penalties is not None:
            tokens = sum(trajectory.response_length for trajectory in trajectories)
            facts["fresh/reward_kl"] = sum(float(penalty.sum()) for penalty in penalties) / tokens
        if self.critic is not None:
            batch = self._credited(self.critic, trajectories, penalties, None)
            self.moments = batch.moments
            return batch.trajectories, facts
        returns = None
        if penalties is not None:
            returns = penalized_returns(trajectories, penalties, kl.weight, algorithm.gamma)
        if algorithm.advantage in NEEDS_GROUPS:
            groups = group_facts(trajectories, algorithm.gamma, returns)
            facts["fresh/groups_equal"] = len(groups.equal) / len(groups.names)
        return ADVANTAGES[algorithm.advantage](trajectories, algorithm.gamma, returns), facts

    def replayed(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """With the advantages to learn from now."""
        if self.critic is None:
            return trajectories
        return self._credited(self.critic, trajectories, self._penalties(trajectories), self.moments).trajectories

    def fit(self, sampling_weights: NDArray[np.float64] | None = None, *, applied: bool = True) -> dict[str, float]:
        """One critic update on the batch that was estimated last; nothing where there is no critic.

        Nor where the policy's update was not ``applied``: an ill batch moves no weight. Raises
        :class:`DivergedError` after guard.patience updates in a row that were not finite, and so not applied.
        """
        if self.critic is None or self._pending is None:
            return {}
        pending, self._pending = self._pending, None
        if not applied:
            return {}
        batch = pending.batch
        update = self.critic.update(batch.trajectories, batch.targets, pending.values, sampling_weights)
        self._failures = 0 if update.applied else self._failures + 1
        if self._failures >= self._config.guard.patience:
            raise DivergedError(
                f"{self._failures} updates of the critic in a row were not finite (guard.patience "
                f"{self._config.guard.patience}; value loss {update.metrics['value_loss']}): lower "
                f"critic.learning_rate ({self._config.critic.learning_rate:g})"
            )
        return update.metrics | {"value_skipped": float(not update.applied)}

    def _penalties(self, trajectories: Sequence[Trajectory]) -> list[NDArray[np.float64]] | None:
        """KL of every token (T,) to the reference, where rewards are to pay for it.

        Of replayed trajectories it is what it was at collection: both the recorded log-probs and the reference stay.
        """
        kl = self._config.kl
        if kl.weight == 0 or kl.place != "reward":
            return None
        return kl_penalties(trajectories, self._learner.score_reference(trajectories), kl.estimator)

    def _credited(
        self,
        critic: Critic,
        trajectories: Sequence[Trajectory],
        penalties: Sequence[NDArray[np.float64]] | None,
        moments: Moments | None,
    ) -> GaeBatch:
        settings, rewards = self._config, None
        if penalties is not None:
            pairs = zip(trajectories, penalties, strict=True)
            rewards = [token_rewards(trajectory, settings.kl.weight * penalty) for trajectory, penalty in pairs]
        values = critic.values(trajectories)
        batch = gae(
            trajectories,
            values,
            gamma=settings.algorithm.gamma,
            gae_lambda=settings.critic.gae_lambda,
            rewards=rewards,
            moments=moments,
        )
        self._pending = _Pending(batch, values)
        return batch
