"""The policy of a run: the embedded one from its warm start, or any causal language model; and saved ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from freshper.envs import Pictured
from freshper.errors import ConfigError, RunFolderError
from freshper.learning.logprobs import CHUNK_ELEMENTS, KEEP_ELEMENTS
from freshper.policies.core import Policy
from freshper.policies.hf import DEFAULT_SLOTS, HFPolicy, policy_of
from freshper.policies.loading import FoundModel, find_model
from freshper.policies.lora import Lora
from freshper.policies.memory import MemoryEstimate, estimate
from freshper.policies.quiet import no_progress_bars
from freshper.policies.tiny_vision import load_tiny
from freshper.training.config import TrainConfig
from freshper.training.config_file import make_config, read_toml
from freshper.training.sections import EPISODES_AT_ONCE
from freshper.training.seeds import derive_seed
from freshper.training.tasks import make_task
from freshper.training.warm_start import Note, warm_started_policy

TINY = "tiny"


class TrainablePolicy(Policy, Protocol):
    """A policy whose model the learner trains, and that can be written down."""

    model: Any

    def save(self, folder: Path) -> None:
        """Write everything that it takes to load it again."""
        ...


def make_policy(config: TrainConfig, note: Note | None = None) -> TrainablePolicy:
    """The policy before RL. Raises :class:`ConfigError` for a model that cannot be had, before anything is loaded."""
    if config.policy.model == TINY:
        return warm_started_policy(config, note)
    pictured = isinstance(make_task(config, "train"), Pictured)
    found = find(config, note)
    if pictured and found.reader is None:
        raise ConfigError(
            f"task {config.run.task!r} shows pictures, and model {found.name!r} reads text alone: choose an image-text "
            "model, or the task's text version"
        )
    if found.context is not None and config.rollout.max_episode_tokens > found.context:
        raise ConfigError(
            f"rollout.max_episode_tokens {config.rollout.max_episode_tokens} exceeds the {found.context} tokens that "
            f"{found.name} can read: lower it"
        )
    if note:
        note(f"{found.name} on {found.device}, estimated memory:\n{memory_of(config, found.config).table()}")
    with no_progress_bars():
        loaded = found.load(seed=derive_seed(config.run.seed, "adapters"))
    return policy_of(loaded, slots=_slots(config))


def find(config: TrainConfig, note: Note | None = None) -> FoundModel:
    """The model that the settings name, with everything checked but its weights."""
    settings = config.policy
    with no_progress_bars():  # a GGUF file is unpacked here, once
        return find_model(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            attention=settings.attention,
            gradient_checkpointing=settings.gradient_checkpointing,
            lora=lora_of(config),
            note=note,
        )


def lora_of(config: TrainConfig) -> Lora:
    """The adapters that the settings ask for."""
    return Lora(**config.lora.model_dump())


def memory_of(config: TrainConfig, model: Any) -> MemoryEstimate:
    """What training with a model of that transformers config takes; no weight is read."""
    longest = config.rollout.max_episode_tokens
    rows = max(config.rollout.episodes, config.replay.batch_size if config.replay.ratio else 0)
    vocabulary = int(model.get_text_config().vocab_size)
    together = max(config.rollout.episodes, min(config.eval.episodes, EPISODES_AT_ONCE))
    return estimate(
        model,
        dtype=getattr(torch, config.policy.dtype),
        lora=lora_of(config),
        attention=config.policy.attention,
        gradient_checkpointing=config.policy.gradient_checkpointing,
        reference=config.kl.weight > 0,
        token_budget=(tokens := min(config.optimizer.token_budget, rows * longest)),
        # What is kept of log-probs over the vocabulary, and one chunk under way.
        logit_rows=min(tokens, (KEEP_ELEMENTS + CHUNK_ELEMENTS) // vocabulary),
        conversations=min(_slots(config), together),
        longest=longest,
    )


def _slots(config: TrainConfig) -> int:
    return config.policy.parallel or DEFAULT_SLOTS


def load_policy(folder: Path, config: TrainConfig) -> TrainablePolicy:
    """A policy that a run has saved in ``folder``."""
    if config.policy.model == TINY:
        return load_tiny(folder)
    with no_progress_bars():
        return HFPolicy.load(folder, dtype=config.policy.dtype, device=config.policy.device, slots=_slots(config))


def load_trained(folder: Path, which: str) -> tuple[TrainConfig, TrainablePolicy]:
    """The config of a run and one of its saved policies, "best" or "last".

    Raises :class:`RunFolderError` where the folder holds no run or no such policy.
    """
    if not (folder / "config.toml").exists():
        raise RunFolderError(f"{folder} is no run folder: it holds no config.toml")
    saved = folder / "model" / which
    if not saved.exists():
        raise RunFolderError(f"{folder} holds no {which} policy yet: one is saved at every evaluation and at the end")
    config = make_config(read_toml(folder / "config.toml"))
    return config, load_policy(saved, config)
