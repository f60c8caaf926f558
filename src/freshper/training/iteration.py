"""One iteration of the method (Freshness-Aware PER, arXiv 2604.16918): collect, learn, remember, replay, publish.

Everything that changes the policy or the buffer happens here. Replay ratio 0 is on-policy training: the replay loop
runs zero times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from freshper.errors import EnvError
from freshper.replay.batch import SampledBatch
from freshper.rollout.collect import Rollout
from freshper.training.build import Parts, sampling_of, starts
from freshper.training.config import TrainConfig
from freshper.training.metrics import Metrics
from freshper.training.mixing import fresh_batch, groups_of
from freshper.training.seeds import derive_seed
from freshper.training.tasks import play
from freshper.trajectory import Trajectory


def iterate(config: TrainConfig, parts: Parts, iteration: int, metrics: Metrics) -> Rollout:
    """One pass of the method; raises :class:`EnvError` when every episode broke."""
    with metrics.timed("rollout"):
        shares = parts.curriculum.apply(parts.envs)
        rollout = play(
            config,
            parts.envs,
            parts.policy,
            starts(config, iteration),
            "train",
            sampling=sampling_of(config.rollout),
            seed=derive_seed(config.run.seed, "sampling", iteration),
            parallel=config.policy.parallel or None,
        )
        metrics.rollout(rollout)
        metrics.add({f"rollout/{task}/share": share for task, share in shares.items()})
        parts.curriculum.observe(rollout.transcripts)
    if not rollout.trajectories:
        raise EnvError(f"every episode of iteration {iteration} broke, the first with {rollout.errors[0].error}")
    with metrics.timed("update"):
        learn(config, parts, iteration, rollout.trajectories, metrics)
        for _ in range(config.replay.ratio):
            if parts.buffer.drawable < config.replay.batch_size:  # at the start, or because draws have used items up
                break
            replay(config, parts, iteration, metrics)
        parts.policy.publish(parts.learner.model, parts.learner.version)
    return rollout


def learn(
    config: TrainConfig, parts: Parts, iteration: int, trajectories: Sequence[Trajectory], metrics: Metrics
) -> None:
    """The fresh updates; then the fresh trajectories are stored, at least one update old when they are drawn."""
    learner, buffer = parts.learner, parts.buffer
    fresh, facts = parts.estimator.fresh(trajectories)
    progress = iteration / config.run.iterations
    batch = fresh_batch(fresh, buffer, config, policy_version=learner.version, progress=progress)
    since = learner.version
    for _ in range(1 + config.algorithm.extra_epochs):
        accept = parts.guard.watch("fresh", iteration, batch.trajectories, batch.sampling_weights, since=since)
        update = learner.update(batch.trajectories, batch.sampling_weights, accept=accept)
        metrics.fresh(update, batch.trajectories, since)
    metrics.measure("fresh", parts.estimator.fit(applied=learner.version > since))
    if config.mix.share or config.mix.backfill:
        facts |= {"fresh/mixed": float(batch.mixed), "fresh/backfilled": float(batch.backfilled)}
    metrics.add(facts)
    buffer.add(groups_of(fresh) if buffer.unit == "group" else fresh, policy_version=learner.version)


def replay(config: TrainConfig, parts: Parts, iteration: int, metrics: Metrics) -> None:
    """One replay update: both corrections, then what it has shown goes back to the buffer."""
    learner, buffer = parts.learner, parts.buffer
    batch = buffer.sample(
        config.replay.batch_size,
        policy_version=learner.version,
        **config.replay.correction.arguments(iteration / config.run.iterations),
    )
    trajectories, weights = parts.estimator.replayed(batch.trajectories), batch.trajectory_weights
    accept = parts.guard.watch("replay", iteration, trajectories, weights)
    update = learner.update(trajectories, weights, accept=accept, scale_by_ess=config.algorithm.ess_scaling)
    metrics.measure("replay", parts.estimator.fit(weights, applied=update.applied))
    if update.applied:
        buffer.observe(batch, update.log_ratios, update.clip_fractions)
    # The measure that set a priority sets it again; it moves where the measure does.
    items = _items(batch, trajectories) if buffer.unit == "group" else trajectories
    buffer.update_priorities(batch.keys, buffer.base_priorities(items))
    metrics.replay(batch, update)


def _items(batch: SampledBatch, trajectories: Sequence[Trajectory]) -> list[Sequence[Trajectory]]:
    """The trajectories of each drawn item."""
    return [trajectories[start:end] for start, end in pairwise(batch.item_offsets.tolist())]
