"""Trajectories as Parquet: one row each, nested lists and structs. Needs pyarrow (extra ``disk``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from freshper.errors import MissingExtraError, TrajectoryError
from freshper.replay.store.columns import OPTIONAL

_ROWS = 64  # decoded at once when reading


class TableWriter:
    """Writes rows (fields by name, as of a trajectory) to ``file``.

    Every call of :meth:`write` makes a row group; every page has a checksum, since Parquet returns damaged values in
    silence without one.
    """

    def __init__(self, file: BinaryIO) -> None:
        arrow, parquet = libraries()
        self._arrow, self._schema = arrow, _schema(arrow)
        self._writer = parquet.ParquetWriter(
            file,
            self._schema,
            compression="zstd",
            use_dictionary=["stop_reason", "task", "group"],  # tokens and floats hardly repeat
            write_page_checksum=True,
        )

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Writes the footer; without it the file cannot be read."""
        self._writer.close()

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows. Raises :class:`TrajectoryError` where a value is beyond the types of the columns."""
        arrow = self._arrow
        try:
            columns = [arrow.array([row[field.name] for row in rows], field.type) for field in self._schema]
            table = arrow.Table.from_arrays(columns, schema=self._schema)
        except (arrow.ArrowException, OverflowError) as error:
            raise TrajectoryError(f"a trajectory does not fit into Parquet: {error}") from error
        self._writer.write_table(table)


def libraries() -> tuple[ModuleType, ModuleType]:
    """pyarrow and pyarrow.parquet. Raises :class:`MissingExtraError` where they are not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "disk") from None
    return pyarrow, pyarrow.parquet


def read_rows(path: Path, wanted: Sequence[str], required: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The ``wanted`` columns of each row, with the name of its place, "row 0" first.

    Lists of numbers are arrays; where something else stands among them they are Python lists. Raises
    :class:`TrajectoryError` where the file is damaged or no Parquet, or lacks a ``required`` column.
    """
    arrow, parquet = libraries()
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
            names = file.schema_arrow.names
            if missing := [name for name in required if name not in names]:
                raise TrajectoryError(f"{path} lacks the columns {', '.join(missing)}: a trajectory needs them")
            columns = [name for name in wanted if name in names]
            if twice := [name for name in columns if names.count(name) > 1]:
                raise TrajectoryError(f"{path} holds the column {twice[0]} twice: which of them counts is not defined")
            row = 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=columns):
                for index in range(len(batch)):
                    yield f"row {row}", _row(arrow, path, row, {name: batch.column(name)[index] for name in columns})
                    row += 1
            if row != file.metadata.num_rows:
                raise TrajectoryError(f"{path} is no whole Parquet file: {row} rows of {file.metadata.num_rows}")
    except (arrow.ArrowException, UnicodeDecodeError) as error:  # also a damaged name of a column
        raise TrajectoryError(f"{path} is no whole Parquet file: {error}") from error
    except OSError as error:
        if error.errno is not None:  # the system's own; pyarrow raises one without a number for damage
            raise
        raise TrajectoryError(f"{path} is no whole Parquet file: {error}") from error


def _row(arrow: Any, path: Path, row: int, scalars: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, scalar in scalars.items():
        try:
            plain[name] = _plain(arrow, scalar)
        except (ValueError, OverflowError) as error:  # text that is no UTF-8, a date beyond Python's
            raise TrajectoryError(f"{path}, row {row}: {name} cannot be read: {error}") from error
    return plain


def _plain(arrow: Any, scalar: Any) -> Any:
    values = scalar.values if isinstance(scalar, arrow.ListScalar) else None
    if values is None or values.null_count:
        return scalar.as_py()
    kinds = arrow.types
    if kinds.is_integer(values.type) or kinds.is_floating(values.type) or kinds.is_boolean(values.type):
        return values.to_numpy(zero_copy_only=False)
    return values.to_pylist()


def _schema(arrow: Any) -> Any:
    def present(name: str, kind: Any) -> Any:
        return arrow.field(name, kind, nullable=False)

    turn = [present(name, arrow.int32()) for name in ("start", "reply_start", "end")]
    turn += [present("reward", arrow.float64()), present("images", arrow.int32())]
    sampling = [("temperature", arrow.float64()), ("top_p", arrow.float64()), ("top_k", arrow.int64())]
    kinds = {
        "tokens": arrow.list_(arrow.int32()),
        "response_mask": arrow.list_(arrow.bool_()),
        "behavior_logprobs": arrow.list_(arrow.float32()),
        "turns": arrow.list_(arrow.struct(turn)),
        "stop_reason": arrow.string(),
        "success": arrow.bool_(),
        "policy_version": arrow.int64(),
        "task": arrow.string(),
        "group": arrow.string(),
        "seed": arrow.int64(),
        "sampling": arrow.struct([present(*field) for field in sampling]),
        "advantages": arrow.list_(arrow.float32()),
        "td_errors": arrow.list_(arrow.float32()),
        "images": arrow.list_(arrow.binary()),
        "logprobs_known": arrow.bool_(),
    }
    nullable = {"behavior_logprobs", *OPTIONAL}
    return arrow.schema([arrow.field(name, kind, nullable=name in nullable) for name, kind in kinds.items()])
