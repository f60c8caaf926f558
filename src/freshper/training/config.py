"""Everything a run is decided by, and what has to fit together."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import model_validator

from freshper.envs import task_names
from freshper.errors import ConfigError, UnknownNameError
from freshper.learning.advantages import ADVANTAGES
from freshper.replay.priority import NAMED_PRIORITIES
from freshper.training.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    ClipConfig,
    CriticConfig,
    EvalConfig,
    GuardConfig,
    KlConfig,
    LogConfig,
    LoraConfig,
    MixConfig,
    OptimizerConfig,
    PolicyConfig,
    ReplayConfig,
    RolloutConfig,
    RunConfig,
    Section,
    TinyConfig,
    WarmStartConfig,
)


class TrainConfig(Section):
    """Everything a run is decided by."""

    run: RunConfig = RunConfig()
    rollout: RolloutConfig = RolloutConfig()
    policy: PolicyConfig = PolicyConfig()
    tiny: TinyConfig = TinyConfig()
    lora: LoraConfig = LoraConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    clip: ClipConfig = ClipConfig()
    kl: KlConfig = KlConfig()
    critic: CriticConfig = CriticConfig()
    replay: ReplayConfig = ReplayConfig()
    mix: MixConfig = MixConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        """What no single field can tell."""
        _known("task", self.run.task, task_names())
        _known("priority", self.replay.priority, NAMED_PRIORITIES)
        _known("advantage estimator", self.algorithm.advantage, ADVANTAGES)
        checks = (
            (
                self.rollout.episodes % self.rollout.group_size == 0,
                f"rollout.group_size {self.rollout.group_size} must divide rollout.episodes {self.rollout.episodes}",
            ),
            (
                self.tiny.hidden_size % (2 * self.tiny.heads) == 0,
                f"tiny.hidden_size {self.tiny.hidden_size} must be a multiple of 2 x tiny.heads "
                f"({self.tiny.heads}): a head's width is even",
            ),
            (
                self.policy.model != "tiny" or self.rollout.max_episode_tokens <= self.tiny.context,
                f"rollout.max_episode_tokens {self.rollout.max_episode_tokens} exceeds tiny.context "
                f"{self.tiny.context}: the model could not read the whole episode",
            ),
            (
                self.rollout.max_episode_tokens <= self.optimizer.token_budget,
                f"optimizer.token_budget {self.optimizer.token_budget} must hold one episode of "
                f"rollout.max_episode_tokens {self.rollout.max_episode_tokens}",
            ),
            (
                self.replay.batch_size <= self.replay.capacity,
                f"replay.batch_size {self.replay.batch_size} exceeds replay.capacity {self.replay.capacity}",
            ),
            (
                self.rollout.episodes <= self.replay.capacity,
                f"rollout.episodes {self.rollout.episodes} exceeds replay.capacity {self.replay.capacity}: "
                "part of each fresh batch would be evicted at once",
            ),
            (
                self.optimizer.warmup_updates < self.total_updates,
                f"optimizer.warmup_updates {self.optimizer.warmup_updates} must be below the run's "
                f"{self.total_updates} updates",
            ),
            (
                self.clip.dual == 0 or self.clip.dual > 1,
                f"clip.dual {self.clip.dual} must be above 1, or 0 to switch it off",
            ),
            (
                self.replay.priority != "td_error" or self.algorithm.advantage == "gae",
                f"replay.priority td_error needs the critic of algorithm.advantage gae, and {self.algorithm.advantage} "
                "has none: use reward or advantage",
            ),
        )
        for holds, message in checks:
            if not holds:
                raise ConfigError(message)
        return self

    @property
    def updates_per_iteration(self) -> int:
        """Optimizer updates of one iteration once replay has begun."""
        return 1 + self.algorithm.extra_epochs + self.replay.ratio

    @property
    def total_updates(self) -> int:
        """Optimizer updates of the whole run: what schedules count."""
        return self.run.iterations * self.updates_per_iteration


def _known(kind: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name not in names:
        raise UnknownNameError(kind, name, names)
