"""The sections of the trainer's settings: frozen, checked when made, one sentence under each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from freshper.replay.auto_tau import AutoTau
from freshper.replay.draw.sampler import MAX_ALPHA
from freshper.replay.freshness import MAX_RATE, Freshness, make_freshness

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]

EPISODES_AT_ONCE = 100
"""Episodes that an evaluation plays at once."""


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
    folder: Annotated[str, Field(pattern=r"^[^\x00]*$")] = ""
    """Run folder; empty makes runs/TASK-ARM-sSEED, with a number behind it where that is taken."""
    sample_every: PositiveInt = 10
    """Iterations between two sample episodes written as text."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Torch threads; on few cores one is fastest for a small model."""


class EnvConfig(Section):
    """The task's own settings, and how its environments are called."""

    options: dict[str, Any] = {}
    """Settings of the task, as `--env.options.size 8`; `freshper envs show TASK` lists them."""
    timeout: NonNegativeFloat = 60.0
    """Seconds that a reset or a reply may take; a longer one ends the episode as an error. 0 is no limit."""
    threads: Count = 0
    """Threads that call environments while the model samples: for those that wait for a tool; 0 calls one by one."""
    curriculum: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Part of a mixture's episodes that goes to tasks with a success rate near one half; the rest goes by weight."""
    curriculum_window: Annotated[int, Field(ge=1, le=10**6)] = 64
    """The latest episodes of a task that its success rate is told from."""


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
    """The language model that is trained, and how it is loaded."""

    model: str = "tiny"
    """tiny (embedded, warm-started), smollm2 (out of its package), or a Hugging Face name, folder or GGUF file."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights and of the computation."""
    device: str = "auto"
    """Where it runs: auto (a GPU when there is one), cpu, cuda, cuda:1, ..."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """Implementation of attention; auto leaves it to transformers."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """torch.compile the learner's forward pass; the first updates are slow."""
    share_prompts: bool = False
    """Let the learner compute a prompt once that several episodes begin with: the same gradient within rounding."""
    parallel: Count = 0
    """Episodes that run at once; the next one starts when one ends. 0 is as many as the engine holds."""

    @field_validator("model")
    @classmethod
    def _absolute(cls, model: str) -> str:
        """A folder or file here is found again from wherever the run is resumed or evaluated."""
        path = Path(model).expanduser()
        return str(path.absolute()) if model not in ("tiny", "smollm2") and path.exists() else model


class TinyConfig(Section):
    """The embedded language model: a transformers decoder built from these numbers."""

    hidden_size: PositiveInt = 64
    """Width of the model."""
    layers: PositiveInt = 3
    """Number of transformer layers."""
    heads: PositiveInt = 4
    """Attention heads; must divide hidden_size."""
    context: PositiveInt = 512
    """Longest conversation in tokens."""


class LoraConfig(Section):
    """Low-rank adapters (peft); the reference model is the base without them."""

    rank: Count = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: PositiveFloat = 16.0
    """Scale of the adapters: alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout in the adapters; above 0 the learner's log-probs are noisy."""
    targets: str = "all-linear"
    """Layers that get one: all-linear, or names separated by commas."""
    quantize: Literal["none", "4bit"] = "none"
    """QLoRA: base weights in 4 bits (bitsandbytes, GPU)."""


class WarmStartConfig(Section):
    """The supervised phase that teaches the format and a weak skill. One for all arms and seeds, cached."""

    updates: PositiveInt = 600
    """Optimizer updates of behavior cloning."""
    batch_size: PositiveInt = 16
    """Demonstrated episodes per update."""
    learning_rate: PositiveFloat = 3e-3
    """Peak rate of AdamW; it falls to 0 along a cosine."""
    teacher: Literal["demonstrator", "solver"] = "demonstrator"
    """Who is cloned: the weak demonstrator, or the solver, for so few updates that the clone still errs."""
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
    """Advantage estimator: reinforce++, reinforce++-baseline, grpo, grpo-no-std, dr-grpo, rloo, or gae (a critic)."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount per turn."""
    loss: str = "ppo"
    """Surrogate: ppo, truncated-is, gspo, cispo, trajectory-is, or reinforce, which is right on-policy alone."""
    aggregation: Literal["token", "sequence", "fixed"] = "token"
    """Mean over the batch's response tokens, over sequences of their means, or a sum over a fixed length."""
    entropy: NonNegativeFloat = 0.0
    """Weight of an entropy bonus."""
    extra_epochs: Count = 0
    """Further updates on the fresh batch: the control that replay has to beat."""
    ess_scaling: bool = False
    """Scale the learning rate of a replay update by the square root of its ESS fraction."""


