"""The trainer's settings: frozen, checked when made, one sentence under each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from freshper.envs import task_names
from freshper.errors import ConfigError, UnknownNameError
from freshper.learning.advantages import ADVANTAGES
from freshper.replay.auto_tau import AutoTau
from freshper.replay.draw.sampler import MAX_ALPHA
from freshper.replay.freshness import MAX_RATE, Freshness, make_freshness
from freshper.replay.priority import NAMED_PRIORITIES

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A part of the settings. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


class RunConfig(Section):
    """What is run, how long, and where it is written."""

    task: str = "sokoban"
    """Task to learn; `freshper envs` lists them."""
    arm: Annotated[str, Field(max_length=80, pattern=r"^[^/\x00-\x1f]+$")] = "freshper"  # a part of folder names
    """Label of the setting in tables and plots; choose an arm's values with --arm."""
    seed: Seed = 0
    """Decides levels, sampling and replay draws; the same seed gives the same metrics."""
    iterations: PositiveInt = 150
    """Passes of the main loop: collect, learn, replay."""
    folder: str = ""
    """Run folder; empty makes runs/TASK-ARM-sSEED, with a number behind it where that is taken."""
    sample_every: PositiveInt = 10
    """Iterations between two sample episodes written as text."""
    threads: PositiveInt = 1
    """Torch threads; on few cores one is fastest for a small model."""


class RolloutConfig(Section):
    """How episodes are collected."""

    episodes: PositiveInt = 32
    """Episodes per iteration: the fresh batch."""
    group_size: PositiveInt = 1
    """Episodes that share a level; must divide episodes."""
    max_turns: Count = 0
    """Bound on turns; 0 leaves it to the task."""
    max_reply_tokens: PositiveInt = 8
    """Bound on the tokens of one reply; a longer one is cut."""
    max_episode_tokens: PositiveInt = 512
    """Bound on all tokens of an episode, observations included."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the learner scores at the same."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; below 1 the importance ratios are biased, and a warning says so."""
    top_k: Count = 0
    """Sample among the k likeliest tokens; 0 is all, anything else biases the ratios likewise."""


class PolicyConfig(Section):
    """The embedded language model: a transformers decoder built from these numbers."""

    hidden_size: PositiveInt = 64
    """Width of the model."""
    layers: PositiveInt = 3
    """Number of transformer layers."""
    heads: PositiveInt = 4
    """Attention heads; must divide hidden_size."""
    context: PositiveInt = 512
    """Longest conversation in tokens."""


class WarmStartConfig(Section):
    """The supervised phase that teaches the format and a weak skill. One for all arms and seeds, cached."""

    updates: PositiveInt = 600
    """Optimizer updates of behavior cloning."""
    batch_size: PositiveInt = 16
    """Demonstrated episodes per update."""
    learning_rate: PositiveFloat = 3e-3
    """Peak rate of AdamW; it falls to 0 along a cosine."""
    seed: Seed = 0
    """Decides initial weights and demonstrations, independent of the run's seed."""


class OptimizerConfig(Section):
    """AdamW and its schedule, counted in optimizer updates, replay updates included."""

    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls to 0 over all updates of the run."""
    warmup_updates: Count = 0
    """Updates over which the rate rises from 0."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's averaging of the gradient."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """AdamW's averaging of its square."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    token_budget: PositiveInt = 16_384
    """Tokens of one forward pass, padding included; the gradient does not depend on it."""


class AlgorithmConfig(Section):
    """The policy-gradient estimator."""

    advantage: str = "reinforce++"
    """Advantage estimator: reinforce++."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount per turn."""
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """PPO clip of the importance ratio."""
    dual_clip: NonNegativeFloat = 3.0
    """Bound on the loss of negative advantages at large ratios, above 1; 0 switches it off."""
    kl: NonNegativeFloat = 0.0
    """Weight of the KL to the warm-started policy, on a batch's tokens as they are; the method needs 0 for replay."""
    entropy: NonNegativeFloat = 0.0
    """Weight of an entropy bonus."""
    extra_epochs: Count = 0
    """Further updates on the fresh batch: the control that replay has to beat."""


