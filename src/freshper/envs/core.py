"""What an environment is: chat turns in, rewards out; how levels are drawn and replies read."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, TypeVar, get_args, get_type_hints, runtime_checkable

import numpy as np

from freshper.errors import ConfigError, EnvError, FreshPERError, UnknownNameError

Split = Literal["train", "eval"]
EVAL_SHARE = 0.2  # share of all levels that is kept for evaluation
INVALID_REWARD = -0.15  # what a reply costs that no action can be read from; it also costs a turn
MAX_TRIES = 10_000  # draws before a task is taken to have no level of the wanted kind

_Spec = TypeVar("_Spec", bound=Any)  # a frozen dataclass; typing has no public name for one


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one reply led to.

    ``observation`` is the next user message (what a person would be shown, also after the last reply),
    ``done`` whether the episode is over, ``success`` whether the task is solved (only ever true with
    ``done``), ``valid`` whether an action could be read from the reply. ``measures`` are named numbers of the
    whole episode beside its rewards, such as an F1 score; only those of the last outcome count, also where a limit
    ends the episode: what should count then is measured in every outcome.
    """

    observation: str
    reward: float
    done: bool
    success: bool
    valid: bool
    measures: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Env(Protocol):
    """A multi-turn task. One object runs one episode at a time; ``reset`` starts the next.

    ``instructions`` stands in the first turn of a conversation. ``max_turns`` is the task's own limit on
    replies: the environment itself says ``done`` when it is reached.
    """

    @property
    def task(self) -> str:
        """Name of the task, which every trajectory carries."""
        ...

    @property
    def instructions(self) -> str:
        """What a beginner is told."""
        ...

    @property
    def max_turns(self) -> int:
        """Bound on replies."""
        ...

    def reset(self, seed: int) -> str:
        """Start the level that ``seed`` decides (nothing else does) and return the first observation."""
        ...

    def step(self, reply: str) -> Outcome:
        """Play one reply. Any string is accepted: what cannot be read is an invalid action, never an exception.

        Raises :class:`EnvError` when no episode is running: before ``reset`` and after ``done``.
        """
        ...


@runtime_checkable
class Pictured(Env, Protocol):
    """An environment whose observations show pictures."""

    def images(self) -> tuple[bytes, ...]:
        """The encoded pictures (PNG, JPEG) of the observation that was returned last; they stand before its text."""
        ...


@runtime_checkable
class Teachable(Env, Protocol):
    """An environment that knows how it is solved, and that can be shown to a beginner."""

    def solution(self) -> list[str] | None:
        """The shortest list of actions from the current state to success, None if there is none."""
        ...

    def demonstrate(self, rng: np.random.Generator) -> str:
        """The reply of a weak demonstrator in the current state: good enough to start from, far from perfect."""
        ...


def level_split(level: str) -> Split:
    """The split that a level belongs to, from its text alone: small worlds repeat under different seeds."""
    digest = hashlib.sha256(level.encode()).digest()
    return "eval" if int.from_bytes(digest[:8], "big") < EVAL_SHARE * 2**64 else "train"


def draw_level(seed: int, split: Split, sample: Callable[[np.random.Generator], str | None]) -> str:
    """The level that ``seed`` decides in ``split``: the first accepted draw that lies in the split.

    ``sample`` draws the text of one level from the generator it is given, or None for a draw to reject
    (an unsolvable one). Raises :class:`EnvError` after ``MAX_TRIES`` draws.
    """
    check_split(split)
    if seed < 0:
        raise ConfigError(f"seed {seed} must be >= 0: it seeds the generator that draws the level")
    rng = np.random.default_rng(seed)
    for _ in range(MAX_TRIES):
        level = sample(rng)
        if level is not None and level_split(level) == split:
            return level
    raise EnvError(
        f"seed {seed}: none of {MAX_TRIES} draws is a level of the {split} split that can be played; "
        "the task's settings reject too much"
    )


def read_action(reply: str, actions: Sequence[str]) -> str | None:
    """The action named in the reply's ``<answer>…</answer>``, upper and lower case alike, else None.

    None also when tags are nested, when two answers differ, and when the answer is no action.
    """
    answers = set()
    # Split instead of a regular expression: linear in the reply, whatever a model babbles.
    for part in reply.split("</answer>")[:-1]:
        _, opened, inner = part.partition("<answer>")
        if opened:
            answers.add(inner.strip().lower())
    if len(answers) != 1:
        return None
    answer = answers.pop()
    return next((action for action in actions if action.lower() == answer), None)


def write_action(action: str) -> str:
    """The reply that :func:`read_action` reads as ``action``."""
    return f"<answer> {action} </answer>"


def with_options(spec: _Spec, options: Mapping[str, Any]) -> _Spec:
    """A copy of a task's settings (a frozen dataclass) with ``options`` changed.

    Raises :class:`UnknownNameError` for a setting that the dataclass does not have, :class:`ConfigError` for a value
    of another type than its own: a text is never taken for true.
    """
    known = [field.name for field in fields(spec)]
    types = get_type_hints(type(spec))
    for name, value in options.items():
        if name not in known:
            raise UnknownNameError("option", name, known)
        _check_type(name, value, types[name])
    return replace(spec, **options)


def _check_type(name: str, value: Any, kind: Any) -> None:
    """Of plain types alone: settings of other types are checked where they are used."""
    wanted = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}
    if kind not in wanted:
        return
    right = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not right or (kind is not bool and isinstance(value, bool)) or (kind is float and not math.isfinite(value)):
        raise ConfigError(f"option {name} is {value!r}: it must be {wanted[kind]}")


@contextmanager
def faults_of(task: str | Env) -> Iterator[None]:
    """Turns whatever the code of an environment raises inside into an :class:`EnvError` that names the task.

    Of an environment it is the task at that moment: that of a mixture changes.
    """
    try:
        yield
    except FreshPERError:
        raise
    except Exception as error:  # an environment's code may be anybody's
        name = task if isinstance(task, str) else task.task
        raise EnvError(f"{name} raised {type(error).__name__}: {error}") from error


def check_split(split: str) -> None:
    """Raise :class:`UnknownNameError` unless ``split`` is one."""
    if split not in get_args(Split):
        raise UnknownNameError("split", split, get_args(Split))