class ClipConfig(Section):
    """Bounds on importance ratios."""

    low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratios below 1 - low earn no gradient (ppo, gspo)."""
    high: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Ratios above 1 + high earn none; 0 is the same as low."""
    dual: NonNegativeFloat = 3.0
    """Bound on the loss of negative advantages at large ratios, above 1; 0 switches it off (ppo)."""
    truncation: Annotated[float, Field(ge=1, le=1e6)] = 2.0
    """Largest weight that an importance ratio counts with (truncated-is, cispo)."""


class KlConfig(Section):
    """The penalty for leaving the policy that training began with."""

    weight: NonNegativeFloat = 0.0
    """Weight of the KL, on a batch's tokens as they are; 0 keeps no reference; the method needs 0 for replay."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate per token (Schulman 2020)."""
    place: Literal["loss", "reward"] = "loss"
    """In the loss, or taken from the reward of every token at collection."""


class CriticConfig(Section):
    """The value function of PPO with GAE; only with algorithm.advantage gae."""

    kind: Literal["head", "model"] = "head"
    """head: one linear layer on the policy's last hidden states, detached; model: a network of its own."""
    learning_rate: PositiveFloat = 1e-3
    """Peak rate of the critic's own AdamW."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of GAE, per token."""
    value_clip: NonNegativeFloat = 0.2
    """Bound on the change of a value in one update; 0 switches it off."""


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
    """Items per replay update: trajectories, or groups."""
    capacity: Annotated[int, Field(ge=1, le=10**8)] = 50_000
    """Items kept."""
    priority: str = "reward"
    """Base priority: reward, advantage, uniform, success, or td_error (needs the critic of gae)."""
    eps: NonNegativeFloat = 0.1
    """Added to the measure, so that an episode of reward 0 stays drawable."""
    alpha: Annotated[float, Field(ge=0, le=MAX_ALPHA)] = 0.6
    """Exponent on priorities; 0 is uniform replay."""
    freshness: FreshnessConfig = FreshnessConfig()
    """Decay of priorities with age."""
    correction: CorrectionConfig = CorrectionConfig()
    """Sampling weights."""


class StorageConfig(Section):
    """What one item of the buffer is, and how long it stays."""

    unit: Literal["trajectory", "group"] = "trajectory"
    """What is drawn: single trajectories, or whole groups for group-relative estimators."""
    evict: Literal["fifo", "lowest"] = "fifo"
    """What goes when the buffer is full: the oldest, or what has the lowest priority now."""
    max_age: Count = 0
    """Trajectories older than this many policy versions leave; 0 is off."""
    max_uses: Count = 0
    """Trajectories leave after so many draws; 0 is off."""
    max_bytes: Count = 0
    """Bound on the buffer's bytes, beside its capacity; 0 is off."""
    ram_bytes: Count = 0
    """Bytes of it that stay in memory, the rest in mapped files of the run folder; 0 keeps all in memory."""


class MixConfig(Section):
    """Replayed trajectories inside the fresh update, beside the replay updates. Both are off by default."""

    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the fresh batch that is replayed trajectories."""
    backfill: bool = False
    """Put a replayed group in the place of a fresh one whose returns are all equal; needs group_size above 1."""


class EvalConfig(Section):
    """Held-out evaluation on levels that training never sees; the same for all arms and seeds."""

    every: PositiveInt = 25
    """Iterations between two evaluations."""
    episodes: PositiveInt = 100
    """Episodes per evaluation, sampled and greedy each."""
    seed: Seed = 1_000
    """Decides the evaluation levels."""
    patience: Count = 0
    """Stop after so many evaluations in a row without a better score; 0 never does."""


class CheckpointConfig(Section):
    """What a run can be resumed from."""

    every: Count = 25
    """Iterations between two checkpoints; 0 writes none."""
    keep: PositiveInt = 2
    """Newest checkpoints that stay; the best policy is kept beside them."""


class GuardConfig(Section):
    """When a run is ill, and what is done. Every update that is skipped has its batch saved."""

    patience: PositiveInt = 5
    """So many ill updates of one kind in a row end the run."""
    max_kl: NonNegativeFloat = 0.0
    """Fresh updates whose drift from the sampler exceeds this, in nats per token, are skipped; 0 is off."""
    min_entropy: NonNegativeFloat = 0.0
    """Fresh updates whose entropy is below this, in nats per token, are skipped; 0 is off."""
    min_ess: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Replay updates whose ESS fraction is below this are skipped; 0 is off."""


class LogConfig(Section):
    """Where metrics go beside metrics.jsonl."""

    tensorboard: bool = True
    """Event files in the run folder."""
    wandb: str = ""
    """Project on Weights & Biases; empty is off (extra wandb)."""
    trackio: str = ""
    """Project of trackio; empty is off (extra trackio)."""
    mlflow: str = ""
    """Experiment of MLflow; empty is off (extra mlflow)."""
