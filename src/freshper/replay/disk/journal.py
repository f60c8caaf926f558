"""Snapshots on disk: one file, written atomically, checked when read, never pickle. Needs numpy only."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from freshper.errors import SnapshotError
from freshper.replay.disk.atomic import replacing
from freshper.replay.disk.column_files import columns_from, describe_columns
from freshper.replay.disk.first_format import read_first_format
from freshper.replay.store.columns import Columns

FORMAT = "freshper-buffer"
FORMAT_VERSION = 2
# What the readers of zip, npy and JSON raise when they meet damage.
_DAMAGE = (
    zipfile.BadZipFile,
    EOFError,
    IndexError,
    KeyError,
    OSError,
    OverflowError,
    RuntimeError,
    struct.error,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a buffer, as facts (ready for JSON) and arrays, and its trajectories by number, ascending."""

    facts: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    serials: NDArray[np.int64]
    columns: Columns


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write ``snapshot`` to ``path``, whole or not at all."""
    names, columns = describe_columns(snapshot.columns)
    header = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "facts": snapshot.facts,
        "names": names,
        "arrays": sorted(snapshot.arrays),
        "columns": sorted(columns),
    }
    members: dict[str, Any] = {
        "header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
        "serials": snapshot.serials,
        **{f"array/{name}": array for name, array in snapshot.arrays.items()},
        **{f"column/{name}": array for name, array in columns.items()},
    }
    with replacing(path) as file:
        np.savez(file, **members)


def read_snapshot(path: Path) -> Snapshot:
    """What :func:`write_snapshot` was given, also by earlier releases.

    Raises :class:`SnapshotError` when the file is damaged or foreign.
    """
    with path.open("rb") as file:
        try:
            _check_archive(file)
            with np.load(file, allow_pickle=False) as members:
                header = json.loads(members["header"].tobytes())
                reader = _READERS.get(header["format_version"]) if header["format"] == FORMAT else None
                if reader is None:
                    raise SnapshotError(
                        f"{path} has format {header['format']} {header['format_version']}; this version reads "
                        f"{FORMAT} {', '.join(map(str, _READERS))}"
                    )
                return reader(header, members)
        except _DAMAGE as error:
            if isinstance(error, SnapshotError):
                raise
            raise SnapshotError(f"{path} is not a whole freshper snapshot ({error}); nothing was loaded") from error


def _read_second(header: Mapping[str, Any], members: Mapping[str, NDArray[Any]]) -> Snapshot:
    arrays = {name: members[f"array/{name}"] for name in header["arrays"]}
    columns = {name: members[f"column/{name}"] for name in header["columns"]}
    return Snapshot(header["facts"], arrays, members["serials"], columns_from(header["names"], columns))


def _read_first(header: Mapping[str, Any], members: Mapping[str, NDArray[Any]]) -> Snapshot:
    return Snapshot(*read_first_format(header, members))


_READERS = {1: _read_first, FORMAT_VERSION: _read_second}


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
