"""Everything a run is decided by, and what has to fit together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import model_validator

from freshper.envs import MIXTURE, check_task
from freshper.errors import ConfigError, UnknownNameError
from freshper.learning.advantages import ADVANTAGES, NEEDS_GROUPS
from freshper.learning.kl import check_kl
from freshper.learning.losses import LOSSES
from freshper.replay.priority import NAMED_PRIORITIES
from freshper.training.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    ClipConfig,
    CriticConfig,
    EnvConfig,
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
    StorageConfig,
    TinyConfig,
    WarmStartConfig,
)

GAE = "gae"
"""The advantage estimator that has a critic."""


class TrainConfig(Section):
    """Everything a run is decided by."""

    run: RunConfig = RunConfig()
    env: EnvConfig = EnvConfig()
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
    storage: StorageConfig = StorageConfig()
    mix: MixConfig = MixConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        """What no single field can tell."""
        check_task(self.run.task)
        _known("priority", self.replay.priority, NAMED_PRIORITIES)
        _known("advantage estimator", self.algorithm.advantage, [*ADVANTAGES, GAE])
        _known("loss", self.algorithm.loss, LOSSES)
        if self.kl.weight > 0:
            check_kl(self.kl.estimator, self.kl.place)
        for holds, message in (*self._sizes(), *self._storage(), *self._algorithms(), *self._models()):
            if not holds:
                raise ConfigError(message)
        return self

    def _sizes(self) -> Iterator[tuple[bool, str]]:
        rollout, replay = self.rollout, self.replay
        yield (
            rollout.episodes % rollout.group_size == 0,
            f"rollout.group_size {rollout.group_size} must divide rollout.episodes {rollout.episodes}",
        )
        yield (
            rollout.max_episode_tokens <= self.optimizer.token_budget,
            f"optimizer.token_budget {self.optimizer.token_budget} must hold one episode of "
            f"rollout.max_episode_tokens {rollout.max_episode_tokens}",
        )
        yield (
            replay.batch_size <= replay.capacity,
            f"replay.batch_size {replay.batch_size} exceeds replay.capacity {replay.capacity}",
        )
        yield (
            rollout.episodes <= replay.capacity,
            f"rollout.episodes {rollout.episodes} exceeds replay.capacity {replay.capacity}: part of each fresh batch "
            "would be evicted at once",
        )
        yield (
            self.optimizer.warmup_updates < self.total_updates,
            f"optimizer.warmup_updates {self.optimizer.warmup_updates} must be below the run's {self.total_updates} "
            "updates",
        )
        for name in ("gradient_checkpointing", "compile"):
            yield (
                not (self.policy.share_prompts and getattr(self.policy, name)),
                f"policy.share_prompts and policy.{name} do not go together: set policy.{name} false, which a preset "
                "may have set, or share no prompts",
            )
        yield (
            self.env.curriculum == 0 or self.run.task == MIXTURE,
            f"env.curriculum {self.env.curriculum} chooses between the tasks of a mixture, and {self.run.task} is one "
            "task: --run.task mixture --env.options.weights.TASK 1 ...",
        )

    def _storage(self) -> Iterator[tuple[bool, str]]:
        storage, ages = self.storage, self.updates_per_iteration
        yield (
            storage.max_age == 0 or storage.max_age >= ages,
            f"storage.max_age {storage.max_age} is less than the {ages} updates of an iteration: trajectories would "
            "leave before they could be replayed",
        )
        yield (
            storage.ram_bytes == 0 or self.checkpoint.every > 0,
            f"storage.ram_bytes {storage.ram_bytes} puts older data into the run folder: checkpoint.every 0 keeps no "
            "buffer there",
        )

    def _algorithms(self) -> Iterator[tuple[bool, str]]:
        advantage, mix = self.algorithm.advantage, self.mix
        yield (
            self.clip.dual == 0 or self.clip.dual > 1,
            f"clip.dual {self.clip.dual} must be above 1, or 0 to switch it off",
        )
        yield (
            self.replay.priority != "td_error" or advantage == GAE,
            f"replay.priority td_error needs the critic of algorithm.advantage gae, and {advantage} has none: use "
            "reward or advantage",
        )
        yield (
            advantage not in NEEDS_GROUPS or self.rollout.group_size > 1,
            f"algorithm.advantage {advantage} compares the episodes of a group: rollout.group_size "
            f"{self.rollout.group_size} must be at least 2, or every advantage is 0",
        )
        yield (
            advantage != GAE or not (mix.share or mix.backfill),
            "mix.share and mix.backfill use the advantages stored at collection, which algorithm.advantage gae "
            "computes anew: use replay.ratio",
        )
        yield (
            not mix.backfill or (advantage in NEEDS_GROUPS and self.storage.unit == "group"),
            "mix.backfill puts whole groups in the place of useless ones: it needs storage.unit group and an "
            f"estimator over groups ({', '.join(sorted(NEEDS_GROUPS))})",
        )

    def _models(self) -> Iterator[tuple[bool, str]]:
        tiny, policy = self.tiny, self.policy
        yield (
            tiny.hidden_size % (2 * tiny.heads) == 0,
            f"tiny.hidden_size {tiny.hidden_size} must be a multiple of 2 x tiny.heads ({tiny.heads}): a head's width "
            "is even",
        )
        if policy.model != "tiny":
            return
        yield (
            self.rollout.max_episode_tokens <= tiny.context,
            f"rollout.max_episode_tokens {self.rollout.max_episode_tokens} exceeds tiny.context {tiny.context}: the "
            "model could not read the whole episode",
        )
        yield (
            policy.dtype == "float32" and policy.device in ("auto", "cpu"),
            f"the embedded policy runs in float32 on the CPU: policy.dtype {policy.dtype} and policy.device "
            f"{policy.device} are for other models",
        )
        yield (
            self.lora == LoraConfig() and policy.attention == "auto" and not policy.gradient_checkpointing,
            "the embedded policy is trained whole and as it is: lora.*, policy.attention and "
            "policy.gradient_checkpointing are for other models",
        )

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
