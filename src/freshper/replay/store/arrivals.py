"""What comes into a buffer: trajectories become items, checked, with their base priorities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ClockError, ConfigError, TrajectoryError
from freshper.replay.priority import Priority, base_priorities
from freshper.replay.store.columns import Columns, pack
from freshper.replay.store.turns import at_turns
from freshper.trajectory import StopReason, Trajectory

Unit = Literal["trajectory", "turn", "group"]
UNITS: tuple[Unit, ...] = ("trajectory", "turn", "group")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """n items on their way into a buffer, and the trajectories they are made of.

    Item i is the trajectories ``members[offsets[i] : offsets[i + 1]]`` of ``columns``, or, where ``turns`` is
    given, that turn of its one trajectory. All other arrays are (n,).
    """

    columns: Columns
    members: NDArray[np.int64]
    offsets: NDArray[np.int64]
    turns: NDArray[np.int32] | None
    bases: NDArray[np.float64]
    owners: NDArray[np.int16]

    def __len__(self) -> int:
        """Number of items."""
        return len(self.bases)

    @property
    def versions(self) -> NDArray[np.int64]:
        """The policy version of each item: that of its oldest trajectory."""
        if len(self) == 0:
            return np.empty(0, dtype=np.int64)
        oldest: NDArray[np.int64] = np.minimum.reduceat(self.columns.policy_versions[self.members], self.offsets[:-1])
        return oldest


def arrive(
    given: Iterable[Any],
    version: int,
    *,
    unit: Unit,
    priority: Priority,
    eps: float,
    owners: Mapping[str, int] | None,
) -> Arrivals:
    """Items out of trajectories, or out of groups of them; ``owners`` gives the index of every known task.

    Raises as :meth:`~freshper.replay.buffer.ReplayBuffer.add` does.
    """
    groups = as_groups(given, unit)
    flat = [trajectory for group in groups for trajectory in group]
    for number, trajectory in enumerate(flat):
        _check_storable(number, trajectory, version)
    columns = pack(flat)
    if unit == "turn":
        counts = np.diff(columns.turn_offsets)
        members = np.repeat(np.arange(len(flat)), counts)
        turns = (np.arange(len(members)) - np.repeat(columns.turn_offsets[:-1], counts)).astype(np.int32)
        # A named measure looks at the reply alone; a function may look at everything before it.
        views = at_turns(columns, turns, rows=members, context=callable(priority)).trajectories()
        offsets = np.arange(len(members) + 1)
        bases = base_priorities(views, priority, eps)
    else:
        members, turns = np.arange(len(flat)), None
        offsets = np.cumsum([0, *map(len, groups)], dtype=np.int64)
        bases = group_priorities(groups, priority, eps)
    first = [flat[member].task for member in members[offsets[:-1]].tolist()]
    return Arrivals(columns, members, offsets, turns, bases, owners_of(first, owners))


def as_groups(given: Iterable[Any], unit: Unit) -> list[tuple[Trajectory, ...]]:
    """The trajectories of each item: one each for the units trajectory and turn. Raises TypeError for other shapes."""
    if isinstance(given, Trajectory):
        raise TypeError("a sequence of trajectories is needed, not one: write [trajectory]")
    items = tuple(given)
    if unit != "group":
        for number, item in enumerate(items):
            if not isinstance(item, Trajectory):
                raise TypeError(
                    f"item {number} is a {type(item).__name__}: a flat sequence of Trajectory is needed (groups go "
                    "into a buffer with unit='group')"
                )
        return [(item,) for item in items]
    groups = []
    for number, item in enumerate(items):
        if isinstance(item, Trajectory) or not isinstance(item, Sequence):
            raise TypeError(
                f"item {number} is a {type(item).__name__}: a buffer with unit='group' takes a sequence of groups, "
                "each a sequence of Trajectory"
            )
        groups.append(_group(number, tuple(item)))
    return groups


def _group(number: int, members: tuple[Any, ...]) -> tuple[Trajectory, ...]:
    for member in members:
        if not isinstance(member, Trajectory):
            raise TypeError(f"group {number} holds a {type(member).__name__}: each member must be a Trajectory")
    if not members:
        raise TrajectoryError(f"group {number} is empty: nothing was added")
    names = sorted({(member.task, member.group) for member in members})
    if len(names) != 1:
        raise TrajectoryError(
            f"group {number} has members of {len(names)} starts {names[:3]}: all members of a group share task and "
            "group; nothing was added"
        )
    return members


def group_priorities(groups: Sequence[Sequence[Trajectory]], priority: Priority, eps: float) -> NDArray[np.float64]:
    """The base priority of each group, (n,): the mean over its members."""
    flat = base_priorities([trajectory for group in groups for trajectory in group], priority, eps)
    sizes = np.array([len(group) for group in groups], dtype=np.int64)
    if len(sizes) == len(flat):
        return flat
    parts = flat / np.repeat(sizes, sizes)  # divided first: the sum of finite priorities may overflow
    means: NDArray[np.float64] = np.add.reduceat(parts, np.cumsum(sizes) - sizes)
    return means


def owners_of(tasks: Sequence[str], owners: Mapping[str, int] | None) -> NDArray[np.int16]:
    """The index of every task (n,). Raises :class:`ConfigError` for one that the buffer does not know."""
    if owners is None:
        return np.zeros(len(tasks), dtype=np.int16)
    unknown = next((task for task in tasks if task not in owners), None)
    if unknown is not None:
        raise ConfigError(
            f"a trajectory of task {unknown!r} came to a buffer with tasks {', '.join(sorted(owners))}: name it "
            "there; nothing was done"
        )
    return np.array([owners[task] for task in tasks], dtype=np.int16)


def _check_storable(number: int, trajectory: Trajectory, version: int) -> None:
    if trajectory.policy_version > version:
        raise ClockError(
            f"trajectory {number} was written by policy version {trajectory.policy_version}, but the policy is at "
            f"{version}: its freshness would exceed 1; nothing was added"
        )
    if trajectory.stop_reason is StopReason.ERROR:
        raise TrajectoryError(f"trajectory {number} ended in an error: such an episode is never replayed")
