"""What one frame says: an add with its trajectories, or a change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy import int64
from numpy.typing import NDArray

from freshper.replay.disk.arrow_columns import decode_columns, encode_columns
from freshper.replay.disk.frames import Buffer, decode_payload, encode_payload
from freshper.replay.store.columns import Columns

ADD = "add"
_SERIALS, _COLUMNS, _ARRAY = "serials", "columns", "array/"


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One thing that happened after the checkpoint: ``kind`` is "add", or what :meth:`DurableLog.change` was told.

    An add has its trajectories: ``serials`` (n,) and ``columns``. Arrays are read-only.
    """

    kind: str
    meta: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    serials: NDArray[int64] | None = None
    columns: Columns | None = None


def encode_entry(
    kind: str,
    meta: dict[str, Any],
    arrays: dict[str, NDArray[Any]],
    serials: NDArray[int64] | None = None,
    columns: Columns | None = None,
) -> bytes:
    """An entry as the payload of a frame. Raises :class:`TypeError` for what JSON or plain arrays cannot hold."""
    parts: dict[str, NDArray[Any]] = {_ARRAY + name: array for name, array in arrays.items()}
    if serials is not None and columns is not None:
        parts |= {_SERIALS: serials, _COLUMNS: encode_columns(columns)}
    return encode_payload({"kind": kind, "meta": meta}, parts)


def decode_entry(payload: Buffer) -> Entry:
    """What :func:`encode_entry` was given; arrays are read-only views of ``payload``."""
    head, arrays = decode_payload(payload)
    own = {name.removeprefix(_ARRAY): array for name, array in arrays.items() if name.startswith(_ARRAY)}
    if _COLUMNS not in arrays:
        return Entry(head["kind"], head["meta"], own)
    return Entry(head["kind"], head["meta"], own, arrays[_SERIALS], decode_columns(arrays[_COLUMNS]))
