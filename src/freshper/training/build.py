"""From settings to parts: the library classes take plain arguments, and here they get them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from freshper.envs import Env
from freshper.learning.critic import Critic
from freshper.learning.learner import Learner
from freshper.learning.logprobs import Pictures, TokenLogprobs
from freshper.learning.losses import Clip
from freshper.learning.objective import Objective
from freshper.policies.core import SeeingPolicy
from freshper.policies.lora import inner_model, reference_of
from freshper.replay.buffer import ReplayBuffer
from freshper.rollout.collect import Start
from freshper.training.config import GAE, TrainConfig
from freshper.training.curriculum import Curriculum
from freshper.training.estimator import Estimator
from freshper.training.guard import Guard
from freshper.training.policy import TrainablePolicy
from freshper.training.sections import RolloutConfig
from freshper.training.seeds import derive_seed
from freshper.training.tasks import make_task
from freshper.trajectory import SamplingParams


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop works with."""

    policy: TrainablePolicy
    learner: Learner
    estimator: Estimator
    buffer: ReplayBuffer
    guard: Guard
    envs: list[Env]
    curriculum: Curriculum


def build(config: TrainConfig, policy: TrainablePolicy, folder: Path, buffer: ReplayBuffer | None = None) -> Parts:
    """The parts of a run in ``folder`` around its policy, and around its buffer where there is one already."""
    envs = [make_task(config, "train") for _ in range(config.rollout.episodes)]
    pictures = policy.picture_inputs if isinstance(policy, SeeingPolicy) else None
    learner = make_learner(policy.model, config, pictures)
    estimator = Estimator(config, learner, make_critic(learner, config, pictures))
    guard = Guard(folder, **config.guard.model_dump())
    curriculum = Curriculum(config.env.curriculum, config.env.curriculum_window)
    buffer = make_buffer(config) if buffer is None else buffer
    return Parts(policy, learner, estimator, buffer, guard, envs, curriculum)


def make_learner(model: nn.Module, config: TrainConfig, pictures: Pictures | None = None) -> Learner:
    """The learner of a run; its schedule covers all updates, replay included. ``pictures`` is how the model sees."""
    optimizer, algorithm, kl = config.optimizer, config.algorithm, config.kl
    objective = Objective(
        loss=algorithm.loss,
        clip=Clip(**config.clip.model_dump()),
        aggregation=algorithm.aggregation,
        fixed_length=config.rollout.max_episode_tokens,
        kl=kl.weight if kl.place == "loss" else 0.0,
        kl_estimator=kl.estimator,
        entropy_bonus=algorithm.entropy,
    )
    return Learner(
        model,
        objective=objective,
        total_updates=config.total_updates,
        learning_rate=optimizer.learning_rate,
        schedule=optimizer.schedule,
        warmup_updates=optimizer.warmup_updates,
        betas=(optimizer.beta1, optimizer.beta2),
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        token_budget=optimizer.token_budget,
        patience=config.guard.patience,
        reference=reference_of(model) if kl.weight > 0 else None,
        compiled=config.policy.compile,
        pictures=pictures,
        share_prompts=config.policy.share_prompts,
    )


def make_critic(learner: Learner, config: TrainConfig, pictures: Pictures | None = None) -> Critic | None:
    """The critic of GAE, on the policy's hidden states or with a network that begins as the policy does."""
    if config.algorithm.advantage != GAE:
        return None
    settings, optimizer = config.critic, config.optimizer
    model = inner_model(learner.model)
    network = copy.deepcopy(model).requires_grad_(True) if settings.kind == "model" else None
    scorer = learner.token_logprobs if network is None else TokenLogprobs(network, pictures=pictures)
    return Critic(
        scorer.states,
        int(model.config.get_text_config().hidden_size),
        network=network,
        learning_rate=settings.learning_rate,
        total_updates=config.run.iterations * (1 + config.replay.ratio),  # once a batch, whatever the epochs
        value_clip=settings.value_clip,
        max_grad_norm=optimizer.max_grad_norm,
        token_budget=optimizer.token_budget,
        device=next(learner.model.parameters()).device,
    )


def make_buffer(config: TrainConfig, directory: Path | None = None) -> ReplayBuffer:
    """The replay buffer of a run, kept in ``directory`` where one is given: what a run is resumed with."""
    replay, storage = config.replay, config.storage
    spill = directory.with_name("spilled") if directory is not None and storage.ram_bytes else None
    return ReplayBuffer(
        replay.capacity,
        priority=replay.priority,
        freshness=replay.freshness.make(),
        alpha=replay.alpha,
        eps=replay.eps,
        unit=storage.unit,
        evict=storage.evict,
        max_age=storage.max_age or None,
        max_uses=storage.max_uses or None,
        max_bytes=storage.max_bytes or None,
        ram_bytes=storage.ram_bytes or None,
        spill_directory=spill,
        directory=directory,
        fsync="checkpoint",
        keep_marks=config.checkpoint.keep + 1,  # one more: a checkpoint that fails leaves its mark behind
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
