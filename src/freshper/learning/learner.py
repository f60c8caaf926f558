"""The learner: one call is one optimizer update on a batch of trajectories. It owns the clock."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from freshper.errors import ConfigError, DivergedError, TrajectoryError, UnknownNameError
from freshper.learning.batching import MicroBatch, micro_batches
from freshper.learning.losses import entropy, kl_to_reference, log_ratios, ppo_clip
from freshper.trajectory import Trajectory

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, eq=False)
class LearnerUpdate:
    """What one update did. ``applied`` is false when it was skipped because a number was not finite.

    ``log_ratios`` (B,) are log(pi/mu) of whole trajectories **before** the update, in nats, ``clip_fractions`` (B,)
    the parts of their response tokens whose ratio lay outside the clip.
    """

    applied: bool
    metrics: dict[str, float]
    log_ratios: NDArray[np.float64]
    clip_fractions: NDArray[np.float64]


class Learner:
    """Trains a causal language model on trajectories with PPO clip against the recorded behavior log-probs.

    Args:
        model: a transformers causal LM; it is trained in place.
        learning_rate: peak rate of AdamW.
        total_updates: length of the schedule in optimizer updates, replay updates included.
        schedule: how the rate falls to 0 over ``total_updates``; "constant" never does.
        warmup_updates: updates over which the rate rises linearly from 0.
        clip, dual_clip: see :func:`freshper.learning.losses.ppo_clip`.
        kl: weight of the KL to the model as it is now; 0 keeps no copy.
        entropy_bonus: weight of the entropy.
        max_grad_norm: gradients are scaled down to this norm.
        token_budget: rows x longest row of one forward pass; the gradient does not depend on it.
        patience: so many non-finite updates in a row raise :class:`DivergedError`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        learning_rate: float,
        total_updates: int,
        schedule: Schedule = "constant",
        warmup_updates: int = 0,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        clip: float = 0.2,
        dual_clip: float = 3.0,
        kl: float = 0.0,
        entropy_bonus: float = 0.0,
        max_grad_norm: float = 1.0,
        token_budget: int = 16_384,
        patience: int = 5,
    ) -> None:
        for name, value, holds in (
            ("clip", clip, clip > 0),
            ("dual_clip", dual_clip, dual_clip == 0 or dual_clip > 1),
            ("kl", kl, kl >= 0),
            ("entropy_bonus", entropy_bonus, entropy_bonus >= 0),
            ("max_grad_norm", max_grad_norm, max_grad_norm > 0),
        ):
            if not holds:
                raise ConfigError(f"{name} {value} is out of range: the loss would not mean what it says")
        self.model = model
        self.version = 0
        self.clip, self.dual_clip, self.kl, self.entropy_bonus = clip, dual_clip, kl, entropy_bonus
        self.max_grad_norm, self.token_budget, self.patience = max_grad_norm, token_budget, patience
        self._reference = copy.deepcopy(model).requires_grad_(False).eval() if kl > 0 else None
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay, foreach=True
        )
        factor = _schedule_factor(schedule, warmup_updates, total_updates)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, factor)
        self._device = next(model.parameters()).device
        self._failures = 0
        self._warned_truncation = False

    @property
    def learning_rate(self) -> float:
        """The rate of the next update."""
        return float(self._scheduler.get_last_lr()[0])

    def update(
        self, trajectories: Sequence[Trajectory], sampling_weights: NDArray[np.float64] | None = None
    ) -> LearnerUpdate:
        """One optimizer update on B trajectories, each weighted by its sampling weight (B,), ones if left out.

        The loss is the sum over response tokens divided by the batch's number of response tokens, never by
        the sum of weights. Raises :class:`DivergedError` after ``patience`` skipped updates in a row, and
        :class:`TrajectoryError` for a demonstration without log-probs: it has no importance ratio.
        Where all advantages are 0, so is the gradient, and only AdamW's momentum moves the weights.
        """
        if not trajectories:
            raise ConfigError("an update needs at least one trajectory")
        weights = np.ones(len(trajectories)) if sampling_weights is None else np.asarray(sampling_weights, np.float64)
        if weights.shape != (len(trajectories),):
            raise ConfigError(f"sampling_weights has shape {weights.shape}, there are {len(trajectories)} trajectories")
        if not np.all(np.isfinite(weights) & (weights >= 0)):
            worst = weights[~(np.isfinite(weights) & (weights >= 0))][0]
            raise ConfigError(f"sampling weight {worst} must be finite and >= 0: below 0 an update would unlearn")
        _check_logprobs_known(trajectories)
        self._check_sampling(trajectories)
        self.model.train()
        self._optimizer.zero_grad(set_to_none=True)
        token_count = sum(trajectory.response_length for trajectory in trajectories)
        totals: dict[str, float] = {}
        by_trajectory = np.zeros((2, len(trajectories)))  # log-ratios and clip fractions
        temperature = _temperature(trajectories)
        for batch in micro_batches(trajectories, weights, self.token_budget, self._device):
            loss, sums, by_row = self._loss(batch, temperature)
            (loss / token_count).backward()  # type: ignore[no-untyped-call]
            by_trajectory[:, batch.rows] = by_row
            for name, value in sums.items():
                together = max if name == "ratio_max" else float.__add__
                totals[name] = together(totals.get(name, 0.0), value)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm))
        metrics = {name: value if name == "ratio_max" else value / token_count for name, value in totals.items()}
        metrics |= {"grad_norm": grad_norm, "learning_rate": self.learning_rate, "response_tokens": float(token_count)}
        applied = math.isfinite(metrics["loss"]) and math.isfinite(grad_norm)
        self._finish(applied, metrics)
        return LearnerUpdate(applied, metrics, *by_trajectory)

    @torch.inference_mode()
    def score(self, trajectories: Sequence[Trajectory]) -> list[NDArray[np.float32]]:
        """Log-probs (T,) that the present model gives to the sampled tokens, 0 elsewhere, at their temperature."""
        self.model.eval()
        scores: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(trajectories)
        ready = [t if t.advantages is not None else t.with_columns(advantages=np.zeros(len(t))) for t in trajectories]
        weights = np.ones(len(trajectories))
        for batch in micro_batches(ready, weights, self.token_budget, self._device):
            logprobs, _ = _logprobs(self.model, batch, _temperature(trajectories))
            for row, line in zip(batch.rows.tolist(), logprobs.cpu().numpy(), strict=True):
                scores[row] = line[: len(trajectories[row])]
        return scores

    def _loss(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, dict[str, float], NDArray[np.float64]]:
        """Summed loss of a micro-batch, sums for the metrics, and log-ratio and clip fraction of every row, (2, b)."""
        logprobs, all_logprobs = _logprobs(self.model, batch, temperature)
        mask, behavior = batch.response_mask, batch.behavior_logprobs
        loss, sums = ppo_clip(
            logprobs, behavior, batch.advantages, mask, batch.weights, clip=self.clip, dual_clip=self.dual_clip
        )
        with torch.set_grad_enabled(self.entropy_bonus > 0):
            sums["entropy"] = entropy(all_logprobs)
        if self.entropy_bonus > 0:
            loss = loss - self.entropy_bonus * sums["entropy"]
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = _logprobs(self._reference, batch, temperature)
            sums["kl"] = kl_to_reference(logprobs, reference, mask)
            loss = loss + self.kl * sums["kl"]
        sums["loss"] = loss
        by_row = _by_row(log_ratios(logprobs.detach(), behavior, mask), mask, self.clip)
        return loss, {name: float(value.detach()) for name, value in sums.items()}, by_row

    def _finish(self, applied: bool, metrics: dict[str, float]) -> None:
        """Apply the gradient and advance the clock, or count a failure."""
        if applied:
            self._optimizer.step()
            self._scheduler.step()
            self.version += 1
            self._failures = 0
            return
        self._optimizer.zero_grad(set_to_none=True)
        self._failures += 1
        if self._failures >= self.patience:
            raise DivergedError(
                f"{self._failures} updates in a row had a non-finite loss ({metrics['loss']}) or gradient norm "
                f"({metrics['grad_norm']}); lower the learning rate ({metrics['learning_rate']:g}) or the clip"
            )

    def _check_sampling(self, trajectories: Sequence[Trajectory]) -> None:
        if not self._warned_truncation and any(trajectory.sampling.truncated for trajectory in trajectories):
            self._warned_truncation = True
            warnings.warn(
                "trajectories were sampled with top-p or top-k, but the learner scores the full distribution: "
                "importance ratios are biased by the mass that was cut off",
                stacklevel=3,
            )


