"""What a draw returns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.replay.store.columns import Columns
from freshper.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class SampledBatch:
    """The facts of one draw of B items. Arrays are (B,), in the order of the draw.

    An item is a trajectory, a turn or a group, as the buffer's unit says. A stratified or systematic draw comes
    in the order of its strata: shuffle it before it is split. The data are copies: what happens to
    the buffer later changes nothing here.
    """

    keys: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    """P(i), from the tree that the item was drawn from: its chance per single draw. Without replacement: its
    inclusion probability divided by B."""
    base_priorities: NDArray[np.float64]
    """b_i, before freshness and alpha."""
    sampling_weights: NDArray[np.float64]
    """(Q_i / P_i)^beta, normalized as asked for; ones at beta 0."""
    ages: NDArray[np.int64]
    """Policy versions since the item's oldest turn was sampled."""
    uses: NDArray[np.int64]
    """How often the item had been drawn when this draw began."""
    index_version: int
    """The policy version whose freshness the draw was made with: earlier than the one asked for only while a
    background refresh is under way."""
    columns: Columns
    """The data, packed: all tokens in a row, with offsets; n trajectories, or turns with their context."""
    item_offsets: NDArray[np.int64]
    """(B + 1,): item i is trajectories item_offsets[i] to item_offsets[i + 1]; one each but for groups."""

    def __len__(self) -> int:
        """Batch size B, in items."""
        return len(self.keys)

    @cached_property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All n trajectories as objects; their arrays are views of :attr:`columns`."""
        return self.columns.trajectories()

    @property
    def groups(self) -> tuple[tuple[Trajectory, ...], ...]:
        """The trajectories of each item, B tuples."""
        bounds = self.item_offsets.tolist()
        return tuple(self.trajectories[start:end] for start, end in pairwise(bounds))

    @property
    def trajectory_weights(self) -> NDArray[np.float64]:
        """The sampling weight of each trajectory, (n,): that of its item."""
        return self.per_trajectory(self.sampling_weights)

    def per_trajectory(self, values: NDArray[np.generic]) -> NDArray[np.float64]:
        """Values of items (B,) repeated for each of their trajectories, (n,)."""
        repeated: NDArray[np.float64] = np.repeat(values, np.diff(self.item_offsets))
        return repeated

    @property
    def mean_sampling_weight(self) -> float:
        """By how much the weights scale the mean gradient; always worth logging."""
        return float(self.sampling_weights.mean())


@dataclass(frozen=True, slots=True, eq=False)
class PriorityUpdate:
    """What an update of priorities did: how many items it changed, and the keys it refused as gone or unknown."""

    updated: int
    refused: NDArray[np.integer[Any]]
