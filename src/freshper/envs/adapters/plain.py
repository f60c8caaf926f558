"""A plain Python class as an environment: ``reset`` and ``step``, and whatever else it cares to have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from freshper.envs.adapters.base import AdaptedEnv, Played, SplitBy, adopt
from freshper.envs.adapters.loading import load
from freshper.envs.core import Outcome, Split
from freshper.errors import ConfigError, EnvError, UnknownNameError

MAX_TURNS = 20
OWN_OPTIONS = ("max_turns", "success_return", "split_by")


class PlainEnv(AdaptedEnv):
    """An object with ``reset`` and ``step`` as an environment.

    Observation: the text that ``reset()`` or ``reset(seed)`` returns, or the first part of ``(text, info)``; later the
    first part of what ``step`` returns. With a method ``images()`` that returns encoded pictures it shows pictures.

    Actions: ``step(reply)`` gets the reply as it was said, any text.

    Rewards and end: ``step`` returns ``(observation, reward, done)``, ``(observation, reward, done, info)``,
    gymnasium's ``(observation, reward, terminated, truncated, info)``, or an :class:`~freshper.envs.core.Outcome`.
    The info may say ``success`` and ``valid`` (bool) and ``measures`` (numbers by name). Without ``success``, an
    episode that the object has ended with a return above 0 is one, or with ``success_return`` one that has reached it.

    Parameters: ``max_turns`` (20), ``success_return`` and ``split_by``, which the class may set as attributes, too, as
    well as ``task``, ``instructions`` and ``free_form`` (whether any reply may be an answer; true unless it says
    otherwise); the others go to its constructor. One that takes an argument ``split`` is told "train" or "eval" and
    keeps levels apart itself. With both ``demonstrate(rng)`` and ``solution()`` the embedded policy can be
    warm-started on it.

    Source: yours.
    """

    def __init__(
        self,
        game: Any,
        task: str,
        split: Split,
        *,
        max_turns: int | None = None,
        success_return: float | None = None,
        split_by: SplitBy | None = None,
    ) -> None:
        kind = type(game)
        for name in ("reset", "step"):
            if not callable(getattr(game, name, None)):
                raise ConfigError(f"{task}: {kind.__name__} has no method {name}(): it can be no environment")
        super().__init__(
            getattr(game, "task", task),
            split,
            instructions=getattr(game, "instructions", None) or inspect.getdoc(kind) or "Reply to what you are shown.",
            max_turns=getattr(game, "max_turns", MAX_TURNS) if max_turns is None else max_turns,
            success_return=getattr(game, "success_return", None) if success_return is None else success_return,
            split_by=getattr(game, "split_by", "observation") if split_by is None else split_by,
        )
        self.free_form = bool(getattr(game, "free_form", True))
        self._game = game
        if callable(show := getattr(game, "images", None)):
            self.images = lambda: tuple(show())
        adopt(self, game, "demonstrate", "solution")

    def _begin(self, seed: int) -> str:
        if takes(self._game.reset, "seed"):
            shown = self._game.reset(seed=seed)
        elif _takes_one(self._game.reset):
            shown = self._game.reset(seed)
        else:
            shown = self._same(self._game.reset())
        return shown[0] if isinstance(shown, tuple) and shown else shown  # type: ignore[no-any-return]

    def _play(self, reply: str) -> Played:
        return played(self._game.step(reply))


def played(answer: object) -> Played:
    """What ``step`` returned, whichever of the known forms it has. Raises :class:`EnvError` for any other."""
    if isinstance(answer, Outcome):
        success = answer.success if answer.done else None
        return Played(
            answer.observation,
            answer.reward,
            answer.done,
            success=success,
            valid=bool(answer.valid),
            measures=answer.measures,
        )
    if not (isinstance(answer, tuple) and 3 <= len(answer) <= 5):
        raise EnvError(
            f"step() returned {answer!r:.200}: it must return (observation, reward, done), one more with an info, "
            "gymnasium's five, or an Outcome"
        )
    observation, reward, ended, *rest = answer
    cut = rest.pop(0) if len(rest) == 2 else False
    info = rest[0] if rest else {}
    if not isinstance(info, Mapping):
        raise EnvError(f"step() returned the info {info!r:.200}: it must be a dict")
    if isinstance(reward, bool) or not isinstance(reward, int | float | np.integer | np.floating):
        raise EnvError(f"step() returned the reward {reward!r:.200}: it must be a number")
    return Played(
        observation,
        float(reward),
        _flag("done", ended),
        _flag("truncated", cut),
        success=_flag("success", info["success"]) if "success" in info else None,
        valid=_flag("valid", info.get("valid", True)),
        measures=info.get("measures", {}),
    )


def make_plain(task: str, split: Split, **options: Any) -> PlainEnv:
    """The environment that the Python class at ``MODULE:CLASS`` makes; see :class:`PlainEnv`."""
    kind = load(task)
    if not callable(kind):
        raise ConfigError(f"{task} is {kind!r:.200}: it must be a class, or a function that makes an environment")
    own = {name: options.pop(name) for name in OWN_OPTIONS if name in options and not takes(kind, name, by_name=True)}
    told = {"split": split} if takes(kind, "split", by_name=True) else {}
    game = build(task, kind, told | options, OWN_OPTIONS)
    return PlainEnv(game, task, split, **({"split_by": "env"} if told else {}) | own)


def build(task: str, kind: Callable[..., Any], options: Mapping[str, Any], own: tuple[str, ...]) -> Any:
    """Call a constructor with ``options``; an adapter takes those named in ``own``, they are not among them.

    Raises :class:`UnknownNameError` for an option that the constructor does not take, :class:`ConfigError` for one that
    it needs and is not given.
    """
    for name in options:
        if not takes(kind, name):
            known = [p.name for p in _parameters(kind) if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
            raise UnknownNameError(f"option of {task}", name, {*known, *own} - {"split"})
    for parameter in _parameters(kind):
        needed = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if needed and parameter.default is parameter.empty and parameter.name not in options:
            raise ConfigError(f"{task} needs the option {parameter.name!r}: its constructor has no default for it")
    return kind(**options)


def takes(call: Callable[..., Any], name: str, *, by_name: bool = False) -> bool:
    """Whether a call takes the argument ``name``; ``by_name``: names it, ``**anything`` is not enough."""
    for parameter in _parameters(call):
        if parameter.kind is parameter.VAR_KEYWORD and not by_name:
            return True
        if parameter.name == name and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            return True
    return False


def _takes_one(call: Callable[..., Any]) -> bool:
    """Whether it needs an argument of whatever name."""
    needed = [
        p for p in _parameters(call) if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)
    ]
    return len(needed) == 1


def _parameters(call: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):  # a builtin that does not tell
        return []


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise EnvError(f"step() returned {name} {value!r:.200}: it must be true or false")
    return bool(value)
