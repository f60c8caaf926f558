"""A curriculum by success rate: which task of a mixture is played how often."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from freshper.envs import Env, MixtureEnv
from freshper.errors import SnapshotError
from freshper.rollout.collect import Transcript


class Curriculum:
    """Tasks that the policy sometimes solves, and sometimes not, are played more than those it always or never does.

    With p_k the success rate of task k and w_k its weight in the mixture, a ``part`` c of all episodes goes to the
    tasks in proportion to w_k p_k (1 - p_k), the rest in proportion to w_k: no task is ever left out while c < 1.
    p (1 - p) is the variance of success, so what the episodes of a group can differ by (sampling for learnability:
    Foster et al. 2025, arXiv 2502.12272, there for single questions). p_k is (successes + 1) / (episodes + 2) of the
    latest ``window`` episodes of the task; what was never played counts as one half.

    With ``part`` 0, and for a task that is no mixture, nothing changes.
    """

    def __init__(self, part: float, window: int) -> None:
        self._part = part
        self._window = window
        self._successes: dict[str, deque[bool]] = {}

    def observe(self, transcripts: Sequence[Transcript]) -> None:
        """Count episodes; one that broke counts as failed, or a broken task would be played ever more."""
        for transcript in transcripts:
            own = self._successes.setdefault(transcript.task, deque(maxlen=self._window))
            own.append(transcript.success and transcript.error is None)

    def success_rate(self, task: str) -> float:
        """p of a task, in (0, 1)."""
        own = self._successes.get(task, ())
        return (sum(own) + 1) / (len(own) + 2)

    def apply(self, envs: Sequence[Env]) -> dict[str, float]:
        """Let all mixtures among ``envs`` draw by what is known now; returns the share of each task."""
        told: dict[str, float] = {}
        for env in envs if self._part > 0 else ():
            if isinstance(env, MixtureEnv):
                rates = np.array([self.success_rate(task) for task in env.tasks])
                weights = np.array(env.weights)
                learnable = weights * rates * (1 - rates)
                shares = (1 - self._part) * weights + self._part * learnable / learnable.sum()
                env.draw_by(shares.tolist())
                told = dict(zip(env.tasks, shares.tolist(), strict=True))
        return told

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` goes on from, as plain values."""
        return {task: [int(success) for success in own] for task, own in self._successes.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`. Raises :class:`SnapshotError` where it is none, and changes nothing then."""
        try:
            known = {str(task): deque(map(bool, own), maxlen=self._window) for task, own in state.items()}
        except (AttributeError, TypeError) as error:
            raise SnapshotError(f"the saved curriculum is damaged ({type(error).__name__}: {error})") from None
        self._successes = known
