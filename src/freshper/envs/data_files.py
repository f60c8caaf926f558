"""Rows as they are stored: in JSON lines, JSON, CSV and Parquet files, and in data sets of the hub."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freshper.errors import ConfigError, MissingExtraError

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class Damaged:
    """A row that cannot be read at all: why, and what stands there."""

    reason: str
    part: object


Stored = tuple[str, Mapping[str, Any] | Damaged]
"""Where a row stands, and its values."""


def read_local(path: Path, subset: str, split: str, columns: set[str]) -> Iterator[Stored]:
    """The rows of a file, or of a folder's files in the order of their names.

    Raises :class:`ConfigError` for a file of an unknown kind or one that is no such file, and for a folder without.
    """
    files = _files(path, subset, split) if path.is_dir() else [path]
    for file in files:
        reader = _READERS.get(file.suffix.lower())
        if reader is None:
            raise ConfigError(f"{file}: unknown kind of file; known: {', '.join(SUFFIXES)}")
        try:
            for number, values in reader(file, columns):
                yield f"{file.name} {number}", values
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {_one_line(error)}") from error


def _files(folder: Path, subset: str, split: str) -> list[Path]:
    if subset:
        folder = folder / subset
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder, so there is no subset {subset!r}")
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix.lower() in SUFFIXES)
    chosen = [file for file in files if not split or _is_named(file, folder, split)]
    if not chosen:
        of_split = f" of the split {split!r}" if files else ""
        there = f"; there are {', '.join(file.name for file in files[:5])}" if files else ""
        raise ConfigError(f"{folder}: no {', '.join(SUFFIXES)} file{of_split} in it{there}")
    return chosen


def _is_named(file: Path, folder: Path, split: str) -> bool:
    """``split.jsonl``, ``split-00000-of-00001.parquet``, ``split_0.csv``, or anything in a folder ``split``."""
    rest = file.name.removeprefix(split)
    return (rest != file.name and rest[0] in ".-_") or split in file.relative_to(folder).parts[:-1]


def _read_lines(file: Path, columns: set[str]) -> Iterator[Stored]:  # noqa: ARG001
    # Damaged bytes become lone surrogates: they spoil the values they stand in, not the file.
    with file.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"line {number}", _parse(line)


def _parse(line: str) -> Mapping[str, Any] | Damaged:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return Damaged("it is no JSON", line)
    return _as_row(values)


def _as_row(values: object) -> Mapping[str, Any] | Damaged:
    return values if isinstance(values, dict) else Damaged("it is no JSON object", values)


def _read_json(file: Path, columns: set[str]) -> Iterator[Stored]:
    """A list of objects; files of this name with an object a line are about as common."""
    content = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    if not content.lstrip().startswith("["):
        yield from _read_lines(file, columns)
        return
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: {_one_line(error)}") from error
    for number, values in enumerate(rows, start=1):
        yield f"entry {number}", _as_row(values)


def _read_csv(file: Path, columns: set[str]) -> Iterator[Stored]:
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.reader(lines)
        try:
            names = next((fields for fields in reader if fields), [])
        except csv.Error as error:
            raise ConfigError(f"{file} is damaged: its first line is no CSV ({error})") from error
        if twice := sorted(name for name in columns if names.count(name) > 1):
            raise ConfigError(f"{file} has {names.count(twice[0])} columns {twice[0]!r}: rename those not meant")
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield f"line {reader.line_num}", Damaged(f"it is no CSV ({error})", "")
                continue
            if not fields:
                continue
            if len(fields) == len(names):
                yield f"line {reader.line_num}", dict(zip(names, fields, strict=True))
            else:
                wrong = Damaged(f"it has not {len(names)} fields, as the header has", fields)
                yield f"line {reader.line_num}", wrong


def _read_parquet(file: Path, columns: set[str]) -> Iterator[Stored]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("pyarrow", "data") from error
    number = 0
    try:
        with pq.ParquetFile(file) as stored:
            there = list(stored.schema_arrow.names)
            wanted = [name for name in there if name in columns]
            if not wanted:
                raise ConfigError(f"{file} has no column {' or '.join(map(repr, sorted(columns)))}, only {there}")
            for batch in stored.iter_batches(columns=wanted):
                for values in batch.to_pylist():
                    number += 1
                    yield f"row {number}", values
    except pa.ArrowException as error:
        raise ConfigError(f"{file} is damaged after row {number}: {_one_line(error)}") from error


_READERS = {".jsonl": _read_lines, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}


def read_hub(name: str, subset: str, split: str, columns: set[str]) -> Iterator[Stored]:
    """The rows of a hub data set, out of its local cache where it is there. Raises :class:`ConfigError`."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "data") from error
    try:
        data = datasets.load_dataset(name, subset or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        asked = " ".join(part for part in (name, subset, split) if part)
        raise ConfigError(
            f"the hub data set {asked} cannot be loaded: {_one_line(error)}; without a connection, name a local file"
        ) from error
    wanted = [column for column in data.column_names if column in columns]
    if not wanted:
        raise ConfigError(f"{name} has no column {' or '.join(map(repr, sorted(columns)))}, only {data.column_names}")
    data = data.select_columns(wanted)
    for column, feature in data.features.items():
        if isinstance(feature, datasets.Image):  # as it is stored: a row needs the encoded picture, not its pixels
            data = data.cast_column(column, datasets.Image(decode=False))
    for number, values in enumerate(data, start=1):
        yield f"row {number}", values


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
