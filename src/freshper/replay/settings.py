"""What a buffer was asked to be: checked when made, described for saving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ConfigError, SnapshotError
from freshper.replay.auto_tau import AutoTau
from freshper.replay.checks import check_name, shown
from freshper.replay.draw.sampler import check_alpha
from freshper.replay.draw.tasks import TaskReplay, check_decay
from freshper.replay.freshness import (
    Exponential,
    Freshness,
    NoDecay,
    describe_freshness,
    freshness_from,
)
from freshper.replay.priority import Priority, check_priority
from freshper.replay.store.arrivals import UNITS, Unit
from freshper.replay.store.eviction import EVICT, Evict
from freshper.trajectory import Trajectory

Refresh = Literal["sync", "background"]
MAX_CAPACITY = 2**40  # a hundred times what any memory holds, and no product with it leaves int64
_MAX_INT = 2**63 - 1  # what is counted is counted in int64
REFRESH: tuple[Refresh, ...] = ("sync", "background")
Decay = Freshness | AutoTau | Literal["auto"]
_PLAIN = ("capacity", "alpha", "eps", "unit", "evict", "max_bytes", "max_uses", "max_age", "refresh", "seed")


@dataclass(frozen=True, slots=True)
class BufferSettings:
    """The arguments of a :class:`~freshper.replay.buffer.ReplayBuffer` that decide what it does.

    Raises :class:`ConfigError` for a value out of range.
    """

    capacity: int
    priority: Priority
    freshness: Decay
    alpha: float
    eps: float
    unit: Unit
    evict: Evict
    max_bytes: int | None
    max_uses: int | None
    max_age: int | None
    tasks: Mapping[str, TaskReplay] | None
    refresh: Refresh
    seed: int

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "capacity", _count("capacity", self.capacity, 1, MAX_CAPACITY))
        for name, least in (("max_bytes", 1), ("max_uses", 1), ("max_age", 0)):
            if getattr(self, name) is not None:
                put(self, name, _count(name, getattr(self, name), least, _MAX_INT))
        put(self, "seed", _count("seed", self.seed, 0))
        check_priority(self.priority, self.eps)
        put(self, "eps", float(self.eps))
        put(self, "alpha", check_alpha(self.alpha))
        for kind, name, known in (
            ("unit", self.unit, UNITS),
            ("eviction", self.evict, EVICT),
            ("way to refresh", self.refresh, REFRESH),
        ):
            check_name(kind, name, known)
        check_decay(self.freshness)
        self._check_tasks()

    def _check_tasks(self) -> None:
        if self.tasks is None:
            return
        if not isinstance(self.tasks, Mapping):
            raise ConfigError(f"tasks {shown(self.tasks)} must be a mapping of names of tasks to TaskReplay, or None")
        object.__setattr__(self, "tasks", dict(self.tasks))
        for name, task in self.tasks.items():
            if not isinstance(name, str) or not isinstance(task, TaskReplay):
                raise ConfigError(f"tasks holds {shown(name)}: {shown(task)}; it maps names of tasks to TaskReplay")
        if not self.tasks:
            raise ConfigError("tasks is empty: name at least one task, or leave it out for a buffer of one tree")
        shares = sum(task.share or 0.0 for task in self.tasks.values())
        if shares > 1 + 1e-9:
            raise ConfigError(f"the shares of the tasks sum to {shares:g}: a draw has only one whole to give")

    def decays(self) -> list[Decay]:
        """The decay of every index: one for each task, or one."""
        if self.tasks is None:
            return [self.freshness]
        return [self.freshness if task.freshness is None else task.freshness for task in self.tasks.values()]

    def with_decay(self, number: int, freshness: Freshness) -> BufferSettings:
        """The same with another decay of index ``number``."""
        if self.tasks is None:
            return replace(self, freshness=freshness)
        name = list(self.tasks)[number]
        return replace(self, tasks={**self.tasks, name: replace(self.tasks[name], freshness=freshness)})

    def describe(self) -> dict[str, Any]:
        """Ready for JSON; a function of the user's is left out, and has to be given again."""
        described: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        described["priority"] = self.priority if isinstance(self.priority, str) else None
        described["freshness"] = _describe(self.freshness)
        described["tasks"] = self.tasks and {
            name: {
                "freshness": None if task.freshness is None else [_describe(task.freshness)],
                "share": task.share,
                "max_share": task.max_share,
                "quota": task.quota,
            }
            for name, task in self.tasks.items()
        }
        return described

    @classmethod
    def from_description(
        cls,
        described: Mapping[str, Any],
        priority: Priority | None,
        freshness: Decay | Mapping[str, Decay] | None,
        *,
        look_only: bool = False,
    ) -> BufferSettings:
        """What :meth:`describe` described, with the functions that it left out.

        Raises :class:`ConfigError` where one is missing, or given though none was left out, and
        :class:`SnapshotError` for another description. Who only looks needs no function: see :class:`Unseen`.
        """
        if missing := {*_PLAIN, "priority", "freshness", "tasks"} - described.keys():
            raise SnapshotError(f"the saved settings are not those of a buffer: {min(missing)} is missing")
        if look_only and priority is None and described["priority"] is None:
            priority = _unseen_priority
        if (described["priority"] is None) != (priority is not None):
            if described["priority"] is None:
                raise ConfigError("the saved buffer's priority was a function: pass it to load")
            raise ConfigError(
                f"the saved buffer's priority was {described['priority']!r}; load was given {shown(priority)}: "
                "leave it out"
            )
        given = dict(freshness) if isinstance(freshness, Mapping) else {"": freshness} if freshness is not None else {}
        values = {name: described[name] for name in _PLAIN}
        unseen = Unseen() if look_only else None
        values["freshness"] = _from(described["freshness"], "freshness", given.pop("", None), unseen)
        tasks = described["tasks"]
        values["tasks"] = tasks and {
            name: TaskReplay(
                None
                if task["freshness"] is None
                else _from(task["freshness"][0], f"task {name}", given.pop(name, None), unseen),
                task["share"],
                task["max_share"],
                task["quota"],
            )
            for name, task in tasks.items()
        }
        if given:
            raise ConfigError(f"load was given a freshness for {', '.join(map(repr, given))}, which the buffer has not")
        return cls(priority=described["priority"] if priority is None else priority, **values)


