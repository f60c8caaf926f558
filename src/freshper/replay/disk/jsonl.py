"""Trajectories as JSON lines: one object a line, numpy and the standard library only."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from freshper.errors import TrajectoryError

_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineWriter:
    """Writes rows (fields by name, as of a trajectory) to ``file``, one line each."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held back: every line went to the file."""

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append lines. A float32 is written as the shortest number that any reader of doubles takes for its value."""
        for row in rows:
            # All but ASCII is escaped, since some readers end a line at U+2028.
            line = json.dumps(row, separators=(",", ":"), allow_nan=False, default=_plain)
            self._file.write(line.encode("ascii") + b"\n")


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file, each with the name of its place, "line 1" first.

    Raises :class:`TrajectoryError` with file and line where a line is no JSON object, UTF-8, without duplicate keys.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"line {number}"
            try:
                yield place, _object(line, first=number == 1)
            except TrajectoryError as error:
                raise TrajectoryError(f"{path}, {place}: {error}") from error.__cause__


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else base64.b64encode(value).decode("ascii")


def _object(line: bytes, *, first: bool) -> dict[str, Any]:
    if first and line.startswith(_GZIP):
        raise TrajectoryError("the file is compressed with gzip: unpack it first")
    if first and line.startswith(_BYTE_ORDER_MARK):
        raise TrajectoryError("the file starts with a byte-order mark: save it as UTF-8 without one")
    if not line.strip():
        raise TrajectoryError("the line is blank: every line holds one trajectory")
    if line.endswith(b"\r\n"):
        raise TrajectoryError("the line ends with CR LF: save the file with line feeds alone")
    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise TrajectoryError(f"no whole JSON object: {error.msg} at character {error.pos + 1}") from error
    except UnicodeDecodeError as error:
        raise TrajectoryError(f"no UTF-8 text: {error.reason} at byte {error.start + 1}") from error
    except RecursionError as error:
        raise TrajectoryError("no trajectory: the JSON is nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        if isinstance(error, TrajectoryError):
            raise
        raise TrajectoryError(f"no trajectory: {error}") from error
    if not isinstance(value, dict):
        raise TrajectoryError(f"a {type(value).__name__} where a JSON object with the fields of a trajectory belongs")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    together = dict(pairs)
    if len(together) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise TrajectoryError(f"the key {twice!r} stands twice in one object: which of them counts is not defined")
    return together


def _no_number(token: str) -> NoReturn:
    raise TrajectoryError(f"{token} is no JSON: a value that is unknown is null, every other one finite")
