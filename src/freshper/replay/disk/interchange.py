"""Export and import: trajectories in Parquet or JSON lines, so that data moves between runs and tools.

Both formats hold one trajectory a row under the names of its fields: per-token columns are lists, ``turns`` a list
of structs, ``sampling`` a struct, ``images`` a list of binary (base64 text in JSON). pandas, polars, datasets and
DuckDB read them as they are.
"""

from __future__ import annotations

import base64
import binascii
import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from freshper.errors import TrajectoryError, UnknownNameError
from freshper.replay.disk import jsonl, parquet
from freshper.replay.disk.atomic import replacing
from freshper.replay.store.columns import PER_TOKEN
from freshper.trajectory import MAX_POLICY_VERSION, SamplingParams, Trajectory, Turn

SUFFIXES = (".jsonl", ".parquet")
_FIELDS = tuple(field.name for field in fields(Trajectory))
# behavior_logprobs may be missing, but only where logprobs_known is false: Trajectory itself says so.
_REQUIRED = tuple(f.name for f in fields(Trajectory) if f.default is MISSING and f.name != "behavior_logprobs")
_CHUNK_ROWS, _CHUNK_BYTES = 1024, 32 * 2**20  # what is held at once while writing: a row group of Parquet

_Record = TypeVar("_Record", Turn, SamplingParams)