def as_auto(decay: Decay) -> AutoTau | None:
    """A tau of its own to fit, or None for a fixed decay."""
    if isinstance(decay, AutoTau):
        return AutoTau.restore(decay.state())
    return AutoTau() if isinstance(decay, str) else None


def starting_decay(decay: Decay, auto: AutoTau | None) -> Freshness:
    """The decay that an index begins with."""
    if auto is not None:
        return Exponential(auto.tau)
    if isinstance(decay, (str, AutoTau)):
        raise ConfigError(f"freshness {decay!r} has no tau to begin with")
    return decay


def _count(name: str, value: object, least: int, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"{name} {shown(value)} must be an int >= {least}")
    if most is not None and value > most:
        raise ConfigError(f"{name} {shown(value)} must be <= {most}: no machine holds or counts more")
    return int(value)


def _describe(decay: Decay) -> dict[str, Any] | None:
    if isinstance(decay, AutoTau):
        return {"kind": "auto", "auto": decay.state()}
    return {"kind": "auto", "auto": None} if isinstance(decay, str) else describe_freshness(decay)


def _from(described: Mapping[str, Any] | None, where: str, given: Decay | None, unseen: Unseen | None) -> Decay:
    if described is None:
        if given is None and unseen is None:
            raise ConfigError(f"the saved buffer's decay ({where}) was a function: pass it to load")
        return given or unseen or NoDecay()
    decay: Decay = "auto"
    if described["kind"] != "auto":
        decay = freshness_from(described)
    elif described["auto"] is not None:
        decay = AutoTau.restore(described["auto"])
    if given is not None:
        raise ConfigError(
            f"the saved buffer's decay ({where}) was {decay}; load was given {given!r}: leave it out, and call "
            "set_freshness afterwards to change it"
        )
    return decay


class Unseen:
    """Stands for a decay that was a function, in a buffer that is only looked at: saved weights stay as they are."""

    rate = 0.0

    def __call__(self, ages: NDArray[np.int64]) -> NDArray[np.float64]:
        """Ones: what has come since the weights were saved counts as fresh."""
        return np.ones(ages.shape)

    def __repr__(self) -> str:
        """For people."""
        return "a function"


def _unseen_priority(trajectory: Trajectory) -> float:
    raise ConfigError(
        f"the saved buffer's priority was a function: to add a trajectory of task {trajectory.task!r}, load with it"
    )
