"""Single turns with the context they were sampled in, cut out of whole episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.replay.store.columns import FACTS, OPTIONAL, PER_TRAJECTORY, Columns


def at_turns(
    columns: Columns,
    turns: NDArray[np.int32],
    rows: NDArray[np.int64] | None = None,
    *,
    context: bool = True,
) -> Columns:
    """Turn ``turns[i]`` of trajectory ``rows[i]``, (m,), as :meth:`~freshper.trajectory.Trajectory.at_turn` gives it.

    Copies; without ``rows`` it is one turn of each trajectory. Each has one turn, whose observation is everything
    before the reply; without ``context`` it is only the turn's own, and so are the images: the base priorities of
    the names are those of the whole. Linear in the tokens that are returned.
    """
    chosen = (columns.turn_offsets[:-1] if rows is None else columns.turn_offsets[rows]) + turns
    first = chosen if not context else chosen - turns  # the turn that the tokens begin with
    starts = columns.turns[first, 0].astype(np.int64)
    reply_starts = columns.turns[chosen, 1].astype(np.int64) - starts
    lengths = columns.turns[chosen, 2].astype(np.int64) - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)  # place within what is cut out
    source = inside + np.repeat((columns.offsets[:-1] if rows is None else columns.offsets[rows]) + starts, lengths)
    mask = inside >= np.repeat(reply_starts, lengths)
    masked: dict[str, Any] = {}
    for name in ("behavior_logprobs", *OPTIONAL):
        column = getattr(columns, name)
        masked[name] = None if column is None else np.where(mask, column[source], np.float32(0))
    facts: dict[str, Any] = {name: getattr(columns, name) for name in (*FACTS, *PER_TRAJECTORY)}
    if rows is not None:
        facts = {name: facts[name][rows] for name in FACTS}
        picked = rows.tolist()
        facts |= {name: tuple(getattr(columns, name)[row] for row in picked) for name in PER_TRAJECTORY}
    shown = np.concatenate([[0], np.cumsum(columns.turns[:, 3], dtype=np.int64)])
    ends = shown[chosen + 1] - shown[chosen - turns]  # within the trajectory's own images
    images = shown[chosen + 1] - shown[first]
    spans = zip(facts["images"], (ends - images).tolist(), ends.tolist(), strict=True)
    facts["images"] = tuple(kept[start:end] for kept, start, end in spans)
    return replace(
        columns,
        **masked,
        **facts,
        offsets=offsets,
        tokens=columns.tokens[source],
        response_mask=mask,
        turn_offsets=np.arange(len(chosen) + 1, dtype=np.int64),
        turns=np.stack([np.zeros_like(lengths), reply_starts, lengths, images], axis=1).astype(np.int32),
        turn_rewards=columns.turn_rewards[chosen],
    )
