"""Batches: trajectories of different lengths become a few padded tensors within a token budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freshper.errors import ConfigError, TrajectoryError
from freshper.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Right-padded tensors of some rows of a batch. ``rows`` (b,) says which; tensors are (b, T), weights (b, 1).

    ``lengths`` (b,) are the rows' true lengths, and ``response_index`` (n,) the places of the n sampled tokens in the
    flattened (b, T), ascending: both are known before anything reaches a device, so nobody has to wait for it.
    ``images`` are the encoded pictures of each row, in the order in which its tokens show them.
    """

    rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tokens: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    response_index: Tensor
    images: tuple[tuple[bytes, ...], ...] = ()

    @property
    def pictured(self) -> bool:
        """Whether any of its rows shows a picture."""
        return any(self.images)


def micro_batches(
    trajectories: Sequence[Trajectory],
    weights: NDArray[np.float64],
    token_budget: int,
    device: torch.device,
    *,
    pass_cost: int | None = None,
    packed: bool = False,
) -> Iterator[MicroBatch]:
    """Split a batch so that rows x longest row stays within ``token_budget``, longest rows together.

    Args:
        trajectories: the batch; every one needs advantages.
        weights: (B,) sampling weights.
        token_budget: largest rows x longest row of a micro-batch.
        device: where the tensors go.
        pass_cost: what one more forward and backward pass costs beside its tokens, in tokens. Given, the split is the
            one with the least padded tokens plus passes; None puts as many rows together as the budget holds.
        packed: the rows of a micro-batch will share one row without padding, so the budget counts true tokens.

    Raises :class:`ConfigError` where a single trajectory is longer than the budget: nothing is cut.
    """
    lengths = np.array([len(trajectory) for trajectory in trajectories])
    if lengths.max() > token_budget:
        raise ConfigError(f"a trajectory of {lengths.max()} tokens exceeds the token budget {token_budget}: raise it")
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    if packed:
        ends = _fill(falling, token_budget)
    elif pass_cost is None:
        ends = _widest(falling, token_budget)
    else:
        ends = _cheapest(falling, token_budget, pass_cost)
    start = 0
    for end in ends:
        yield _pad(trajectories, order[start:end], weights, device)
        start = end


def _widest(falling: NDArray[np.int64], budget: int) -> list[int]:
    """Ends of the groups when each takes as many rows as fit."""
    ends = [0]
    while ends[-1] < len(falling):
        ends.append(min(len(falling), ends[-1] + max(1, budget // int(falling[ends[-1]]))))
    return ends[1:]


def _fill(falling: NDArray[np.int64], budget: int) -> list[int]:
    """Ends of the groups when each takes rows until their true tokens fill the budget."""
    total = np.concatenate([[0], np.cumsum(falling)])
    ends = [0]
    while ends[-1] < len(falling):
        ends.append(int(np.searchsorted(total, total[ends[-1]] + budget, side="right")) - 1)
    return ends[1:]


def _cheapest(falling: NDArray[np.int64], budget: int, pass_cost: int) -> list[int]:
    """Ends of the groups with the least padded tokens + passes x ``pass_cost``, by dynamic programming."""
    count = len(falling)
    best = np.zeros(count + 1)
    first = np.zeros(count + 1, dtype=np.int64)  # where the last group of the cheapest split of the first k rows begins
    for end in range(1, count + 1):
        padded = (end - np.arange(end)) * falling[:end]
        cost = np.where(padded <= budget, best[:end] + padded, np.inf)
        first[end] = int(np.argmin(cost))
        best[end] = cost[first[end]] + pass_cost
    ends = [count]
    while first[ends[-1]] > 0:
        ends.append(int(first[ends[-1]]))
    return ends[::-1]


def _pad(
    trajectories: Sequence[Trajectory], rows: NDArray[np.int64], weights: NDArray[np.float64], device: torch.device
) -> MicroBatch:
    chosen = [trajectories[row] for row in rows]
    lengths = np.array([len(trajectory) for trajectory in chosen])
    shape = (len(chosen), int(lengths.max()))
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
    columns = {
        "tokens": tokens,
        "attention_mask": attention,
        "response_mask": response,
        "behavior_logprobs": behavior,
        "advantages": advantages,
        "weights": weights[rows, None].astype(np.float32),
        "response_index": np.flatnonzero(response),
    }
    on_device: dict[str, Any] = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
    return MicroBatch(rows, lengths, images=tuple(trajectory.images for trajectory in chosen), **on_device)
