"""Aggregation: how the losses of single tokens become the one number of a batch.

The loss of a batch is sum_b w_b s_b sum_t loss_bt / D, with sampling weights w (B,), row scales s (B,) and one divisor
D. Both belong to the whole batch, so the losses of its micro-batches add up to it exactly. Sampling weights never enter
the divisor: an item that is drawn too often must count for less, and dividing by the sum of weights would undo that.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freshper.errors import ConfigError, UnknownNameError

Aggregation = Literal["token", "sequence", "fixed"]


def row_scales(
    aggregation: Aggregation, lengths: ArrayLike, fixed_length: int | None = None
) -> tuple[NDArray[np.float64], float]:
    """Scale of every row, (B,), and the divisor of the batch, for rows of ``lengths`` (B,) response tokens.

    - "token": every response token of the batch counts the same: scales 1, divisor the number of tokens (DAPO,
      arXiv 2503.14476; the method's REINFORCE++).
    - "sequence": every trajectory counts the same, by the mean of its tokens: scales 1 / length, divisor B (GRPO,
      arXiv 2402.03300; GSPO).
    - "fixed": sums divided by a constant: scales 1, divisor B x ``fixed_length`` (Dr. GRPO, arXiv 2503.20783). The
      only one whose divisor does not depend on what was sampled: the others are biased estimates, by a factor.

    Raises :class:`ConfigError` for a length below 1.
    """
    counts = np.asarray(lengths)
    if counts.ndim != 1 or len(counts) == 0 or counts.min() < 1:
        raise ConfigError(f"lengths of shape {counts.shape}: at least one row, of at least one response token each")
    ones = np.ones(len(counts))
    if aggregation == "token":
        return ones, float(counts.sum())
    if aggregation == "sequence":
        return 1.0 / counts, float(len(counts))
    if aggregation == "fixed":
        if fixed_length is None or fixed_length < 1:
            raise ConfigError(f"fixed_length {fixed_length} must be at least 1: the sums are divided by it")
        return ones, float(len(counts) * fixed_length)
    raise UnknownNameError("aggregation", aggregation, get_args(Aggregation))
