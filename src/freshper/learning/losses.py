"""Losses: named inputs to the loss of every token, with what is measured on the way. All tensors are (B, T).

Every loss is minus a surrogate whose gradient is a policy gradient of importance-weighted tokens. r is the importance
ratio pi/mu against the log-probs recorded when a token was sampled, A the advantage, sg() takes no gradient. Masked
positions count for nothing: whatever stands there, nothing of it reaches a value or a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from freshper.errors import ConfigError

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: far beyond any clip, far inside the float range


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds on importance ratios; each loss says which it uses. Raises :class:`ConfigError` for what bounds nothing.

    Ratios below 1 - ``low`` or above 1 + ``high`` are clipped, 0 for ``high`` means the same as low. ``dual`` above 1
    bounds what a negative advantage can cost, 0 switches it off. ``truncation`` is the largest weight of a ratio.
    """

    low: float = 0.2
    high: float = 0.0
    dual: float = 3.0
    truncation: float = 2.0

    def __post_init__(self) -> None:
        for name, value, holds in (
            ("clip low", self.low, self.low > 0),
            ("clip high", self.high, self.high >= 0),
            ("dual clip", self.dual, self.dual == 0 or self.dual > 1),
            ("truncation", self.truncation, math.isfinite(self.truncation) and self.truncation >= 1),
        ):
            if not holds:
                raise ConfigError(f"{name} {value} is out of range: the loss would not mean what it says")

    @property
    def above(self) -> float:
        """How far above 1 a ratio may lie."""
        return self.high or self.low


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """Log-probs of the present policy (with gradient), those of the behavior policy, advantages, and the mask."""

    logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """Loss of every token, 0 off the mask; log(pi/mu) of every token, without gradient; and where a bound took hold."""

    values: Tensor
    log_ratios: Tensor
    outside: Tensor
    mask: Tensor

    def total(self, weights: Tensor) -> Tensor:
        """The weighted sum; ``weights`` (B, 1). The caller divides by the batch's divisor."""
        return (weights * self.values).sum()

    def sums(self) -> dict[str, Tensor]:
        """Sums over response tokens: how many were out of bounds, and |log r|; and the largest ratio."""
        return {
            "clip_fraction": self.outside.sum(),
            "abs_log_ratio": self.log_ratios.abs().sum(),
            "ratio_max": (self.log_ratios.exp() * self.mask).max(),
        }


LossFunction = Callable[[LossInputs, Clip], TokenLoss]


