"""How good a policy is on held-out levels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from freshper.errors import EnvError
from freshper.policies.core import Policy
from freshper.rollout.collect import Start, Transcript
from freshper.training.build import sampling_of
from freshper.training.config import TrainConfig
from freshper.training.metrics import by_task, mean_measures
from freshper.training.sections import EPISODES_AT_ONCE
from freshper.training.seeds import derive_seed
from freshper.training.tasks import make_task, play
from freshper.trajectory import SamplingParams


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean success and score of the episodes that came to an end, all episodes as text, and how many broke.

    ``measures`` are the means of what the task measures beside its rewards, over the episodes that did.
    """

    success: float
    score: float
    transcripts: tuple[Transcript, ...]
    errors: int
    measures: Mapping[str, float]


def evaluate(policy: Policy, config: TrainConfig, episodes: int, seed: int, *, greedy: bool) -> Evaluation:
    """Play ``episodes`` held-out levels, decided by ``seed``; sampled at the run's settings, or greedily."""
    sampling = SamplingParams(temperature=0.0) if greedy else sampling_of(config.rollout)
    envs = [make_task(config, "eval") for _ in range(min(episodes, EPISODES_AT_ONCE))]
    transcripts: list[Transcript] = []
    for first in range(0, episodes, EPISODES_AT_ONCE):
        numbers = range(first, min(first + EPISODES_AT_ONCE, episodes))
        starts = [Start(derive_seed(seed, "eval level", number), f"eval-{number}") for number in numbers]
        played = play(config, envs, policy, starts, "eval", sampling=sampling, seed=derive_seed(seed, "eval", first))
        transcripts += played.transcripts
    whole = [t for t in transcripts if t.error is None]
    if not whole:
        raise EnvError(f"every one of {episodes} evaluation episodes broke, the first with {transcripts[0].error}")
    return Evaluation(
        success=float(np.mean([t.success for t in whole])),
        score=float(np.mean([t.episode_return for t in whole])),
        transcripts=tuple(transcripts),
        errors=len(transcripts) - len(whole),
        measures=mean_measures(whole),
    )


def evaluate_both(policy: Policy, config: TrainConfig) -> tuple[dict[str, float], Evaluation]:
    """Success and score, sampled and greedy, how many episodes broke, and the sampled episodes.

    Raises :class:`EnvError` when all of a kind broke.
    """
    metrics: dict[str, float] = {"errors": 0.0}
    played = {}
    for name, greedy in (("greedy", True), ("sampled", False)):
        played[name] = evaluate(policy, config, config.eval.episodes, config.eval.seed, greedy=greedy)
        metrics["errors"] += played[name].errors
        metrics |= {f"{name}_success": played[name].success, f"{name}_score": played[name].score}
        metrics |= {f"{name}_{measure}": value for measure, value in played[name].measures.items()}
        for task, own in by_task([t for t in played[name].transcripts if t.error is None]).items():
            metrics[f"{task}/{name}_success"] = float(np.mean([t.success for t in own]))
    return metrics, played["sampled"]
