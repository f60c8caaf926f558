"""Batches: trajectories of different lengths become a few padded tensors within a token budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freshper.errors import ConfigError, TrajectoryError
from freshper.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Right-padded tensors of some rows of a batch. ``rows`` (b,) says which; tensors are (b, T), weights (b, 1)."""

    rows: NDArray[np.int64]
    tokens: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    weights: Tensor


def micro_batches(
    trajectories: Sequence[Trajectory], weights: NDArray[np.float64], token_budget: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Split a batch so that rows x longest row stays within ``token_budget``, longest rows together.

    Raises :class:`ConfigError` where a single trajectory is longer than the budget: nothing is cut.
    """
    lengths = np.array([len(trajectory) for trajectory in trajectories])
    if lengths.max() > token_budget:
        raise ConfigError(f"a trajectory of {lengths.max()} tokens exceeds the token budget {token_budget}: raise it")
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        rows = order[start : start + max(1, token_budget // int(lengths[order[start]]))]
        yield _pad(trajectories, rows, weights, device)
        start += len(rows)


def _pad(
    trajectories: Sequence[Trajectory], rows: NDArray[np.int64], weights: NDArray[np.float64], device: torch.device
) -> MicroBatch:
    chosen = [trajectories[row] for row in rows]
    shape = (len(chosen), max(map(len, chosen)))
    tokens = np.zeros(shape, dtype=np.int64)
    attention = np.zeros(shape, dtype=np.int64)
    response = np.zeros(shape, dtype=np.bool_)
    behavior = np.zeros(shape, dtype=np.float32)
    advantages = np.zeros(shape, dtype=np.float32)
    for index, trajectory in enumerate(chosen):
        span = slice(0, len(trajectory))
        if trajectory.advantages is None:
            raise TrajectoryError(
                "a trajectory without advantages cannot be learned from: compute them at collection, "
                "and keep them with the trajectory when it is replayed"
            )
        if trajectory.response_mask[0]:
            raise TrajectoryError(
                "the first token of a trajectory was sampled from nothing: the model cannot score it, "
                "so every observation must have at least one token"
            )
        tokens[index, span] = trajectory.tokens
        attention[index, span] = 1
        response[index, span] = trajectory.response_mask
        behavior[index, span] = trajectory.behavior_logprobs
        advantages[index, span] = trajectory.advantages
    columns = (tokens, attention, response, behavior, advantages, weights[rows, None].astype(np.float32))
    return MicroBatch(rows, *(torch.from_numpy(column).to(device) for column in columns))
