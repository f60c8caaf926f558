"""The environments of a run, from its settings."""

from __future__ import annotations

from collections.abc import Sequence

from freshper.envs import Env, Split, make_env
from freshper.errors import ConfigError
from freshper.policies.core import Policy
from freshper.rollout.collect import Limits, Rollout, Start, collect
from freshper.training.config import TrainConfig
from freshper.training.sections import RolloutConfig
from freshper.trajectory import SamplingParams


def make_task(config: TrainConfig, split: Split) -> Env:
    """One environment of the run's task, with the task's own settings.

    Raises :class:`ConfigError` for a task or an option that is unknown or cannot be had.
    """
    if taken := {"task", "split"} & config.env.options.keys():
        raise ConfigError(f"env.options.{taken.pop()} is no setting of a task: the run decides it")
    return make_env(config.run.task, split, **config.env.options)


def limits_of(rollout: RolloutConfig) -> Limits:
    """The bounds on an episode."""
    return Limits(rollout.max_reply_tokens, rollout.max_episode_tokens, rollout.max_turns or None)


def play(
    config: TrainConfig,
    envs: list[Env],
    policy: Policy,
    starts: Sequence[Start],
    split: Split,
    *,
    sampling: SamplingParams,
    seed: int,
    parallel: int | None = None,
) -> Rollout:
    """:func:`~freshper.rollout.collect.collect` at the run's settings; what hangs is replaced in ``envs``."""
    rollout = collect(
        envs,
        policy,
        starts,
        limits=limits_of(config.rollout),
        sampling=sampling,
        seed=seed,
        env_threads=config.env.threads,
        env_timeout=config.env.timeout or None,
        parallel=parallel,
    )
    for number in rollout.hung:
        envs[number] = make_task(config, split)
    return rollout