def write_trajectories(path: str | os.PathLike[str], trajectories: Iterable[Trajectory]) -> int:
    """Write ``trajectories`` to ``path``, in the format of its suffix, and return how many there were.

    ``.parquet`` needs pyarrow (extra ``disk``), ``.jsonl`` nothing. Every value survives exactly, float32 in JSON
    too. Unknown log-probs are null. The trajectories are taken one after the other and written in chunks, so an
    iterator may be longer than memory.

    All or nothing: the file is written beside its place, flushed to the disk, and renamed. When anything fails,
    what was at ``path`` is still there.

    Raises:
        UnknownNameError: the suffix is another one.
        MissingExtraError: pyarrow is not installed.
        TrajectoryError: something else than a trajectory, or a value that the file cannot hold.
        OSError: the system's own.
    """
    path = Path(path)
    suffix = _suffix(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if suffix == ".parquet":
        parquet.libraries()  # before a file is made
    count = 0
    with replacing(path) as file, _writer(suffix, file) as writer:
        for chunk in _chunks(trajectories):
            writer.write([_row(number, trajectory) for number, trajectory in enumerate(chunk, count)])
            count += len(chunk)
    return count


def read_trajectories(path: str | os.PathLike[str], *, policy_version: int | None = None) -> Iterator[Trajectory]:
    """The trajectories of a ``.parquet`` or ``.jsonl`` file, one after the other, each checked when it is made.

    Files of other tools are read too. Fields without a default in :class:`Trajectory` are required, the others may be
    missing or null; ``behavior_logprobs`` may be so only where ``logprobs_known`` is false (a demonstration). Columns
    that no trajectory has are ignored, but not within a turn or ``sampling``. Token ids may have any integer type,
    float columns any number type: they are rounded to float32. Images may be bytes or base64 text. JSON lines are
    strict: UTF-8 without a byte-order mark, an object on every line, ended by a line feed alone.

    Args:
        path: the file.
        policy_version: replaces that of every row, which may then be missing. Seed a **new** run with the version
            where it starts (0): what an earlier run wrote counts the updates of another policy, so ages would mean
            nothing, and a buffer refuses versions that its policy has not reached. The data then ages from its
            import; the importance ratios still use the log-probs as they were recorded. Leave it out to go on with
            the run that wrote the file.

    Raises:
        UnknownNameError, MissingExtraError, OSError: as :func:`write_trajectories`, and a file that is not there,
            at once.
        TrajectoryError: when it is reached, a row that is no trajectory, with the file and the line (from 1, JSON)
            or the row (from 0, Parquet); a damaged file. What came before has been yielded: ``list`` takes all or
            nothing.
    """
    path = Path(path)
    suffix = _suffix(path)
    if policy_version is not None:
        _check_version(policy_version)
    if suffix == ".parquet":
        parquet.libraries()
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.stat()  # a file that is not there is an error here and not where the iterator is used
    return _read(path, suffix, policy_version)


def _read(path: Path, suffix: str, policy_version: int | None) -> Iterator[Trajectory]:
    given = {} if policy_version is None else {"policy_version": policy_version}
    required = tuple(name for name in _REQUIRED if name not in given)
    rows = parquet.read_rows(path, _FIELDS, required) if suffix == ".parquet" else jsonl.read_lines(path)
    for place, row in rows:
        try:
            trajectory = _trajectory(row | given)
        except TrajectoryError as error:
            raise TrajectoryError(f"{path}, {place}: {error}") from error
        yield trajectory


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UnknownNameError("suffix of a file of trajectories", suffix, SUFFIXES)
    return suffix


def _check_version(version: object) -> None:
    whole = isinstance(version, (int, np.integer)) and not isinstance(version, bool)
    if not (whole and 0 <= version <= MAX_POLICY_VERSION):  # type: ignore[operator]
        raise TrajectoryError(f"policy_version {version!r} must be an int in [0, 2^63): optimizer updates applied")


def _writer(suffix: str, file: BinaryIO) -> parquet.TableWriter | jsonl.LineWriter:
    return parquet.TableWriter(file) if suffix == ".parquet" else jsonl.LineWriter(file)


def _chunks(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    chunk: list[Trajectory] = []
    size = 0
    for number, trajectory in enumerate(trajectories):
        if not isinstance(trajectory, Trajectory):
            raise TrajectoryError(f"item {number} is {type(trajectory).__name__}: only trajectories can be written")
        chunk.append(trajectory)
        size += 17 * len(trajectory) + sum(map(len, trajectory.images))
        if len(chunk) == _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _row(number: int, trajectory: Trajectory) -> dict[str, Any]:
    """The fields of a trajectory as a writer takes them: arrays, plain values, dicts and lists of them."""
    for name in ("task", "group"):
        _check_text(f"{name} of trajectory {number}", getattr(trajectory, name))
    row = {name: getattr(trajectory, name) for name in _FIELDS}
    return row | {
        "behavior_logprobs": trajectory.behavior_logprobs if trajectory.logprobs_known else None,
        "turns": [asdict(turn) for turn in trajectory.turns],
        "stop_reason": trajectory.stop_reason.value,
        "sampling": asdict(trajectory.sampling),
        "images": list(trajectory.images),
    }


def _check_text(name: str, value: object) -> None:
    """Half of a surrogate pair is a str in Python and JSON, but no other tool takes it."""
    try:
        str(value).encode("utf-8")
    except UnicodeEncodeError as error:
        raise TrajectoryError(f"{name} is no text: {error.reason}") from None


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    """A row of either format as a trajectory; null is the same as missing, what no trajectory has is left aside."""
    parts: dict[str, Any] = {name: value for name in _FIELDS if (value := row.get(name)) is not None}
    if missing := [name for name in _REQUIRED if name not in parts]:
        raise TrajectoryError(f"{', '.join(missing)} missing or null: a trajectory needs them")
    if not isinstance(known := parts.get("logprobs_known", True), bool):
        raise TrajectoryError(f"logprobs_known {known!r} must be true or false")
    for name in ("task", "group"):
        _check_text(name, parts[name])
    for name in PER_TOKEN:
        if name in parts:
            parts[name] = _array(name, parts[name])
    parts["turns"] = tuple(
        _record(Turn, f"turn {number}", turn) for number, turn in enumerate(_list("turns", parts["turns"]))
    )
    if "sampling" in parts:
        parts["sampling"] = _record(SamplingParams, "sampling", parts["sampling"])
    if "images" in parts:
        parts["images"] = tuple(_image(number, image) for number, image in enumerate(_list("images", parts["images"])))
    return Trajectory(**{"behavior_logprobs": None} | parts)


def _list(name: str, value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):  # numbers, in a column where they do not belong
        value = value.tolist()
    if not isinstance(value, list):
        raise TrajectoryError(f"{name} is {type(value).__name__}: a list is needed")
    return value


def _array(name: str, value: Any) -> NDArray[Any]:
    """A per-token column. Nothing is turned into a number that was not one: numpy would take "1", true and null."""
    floats = name not in ("tokens", "response_mask")
    kinds = {"tokens": "iu", "response_mask": "biu"}.get(name, "fiu")
    needed = {"tokens": "integers", "response_mask": "true and false"}.get(name, "numbers")
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in kinds:
            raise TrajectoryError(f"{name} holds {value.dtype}: {needed} are needed")
        return value
    types = {"b": bool, "i": int, "f": float}
    allowed = tuple(types[kind] for kind in kinds if kind in types)
    for item_type in set(map(type, _list(name, value))) - set(allowed):
        at = next(index for index, item in enumerate(value) if type(item) is item_type)
        raise TrajectoryError(f"{name}[{at}] is {value[at]!r}: {needed} are needed")
    try:
        return np.array(value, dtype=np.float64 if floats else np.int64)
    except OverflowError:
        raise TrajectoryError(f"{name} holds an integer that is far too large: {needed} are needed") from None


def _record(kind: type[_Record], what: str, value: Any) -> _Record:
    """A turn or the sampling parameters from an object with their fields."""
    if not isinstance(value, Mapping):
        raise TrajectoryError(f"{what} is {type(value).__name__}: an object with its fields is needed")
    known = {field.name: field for field in fields(kind)}
    if unknown := sorted(value.keys() - known.keys()):
        raise TrajectoryError(f"{what} has the unknown field {unknown[0]!r}; known: {', '.join(known)}")
    given = {name: part for name, part in value.items() if part is not None}
    for name, field in known.items():
        if name not in given and field.default is MISSING:
            raise TrajectoryError(f"{what} has no {name}")
    for name, part in given.items():
        if isinstance(part, bool) or not isinstance(part, Real):
            raise TrajectoryError(f"{name} of {what} is {part!r}: a number is needed")
    return kind(**given)


def _image(number: int, value: Any) -> bytes:
    try:
        return value if isinstance(value, bytes) else base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise TrajectoryError(f"image {number} is neither bytes nor base64 text: {error}") from None
