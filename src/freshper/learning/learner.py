"""The learner: one call is one optimizer update on a batch of trajectories. It owns the clock."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from freshper.errors import ConfigError, DivergedError, TrajectoryError
from freshper.learning.aggregation import row_scales
from freshper.learning.batching import MicroBatch
from freshper.learning.logprobs import Pictures, TokenLogprobs
from freshper.learning.objective import Objective, by_row, ess_fraction
from freshper.learning.optimization import Optimization, Schedule
from freshper.trajectory import Trajectory

Accept = Callable[[dict[str, float], NDArray[np.float64]], str | None]
"""Asked before the optimizer step, with the metrics and log-ratios (B,) of an update: why to skip it, or None."""
Reference = Callable[[], AbstractContextManager[nn.Module]]
"""Enters the reference model: ``with reference() as model: ...``."""


@dataclass(frozen=True, slots=True, eq=False)
class LearnerUpdate:
    """What one update did. ``skipped`` says why it was not applied; it is empty when it was.

    ``log_ratios`` (B,) are log(pi/mu) of whole trajectories **before** the update, in nats, ``clip_fractions`` (B,)
    the parts of their response tokens whose ratio was out of the loss's bounds.
    """

    skipped: str
    metrics: dict[str, float]
    log_ratios: NDArray[np.float64]
    clip_fractions: NDArray[np.float64]

    @property
    def applied(self) -> bool:
        """Whether the weights have moved."""
        return not self.skipped


class Learner:
    """Trains a causal language model on trajectories, against the recorded behavior log-probs.

    Args:
        model: a transformers causal LM, also with peft adapters; what needs a gradient is trained in place.
        objective: what is minimized.
        learning_rate, total_updates, schedule, warmup_updates, betas, weight_decay, max_grad_norm: see
            :class:`~freshper.learning.optimization.Optimization`.
        token_budget: rows x longest row of one forward pass; the gradient does not depend on it.
        patience: so many updates in a row that are not finite raise :class:`DivergedError`.
        reference: of the KL; None makes a copy of the model as it is now where the objective needs one.
        compiled: run the forward pass through ``torch.compile``.
        pictures: what the model needs to see pictures, such as a policy's ``picture_inputs``.
        share_prompts: run a prompt that several trajectories of a micro-batch begin with once.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        objective: Objective | None = None,
        learning_rate: float,
        total_updates: int,
        schedule: Schedule = "constant",
        warmup_updates: int = 0,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        token_budget: int = 16_384,
        patience: int = 5,
        reference: Reference | None = None,
        compiled: bool = False,
        pictures: Pictures | None = None,
        share_prompts: bool = False,
    ) -> None:
        self.model = model
        self.objective = objective or Objective()
        self.version = 0
        self.token_budget, self.patience = token_budget, patience
        self._optimization = Optimization(
            model.parameters(),
            learning_rate=learning_rate,
            total_updates=total_updates,
            schedule=schedule,
            warmup_updates=warmup_updates,
            betas=betas,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
        )
        self._pictures = pictures
        self.token_logprobs = TokenLogprobs(model, compiled=compiled, pictures=pictures, share_prompts=share_prompts)
        if reference is None and self.objective.kl > 0:
            frozen = copy.deepcopy(model).requires_grad_(False).eval()
            reference = lambda: contextlib.nullcontext(frozen)  # noqa: E731
        self._reference = reference
        self._reference_logprobs: TokenLogprobs | None = None
        self._device = next(model.parameters()).device
        self._failures = 0
        self._warned_truncation = False

    @property
    def learning_rate(self) -> float:
        """The rate of the next update."""
        return self._optimization.learning_rate

    def update(
        self,
        trajectories: Sequence[Trajectory],
        sampling_weights: NDArray[np.float64] | None = None,
        *,
        accept: Accept | None = None,
        scale_by_ess: bool = False,
    ) -> LearnerUpdate:
        """One optimizer update on B trajectories, each weighted by its sampling weight (B,), ones if left out.

        The objective is divided by the batch's own count, never by the sum of weights. ``accept`` may refuse the
        update; without it, updates that are not finite are skipped and :class:`DivergedError` is raised after
        ``patience`` of them in a row. ``scale_by_ess`` multiplies the learning rate by the square root of the batch's
        ESS fraction: what the variance of importance-weighted gradients allows.
        Raises :class:`TrajectoryError` for a demonstration without log-probs: it has no importance ratio.
        Where all advantages are 0, so is the gradient, and only AdamW's momentum moves the weights.
        """
        weights = self._checked(trajectories, sampling_weights)
        self.model.train()
        self._optimization.clear()
        lengths = np.array([trajectory.response_length for trajectory in trajectories])
        token_count = int(lengths.sum())
        scales, divisor = row_scales(self.objective.aggregation, lengths, self.objective.fixed_length)
        totals: dict[str, float] = {}
        rows = np.zeros((2, len(trajectories)))  # log-ratios and clip fractions
        temperature = _temperature(trajectories)
        for batch in self.token_logprobs.split(trajectories, weights, self.token_budget, self._device):
            scale = torch.from_numpy(scales[batch.rows, None].astype(np.float32)).to(self._device)
            loss, sums, of_rows = self._loss(batch, scale, temperature)
            (loss / divisor).backward()  # type: ignore[no-untyped-call]
            rows[:, batch.rows] = of_rows
            for name, value in sums.items():
                together = max if name == "ratio_max" else float.__add__
                totals[name] = together(totals.get(name, 0.0), value)
        grad_norm = self._optimization.clip()
        parts = {"loss": divisor, "ratio_max": 1.0}
        metrics = {name: value / parts.get(name, token_count) for name, value in totals.items()}
        rate = math.sqrt(ess_fraction(torch.from_numpy(rows[0]))) if scale_by_ess else 1.0
        metrics |= {"grad_norm": grad_norm, "learning_rate": self.learning_rate * rate}
        metrics["response_tokens"] = float(token_count)
        skipped = (accept or self._finite)(metrics, rows[0]) or ""
        if skipped:
            self._optimization.clear()
        else:
            self._optimization.apply(rate)
            self.version += 1
        return LearnerUpdate(skipped, metrics, *rows)

    @torch.inference_mode()
    def score(self, trajectories: Sequence[Trajectory]) -> list[NDArray[np.float32]]:
        """Log-probs (T,) that the present model gives to the sampled tokens, 0 elsewhere, at their temperature."""
        self.model.eval()
        return self._scores(self.token_logprobs, trajectories)

    @torch.inference_mode()
    def score_reference(self, trajectories: Sequence[Trajectory]) -> list[NDArray[np.float32]]:
        """The same by the reference model. Raises :class:`ConfigError` where there is none."""
        if self._reference is None:
            raise ConfigError("there is no reference model: give the learner one, or a KL above 0 in its objective")
        with self._reference() as model:
            return self._scores(self._referee(model), trajectories)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on, nested: tensors and plain values.

        Of the model, what is trained: a base under adapters stays what it was loaded as.
        """
        trained = {name: value.detach() for name, value in self.model.named_parameters() if value.requires_grad}
        counters = {"version": self.version, "failures": self._failures}
        return {"model": trained, "optimization": self._optimization.state_dict(), "counters": counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the learner that gave ``state`` would have, on a model of the same kind.

        Raises :class:`ConfigError` where the trained parameters are others; then nothing has changed.
        """
        trained = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        saved = state["model"]
        if different := sorted(trained.keys() ^ saved.keys()):
            raise ConfigError(f"the saved learner trained other parameters: {different[0]} is in one of both alone")
        for name, value in trained.items():
            if value.shape != saved[name].shape:
                raise ConfigError(f"{name} was saved with shape {tuple(saved[name].shape)}, it is {tuple(value.shape)}")
        with torch.no_grad():
            for name, value in trained.items():
                value.copy_(saved[name])
        self._optimization.load_state_dict(state["optimization"])
        self.version, self._failures = int(state["counters"]["version"]), int(state["counters"]["failures"])

    def _checked(
        self, trajectories: Sequence[Trajectory], sampling_weights: NDArray[np.float64] | None
    ) -> NDArray[np.float64]:
        """The sampling weights (B,). Raises for a batch that cannot be learned from."""
        if not trajectories:
            raise ConfigError("an update needs at least one trajectory")
        weights = np.ones(len(trajectories)) if sampling_weights is None else np.asarray(sampling_weights, np.float64)
        if weights.shape != (len(trajectories),):
            raise ConfigError(f"sampling_weights has shape {weights.shape}, there are {len(trajectories)} trajectories")
        if not np.all(np.isfinite(weights) & (weights >= 0)):
            worst = weights[~(np.isfinite(weights) & (weights >= 0))][0]
            raise ConfigError(f"sampling weight {worst} must be finite and >= 0: below 0 an update would unlearn")
        _check_logprobs_known(trajectories)
        if not self._warned_truncation and any(trajectory.sampling.truncated for trajectory in trajectories):
            self._warned_truncation = True
            warnings.warn(
                "trajectories were sampled with top-p or top-k, but the learner scores the full distribution: "
                "importance ratios are biased by the mass that was cut off",
                stacklevel=3,
            )
        return weights

    def _scores(self, scorer: TokenLogprobs, trajectories: Sequence[Trajectory]) -> list[NDArray[np.float32]]:
        scores: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(trajectories)
        ready = [t if t.advantages is not None else t.with_columns(advantages=np.zeros(len(t))) for t in trajectories]
        for batch in scorer.split(ready, np.ones(len(trajectories)), self.token_budget, self._device):
            logprobs = scorer(batch, _temperature(trajectories)).logprobs
            for row, line in zip(batch.rows.tolist(), logprobs.cpu().numpy(), strict=True):
                scores[row] = line[: len(trajectories[row])]
        return scores

    def _loss(
        self, batch: MicroBatch, scales: Tensor, temperature: float
    ) -> tuple[Tensor, dict[str, float], NDArray[np.float64]]:
        """Loss of a micro-batch before the divisor, sums for the metrics, and what is known of every row, (2, b)."""
        objective = self.objective
        scores = self.token_logprobs(
            batch, temperature, entropy=objective.entropy, entropy_gradient=objective.entropy_bonus > 0
        )
        reference = None
        if objective.kl > 0 and self._reference is not None:
            with torch.no_grad(), self._reference() as model:
                reference = self._referee(model)(batch, temperature).logprobs
        loss, sums, token_loss = objective(scores, batch, scales, reference)
        of_rows: NDArray[np.float64] = by_row(token_loss).cpu().numpy()
        return loss, {name: float(value.detach()) for name, value in sums.items()}, of_rows

    def _referee(self, model: nn.Module) -> TokenLogprobs:
        """What scores with the reference: of a base under adapters, what scores with the policy."""
        if model is self.model:
            return self.token_logprobs
        if self._reference_logprobs is None or self._reference_logprobs.model is not model:
            share = self.token_logprobs.shares_prompts  # it is given the same micro-batches
            self._reference_logprobs = TokenLogprobs(model, pictures=self._pictures, share_prompts=share)
        return self._reference_logprobs

    def _finite(self, metrics: dict[str, float], log_ratios: NDArray[np.float64]) -> str | None:  # noqa: ARG002
        """Skips what is not finite, and counts."""
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            self._failures = 0
            return None
        self._failures += 1
        reason = f"its loss is {metrics['loss']} and its gradient norm {metrics['grad_norm']}"
        if self._failures >= self.patience:
            raise DivergedError(
                f"{self._failures} updates in a row had a non-finite loss ({metrics['loss']}) or gradient norm "
                f"({metrics['grad_norm']}); lower the learning rate ({metrics['learning_rate']:g}) or the clip"
            )
        return reason


def _check_logprobs_known(trajectories: Sequence[Trajectory]) -> None:
    """A ratio against unknown log-probs is NaN, and the update would be skipped for a reason that nobody sees."""
    unknown = [place for place, trajectory in enumerate(trajectories) if not trajectory.logprobs_known]
    if unknown:
        raise TrajectoryError(
            f"trajectory {unknown[0]} of the batch ({len(unknown)} of {len(trajectories)} in all) has "
            "logprobs_known=False, so its importance ratios are unknown: record the log-probs of the engine that "
            "wrote it, or learn from it with a supervised loss"
        )


def _temperature(trajectories: Sequence[Trajectory]) -> float:
    """The one temperature of a batch. Greedy replies have no distribution to learn from."""
    temperatures = {trajectory.sampling.temperature for trajectory in trajectories}
    if len(temperatures) != 1 or 0 in temperatures:
        raise ConfigError(f"a batch was sampled at temperatures {sorted(temperatures)}: one, above 0, is needed")
    return temperatures.pop()
