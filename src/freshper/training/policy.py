"""The policy of a run: the embedded one from its warm start, or any causal language model; and saved ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from freshper.errors import RunFolderError
from freshper.policies.core import Policy
from freshper.policies.hf import HFPolicy
from freshper.policies.loading import find_model
from freshper.policies.lora import Lora
from freshper.policies.tiny import TinyPolicy
from freshper.training.config import TrainConfig
from freshper.training.config_file import make_config, read_toml
from freshper.training.seeds import derive_seed
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
    settings = config.policy
    found = find_model(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        attention=settings.attention,
        gradient_checkpointing=settings.gradient_checkpointing,
        lora=Lora(**config.lora.model_dump()),
        note=note,
    )
    if note:
        note(f"loading {settings.model} ({settings.dtype}, {found.device})")
    return HFPolicy(found.load(seed=derive_seed(config.run.seed, "adapters")))


def load_policy(folder: Path, config: TrainConfig) -> TrainablePolicy:
    """A policy that a run has saved in ``folder``."""
    if config.policy.model == TINY:
        return TinyPolicy.load(folder)
    return HFPolicy.load(folder, dtype=config.policy.dtype, device=config.policy.device)


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
