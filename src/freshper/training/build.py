"""From settings to parts: the library classes take plain arguments, and here they get them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from freshper.envs import Env, make_env
from freshper.learning.learner import Learner
from freshper.policies.tiny import TinyPolicy
from freshper.replay.buffer import ReplayBuffer
from freshper.rollout.collect import Start
from freshper.training.config import TrainConfig
from freshper.training.sections import RolloutConfig
from freshper.training.seeds import derive_seed
from freshper.trajectory import SamplingParams


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop works with."""

    policy: TinyPolicy
    learner: Learner
    buffer: ReplayBuffer
    envs: list[Env]


def build(config: TrainConfig, policy: TinyPolicy) -> Parts:
    """The parts of a run around its policy."""
    envs = [make_env(config.run.task, split="train") for _ in range(config.rollout.episodes)]
    return Parts(policy, make_learner(policy.model, config), make_buffer(config), envs)


def make_learner(model: nn.Module, config: TrainConfig) -> Learner:
    """The learner of a run; its schedule covers all updates, replay included."""
    optimizer, algorithm = config.optimizer, config.algorithm
    return Learner(
        model,
        total_updates=config.total_updates,
        learning_rate=optimizer.learning_rate,
        schedule=optimizer.schedule,
        warmup_updates=optimizer.warmup_updates,
        betas=(optimizer.beta1, optimizer.beta2),
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        token_budget=optimizer.token_budget,
        clip=config.clip.low,
        dual_clip=config.clip.dual,
        kl=config.kl.weight,
        entropy_bonus=algorithm.entropy,
    )


def make_buffer(config: TrainConfig) -> ReplayBuffer:
    """The replay buffer of a run."""
    replay = config.replay
    return ReplayBuffer(
        replay.capacity,
        priority=replay.priority,
        freshness=replay.freshness.make(),
        alpha=replay.alpha,
        eps=replay.eps,
        seed=derive_seed(config.run.seed, "replay"),
    )


def sampling_of(rollout: RolloutConfig) -> SamplingParams:
    """How replies are sampled while collecting."""
    return SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k)


def starts(config: TrainConfig, iteration: int) -> list[Start]:
    """The levels of an iteration, decided by the run's seed alone: every arm meets the same ones."""
    groups = range(config.rollout.episodes // config.rollout.group_size)
    seeds = [derive_seed(config.run.seed, "level", iteration, group) for group in groups]
    return [
        Start(level, f"{iteration}-{group}")
        for group, level in zip(groups, seeds, strict=True)
        for _ in range(config.rollout.group_size)
    ]
