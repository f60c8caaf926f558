"""The hybrid loop (Freshness-Aware PER, arXiv 2604.16918): collect, learn on-policy, remember, replay, publish.

What is not here: how episodes are played (rollout), what an update does (learning), how a draw is made (replay),
how the policy begins (warm_start). Replay ratio 0 is on-policy training: the replay loop runs zero times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from freshper.envs import make_env
from freshper.learning.advantages import ADVANTAGES
from freshper.rollout.collect import Start, collect
from freshper.trajectory import SamplingParams
from freshper.training.build import make_buffer, make_learner
from freshper.training.config import TrainConfig
from freshper.training.evaluate import evaluate_both, limits_of
from freshper.training.interrupt import StopRequest
from freshper.training.metrics import Metrics
from freshper.training.run_folder import RunFolder, choose_folder
from freshper.training.seeds import derive_seed
from freshper.training.warm_start import warm_started_policy


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Where a run was written, how it ended ("finished" or "interrupted"), and what result.json holds."""

    folder: Path
    status: str
    facts: dict[str, Any]


def train(
    config: TrainConfig,
    *,
    on_iteration: Callable[[Mapping[str, float]], None] = lambda metrics: None,
    note: Callable[[str], None] = lambda text: None,
) -> TrainResult:
    """Run ``config`` to its end or to the first SIGINT; ``on_iteration`` gets every iteration's metrics.

    Raises :class:`ConfigError`, :class:`RunFolderError`, or :class:`DivergedError`; result.json says so then.
    """
    torch.set_num_threads(config.run.threads)
    started = time.perf_counter()
    facts: dict[str, Any] = {"status": "failed", "iterations": 0, "episodes": 0, "policy_version": 0}
    with RunFolder(choose_folder(config), config) as folder:
        try:
            run(config, folder, facts, on_iteration, note)
        except KeyboardInterrupt:
            facts["status"] = "interrupted"
            raise
        finally:
            folder.finish(facts | {"seconds": time.perf_counter() - started})
    return TrainResult(folder.path, facts["status"], facts)


def run(
    config: TrainConfig,
    folder: RunFolder,
    facts: dict[str, Any],
    on_iteration: Callable[[Mapping[str, float]], None],
    note: Callable[[str], None],
) -> None:
    """The whole story of a run; ``facts`` is kept up to date as it goes."""
    policy, facts["warm_start"] = warm_started_policy(config, note)
    learner = make_learner(policy.model, config)
    buffer = make_buffer(config)
    envs = [make_env(config.run.task, split="train") for _ in range(config.rollout.episodes)]
    sampling = SamplingParams(config.rollout.temperature, config.rollout.top_p, config.rollout.top_k)
    advantages = ADVANTAGES[config.algorithm.advantage]
    replay, seed = config.replay, config.run.seed
    metrics, best = Metrics(), float("-inf")
    with StopRequest() as stop:
        for iteration in range(1, config.run.iterations + 1):
            with metrics.timed("iteration"):
                with metrics.timed("rollout"):
                    rollout = collect(
                        envs,
                        policy,
                        starts(config, iteration),
                        limits=limits_of(config.rollout),
                        sampling=sampling,
                        seed=derive_seed(seed, "sampling", iteration),
                    )
                    metrics.rollout(rollout)
                with metrics.timed("update"):
                    fresh = advantages(rollout.trajectories, config.algorithm.gamma)
                    for _ in range(1 + config.algorithm.extra_epochs):
                        metrics.fresh(learner.update(fresh))
                    buffer.add(fresh, policy_version=learner.version)
                    ready = buffer.drawable >= replay.batch_size
                    for _ in range(replay.ratio if ready else 0):
                        batch = buffer.sample(
                            replay.batch_size,
                            policy_version=learner.version,
                            beta=replay.correction.beta(iteration / config.run.iterations),
                            toward=replay.correction.toward,
                            normalization=replay.correction.normalization,
                        )
                        update = learner.update(batch.trajectories, batch.sampling_weights)
                        buffer.update_priorities(batch.keys, buffer.base_priorities(batch.trajectories))
                        metrics.replay(batch, update)
                policy.publish(learner.model, learner.version)
            last = stop.asked or iteration == config.run.iterations
            if last or iteration % config.eval.every == 0:
                with metrics.timed("eval"):
                    facts["eval"], played = evaluate_both(policy, config.run.task, config.eval, config.rollout)
                metrics.add(facts["eval"])
                folder.log_sample(iteration, "eval", played.transcripts[0])
                folder.save_model("last", policy.save)
                if facts["eval"]["eval/sampled_score"] > best:
                    best = facts["eval"]["eval/sampled_score"]
                    folder.save_model("best", policy.save)
            if last or iteration % config.run.sample_every == 0:
                folder.log_sample(iteration, "fresh", rollout.transcripts[0])
                folder.log_drift(iteration, metrics.drift_by_age())
            row = metrics.close(iteration, learner.version, len(buffer), replay.ratio)
            facts |= {name: row[name] for name in ("episodes", "policy_version")} | {"iterations": iteration}
            folder.log(row)
            on_iteration(row)
            if last:
                break
    facts["status"] = "finished" if facts["iterations"] == config.run.iterations else "interrupted"


def starts(config: TrainConfig, iteration: int) -> list[Start]:
    """The levels of an iteration, decided by the run's seed alone: every arm meets the same ones."""
    groups = range(config.rollout.episodes // config.rollout.group_size)
    seeds = [derive_seed(config.run.seed, "level", iteration, group) for group in groups]
    return [
        Start(level, f"{iteration}-{group}")
        for group, level in zip(groups, seeds, strict=True)
        for _ in range(config.rollout.group_size)
    ]
