"""One loader for every task that is made of questions: rows of the hub or of local files, and what became of them.

A row that cannot be used is counted and shown, never dropped in silence; a question of the evaluation set that is also
trained on is refused.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from freshper.envs.core import Split, level_split
from freshper.envs.data_files import SUFFIXES, Damaged, read_hub, read_local
from freshper.errors import ConfigError, MissingExtraError

logger = logging.getLogger("freshper.envs")

Row = Mapping[str, Any]
Reader = Callable[[Any], Any]
"""Turns a stored value into the one a task needs; raises ValueError with what is wrong with it ("is empty")."""

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CACHED = 16  # data sets that a process keeps
_SHOWN = 80  # characters of a value in a report


@dataclass(frozen=True)
class DataSource:
    """Where rows come from, and which of them.

    Args:
        source: a local file (.jsonl, .json, .parquet, .csv), a folder of such files, or the name of a hub data set.
        split: the hub's split; of a folder, the files that are named after it (``test.jsonl``,
            ``test-00000-of-00001.parquet``, ``test/...``). Empty: all files of a folder, the hub's ``train``.
        subset: the hub's configuration; of a folder, the folder of that name in it.
        columns: names of columns as the task knows them -> as the data has them; the same where none is given.
        limit: the first so many usable rows, after shuffling; None is all.
        shuffle_seed: order of the rows; None leaves them as they are.
    """

    source: str
    split: str = ""
    subset: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None
    shuffle_seed: int | None = None

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ConfigError(
                "the source of a data set is empty: it must be a file, a folder or the name of a hub data set"
            )
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit {self.limit} must be at least 1: no row would be left of {self.source}")
        if self.shuffle_seed is not None and self.shuffle_seed < 0:
            raise ConfigError(f"shuffle_seed {self.shuffle_seed} must be >= 0: it seeds the generator of the order")
        if (self.split or self.subset) and self.is_file:
            raise ConfigError(f"{self}: a single file has no subset and no split; name a folder, or leave them out")

    @property
    def path(self) -> Path | None:
        """The file or folder, None for the name of a hub data set. Raises :class:`ConfigError` when it is not there."""
        path = Path(self.source).expanduser()
        if path.exists():
            return path
        if path.suffix.lower() in SUFFIXES or not _HUB_NAME.fullmatch(self.source):
            raise ConfigError(f"{self.source}: no such file or folder, and not the name of a hub data set")
        return None

    @property
    def is_file(self) -> bool:
        """Whether it is one local file, which has no splits."""
        return Path(self.source).expanduser().is_file()

    def __str__(self) -> str:
        return " ".join(part for part in (self.source, self.subset, self.split) if part)


@dataclass(frozen=True, slots=True)
class Unusable:
    """Rows that cannot be used for one reason: how many, and the first of them."""

    count: int
    first: str


@dataclass(frozen=True, slots=True)
class Report:
    """What became of the rows of one source; ``left_out`` are usable ones beyond the limit."""

    source: str
    total: int
    used: int
    left_out: int
    unusable: Mapping[str, Unusable]

    def __str__(self) -> str:
        text = f"{self.source}: {self.used} of {self.total} rows are used"
        if self.left_out:
            text += f", {self.left_out} lie beyond the limit"
        for reason, rows in self.unusable.items():
            text += f"; {rows.count} cannot be: {reason} (first: {rows.first})"
        return text


@dataclass(frozen=True, slots=True)
class Rows:
    """Usable rows, each with the columns a task needs, and the reports of the sources they come from."""

    rows: tuple[Row, ...]
    reports: tuple[Report, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


def text(value: Any) -> str:
    """Text that is not blank, without the blanks around it."""
    if not isinstance(value, str):
        raise ValueError("is no text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("is no valid Unicode") from error
    if not value.strip():
        raise ValueError("is empty")
    return value.strip()


def text_or_number(value: Any) -> str:
    """Text, or a finite number as text (whole ones without a decimal point)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("is no finite number")
    return str(int(value) if value == int(value) else value)


