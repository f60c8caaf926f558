"""The hybrid loop (Freshness-Aware PER, arXiv 2604.16918): collect, learn on-policy, remember, replay, publish.

What is not here: how episodes are played (rollout), what an update does (learning), how a draw is made (replay),
how the policy begins (warm_start). Replay ratio 0 is on-policy training: the replay loop runs zero times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from freshper.errors import EnvError
from freshper.learning.advantages import ADVANTAGES
from freshper.rollout.collect import Rollout, collect
from freshper.training.build import Parts, build, sampling_of, starts
from freshper.training.config import TrainConfig
from freshper.training.evaluate import evaluate_both, limits_of
from freshper.training.interrupt import StopRequest, termination_interrupts
from freshper.training.metrics import Metrics
from freshper.training.run_folder import RunFolder, TrainResult, choose_folder
from freshper.training.seeds import derive_seed
from freshper.training.warm_start import warm_started_policy

Listener = Callable[[Mapping[str, float]], None]
Note = Callable[[str], None]


def train(config: TrainConfig, *, on_iteration: Listener | None = None, note: Note | None = None) -> TrainResult:
    """Run ``config`` to its end or to the first SIGINT; ``on_iteration`` gets metrics, ``note`` a sentence per phase.

    Raises :class:`RunFolderError` when the folder is taken, :class:`DivergedError` when updates stop being finite,
    :class:`EnvError` when all episodes of an iteration broke.
    """
    torch.set_num_threads(config.run.threads)
    started = time.perf_counter()
    facts: dict[str, Any] = {"status": "failed", "iterations": 0, "episodes": 0, "policy_version": 0}
    with termination_interrupts(), RunFolder(choose_folder(config), config) as folder:
        try:
            run(config, folder, facts, on_iteration, note)
        except KeyboardInterrupt:
            facts["status"] = "interrupted"
            raise
        finally:
            folder.finish(facts | {"seconds": time.perf_counter() - started})
    return TrainResult(folder.path, facts["status"], facts)


def run(
    config: TrainConfig, folder: RunFolder, facts: dict[str, Any], on_iteration: Listener | None, note: Note | None
) -> None:
    """Iterate, evaluate, write; ``facts`` always says how far the run has come."""
    policy = warm_started_policy(config, note)
    facts["warm_start"], _ = evaluate_both(policy, config.run.task, config.eval, config.rollout)
    parts, metrics, best = build(config, policy), Metrics(), float("-inf")
    if note:
        note(f"training; held-out success before RL: {facts['warm_start']['sampled_success']:.2f}")
    with StopRequest() as stop:
        for iteration in range(1, config.run.iterations + 1):
            rollout = iterate(config, parts, iteration, metrics)
            last = stop.asked or iteration == config.run.iterations
            if last or iteration % config.eval.every == 0:
                with metrics.timed("eval"):
                    facts["eval"], played = evaluate_both(policy, config.run.task, config.eval, config.rollout)
                metrics.add({f"eval/{name}": value for name, value in facts["eval"].items()})
                folder.log_sample(iteration, "eval", played.transcripts[0])
                folder.save_model("last", policy.save)
                if facts["eval"]["sampled_score"] > best:
                    best = facts["eval"]["sampled_score"]
                    folder.save_model("best", policy.save)
            if last or iteration % config.run.sample_every == 0:
                folder.log_sample(iteration, "fresh", rollout.transcripts[0])
                folder.log_drift(iteration, parts.buffer.drift_by_age())
            row = metrics.close(iteration, parts.learner.version, parts.buffer, config.replay.ratio)
            facts |= {"iterations": iteration, "episodes": row["episodes"], "policy_version": row["policy_version"]}
            folder.log(row)
            if on_iteration:
                on_iteration(row)
            if last:
                break
    facts["status"] = "finished" if facts["iterations"] == config.run.iterations else "interrupted"


def iterate(config: TrainConfig, parts: Parts, iteration: int, metrics: Metrics) -> Rollout:
    """One pass of the method: everything that changes the policy or the buffer happens here."""
    policy, learner, buffer, replay = parts.policy, parts.learner, parts.buffer, config.replay
    with metrics.timed("rollout"):
        rollout = collect(
            parts.envs,
            policy,
            starts(config, iteration),
            limits=limits_of(config.rollout),
            sampling=sampling_of(config.rollout),
            seed=derive_seed(config.run.seed, "sampling", iteration),
        )
        metrics.rollout(rollout)
    if not rollout.trajectories:
        raise EnvError(f"every episode of iteration {iteration} broke, the first with {rollout.errors[0].error}")
    with metrics.timed("update"):
        fresh = ADVANTAGES[config.algorithm.advantage](rollout.trajectories, config.algorithm.gamma)
        for _ in range(1 + config.algorithm.extra_epochs):
            metrics.fresh(learner.update(fresh))
        buffer.add(fresh, policy_version=learner.version)
        enough = buffer.drawable >= replay.batch_size
        for _ in range(replay.ratio if enough else 0):
            batch = buffer.sample(
                replay.batch_size,
                policy_version=learner.version,
                **replay.correction.arguments(iteration / config.run.iterations),
            )
            update = learner.update(batch.trajectories, batch.sampling_weights)
            if update.applied:
                buffer.observe(batch, update.log_ratios, update.clip_fractions)
            # The measure that set a priority sets it again; it moves where the measure does.
            buffer.update_priorities(batch.keys, buffer.base_priorities(batch.trajectories))
            metrics.replay(batch, update)
        policy.publish(learner.model, learner.version)
    return rollout
