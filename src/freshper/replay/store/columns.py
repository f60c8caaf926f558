"""Columns: many trajectories as a few flat arrays, all tokens in a row. What the store keeps and a draw returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from freshper.errors import TrajectoryError, UnknownNameError
from freshper.trajectory import SamplingParams, StopReason, Trajectory, Turn

OPTIONAL = ("advantages", "td_errors")
PER_TOKEN = ("tokens", "response_mask", "behavior_logprobs", *OPTIONAL)
PER_TURN = ("turns", "turn_rewards")
FLAGS = ("successes", "logprobs_known", "has_advantages", "has_td_errors")
FACTS = ("policy_versions", "seeds", "stop_reasons", *FLAGS)
PER_TRAJECTORY = ("tasks", "groups", "sampling", "images")  # the ones that are tuples
_STOP_REASONS = tuple(StopReason)
_STOP_CODES = {reason: code for code, reason in enumerate(_STOP_REASONS)}


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """n trajectories with S tokens and M turns in all; those of trajectory i are ``offsets[i]:offsets[i + 1]``.

    Per token: ``tokens`` int32, ``response_mask`` bool, ``behavior_logprobs`` float32, and the optional float32
    columns ``advantages`` and ``td_errors`` (None when no trajectory has it; 0 where one has not), all (S,).
    Per turn: ``turns`` (M, 4) int32 with start, reply start, end (relative to the trajectory) and number of
    images, ``turn_rewards`` (M,) float64. Per trajectory, (n,): everything else. ``stop_reasons`` are places in
    the list of :class:`StopReason`.
    """

    offsets: NDArray[np.int64]  # (n + 1,)
    tokens: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32] | None
    td_errors: NDArray[np.float32] | None
    turn_offsets: NDArray[np.int64]  # (n + 1,)
    turns: NDArray[np.int32]
    turn_rewards: NDArray[np.float64]
    policy_versions: NDArray[np.int64]
    seeds: NDArray[np.int64]
    stop_reasons: NDArray[np.uint8]
    successes: NDArray[np.bool_]
    logprobs_known: NDArray[np.bool_]
    has_advantages: NDArray[np.bool_]
    has_td_errors: NDArray[np.bool_]
    tasks: tuple[str, ...]
    groups: tuple[str, ...]
    sampling: tuple[SamplingParams, ...]
    images: tuple[tuple[bytes, ...], ...]

    def __len__(self) -> int:
        """Number of trajectories n."""
        return len(self.policy_versions)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each trajectory, (n,)."""
        return np.diff(self.offsets)

    @staticmethod
    def pack(trajectories: Sequence[Trajectory]) -> Columns:
        """``trajectories`` (n,) as columns: copies."""
        return pack(trajectories)

    def take(self, rows: ArrayLike) -> Columns:
        """The trajectories at ``rows`` (m,) of 0..n-1, in that order; repeats are allowed."""
        chosen = np.asarray(rows)
        if chosen.ndim != 1 or not (chosen.size == 0 or np.issubdtype(chosen.dtype, np.integer)):
            raise TypeError(f"rows have shape {chosen.shape} and dtype {chosen.dtype}: they must be (m,) integers")
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < len(self)):
            raise IndexError(f"rows run from {chosen.min()} to {chosen.max()}: there are {len(self)} trajectories")
        return take_rows(self, chosen.astype(np.int64))

    def trajectories(self) -> tuple[Trajectory, ...]:
        """The same as objects, (n,); their arrays are read-only views of these columns."""
        return tuple(self._trajectory(number) for number in range(len(self)))

    def padded(self, column: str, *, fill: float = 0) -> NDArray[Any]:
        """A per-token column as (n, longest), right-padded with ``fill``: an array of its own, which may be written.

        Raises :class:`UnknownNameError` for another column, :class:`TrajectoryError` for an optional one that no
        trajectory has.
        """
        if column not in PER_TOKEN:
            raise UnknownNameError("column per token", str(column), PER_TOKEN)
        values: NDArray[Any] | None = getattr(self, column)
        if values is None:
            raise TrajectoryError(f"no trajectory of these has {column}: set them before it is added")
        lengths = self.lengths
        longest = int(lengths.max()) if len(lengths) else 0
        table = np.full((len(self), longest), fill, dtype=values.dtype)
        table[np.arange(longest) < lengths[:, None]] = values
        return table

    def _trajectory(self, number: int) -> Trajectory:
        span = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        spans = slice(int(self.turn_offsets[number]), int(self.turn_offsets[number + 1]))
        rewards = self.turn_rewards[spans].tolist()
        turns = tuple(
            _unchecked(Turn, start=start, reply_start=reply_start, end=end, reward=reward, images=images)
            for (start, reply_start, end, images), reward in zip(self.turns[spans].tolist(), rewards, strict=True)
        )
        trajectory: Trajectory = _unchecked(
            Trajectory,
            tokens=_view(self.tokens, span),
            response_mask=_view(self.response_mask, span),
            behavior_logprobs=_view(self.behavior_logprobs, span),
            turns=turns,
            stop_reason=_STOP_REASONS[self.stop_reasons[number]],
            success=bool(self.successes[number]),
            policy_version=int(self.policy_versions[number]),
            task=self.tasks[number],
            group=self.groups[number],
            seed=int(self.seeds[number]),
            sampling=self.sampling[number],
            advantages=_view(self.advantages, span) if self.has_advantages[number] else None,
            td_errors=_view(self.td_errors, span) if self.has_td_errors[number] else None,
            images=self.images[number],
            logprobs_known=bool(self.logprobs_known[number]),
        )
        return trajectory