def _check_logprobs_known(trajectories: Sequence[Trajectory]) -> None:
    """A ratio against unknown log-probs is NaN, and the update would be skipped for a reason that nobody sees."""
    unknown = [place for place, trajectory in enumerate(trajectories) if not trajectory.logprobs_known]
    if unknown:
        raise TrajectoryError(
            f"trajectory {unknown[0]} of the batch ({len(unknown)} of {len(trajectories)} in all) has "
            "logprobs_known=False, so its importance ratios are unknown: record the log-probs of the engine that "
            "wrote it, or learn from it with a supervised loss"
        )


def _by_row(token_log_ratios: Tensor, mask: Tensor, clip: float) -> NDArray[np.float64]:
    """Log-ratio of every row, and the part of its response tokens whose ratio lies outside the clip, (2, b)."""
    outside = ((token_log_ratios.exp() - 1).abs() > clip) & mask
    rows = torch.stack([token_log_ratios.double().sum(1), outside.sum(1).double() / mask.sum(1)])
    values: NDArray[np.float64] = rows.cpu().numpy()
    return values


def _temperature(trajectories: Sequence[Trajectory]) -> float:
    """The one temperature of a batch. Greedy replies have no distribution to learn from."""
    temperatures = {trajectory.sampling.temperature for trajectory in trajectories}
    if len(temperatures) != 1 or 0 in temperatures:
        raise ConfigError(f"a batch was sampled at temperatures {sorted(temperatures)}: one, above 0, is needed")
    return temperatures.pop()


