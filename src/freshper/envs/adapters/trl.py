"""Classes made for TRL's ``environment_factory``: ``reset`` and tools, one method each."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from freshper.envs.adapters.base import AdaptedEnv, Played, SplitBy, clean
from freshper.envs.adapters.loading import load
from freshper.envs.adapters.plain import build, takes
from freshper.envs.adapters.spaces import read_json
from freshper.envs.core import INVALID_REWARD, Split, level_split
from freshper.envs.data_files import Damaged, read_local
from freshper.errors import ConfigError, EnvError

MAX_TURNS = 10
OWN_OPTIONS = ("max_turns", "success_return", "split_by", "rows")

_OPEN, _CLOSE = "<tool>", "</tool>"
_USAGE = f'{_OPEN}{{"name": ..., "arguments": {{...}}}}{_CLOSE}'
# What a tool may raise to say that it cannot do what was asked; TRL shows the model every exception likewise.
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


class TrlEnv(AdaptedEnv):
    """An environment of TRL's kind: ``reset(**row)``, public methods that are tools, and ``get_reward()``.

    Observation: first the row's prompt, if it has one, and the text that ``reset`` returns; then what the tool
    returned, or its error.

    Actions: ``<tool>{"name": …, "arguments": {…}}</tool>`` calls one tool; the instructions show their signatures and
    docstrings. A reply without any is the last word and ends the episode, as in TRL.

    Rewards: ``get_reward()``, or else the attribute ``reward``, when the episode has ended, as in TRL; a tool call
    that cannot be read, or that names no tool, costs 0.15 and a turn.

    End: a reply without a tool call, an attribute or property ``done`` that has become true, or ``max_turns`` replies.
    Success: the environment's reward is at least ``success_return``.

    Parameters: ``max_turns`` (10); ``success_return`` (1); ``split_by``; ``rows``, a .jsonl, .json or .csv file whose
    rows are the levels, each given to ``reset`` by name, as the rows of TRL's data set are, and divided by their hash.
    Without rows ``reset`` gets ``seed=``, if it takes one. The other options go to the constructor.

    Source: TRL (https://huggingface.co/docs/trl), ``GRPOTrainer(environment_factory=…)``.
    """

    free_form = True  # a reply that calls no tool is a last word

    def __init__(
        self,
        inner: Any,
        task: str,
        split: Split,
        *,
        max_turns: int = MAX_TURNS,
        success_return: float = 1.0,
        split_by: SplitBy = "observation",
        rows: str | None = None,
    ) -> None:
        if not callable(getattr(inner, "reset", None)):
            raise ConfigError(f"{task}: {type(inner).__name__} has no method reset(): TRL's environments need it")
        if split_by == "env":
            raise ConfigError(f"{task}: split_by 'env': TRL's environments know no splits, use 'seed'")
        self._tools = _tools(inner)
        super().__init__(
            task,
            split,
            instructions=_instructions(inner, self._tools, max_turns),
            max_turns=max_turns,
            success_return=success_return,
            split_by=split_by,
        )
        self._inner = inner
        self._enough = success_return
        self._rows = None if rows is None else _read_rows(Path(rows), split)

    def _draw(self, seed: int) -> str:
        if self._rows is None:
            return super()._draw(seed)
        row = self._rows[int(np.random.default_rng(seed).integers(len(self._rows)))]  # all of this split
        return clean(_opening(row.get("prompt"), _value(self._inner.reset(**row))))

    def _begin(self, seed: int) -> str:
        seeded = takes(self._inner.reset, "seed")
        shown = _value(self._inner.reset(seed=seed) if seeded else self._inner.reset())
        return _opening(None, shown if seeded else self._same(shown))

    def _play(self, reply: str) -> Played:
        if _OPEN not in reply and _CLOSE not in reply:
            return self._said("(the episode has ended)", valid=bool(reply.strip()), last=True)
        call = _read_call(reply)
        if call is None:
            return self._said(f"error: no call can be read from this; write one as {_USAGE}", valid=False)
        name, arguments = call
        if name not in self._tools:
            known = ", ".join(self._tools)
            return self._said(f"error: there is no tool {name[:100]!r}, only {known}", valid=False)
        try:
            shown = str(_value(self._tools[name](**arguments)))
        except _REFUSALS as error:
            shown = f"error: {error}"
        return self._said(shown or "(nothing)", valid=True)

    def _said(self, shown: str, *, valid: bool, last: bool = False) -> Played:
        """The answer to a reply; where it ends the episode, with the reward that the environment gives for it."""
        ended = last or bool(getattr(self._inner, "done", False))
        reward, success = 0.0 if valid else INVALID_REWARD, None
        if ended or self._last_turn:
            given = self._reward()
            reward, success = reward + given, given >= self._enough
        return Played(shown, reward, ended, success=success, valid=valid)

    def _reward(self) -> float:
        get = getattr(self._inner, "get_reward", None)
        reward = _value(get()) if callable(get) else getattr(self._inner, "reward", None)
        if isinstance(reward, bool) or not isinstance(reward, int | float | np.integer | np.floating):
            raise EnvError(
                f"{self.task}: the episode's reward is {reward!r:.100}: get_reward() must return a number, or an "
                "attribute `reward` hold it"
            )
        return float(reward)


def make_trl(task: str, split: Split, **options: Any) -> TrlEnv:
    """The environment that the class at ``trl:MODULE:CLASS`` makes; see :class:`TrlEnv` for the options."""
    kind = load(task.partition(":")[2])
    if not callable(kind):
        raise ConfigError(f"{task} is {kind!r:.200}: it must be a class, or a function that makes an environment")
    own = {name: options.pop(name) for name in OWN_OPTIONS if name in options and not takes(kind, name, by_name=True)}
    return TrlEnv(build(task, kind, options, OWN_OPTIONS), task, split, **own)


def _tools(inner: Any) -> dict[str, Callable[..., Any]]:
    """Its tools, chosen as TRL chooses them: public methods of the class but ``reset`` and ``get_reward``."""
    names = [name for name, _ in inspect.getmembers(type(inner), predicate=inspect.isfunction)]
    kept = [name for name in names if name not in ("reset", "get_reward") and not name.startswith("_")]
    if not kept:
        raise ConfigError(f"{type(inner).__name__} has no public method beside reset and get_reward: it has no tools")
    return {name: getattr(inner, name) for name in kept}


def _instructions(inner: Any, tools: Mapping[str, Callable[..., Any]], max_turns: int) -> str:
    about = inspect.getdoc(type(inner)) if type(inner).__doc__ else None
    shown = [f"{name}{inspect.signature(tool)}\n{inspect.getdoc(tool) or ''}".rstrip() for name, tool in tools.items()]
    return (
        (f"{about}\n\n" if about else "")
        + "You have these tools:\n\n"
        + "\n\n".join(shown)
        + f"\n\nYou have {max_turns} turns, one call a turn, written like this: {_USAGE}. A call that cannot be read "
        f"costs {-INVALID_REWARD:g}. A reply without a call ends the episode."
    )


def _read_call(reply: str) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of the reply's only tool call, None where there is no such one."""
    before, opened, rest = reply.partition(_OPEN)
    inner, closed, after = rest.partition(_CLOSE)
    if not (opened and closed) or _CLOSE in before or _OPEN in inner or _OPEN in after or _CLOSE in after:
        return None
    call = read_json(inner)
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _opening(prompt: object, shown: object) -> str:
    """The first observation: the text of the prompt's messages, and what ``reset`` returned."""
    if isinstance(prompt, list):
        prompt = "\n".join(str(message.get("content", "")) for message in prompt if isinstance(message, Mapping))
    if shown is not None and not isinstance(shown, str):
        raise EnvError(f"reset() returned {shown!r:.200}: only text can be shown, or None for nothing")
    return f"{prompt or ''}{shown or ''}" or "Begin."


def _value(returned: Any) -> Any:
    """What a method returned, awaited where it is a coroutine."""
    return asyncio.run(returned) if inspect.iscoroutine(returned) else returned


def _read_rows(path: Path, split: Split) -> list[Mapping[str, Any]]:
    """The rows of a file that lie in the split. Raises :class:`ConfigError`, also for one row that cannot be read."""
    if not path.is_file() or path.suffix.lower() not in (".jsonl", ".json", ".csv"):
        raise ConfigError(f"rows {path} must be a .jsonl, .json or .csv file, and be there")
    rows: list[Mapping[str, Any]] = []
    for place, row in read_local(path, "", "", set()):
        if isinstance(row, Damaged):
            raise ConfigError(f"{place} cannot be given to reset(): {row.reason}")
        if level_split(json.dumps(row, sort_keys=True)) == split:
            rows.append(row)
    if not rows:
        raise ConfigError(f"{path} has no row of the {split} split, which a hash of each row decides: give more rows")
    return rows
