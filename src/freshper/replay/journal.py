"""Snapshots on disk: one file, written atomically, checked when read, never pickle."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from freshper.errors import SnapshotError
from freshper.trajectory import SamplingParams, Trajectory, Turn

FORMAT = "freshper-buffer"
FORMAT_VERSION = 1
_FACTS = ("stop_reason", "success", "policy_version", "task", "group", "seed")
_OPTIONAL_COLUMNS = ("advantages", "td_errors")
_COLUMNS = ("offsets", "tokens", "response_mask", "behavior_logprobs", *_OPTIONAL_COLUMNS)
# What the readers of zip, npy and JSON raise when they meet damage.
_DAMAGE = (
    zipfile.BadZipFile,
    EOFError,
    KeyError,
    OSError,
    OverflowError,
    RuntimeError,
    struct.error,
    TypeError,
    ValueError,
)


def write_snapshot(
    path: Path, meta: dict[str, Any], arrays: dict[str, NDArray[Any]], trajectories: Sequence[Trajectory]
) -> None:
    """Write ``meta`` (JSON), ``arrays`` and ``trajectories`` to ``path``.

    The file is written beside its place, flushed to the disk, and renamed: a reader never meets half of it,
    and when the disk is full the old file stays.
    """
    header = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "meta": meta,
        "facts": [_facts(t) for t in trajectories],
        "arrays": sorted(arrays),
    }
    members: dict[str, Any] = {
        "header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
        **{f"array/{name}": array for name, array in arrays.items()},
        **{f"column/{name}": array for name, array in _columns(trajectories).items()},
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(file, **members)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # makes the rename itself durable
    finally:
        os.close(directory)


def read_snapshot(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]], list[Trajectory]]:
    """What :func:`write_snapshot` was given. Raises :class:`SnapshotError` when the file is damaged or foreign."""
    with path.open("rb") as file:
        try:
            _check_archive(file)
            with np.load(file, allow_pickle=False) as members:
                header = json.loads(members["header"].tobytes())
                if header["format"] != FORMAT or header["format_version"] != FORMAT_VERSION:
                    raise SnapshotError(
                        f"{path} has format {header['format']} {header['format_version']}; this version reads "
                        f"{FORMAT} {FORMAT_VERSION}"
                    )
                arrays = {name: members[f"array/{name}"] for name in header["arrays"]}
                columns = {name: members[f"column/{name}"] for name in _COLUMNS}
            return header["meta"], arrays, _trajectories(header["facts"], columns)
        except _DAMAGE as error:
            if isinstance(error, SnapshotError):
                raise
            raise SnapshotError(f"{path} is not a whole freshper snapshot ({error}); nothing was loaded") from error


def _check_archive(file: BinaryIO) -> None:
    """Compare every member with its checksum, before a byte of it is believed.

    Reading the members alone would not do: a checksum is looked at only when a member is read to its end, and a
    damaged array header can make numpy stop before, with wrong values.
    """
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(f"{member.filename} is compressed, which no snapshot is")
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} does not match")
    file.seek(0)


def _facts(trajectory: Trajectory) -> dict[str, Any]:
    facts = {name: getattr(trajectory, name) for name in _FACTS}
    return facts | {
        "turns": [[turn.start, turn.reply_start, turn.end, turn.reward] for turn in trajectory.turns],
        "sampling": asdict(trajectory.sampling),
        "columns": [name for name in _OPTIONAL_COLUMNS if getattr(trajectory, name) is not None],
    }


def _columns(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """All tokens in a row, and the other columns likewise; an optional one only of those that have it."""

    def joined(name: str, dtype: type[np.generic]) -> NDArray[Any]:
        parts = [part for trajectory in trajectories if (part := getattr(trajectory, name)) is not None]
        return np.concatenate([*parts, np.empty(0, dtype)]).astype(dtype)

    return {
        "offsets": np.cumsum([0, *map(len, trajectories)], dtype=np.int64),
        "tokens": joined("tokens", np.int32),
        "response_mask": joined("response_mask", np.bool_),
        "behavior_logprobs": joined("behavior_logprobs", np.float32),
        **{name: joined(name, np.float32) for name in _OPTIONAL_COLUMNS},
    }


def _trajectories(facts: Sequence[dict[str, Any]], columns: dict[str, NDArray[Any]]) -> list[Trajectory]:
    offsets = columns["offsets"]
    taken = dict.fromkeys(_OPTIONAL_COLUMNS, 0)
    trajectories = []
    for number, fact in enumerate(facts):
        span = slice(int(offsets[number]), int(offsets[number + 1]))
        optional: dict[str, Any] = {}
        for name in fact["columns"]:
            start = taken[name]
            taken[name] = start + span.stop - span.start
            optional[name] = columns[name][start : taken[name]]
        trajectories.append(
            Trajectory(
                tokens=columns["tokens"][span],
                response_mask=columns["response_mask"][span],
                behavior_logprobs=columns["behavior_logprobs"][span],
                turns=tuple(Turn(*turn) for turn in fact["turns"]),
                sampling=SamplingParams(**fact["sampling"]),
                **{name: fact[name] for name in _FACTS},
                **optional,
            )
        )
    return trajectories
