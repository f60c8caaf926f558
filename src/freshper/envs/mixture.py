"""Several tasks as one: every episode is of a task that its seed draws by weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from freshper.envs.core import Env, Outcome, Pictured, Split, Teachable
from freshper.envs.registry import make_env
from freshper.errors import ConfigError, EnvError, UnknownNameError

TASK = "mixture"
SUMMARY = "Several tasks with weights (frozenlake and sokoban, equal ones): each episode's seed draws one of them."
_LARGEST_WEIGHT = 1e100  # so that their sum is finite
_ROUNDING = 1e-9
DEFAULT_WEIGHTS: Mapping[str, float] = MappingProxyType({"frozenlake": 1.0, "sokoban": 1.0})


class MixtureEnv:
    """Episodes of several tasks, drawn by weight.

    Observation, actions, rewards and end are those of the task that the episode's seed draws; all runs from one seed,
    such as a group, play the same level of the same task. Between ``reset`` and the next, ``task``, ``instructions``
    and ``max_turns`` are those of that task: trajectories carry its name, and counts are kept for each. ``weights``
    (k,) are the tasks' shares as they were asked for; :meth:`draw_by` sets others.

    It shows pictures if one of its tasks does, and has a demonstrator if all of them have one.

    Parameters: ``weights``, a table of task and weight (a task is drawn in proportion to it; frozenlake and sokoban,
    equal ones, by default); ``options``, a table of task and table of that task's settings. Environments of one's own
    are named as everywhere, MODULE:CLASS and so on.

    Source: its tasks' own.
    """

    images: Callable[[], tuple[bytes, ...]]  # only where a task shows pictures
    solution: Callable[[], list[str] | None]  # these two where all tasks have them
    demonstrate: Callable[[np.random.Generator], str]

    def __init__(self, envs: Sequence[Env], weights: Sequence[float]) -> None:
        if not (envs and len(envs) == len(weights)):
            raise ConfigError(f"a mixture of {len(envs)} tasks with {len(weights)} weights: one each, at least one")
        if any(isinstance(weight, bool) or not 0 < weight <= _LARGEST_WEIGHT for weight in weights):
            raise ConfigError(
                f"the weights {list(weights)} of a mixture must be above 0 and at most {_LARGEST_WEIGHT:g}; leave a "
                "task out"
            )
        if any(isinstance(env, MixtureEnv) for env in envs):
            raise ConfigError("a mixture cannot be a task of another one: name its tasks")
        self.tasks = tuple(env.task for env in envs)  # in the order of the weights
        if twice := [task for task in self.tasks if self.tasks.count(task) > 1]:
            raise ConfigError(f"{self.tasks.count(twice[0])} tasks of a mixture are called {twice[0]!r}: rename one")
        self._envs = list(envs)
        total = math.fsum(weights)
        self.weights = tuple(weight / total for weight in weights)
        self._shares = list(self.weights)
        self._current = self._envs[0]
        self._running = False
        self.split_by = "seed" if all(getattr(env, "split_by", None) == "seed" for env in envs) else "observation"
        self.free_form = any(getattr(env, "free_form", False) for env in envs)
        if any(isinstance(env, Pictured) for env in envs):
            self.images = self._images
        if all(isinstance(env, Teachable) for env in envs):
            self.solution = partial(self._ask, "solution")
            self.demonstrate = partial(self._ask, "demonstrate")

    @property
    def task(self) -> str:
        """The task of the running episode; before the first one, the mixture's own name."""
        return self._current.task if self._running else TASK

    @property
    def instructions(self) -> str:
        """Those of the running episode's task."""
        return self._current.instructions

    @property
    def max_turns(self) -> int:
        """That of the running episode's task; before the first one, the largest."""
        return self._current.max_turns if self._running else max(env.max_turns for env in self._envs)

    def draw_by(self, shares: Sequence[float]) -> None:
        """From the next ``reset`` on draw the tasks with these chances (k,), which are >= 0 and sum to 1."""
        whole = len(shares) == len(self._envs) and abs(sum(shares) - 1) < _ROUNDING
        if not (whole and all(share >= 0 for share in shares)):
            raise ConfigError(f"{list(shares)} are no chances of the {len(self._envs)} tasks {', '.join(self.tasks)}")
        self._shares = list(shares)

    def reset(self, seed: int) -> str:
        """Draw the task, then start the level that the seed decides in it."""
        if seed < 0:
            raise ConfigError(f"seed {seed} must be >= 0: it seeds the generator that draws the task")
        # The second number keeps the draw apart from those that a task makes from the same seed.
        rng = np.random.default_rng([int(seed), 1])
        self._current = self._envs[int(rng.choice(len(self._envs), p=self._shares))]
        self._running = True
        return self._current.reset(seed)

    def step(self, reply: str) -> Outcome:
        """Play one reply. Raises :class:`EnvError` when no episode is running."""
        if not self._running:
            raise EnvError(f"{TASK}: step() while no episode is running; call reset(seed) first")
        return self._current.step(reply)

    def _images(self) -> tuple[bytes, ...]:
        return self._current.images() if isinstance(self._current, Pictured) else ()

    def _ask(self, method: str, *arguments: Any) -> Any:
        if not self._running:
            raise EnvError(f"{TASK}: {method}() while no episode is running; call reset(seed) first")
        return getattr(self._current, method)(*arguments)


def make_mixture(
    task: str,
    split: Split,
    *,
    weights: Mapping[str, float] = DEFAULT_WEIGHTS,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    **others: Any,
) -> MixtureEnv:
    """The mixture of registered tasks, or of one's own, that ``weights`` names; see :class:`MixtureEnv`.

    Raises :class:`ConfigError` for weights that are none, and for settings of a task that is not in the mixture.
    """
    if others:
        raise UnknownNameError("option", next(iter(others)), ["weights", "options"])
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigError(f"{task} has the weights {weights!r}: name its tasks, as weights = {{frozenlake = 1.0}}")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(
                f"the weight of {name} is {weight!r}: it must be a number above 0 (as a flag, a name with a dot stands "
                f"in a table: --env.options.weights '{{\"package.module:Class\" = 1}}')"
            )
        if name == task:
            raise ConfigError(f"{task} cannot be a task of itself")
    for name in options or {}:
        if name not in weights:
            raise UnknownNameError("task of the mixture", name, weights)
    settings = options or {}
    return MixtureEnv([make_env(name, split, **settings.get(name, {})) for name in weights], list(weights.values()))
