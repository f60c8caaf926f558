"""Batches: trajectories of different lengths become a few padded tensors within a token budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freshper.errors import ConfigError, TrajectoryError
from freshper.trajectory import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """What the b rows of a micro-batch begin with, up to the last token before their first sampled one, each once.

    Row i begins with prompt ``of_row[i]``, (b,); prompt k has ``lengths[k]`` tokens and is that of row ``rows[k]``,
    both (p,). ``reach`` (b,) is the column of the last sampled token of each row: what comes later predicts nothing.
    """

    of_row: NDArray[np.int64]
    rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    reach: NDArray[np.int64]

    @property
    def shared(self) -> bool:
        """Whether some rows begin alike."""
        return len(self.rows) < len(self.of_row)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Right-padded tensors of some rows of a batch. ``rows`` (b,) says which; tensors are (b, T), weights (b, 1).

    ``lengths`` (b,) are the rows' true lengths, and ``response_index`` (n,) the places of the n sampled tokens in the
    flattened (b, T), ascending: both are known before anything reaches a device, so nobody has to wait for it.
    ``images`` are the encoded pictures of each row, in the order in which its tokens show them, ``prompts`` what rows
    share, where that was asked for.
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
    prompts: Prompts | None = None

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
    shared: bool = False,
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
        shared: rows that begin with the same prompt will share it, so the budget counts the longest prompt once for
            every other prompt, and the longest rest for every row. Needs a ``pass_cost``.

    Raises :class:`ConfigError` where a single trajectory is longer than the budget: nothing is cut.
    """
    lengths = np.array([len(trajectory) for trajectory in trajectories])
    if lengths.max() > token_budget:
        raise ConfigError(f"a trajectory of {lengths.max()} tokens exceeds the token budget {token_budget}: raise it")
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    if shared and pass_cost is not None:
        order, ends = _shared_split(trajectories, token_budget, pass_cost)
    elif packed:
        ends = _fill(falling, token_budget)
    elif pass_cost is None:
        ends = _widest(falling, token_budget)
    else:
        _, ends = _cheapest(len(falling), token_budget, pass_cost, _padded_tokens(falling))
    start = 0
    for end in ends:
        yield _pad(trajectories, order[start:end], weights, device, shared=shared)
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


def _cheapest(
    count: int, budget: int, pass_cost: int, tokens: Callable[[int], NDArray[np.int64]]
) -> tuple[float, list[int]]:
    """The least padded tokens + passes x ``pass_cost``, and the ends of its groups, by dynamic programming.

    ``tokens(end)`` (end,) are those of the groups that begin at each row and end before ``end``.
    """
    best = np.zeros(count + 1)
    first = np.zeros(count + 1, dtype=np.int64)  # where the last group of the cheapest split of the first k rows begins
    for end in range(1, count + 1):
        padded = tokens(end)
        cost = np.where(padded <= budget, best[:end] + padded, np.inf)
        first[end] = int(np.argmin(cost))
        best[end] = cost[first[end]] + pass_cost
    ends = [count]
    while first[ends[-1]] > 0:
        ends.append(int(first[ends[-1]]))
    return float(best[count]), ends[::-1]


def _padded_tokens(falling: NDArray[np.int64]) -> Callable[[int], NDArray[np.int64]]:
    """Tokens of a pass as :func:`_cheapest` asks for them, every row padded to its group's first."""
    return lambda end: (end - np.arange(end)) * falling[:end]


def _shared_split(
    trajectories: Sequence[Trajectory], budget: int, pass_cost: int
) -> tuple[NDArray[np.int64], list[int]]:
    """An order of the rows and the ends of its groups: like prompts together, or like lengths, which is cheaper."""
    prompts = [_prompt(trajectory) for trajectory in trajectories]
    same = _numbered(prompts)
    firsts = np.array([len(prompt) for prompt in prompts])
    rests = np.array([_reach(trajectory) for trajectory in trajectories]) - firsts
    wholes = np.array([len(trajectory) for trajectory in trajectories])
    by_length = np.argsort(-rests, kind="stable")
    longest = np.zeros(len(same), dtype=np.int64)
    np.maximum.at(longest, same, rests)
    by_prompt = np.lexsort((-rests, same, -longest[same]))
    found = []
    for order in (by_prompt, by_length):
        tokens = _shared_tokens(same[order], firsts[order], rests[order], wholes[order])
        cost, ends = _cheapest(len(order), budget, pass_cost, tokens)
        found.append((cost, order, ends))
    _, order, ends = min(found, key=lambda split: split[0])
    return order, ends


def _shared_tokens(
    same: NDArray[np.int64], firsts: NDArray[np.int64], rests: NDArray[np.int64], wholes: NDArray[np.int64]
) -> Callable[[int], NDArray[np.int64]]:
    """Tokens of a pass as :func:`_cheapest` asks for them: of rows with the prompts ``same``, of lengths ``firsts``.

    ``rests`` is what a row runs behind its prompt, ``wholes`` what it runs where it shares none; all (n,).
    """
    count = len(same)
    again = np.full(count, count)  # where the next row with the same prompt stands
    last: dict[int, int] = {}
    for place in range(count - 1, -1, -1):
        again[place] = last.get(int(same[place]), count)
        last[int(same[place])] = place

    def tokens(end: int) -> NDArray[np.int64]:
        rows = np.arange(end, 0, -1)
        first, rest, whole = (np.maximum.accumulate(sizes[:end][::-1])[::-1] for sizes in (firsts, rests, wholes))
        different = np.cumsum((again[:end] >= end)[::-1])[::-1]
        return np.where(different < rows, different * first + rows * rest, rows * whole)

    return tokens


def _prompt(trajectory: Trajectory) -> NDArray[np.int32]:
    """The tokens before the one that predicts the first sampled token."""
    return trajectory.tokens[: max(int(np.argmax(trajectory.response_mask)) - 1, 0)]


def _reach(trajectory: Trajectory) -> int:
    """The place of the last sampled token."""
    return len(trajectory) - 1 - int(np.argmax(trajectory.response_mask[::-1]))


def _numbered(prompts: Sequence[NDArray[np.int32]]) -> NDArray[np.int64]:
    """The same number for the same prompts, (n,), counted from 0 as they come; an empty one is like no other."""
    found: dict[bytes | int, int] = {}
    keys = [prompt.tobytes() or row for row, prompt in enumerate(prompts)]
    return np.array([found.setdefault(key, len(found)) for key in keys])


def _prompts_of(chosen: Sequence[Trajectory]) -> Prompts:
    prompts = [_prompt(trajectory) for trajectory in chosen]
    of_row = _numbered(prompts)
    _, rows = np.unique(of_row, return_index=True)
    lengths = np.array([len(prompts[row]) for row in rows])
    return Prompts(of_row, rows, lengths, np.array([_reach(trajectory) for trajectory in chosen]))


def _pad(
    trajectories: Sequence[Trajectory],
    rows: NDArray[np.int64],
    weights: NDArray[np.float64],
    device: torch.device,
    *,
    shared: bool,
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
    images, prompts = tuple(trajectory.images for trajectory in chosen), _prompts_of(chosen) if shared else None
    return MicroBatch(rows, lengths, images=images, prompts=prompts, **on_device)
