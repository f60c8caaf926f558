"""What an update minimizes: a loss of every token, a KL to a reference, an entropy bonus, and how they are added up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freshper.errors import ConfigError, UnknownNameError
from freshper.learning.aggregation import Aggregation
from freshper.learning.batching import MicroBatch
from freshper.learning.heads import Entropy
from freshper.learning.kl import check_kl, token_kl
from freshper.learning.logprobs import TokenScores
from freshper.learning.losses import LOSSES, Clip, LossFunction, LossInputs, TokenLoss


@dataclass(frozen=True, slots=True)
class Objective:
    """loss + ``kl`` x KL - ``entropy_bonus`` x entropy, each aggregated in the same way.

    ``loss`` names one of :data:`~freshper.learning.losses.LOSSES`, or is a function like them. ``aggregation`` and
    ``fixed_length`` are those of :func:`~freshper.learning.aggregation.row_scales`, ``kl_estimator`` one of
    :data:`~freshper.learning.kl.KL_ESTIMATORS`. Sampling weights weigh the loss; KL and entropy are those of the
    batch's tokens as they are. Raises :class:`ConfigError` and :class:`UnknownNameError`.
    """

    loss: str | LossFunction = "ppo"
    clip: Clip = field(default_factory=Clip)
    aggregation: Aggregation = "token"
    fixed_length: int | None = None
    kl: float = 0.0
    kl_estimator: str = "k3"
    entropy_bonus: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.loss, str) and self.loss not in LOSSES:
            raise UnknownNameError("loss", self.loss, LOSSES)
        for name, value in (("kl", self.kl), ("entropy_bonus", self.entropy_bonus)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} {value} must be finite and >= 0: below 0 it would be sought, not avoided")
        if self.kl > 0:
            check_kl(self.kl_estimator, "loss")

    @property
    def entropy(self) -> Entropy:
        """In what form the entropy is needed."""
        return "sum" if self.aggregation == "token" else "tokens"

    def __call__(
        self, scores: TokenScores, batch: MicroBatch, scales: Tensor, reference_logprobs: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor], TokenLoss]:
        """Loss of a micro-batch before the batch's divisor, sums over its response tokens, and the loss per token.

        ``scales`` (b, 1) are those of its rows, ``reference_logprobs`` (b, T) are needed where ``kl`` is above 0.
        """
        mask = batch.response_mask
        inputs = LossInputs(scores.logprobs, batch.behavior_logprobs, batch.advantages, mask)
        function = LOSSES[self.loss] if isinstance(self.loss, str) else self.loss
        token_loss = function(inputs, self.clip)
        loss, sums = token_loss.total(batch.weights * scales), token_loss.sums()
        entropy = scores.entropy
        assert entropy is not None
        sums["entropy"] = entropy.sum()
        if self.entropy_bonus > 0:
            loss = loss - self.entropy_bonus * (entropy if self.aggregation == "token" else (scales * entropy).sum())
        if reference_logprobs is not None:
            kl = token_kl(self.kl_estimator, scores.logprobs, reference_logprobs, mask)
            sums["kl"] = kl.sum()
            loss = loss + self.kl * (scales * kl).sum()
        sums["loss"] = loss
        return loss, sums, token_loss


def by_row(token_loss: TokenLoss) -> Tensor:
    """Log-ratio of every row in nats, and the part of its response tokens out of bounds, (2, b) float64."""
    mask = token_loss.mask
    counts = mask.sum(1).double()
    return torch.stack([token_loss.log_ratios.double().sum(1), token_loss.outside.sum(1).double() / counts])


def ess_fraction(log_ratios: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of importance ratios w = exp(``log_ratios``) (n,): 1 when all are equal, at least 1/n."""
    weights = (log_ratios - log_ratios.max()).exp()
    return float(weights.sum().square() / weights.square().sum() / len(weights))