def _logprobs(model: nn.Module, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs (b, T) of the response tokens, 0 elsewhere; and log pi (n, V) where each of the n was sampled.

    Only there: distributions over a whole vocabulary are what a batch needs most memory for.
    """
    mask = batch.response_mask
    output = model(input_ids=batch.tokens, attention_mask=batch.attention_mask, use_cache=False)
    all_logprobs = torch.log_softmax(output.logits[:, :-1][mask[:, 1:]].float() / temperature, -1)
    chosen = all_logprobs.gather(-1, batch.tokens[mask].unsqueeze(-1)).squeeze(-1)
    return torch.zeros_like(batch.behavior_logprobs).masked_scatter(mask, chosen), all_logprobs


def _schedule_factor(schedule: Schedule, warmup: int, total: int) -> _Factor:
    if schedule not in get_args(Schedule):
        raise UnknownNameError("schedule", schedule, get_args(Schedule))
    if total < 1 or not 0 <= warmup < total:
        raise ConfigError(f"a schedule of {total} updates with {warmup} of warm-up: warm-up must be in [0, total)")
    return _Factor(schedule, warmup, total)


@dataclass(frozen=True, slots=True)
class _Factor:
    """Learning-rate factor after n optimizer updates."""

    schedule: Schedule
    warmup: int
    total: int

    def __call__(self, updates: int) -> float:
        if updates < self.warmup:
            return (updates + 1) / self.warmup
        done = min(1.0, (updates - self.warmup) / (self.total - self.warmup))
        if self.schedule == "constant":
            return 1.0
        return 1.0 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
