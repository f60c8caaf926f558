"""From settings to parts: the library classes take plain arguments, and here they get them."""

from __future__ import annotations

from torch import nn

from freshper.learning.learner import Learner
from freshper.replay.buffer import ReplayBuffer
from freshper.training.config import TrainConfig
from freshper.training.seeds import derive_seed


def make_learner(model: nn.Module, config: TrainConfig) -> Learner:
    """The learner of a run; its schedule covers all updates, replay included."""
    optimizer, algorithm = config.optimizer, config.algorithm
    return Learner(
        model,
        total_updates=config.total_updates,
        learning_rate=optimizer.learning_rate,
        schedule=optimizer.schedule,
        warmup_updates=optimizer.warmup_updates,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        token_budget=optimizer.token_budget,
        clip=algorithm.clip,
        dual_clip=algorithm.dual_clip,
        kl=algorithm.kl,
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
