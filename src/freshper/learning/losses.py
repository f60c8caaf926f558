"""Losses: named inputs to a loss and its metrics. All tensors are (B, T); masked positions count for nothing."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: far beyond any clip, far inside the float range


def log_ratios(logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi/mu per token, clamped before any exp, exactly 0 off the mask; so 0 * inf cannot arise."""
    difference = torch.where(mask, logprobs - behavior_logprobs, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ppo_clip(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    clip: float,
    dual_clip: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over response tokens of -w min(r A, clip(r, 1 - clip, 1 + clip) A), and sums for the metrics.

    r is the importance ratio pi/mu against the log-probs recorded when the token was sampled (PPO,
    arXiv 1707.06347). ``weights`` (B, 1) are sampling weights. ``dual_clip`` c > 1 bounds the loss of a
    negative advantage by -c A (arXiv 1912.09729); 0 switches it off. The caller divides by a token count.
    """
    log_ratio = log_ratios(logprobs, behavior_logprobs, mask)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip > 0:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    loss = -(weights * objective * mask).sum()
    outside = ((ratio - 1).abs() > clip) & mask
    return loss, {
        "clip_fraction": outside.sum(),
        "abs_log_ratio": log_ratio.detach().abs().sum(),
        "ratio_max": (ratio.detach() * mask).max(),
    }


def entropy(all_logprobs: Tensor) -> Tensor:
    """Sum over N tokens of the policy's entropy, in nats; ``all_logprobs`` (N, V) is log pi."""
    return -(all_logprobs.exp() * all_logprobs).sum()


def kl_to_reference(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sum over response tokens of the k3 estimate of KL(pi || reference), in nats: exp(d) - d - 1 >= 0.

    d = log reference - log pi (Schulman, "Approximating KL divergence", 2020).
    """
    difference = log_ratios(reference_logprobs, logprobs, mask)
    return ((difference.exp() - difference - 1) * mask).sum()
