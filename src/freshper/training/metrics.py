"""The numbers of an iteration, by name: rollout/, fresh/, replay/, eval/, time/."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.errors import SnapshotError
from freshper.learning.learner import LearnerUpdate
from freshper.replay.batch import SampledBatch
from freshper.replay.buffer import ReplayBuffer
from freshper.replay.diagnostics import drift
from freshper.replay.freshness import Exponential
from freshper.rollout.collect import Rollout, Transcript
from freshper.trajectory import StopReason, Trajectory

_LOGPROB_GAP_LIMIT = 1e-3  # nats per token, fp32, the same engine for sampling and learning
_DRIFT_WINDOW = 64  # replay updates whose log-ratios describe the present drift


class Metrics:
    """Collects what happens in an iteration and hands it out as one flat dict; keeps the running totals."""

    def __init__(self) -> None:
        self.episodes = 0
        self.tokens = 0
        self._recent: deque[NDArray[np.float64]] = deque(maxlen=_DRIFT_WINDOW)  # log-ratios (B,) of each
        self._warned = False
        self._begin()

    def _begin(self) -> None:
        self._values: dict[str, float] = {}
        self._updates: dict[str, list[LearnerUpdate]] = {"fresh": [], "replay": []}
        self._draws: list[SampledBatch] = []
        self._measured: dict[str, list[float]] = {}
        self._seconds: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        """The running totals between two iterations, as plain JSON values: what :meth:`restore` goes on from.

        Floats survive JSON exactly, so a resumed run has the metrics of an uninterrupted one, bit for bit. What
        happened since the last :meth:`close` is not in it: it belongs to an iteration that is not whole.
        """
        return {
            "episodes": self.episodes,
            "tokens": self.tokens,
            "warned": self._warned,
            "recent": [log_ratios.tolist() for log_ratios in self._recent],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`. Raises :class:`SnapshotError` where it is none, and changes nothing then."""
        try:
            episodes, tokens, warned = int(state["episodes"]), int(state["tokens"]), bool(state["warned"])
            recent = [np.array(log_ratios, dtype=np.float64) for log_ratios in state["recent"]]
            if any(log_ratios.ndim != 1 for log_ratios in recent):
                raise ValueError("recent must hold one list of numbers per replay update")
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotError(f"the saved metrics are damaged ({type(error).__name__}: {error})") from None
        self.episodes, self.tokens, self._warned = episodes, tokens, warned
        self._recent = deque(recent, maxlen=_DRIFT_WINDOW)
        self._begin()

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the time inside under time/``part``_s."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - start

    def add(self, values: Mapping[str, float]) -> None:
        """Add finished numbers under their own names."""
        self._values |= {name: float(value) for name, value in values.items()}  # numpy's are no plain values

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
            "rollout/score_std": float(np.std([t.episode_return for t in whole])),
            "rollout/success": float(np.mean([t.success for t in whole])),
            "rollout/turns": len(turns) / len(whole),
            "rollout/reply_tokens": sampled / len(turns),
            "rollout/token_limit": float(np.mean([t.stop_reason is StopReason.TOKEN_LIMIT for t in whole])),
            "rollout/invalid": float(np.mean([not turn.valid for turn in turns])),
        }
        self._values |= {f"rollout/{name}": value for name, value in mean_measures(whole).items()}
        for task, own in by_task(whole).items():
            self._values |= {
                f"rollout/{task}/episodes": float(len(own)),
                f"rollout/{task}/success": float(np.mean([t.success for t in own])),
                f"rollout/{task}/score": float(np.mean([t.episode_return for t in own])),
            }

    def measure(self, source: str, values: Mapping[str, float]) -> None:
        """Add what was measured once or more in an iteration, under ``source``/: it is averaged as updates are."""
        for name, value in values.items():
            self._measured.setdefault(f"{source}/{name}", []).append(value)

    def fresh(self, update: LearnerUpdate, trajectories: Sequence[Trajectory] = (), since: int = 0) -> None:
        """An update on the fresh batch. In the first one the learner's log-probs are those of the sampler's weights.

        Where replayed trajectories are mixed in, ``trajectories`` (B,) are the batch, and ``since`` is the policy
        version that wrote the fresh ones: the others have drifted, and rightly so. The gap is then that of the fresh
        ones, from log-ratios of whole trajectories: the least that it can be.
        """
        if not self._updates["fresh"]:
            self._check_gap(update, trajectories, since)
        self._updates["fresh"].append(update)

    def _check_gap(self, update: LearnerUpdate, trajectories: Sequence[Trajectory], since: int) -> None:
        gap = update.metrics["abs_log_ratio"]
        rows = [place for place, trajectory in enumerate(trajectories) if trajectory.policy_version >= since]
        if len(rows) < len(trajectories):
            if not rows:  # replayed groups stand in for all fresh ones
                return
            tokens = sum(trajectories[place].response_length for place in rows)
            gap = float(np.abs(update.log_ratios[rows]).sum()) / tokens
        self._values["fresh/logprob_gap"] = gap
        if gap > _LOGPROB_GAP_LIMIT and not self._warned:
            self._warned = True
            warnings.warn(
                f"sampler and learner disagree by {gap:.2g} nats per token on a batch that no update has touched "
                f"(limit {_LOGPROB_GAP_LIMIT:g}): every importance ratio is off by that",
                stacklevel=4,
            )

    def replay(self, batch: SampledBatch, update: LearnerUpdate) -> None:
        """A replay update and the draw behind it."""
        self._updates["replay"].append(update)
        self._draws.append(batch)
        # A ratio that is not finite stands for an update that was skipped, and would spoil the whole window.
        self._recent.append(update.log_ratios[np.isfinite(update.log_ratios)])

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
        values |= {name: _together(name, numbers) for name, numbers in self._measured.items()}
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
        log_ratios = np.concatenate(self._recent)
        measured = {}
        if len(log_ratios):
            # Of what was replayed, as it was drawn; the bins by age describe what is stored.
            ess_fraction, kl, _ = drift(log_ratios, np.ones_like(log_ratios))
            measured = {"replay/ess_fraction": ess_fraction, "replay/kl": kl}
        return measured | {
            "replay/age_mean": float(ages.mean()),
            "replay/age_max": float(ages.max()),
            "replay/weight_mean": float(weights.mean()),
            "replay/weight_max": float(weights.max()),
            "replay/repeated": 1 - len(np.unique(keys)) / len(keys),
        }


