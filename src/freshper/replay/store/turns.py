"""Single turns with the context they were sampled in, cut out of whole episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.replay.store.columns import OPTIONAL, Columns


def at_turns(columns: Columns, turns: NDArray[np.int32]) -> Columns:
    """Turn ``turns[i]`` of trajectory i, (n,), as :meth:`~freshper.trajectory.Trajectory.at_turn` gives it; copies.

    Each has one turn, whose observation is everything before the reply.
    """
    chosen = columns.turn_offsets[:-1] + turns
    reply_starts = columns.turns[chosen, 1].astype(np.int64)
    ends = columns.turns[chosen, 2].astype(np.int64)
    shown = np.concatenate([[0], np.cumsum(columns.turns[:, 3], dtype=np.int64)])
    images = shown[chosen + 1] - shown[columns.turn_offsets[:-1]]
    offsets = np.concatenate([[0], np.cumsum(ends)]).astype(np.int64)
    inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], ends)  # place within its trajectory
    source = inside + np.repeat(columns.offsets[:-1], ends)
    mask = inside >= np.repeat(reply_starts, ends)
    masked: dict[str, Any] = {}
    for name in ("behavior_logprobs", *OPTIONAL):
        column = getattr(columns, name)
        masked[name] = None if column is None else np.where(mask, column[source], np.float32(0))
    return replace(
        columns,
        **masked,
        offsets=offsets,
        tokens=columns.tokens[source],
        response_mask=mask,
        turn_offsets=np.arange(len(columns) + 1, dtype=np.int64),
        turns=np.stack([np.zeros_like(ends), reply_starts, ends, images], axis=1).astype(np.int32),
        turn_rewards=columns.turn_rewards[chosen],
        images=tuple(kept[:count] for kept, count in zip(columns.images, images.tolist(), strict=True)),
    )