def log_ratios(logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi/mu per token, clamped before any exp, exactly 0 off the mask; so 0 * inf cannot arise."""
    difference = torch.where(mask, logprobs - behavior_logprobs, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ppo(inputs: LossInputs, clip: Clip) -> TokenLoss:
    """PPO clip (arXiv 1707.06347): -min(r A, clip(r, 1 - low, 1 + high) A).

    ``high`` above ``low`` leaves room to unlikely tokens (clip-higher, arXiv 2503.14476). ``dual`` c bounds the loss
    of a negative advantage by -c A (arXiv 1912.09729).
    """
    log_ratio = log_ratios(inputs.logprobs, inputs.behavior_logprobs, inputs.mask)
    ratio = log_ratio.exp()
    objective = _clipped(ratio, inputs.advantages, clip)
    if clip.dual > 0:
        floor = torch.maximum(objective, clip.dual * inputs.advantages)
        objective = torch.where(inputs.advantages < 0, floor, objective)
    return _token_loss(-objective, log_ratio, _outside(ratio, clip), inputs.mask)


def truncated_is(inputs: LossInputs, clip: Clip) -> TokenLoss:
    """Truncated importance sampling (Ionides 2008; as rho in arXiv 1802.01561): -sg(min(r, c)) A log pi.

    c is ``truncation``. The bound limits the variance, and no token loses its gradient. This is also CISPO
    (arXiv 2506.13585, eq. 4) as it was run and as TRL has it: its clipped weight has an upper bound, 1 + epsilon = c,
    and none below.
    """
    log_ratio = log_ratios(inputs.logprobs, inputs.behavior_logprobs, inputs.mask).detach()
    ratio = log_ratio.exp()
    return _weighted(inputs, ratio.clamp(max=clip.truncation), log_ratio, ratio > clip.truncation)


def gspo(inputs: LossInputs, clip: Clip) -> TokenLoss:
    """GSPO in its form per token (arXiv 2507.18071, section 4.3): -min(s_t A, clip(s_t, 1 - low, 1 + high) A).

    s_t = sg(s) pi / sg(pi): the value is the geometric mean s of a trajectory's ratios over all its response tokens,
    the gradient that of the token. With one advantage per trajectory and the aggregation "sequence" it is GSPO's own
    objective, value and gradient. s lies far closer to 1 than single ratios do: the paper clips at 3e-4 and 4e-4.
    """
    mask = inputs.mask
    log_ratio = log_ratios(inputs.logprobs, inputs.behavior_logprobs, mask).detach()
    mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    own = torch.where(mask, inputs.logprobs, 0.0)
    ratio = (mean + (own - own.detach())).exp()
    outside = _outside(ratio.detach(), clip)
    return _token_loss(-_clipped(ratio, inputs.advantages, clip), log_ratio, outside, mask)


def trajectory_is(inputs: LossInputs, clip: Clip) -> TokenLoss:  # noqa: ARG001 - one signature for all
    """Importance sampling of whole trajectories: -sg(product of all r) A log pi. Unbiased, and of high variance.

    Nothing is clipped (but at exp(20)): a few trajectories that fit the present policy outweigh all others, the more
    the longer they are. With sampling weights at beta 1, not normalized, toward uniform or toward freshness (an age
    says nothing of what was sampled), advantages R - b of a fixed baseline b and the aggregation "fixed", its gradient
    on replayed trajectories is that of the present policy's expected return without bias. Use it to measure what
    other losses give up, not to train.
    """
    log_ratio = log_ratios(inputs.logprobs, inputs.behavior_logprobs, inputs.mask).detach()
    whole = log_ratio.sum(1, keepdim=True)
    bounded = whole.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return _weighted(inputs, bounded.exp(), log_ratio, bounded != whole)


def reinforce(inputs: LossInputs, clip: Clip) -> TokenLoss:  # noqa: ARG001 - one signature for all
    """REINFORCE (Williams 1992): -A log pi. No ratio: right only on tokens of the present policy, biased in replay."""
    log_ratio = log_ratios(inputs.logprobs, inputs.behavior_logprobs, inputs.mask).detach()
    return _weighted(inputs, torch.ones_like(log_ratio), log_ratio, torch.zeros_like(inputs.mask))


LOSSES: dict[str, LossFunction] = {
    "ppo": ppo,
    "truncated-is": truncated_is,
    "gspo": gspo,
    "cispo": truncated_is,
    "reinforce": reinforce,
    "trajectory-is": trajectory_is,
}


def _clipped(ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip.low, 1 + clip.above) * advantages)


def _outside(ratio: Tensor, clip: Clip) -> Tensor:
    return (ratio - 1 > clip.above) | (1 - ratio > clip.low)


def _weighted(inputs: LossInputs, weight: Tensor, log_ratio: Tensor, outside: Tensor) -> TokenLoss:
    """A policy gradient whose tokens count with a fixed weight."""
    slope = torch.where(inputs.mask, weight * inputs.advantages, 0.0)  # off the mask it must not multiply a gradient
    return _token_loss(-(slope * inputs.logprobs), log_ratio, outside, inputs.mask)


def _token_loss(values: Tensor, log_ratio: Tensor, outside: Tensor, mask: Tensor) -> TokenLoss:
    return TokenLoss(torch.where(mask, values, 0.0), log_ratio.detach(), (outside & mask).detach(), mask)