def _of_updates(name: str, updates: list[LearnerUpdate]) -> dict[str, float]:
    """Each number over the updates that have it, and how many were skipped."""
    if not updates:
        return {}
    values = {}
    for key in dict.fromkeys(key for update in updates for key in update.metrics):
        told = "reference_kl" if key == "kl" else key  # replay/kl is the drift from the behavior policy
        values[f"{name}/{told}"] = _together(key, [update.metrics[key] for update in updates if key in update.metrics])
    return values | {f"{name}/skipped": float(sum(not update.applied for update in updates))}


def _together(name: str, numbers: list[float]) -> float:
    """One number for an iteration: the largest *_max, the last *learning_rate, the mean of anything else."""
    if name.endswith("_max"):
        return float(np.max(numbers))  # unlike max(), it does not hide a NaN
    return float(numbers[-1] if name.endswith("learning_rate") else np.mean(numbers))


def by_task(transcripts: Sequence[Transcript]) -> dict[str, list[Transcript]]:
    """The episodes of each task; empty where all are of one, whose numbers are those of the whole."""
    tasks: dict[str, list[Transcript]] = {}
    for transcript in transcripts:
        tasks.setdefault(transcript.task, []).append(transcript)
    return {task: tasks[task] for task in sorted(tasks)} if len(tasks) > 1 else {}


def mean_measures(transcripts: Sequence[Transcript]) -> dict[str, float]:
    """The mean of every measure over the episodes that have it."""
    values: dict[str, list[float]] = {}
    for transcript in transcripts:
        for name, value in transcript.measures.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(measured)) for name, measured in values.items()}