def texts(value: Any) -> tuple[str, ...]:
    """One or more texts: a list of them, or a single one."""
    if isinstance(value, list | tuple) and not value:
        raise ValueError("is empty")
    return tuple(text(one) for one in value) if isinstance(value, list | tuple) else (text(value),)


def picture(value: Any, folder: Path | None = None) -> bytes:
    """An encoded picture: bytes, a path (relative to the data's ``folder``), the hub's mapping of both, or Pillow's."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow", "vision") from error
    import io

    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, Image.Image):
        encoded = io.BytesIO()
        value.save(encoded, format="PNG")
        return encoded.getvalue()
    if isinstance(value, str) and value:
        path = Path(value) if folder is None else folder / value
        if not path.is_file():
            raise ValueError("names a file that is not there")
        value = path.read_bytes()
    if not isinstance(value, bytes) or not value:
        raise ValueError("is no picture")
    try:
        with Image.open(io.BytesIO(value)) as image:
            image.load()
    except (
        Image.DecompressionBombError,
        OSError,
        RuntimeError,
        SyntaxError,
        ValueError,
    ) as error:
        raise ValueError("is a damaged picture") from error
    return value


def load_rows(source: DataSource, needed: Mapping[str, Reader]) -> Rows:
    """The usable rows of a source, each with the ``needed`` columns as their readers return them.

    A row lacks nothing: one with a missing column, a value that its reader refuses, or damage in the file is counted
    in the report, which is logged. A process reads a source once, until its files change.

    Raises:
        ConfigError: the source is not there, cannot be read, or has no usable row; the hub cannot be reached.
        MissingExtraError: a library that this kind of source needs is not installed.
    """
    return _CACHE.get((_key(source), tuple(needed.items())), lambda: _load(source, needed))


def question_identity(row: Row) -> str:
    """What makes two questions the same one: their text, but for case, width of letters, and blanks."""
    return " ".join(unicodedata.normalize("NFKC", row["question"]).casefold().split())


def pictured_identity(row: Row) -> str:
    """The same for questions about a picture (column ``image``): many ask the same of different ones."""
    return f"{question_identity(row)} {hashlib.sha256(row['image']).hexdigest()}"


def split_rows(
    split: Split,
    train: DataSource,
    evaluation: DataSource | None,
    needed: Mapping[str, Reader],
    identity: Callable[[Row], str] = question_identity,
) -> Rows:
    """The rows of ``split``: of two sources, or of one that is divided by a hash of each question.

    Duplicates of a question lie on one side. With ``evaluation`` None a fifth of the questions of ``train`` is kept
    for evaluation. With two sources a question that stands in both is refused. Raises as :func:`load_rows`, and
    :class:`ConfigError` for an overlap or an empty side.
    """
    keys = (_key(train), evaluation and _key(evaluation), tuple(needed.items()), identity, split)
    return _CACHE.get(keys, lambda: _split(split, train, evaluation, needed, identity))


def _split(
    split: Split,
    train: DataSource,
    evaluation: DataSource | None,
    needed: Mapping[str, Reader],
    identity: Callable[[Row], str],
) -> Rows:
    trained = load_rows(train, needed)
    if evaluation is None:
        rows = tuple(row for row in trained.rows if level_split(identity(row)) == split)
        if not rows:
            raise ConfigError(
                f"{train}: none of its {len(trained)} rows falls to the {split} split, which a hash of the question "
                "decides; give more rows, or a source of its own for evaluation"
            )
        return Rows(rows, trained.reports)
    evaluated = load_rows(evaluation, needed)
    seen = {identity(row) for row in trained.rows}
    both = [row for row in evaluated.rows if identity(row) in seen]
    if both:
        raise ConfigError(
            f"{len(both)} of {len(evaluated)} questions of {evaluation} also stand in {train}, the first is "
            f"{_shown(both[0]['question'])}: an evaluation on what was trained on says nothing; take them out, or give "
            "one source alone and its questions are divided"
        )
    return Rows(trained.rows if split == "train" else evaluated.rows, trained.reports + evaluated.reports)


def _load(source: DataSource, needed: Mapping[str, Reader]) -> Rows:
    path = source.path
    columns = {name: source.columns.get(name, name) for name in needed}
    unknown = sorted(set(source.columns) - set(needed))
    if unknown:
        raise ConfigError(f"{source}: columns names {', '.join(unknown)}; the task has {', '.join(sorted(needed))}")
    if path is None:
        stored = read_hub(source.source, source.subset, source.split or "train", set(columns.values()))
    else:
        stored = read_local(path, source.subset, source.split, set(columns.values()))
    rows: list[Row] = []
    unusable: dict[str, Unusable] = {}
    for place, values in _in_order(stored, source.shuffle_seed):
        folder = path if path is None or path.is_dir() else path.parent
        row, reason, shown = _read(values, columns, needed, folder)
        if row is not None:
            rows.append(row)
        else:
            before = unusable.get(reason)
            unusable[reason] = Unusable(before.count + 1, before.first) if before else Unusable(1, f"{place}: {shown}")
    used = rows[: source.limit]
    total = len(rows) + sum(kind.count for kind in unusable.values())
    report = Report(str(source), total, len(used), len(rows) - len(used), MappingProxyType(unusable))
    if not used:
        raise ConfigError(f"{report if total else f'{source}: there are no rows in it'}: the task has no questions")
    logger.log(logging.WARNING if unusable else logging.INFO, "%s", report)
    return Rows(tuple(used), (report,))


def _in_order(
    stored: Iterator[tuple[str, Mapping[str, Any] | Damaged]], seed: int | None
) -> Iterator[tuple[str, Mapping[str, Any] | Damaged]]:
    if seed is None:
        yield from stored
        return
    everything = list(stored)
    for index in np.random.default_rng(seed).permutation(len(everything)):
        yield everything[index]


def _read(
    values: Mapping[str, Any] | Damaged, columns: Mapping[str, str], needed: Mapping[str, Reader], folder: Path | None
) -> tuple[Row | None, str, str]:
    """A usable row; or None, what is wrong, and the part of the row that is."""
    if isinstance(values, Damaged):
        return None, values.reason, _shown(values.part)
    row = {}
    for name, reader in needed.items():
        column = columns[name]
        if column not in values:
            return None, f"there is no {column!r}", f"it has {', '.join(map(repr, values)) or 'nothing'}"
        if values[column] is None:
            return None, f"{column!r} is null", _shown(dict(values))
        try:
            row[name] = partial(picture, folder=folder)(values[column]) if reader is picture else reader(values[column])
        except ValueError as error:
            return None, f"{column!r} {error}", _shown(values[column])
    return MappingProxyType(row), "", ""


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def _key(source: DataSource) -> tuple[Any, ...]:
    """Everything that decides the rows of a source; of local files also when they were written."""
    path = source.path
    files = (
        [] if path is None else [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    )
    stamps = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    choice = (source.source, source.split, source.subset, source.limit, source.shuffle_seed)
    return (*choice, tuple(sorted(source.columns.items())), stamps)


class _Cache:
    """What a process has loaded: many environment objects ask for the same."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a split loads its sources within
        self._rows: OrderedDict[Any, Rows] = OrderedDict()

    def get(self, key: Any, load: Callable[[], Rows]) -> Rows:
        with self._lock:
            if key not in self._rows:
                self._rows[key] = load()
            self._rows.move_to_end(key)
            while len(self._rows) > _CACHED:
                self._rows.popitem(last=False)
            return self._rows[key]


_CACHE = _Cache()