class ColumnsBuffer:
    """Memory for packed arrays that is used again: it grows to the largest size asked for and stays there."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def room(self, name: str, rows: int, dtype: DTypeLike, shape: tuple[int, ...] = ()) -> NDArray[Any]:
        """``rows`` rows of ``shape`` for column ``name``; what was given for that name before is overwritten."""
        array = self._arrays.get(name)
        if array is None or len(array) < rows:
            # A quarter more: batches of one size differ a little in tokens.
            array = self._arrays[name] = np.empty((rows + rows // 4, *shape), dtype)
        return array[:rows]


def take_rows(columns: Columns, rows: NDArray[np.int64]) -> Columns:
    """The trajectories at ``rows`` (m,), in that order: copies, or views where ``rows`` is a range."""
    if len(rows) == len(columns) and np.array_equal(rows, np.arange(len(rows))):
        return columns
    tokens, offsets = _spans(columns.offsets, rows)
    turns, turn_offsets = _spans(columns.turn_offsets, rows)
    parts: dict[str, Any] = {"offsets": offsets, "turn_offsets": turn_offsets}
    for name in PER_TOKEN:
        values = getattr(columns, name)
        parts[name] = None if values is None else values[tokens]
    parts |= {name: getattr(columns, name)[turns] for name in PER_TURN}
    parts |= {name: getattr(columns, name)[rows] for name in FACTS}
    picked = rows.tolist()
    parts |= {name: tuple(getattr(columns, name)[row] for row in picked) for name in PER_TRAJECTORY}
    return Columns(**parts)


def _spans(offsets: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[Any, NDArray[np.int64]]:
    """What selects the spans of ``rows`` from a flat column, and the offsets of what is selected."""
    starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
    taken = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    if len(rows) and np.all(np.diff(rows) == 1):
        return slice(int(starts[0]), int(starts[0] + taken[-1])), taken
    return np.repeat(starts - taken[:-1], lengths) + np.arange(taken[-1]), taken


def pack(trajectories: Sequence[Trajectory]) -> Columns:
    """``trajectories`` (n,) as columns: copies."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    spans = [(turn.start, turn.reply_start, turn.end, turn.images) for turn in turns]

    def facts(name: str, dtype: type[np.generic]) -> NDArray[Any]:
        return np.array([getattr(trajectory, name) for trajectory in trajectories], dtype=dtype)

    return Columns(
        offsets=_offsets([len(trajectory) for trajectory in trajectories]),
        tokens=_joined(trajectories, "tokens", np.int32),
        response_mask=_joined(trajectories, "response_mask", np.bool_),
        behavior_logprobs=_joined(trajectories, "behavior_logprobs", np.float32),
        advantages=_optional(trajectories, "advantages"),
        td_errors=_optional(trajectories, "td_errors"),
        turn_offsets=_offsets([len(trajectory.turns) for trajectory in trajectories]),
        turns=np.array(spans, dtype=np.int32).reshape(-1, 4),
        turn_rewards=np.array([turn.reward for turn in turns], dtype=np.float64),
        policy_versions=facts("policy_version", np.int64),
        seeds=facts("seed", np.int64),
        stop_reasons=np.array([_STOP_CODES[trajectory.stop_reason] for trajectory in trajectories], dtype=np.uint8),
        successes=facts("success", np.bool_),
        logprobs_known=facts("logprobs_known", np.bool_),
        has_advantages=np.array([trajectory.advantages is not None for trajectory in trajectories], dtype=np.bool_),
        has_td_errors=np.array([trajectory.td_errors is not None for trajectory in trajectories], dtype=np.bool_),
        tasks=tuple(trajectory.task for trajectory in trajectories),
        groups=tuple(trajectory.group for trajectory in trajectories),
        sampling=tuple(trajectory.sampling for trajectory in trajectories),
        images=tuple(trajectory.images for trajectory in trajectories),
    )


def _offsets(counts: Sequence[int]) -> NDArray[np.int64]:
    return np.cumsum([0, *counts], dtype=np.int64)


def _joined(trajectories: Sequence[Trajectory], name: str, dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *(getattr(trajectory, name) for trajectory in trajectories)])


def _optional(trajectories: Sequence[Trajectory], name: str) -> NDArray[np.float32] | None:
    parts = [getattr(trajectory, name) for trajectory in trajectories]
    if all(part is None for part in parts):
        return None
    filled = [
        np.zeros(len(t), np.float32) if part is None else part for t, part in zip(trajectories, parts, strict=True)
    ]
    return np.concatenate(filled)


def _view(column: Any, span: slice) -> NDArray[Any]:
    view: NDArray[Any] = column[span]
    view.flags.writeable = False
    return view


def _unchecked(kind: type[Any], **fields: Any) -> Any:
    """A record whose parts were checked when they were first made: building it again costs no second check."""
    record = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(record, name, value)
    return record