class FreshnessConfig(Section):
    """How priorities decay with age in policy versions."""

    kind: Literal["exponential", "none", "auto"] = "exponential"
    """exponential: exp(-age/tau). none: standard PER. auto: tau follows the measured drift."""
    tau: Annotated[float, Field(ge=1 / MAX_RATE, allow_inf_nan=False)] = 12.0
    """Policy versions after which the priority falls to 1/e; the sampling weight, after tau/alpha. auto starts here."""
    target: PositiveFloat = 0.3
    """Of auto: the drift, in nats per trajectory, at which the sampling weight falls to 1/e."""

    def make(self) -> Freshness | AutoTau:
        """The decay itself, or what fits it."""
        if self.kind == "auto":
            return AutoTau(tau=self.tau, target=self.target, low=min(1.0, self.tau), high=max(1e5, self.tau))
        return make_freshness(self.kind, self.tau)


class CorrectionConfig(Section):
    """The sampling weights (Q/P)^beta that correct the uneven draw; off while both betas are 0."""

    beta_start: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Beta before the first iteration."""
    beta_end: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Beta at the last iteration; linear in between."""
    toward: Literal["uniform", "freshness"] = "uniform"
    """Corrected toward: uniform undoes the freshness too, freshness keeps it."""
    normalization: Literal["batch_max", "mean", "none"] = "batch_max"
    """Weights are divided by the batch's largest, by its mean, or not at all."""

    def beta(self, progress: float) -> float:
        """Beta when ``progress`` in [0, 1] of the run is done."""
        return self.beta_start + (self.beta_end - self.beta_start) * progress

    def arguments(self, progress: float) -> dict[str, Any]:
        """What a draw is told when ``progress`` in [0, 1] of the run is done."""
        return {"beta": self.beta(progress), "toward": self.toward, "normalization": self.normalization}


class ReplayConfig(Section):
    """The replay buffer and how often it is drawn from. Ratio 0 is on-policy training, exactly."""

    ratio: Count = 2
    """Replay updates per iteration (K)."""
    batch_size: PositiveInt = 32
    """Trajectories per replay update."""
    capacity: PositiveInt = 50_000
    """Trajectories kept; the oldest goes first."""
    priority: str = "reward"
    """Base priority: reward, advantage, uniform, or success; td_error needs a critic, which reinforce++ has not."""
    eps: NonNegativeFloat = 0.1
    """Added to the measure, so that an episode of reward 0 stays drawable."""
    alpha: Annotated[float, Field(ge=0, le=MAX_ALPHA)] = 0.6
    """Exponent on priorities; 0 is uniform replay."""
    freshness: FreshnessConfig = FreshnessConfig()
    """Decay of priorities with age."""
    correction: CorrectionConfig = CorrectionConfig()
    """Sampling weights."""


class EvalConfig(Section):
    """Held-out evaluation on levels that training never sees; the same for all arms and seeds."""

    every: PositiveInt = 25
    """Iterations between two evaluations."""
    episodes: PositiveInt = 100
    """Episodes per evaluation, sampled and greedy each."""
    seed: Seed = 1_000
    """Decides the evaluation levels."""


class TrainConfig(Section):
    """Everything a run is decided by."""

    run: RunConfig = RunConfig()
    rollout: RolloutConfig = RolloutConfig()
    policy: PolicyConfig = PolicyConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    replay: ReplayConfig = ReplayConfig()
    eval: EvalConfig = EvalConfig()

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
                self.policy.hidden_size % (2 * self.policy.heads) == 0,
                f"policy.hidden_size {self.policy.hidden_size} must be a multiple of 2 x policy.heads "
                f"({self.policy.heads}): a head's width is even",
            ),
            (
                self.rollout.max_episode_tokens <= self.policy.context,
                f"rollout.max_episode_tokens {self.rollout.max_episode_tokens} exceeds policy.context "
                f"{self.policy.context}: the model could not read the whole episode",
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
                self.algorithm.dual_clip == 0 or self.algorithm.dual_clip > 1,
                f"algorithm.dual_clip {self.algorithm.dual_clip} must be above 1, or 0 to switch it off",
            ),
            (
                self.replay.priority != "td_error",
                "replay.priority td_error needs a critic, and this estimator has none: use reward or advantage",
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
