"""The numbers of an iteration, by name: rollout/, fresh/, replay/, eval/, time/."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from freshper.learning.learner import LearnerUpdate
from freshper.replay.batch import SampledBatch
from freshper.replay.buffer import ReplayBuffer
from freshper.replay.diagnostics import drift
from freshper.replay.freshness import Exponential
from freshper.rollout.collect import Rollout

_LOGPROB_GAP_LIMIT = 1e-3  # nats per token, fp32, the same engine for sampling and learning
_DRIFT_WINDOW = 64  # replay updates whose log-ratios describe the present drift


class Metrics:
    """Collects what happens in an iteration and hands it out as one flat dict; keeps the running totals."""

    def __init__(self) -> None:
        self.episodes = 0
        self.tokens = 0
        self._recent: deque[tuple[SampledBatch, LearnerUpdate]] = deque(maxlen=_DRIFT_WINDOW)
        self._warned = False
        self._begin()

    def _begin(self) -> None:
        self._values: dict[str, float] = {}
        self._updates: dict[str, list[LearnerUpdate]] = {"fresh": [], "replay": []}
        self._draws: list[SampledBatch] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the time inside under time/``part``_s."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - start

    def add(self, values: dict[str, float]) -> None:
        """Add finished numbers under their own names."""
        self._values |= values

    def rollout(self, rollout: Rollout) -> None:
        """What came of the collection; an episode that broke counts as an error and in nothing else."""
        whole = [t for t in rollout.transcripts if t.error is None]
        self.episodes += len(rollout.transcripts)
        sampled = sum(trajectory.response_length for trajectory in rollout.trajectories)
        self.tokens += sampled
        self._values |= {"rollout/errors": float(len(rollout.errors)), "rollout/tokens": float(sampled)}
        if not whole:
            return
        turns = [turn for transcript in whole for turn in transcript.turns]
        self._values |= {
            "rollout/score": float(np.mean([t.episode_return for t in whole])),
            "rollout/success": float(np.mean([t.success for t in whole])),
            "rollout/turns": len(turns) / len(whole),
            "rollout/invalid": float(np.mean([not turn.valid for turn in turns])),
        }

    def fresh(self, update: LearnerUpdate) -> None:
        """An update on the fresh batch. In the first one the learner's log-probs are those of the sampler's weights."""
        if not self._updates["fresh"]:
            gap = update.metrics["abs_log_ratio"]
            self._values["fresh/logprob_gap"] = gap
            if gap > _LOGPROB_GAP_LIMIT and not self._warned:
                self._warned = True
                warnings.warn(
                    f"sampler and learner disagree by {gap:.2g} nats per token on a batch that no update has touched "
                    f"(limit {_LOGPROB_GAP_LIMIT:g}): every importance ratio is off by that",
                    stacklevel=3,
                )
        self._updates["fresh"].append(update)

    def replay(self, batch: SampledBatch, update: LearnerUpdate) -> None:
        """A replay update and the draw behind it."""
        self._updates["replay"].append(update)
        self._draws.append(batch)
        self._recent.append((batch, update))

    def close(self, iteration: int, policy_version: int, buffer: ReplayBuffer, replay_ratio: int) -> dict[str, float]:
        """All numbers of the iteration; the next one begins."""
        values: dict[str, float] = {
            "iteration": iteration,
            "episodes": self.episodes,
            "policy_version": policy_version,
            "tokens": self.tokens,
        } | self._values
        for name, updates in self._updates.items():
            values |= _of_updates(name, updates)
        if replay_ratio:
            values |= {"replay/size": float(len(buffer)), "replay/updates": float(len(self._draws))}
            if isinstance(buffer.freshness, Exponential):
                values["replay/tau"] = buffer.freshness.tau
        if self._draws:
            values |= self._of_draws()
        values |= {f"time/{part}_s": seconds for part, seconds in self._seconds.items()}
        if rollout_seconds := self._seconds.get("rollout"):
            values["time/tokens_per_s"] = values["rollout/tokens"] / rollout_seconds
        self._begin()
        return values

    def _of_draws(self) -> dict[str, float]:
        ages = np.concatenate([draw.ages for draw in self._draws])
        weights = np.concatenate([draw.sampling_weights for draw in self._draws])
        keys = np.concatenate([draw.keys for draw in self._draws])
        log_ratios = np.concatenate([update.log_ratios for _, update in self._recent])
        # Of what was replayed, as it was drawn; the bins by age describe what is stored.
        ess_fraction, kl, _ = drift(log_ratios, np.ones_like(log_ratios))
        return {
            "replay/age_mean": float(ages.mean()),
            "replay/age_max": float(ages.max()),
            "replay/ess_fraction": ess_fraction,
            "replay/kl": kl,
            "replay/weight_mean": float(weights.mean()),
            "replay/weight_max": float(weights.max()),
            "replay/repeated": 1 - len(np.unique(keys)) / len(keys),
        }


def _of_updates(name: str, updates: list[LearnerUpdate]) -> dict[str, float]:
    """Mean over updates; the largest ratio, the last learning rate, the number skipped."""
    if not updates:
        return {}
    values = {}
    for key in updates[0].metrics:
        numbers = [update.metrics[key] for update in updates]
        whole = {"ratio_max": max(numbers), "learning_rate": numbers[-1]}
        values[f"{name}/{key}"] = whole.get(key, float(np.mean(numbers)))
    return values | {f"{name}/skipped": float(sum(not update.applied for update in updates))}
