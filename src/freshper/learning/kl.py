"""KL to a reference model: estimates per token, in the loss or taken from the reward.

With x = log pi - log ref of a token sampled from pi (Schulman, "Approximating KL divergence", 2020):

=====  ==================  =====================================================================================
k1     x                   unbiased, of either sign
k2     x^2 / 2             biased, never negative
k3     exp(-x) - 1 + x     unbiased, never negative
=====  ==================  =====================================================================================

A good estimate of the number need not have a good gradient (arXiv 2506.09477; arXiv 2510.01555). For tokens sampled
from pi, the expected gradient of the estimate **in the loss** is: of k1, 0: grad log pi alone has mean zero; of k2,
E[x grad log pi], the gradient of KL(pi || ref); of k3, E[(1 - ref/pi) grad log pi], that of KL(ref || pi), which agrees
with it near the reference. So k1 in the loss would be noise, and is refused.

**In the reward**, the policy gradient sees the estimate as a number: k1 gives E[x grad log pi], the gradient of
KL(pi || ref), the right one; k3 gives that minus the gradient of KL(ref || pi), and k2 something else again. Both are
allowed there, since others use them, but k1 is what the reward wants. On replayed tokens all of this holds only as far
as the policies agree: the estimate stays one under the tokens as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freshper.errors import ConfigError, TrajectoryError, UnknownNameError
from freshper.learning.losses import log_ratios
from freshper.trajectory import Trajectory


def _k1(difference: Tensor) -> Tensor:
    return -difference


def _k2(difference: Tensor) -> Tensor:
    return difference.square() / 2


def _k3(difference: Tensor) -> Tensor:
    return difference.exp() - difference - 1


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}  # of log ref - log pi
KL_PLACES = ("loss", "reward")


def check_kl(estimator: str, place: str) -> None:
    """Raise :class:`ConfigError` for an unknown estimator or place, and for k1 in the loss, whose gradient is noise."""
    if estimator not in KL_ESTIMATORS:
        raise UnknownNameError("KL estimator", estimator, KL_ESTIMATORS)
    if place not in KL_PLACES:
        raise UnknownNameError("place of the KL", place, KL_PLACES)
    if (estimator, place) == ("k1", "loss"):
        raise ConfigError(
            "kl k1 in the loss has an expected gradient of zero and adds only noise: use k2 or k3 there, or put k1 "
            "into the reward"
        )


def token_kl(estimator: str, logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Estimate of KL(pi || reference) of every token in nats, (B, T), exactly 0 off the mask.

    The log-ratio is clamped to +-20 as that of losses is: a token far from the reference has no gradient.
    """
    if estimator not in KL_ESTIMATORS:
        raise UnknownNameError("KL estimator", estimator, KL_ESTIMATORS)
    return torch.where(mask, KL_ESTIMATORS[estimator](log_ratios(reference_logprobs, logprobs, mask)), 0.0)


def kl_penalties(
    trajectories: Sequence[Trajectory], reference_logprobs: Sequence[NDArray[np.float32]], estimator: str
) -> list[NDArray[np.float64]]:
    """KL estimate of every token, (T,) each, between the policy that wrote the trajectories and the reference.

    Taken at collection from the recorded log-probs and the reference's scores (T,), at the same temperature; for
    :func:`freshper.learning.advantages.penalized_returns`. Raises :class:`TrajectoryError` where log-probs are unknown.
    """
    penalties = []
    for place, (trajectory, reference) in enumerate(zip(trajectories, reference_logprobs, strict=True)):
        if not trajectory.logprobs_known or reference.shape != (len(trajectory),):
            raise TrajectoryError(
                f"trajectory {place} has logprobs_known={trajectory.logprobs_known} and reference scores of shape "
                f"{reference.shape} for {len(trajectory)} tokens: its KL cannot be taken from its rewards"
            )
        columns = (trajectory.behavior_logprobs, reference)
        written, other = (torch.tensor(column, dtype=torch.float64) for column in columns)
        mask = torch.tensor(trajectory.response_mask)
        values: NDArray[np.float64] = token_kl(estimator, written, other, mask).numpy()
        penalties.append(values)
    return penalties
