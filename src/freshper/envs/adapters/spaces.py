"""gymnasium's spaces as text: observations written, actions read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from freshper.envs.core import read_action
from freshper.errors import ConfigError

LONGEST_ANSWER = 10_000  # characters of an action written as JSON; JSON that is nested deeper than Python could read


def write_space(value: Any, digits: int) -> str:
    """A value of any space, to be read by people: numbers to ``digits`` significant digits, one line a name."""
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {write_space(inner, digits)}" for name, inner in value.items())
    if isinstance(value, np.ndarray):
        rows = value.tolist() if value.ndim == 0 else list(value)
        if value.ndim == 2:
            return "\n".join(write_space(row, digits) for row in rows)
        return write_space(rows, digits)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(write_space(inner, digits) for inner in value) + "]"
    if isinstance(value, float | np.floating):
        return f"{float(value) + 0.0:.{digits}g}"  # + 0.0: no -0
    return str(value)  # text as it is


def space_help(space: Any) -> str:
    """How an action of this space is written. Raises :class:`ConfigError` for a space that has no such form."""
    kind = type(space).__name__
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    if kind == "Box":
        low, high = float(space.low.min()), float(space.high.max())
        return f"a JSON list of shape {list(space.shape)} with numbers from {low:g} to {high:g}"
    if kind in ("MultiDiscrete", "MultiBinary"):
        return f"a JSON list of shape {list(space.shape)} with whole numbers"
    raise ConfigError(
        f"an action of the space {space} has no written form: give a TextWrapper whose read() makes one, as "
        "wrapper = 'mymodule:MyWrapper'"
    )


def read_space(space: Any, reply: str, names: Sequence[str]) -> Any:
    """The action of this space that stands in the reply's ``<answer>…</answer>``, else None."""
    if names:
        name = read_action(reply, names)
        return None if name is None else int(space.start) + list(names).index(name)
    answer = read_answer(reply)
    if answer is None:
        return None
    action = answer if type(space).__name__ == "Text" else _read_array(space, answer)
    return action if action is not None and space.contains(action) else None


def _read_array(space: Any, answer: str) -> Any:
    """The JSON list as an array of the space's shape and type; it may lie outside its bounds."""
    value = read_json(answer)
    if not (isinstance(value, list) and _numbers(value)):
        return None
    try:
        array = np.asarray(value, dtype=np.float64)
    except ValueError:  # lists of different lengths
        return None
    if array.shape != space.shape:
        return None
    with np.errstate(over="ignore", invalid="ignore"):  # a number beyond the type is not in the space
        action = array.astype(space.dtype)
    whole = not np.issubdtype(space.dtype, np.floating)
    return None if whole and (action != array).any() else action  # a fraction, or one that went around


def read_answer(reply: str) -> str | None:
    """What stands in the reply's only ``<answer>…</answer>``, without blanks around it; None where nothing does."""
    before, opened, rest = reply.partition("<answer>")
    inner, closed, after = rest.partition("</answer>")
    if not (opened and closed) or "<answer>" in inner or "</answer>" in before or "<answer>" in after:
        return None
    return inner.strip() or None


def read_json(text: str) -> Any:
    """The JSON that the text is, None for what is none, too long, or not finite."""
    if len(text) > LONGEST_ANSWER:
        return None
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def _numbers(value: Any) -> bool:
    """Whether a list holds nothing but finite numbers and such lists."""
    if isinstance(value, list):
        return all(_numbers(inner) for inner in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**63 and math.isfinite(value)
