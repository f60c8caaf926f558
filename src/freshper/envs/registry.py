"""Tasks by name: those that come with the package, and your own as ``module:Class``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from freshper.envs import own
from freshper.envs.core import Env, Split, check_split, faults_of
from freshper.errors import ConfigError, UnknownNameError


@dataclass(frozen=True, slots=True)
class Task:
    """What builds a task, and a sentence about it."""

    factory: Callable[..., Env]
    summary: str


_TASKS: dict[str, Task] = {}


def register(task: str, factory: Callable[..., Env], summary: str) -> None:
    """Make ``task`` known. ``factory(task, split, **options)`` builds it; ``summary`` is one sentence about it.

    Raises :class:`ConfigError` when the name is taken.
    """
    if task in _TASKS:
        raise ConfigError(f"task {task!r} is registered already ({_TASKS[task].summary}); choose another name")
    _TASKS[task] = Task(factory, summary)


def make_env(task: str, split: Split = "train", **options: Any) -> Env:
    """Build the environment of a registered task on one split; ``options`` change the task's settings.

    Raises :class:`UnknownNameError` for a task, a split or an option that nobody knows, :class:`EnvError` where the
    environment's own code raises.
    """
    check_split(split)
    factory = find_task(task).factory
    with faults_of(task):
        return factory(task, split, **options)


def check_task(task: str) -> None:
    """Raise :class:`ConfigError` for a task that cannot be built: unknown, or of a module that cannot be imported."""
    find_task(task)


def task_names() -> list[str]:
    """The registered tasks, sorted."""
    return sorted(_TASKS)


def describe(task: str) -> str:
    """What a task is, in one sentence. Raises :class:`UnknownNameError`."""
    return find_task(task).summary


def find_task(task: str) -> Task:
    """What is known of a task. Raises :class:`ConfigError` as :func:`check_task`."""
    if task in _TASKS:
        return _TASKS[task]
    if ":" in task:
        return Task(own.resolve(task), f"your own environment {task}.")
    raise UnknownNameError("task", task, _TASKS)
