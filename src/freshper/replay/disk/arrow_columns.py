"""Columns as one Arrow IPC stream and back, and what recovery does with many of them. Needs the extra ``disk``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.errors import MissingExtraError
from freshper.replay.store.columns import FACTS, FLAGS, OPTIONAL, PER_TOKEN, PER_TRAJECTORY, Columns, pack
from freshper.trajectory import SamplingParams


def arrow() -> Any:
    """pyarrow, or an error that names the extra."""
    try:
        import pyarrow as pa
        import pyarrow.ipc  # a submodule that the package does not load itself
    except ImportError as error:
        raise MissingExtraError("pyarrow", "disk") from error
    return pa


def encode_columns(columns: Columns) -> NDArray[np.uint8]:
    """``columns`` as an Arrow IPC stream with one row per trajectory.

    Tokens and turns are list columns, so no array is copied but into the stream; tasks, groups, sampling
    parameters and images are dictionaries: an image that many trajectories share is written once.
    """
    pa = arrow()
    table: dict[str, Any] = {}
    for name in PER_TOKEN:
        values = getattr(columns, name)
        if values is not None:
            table[name] = _list(pa, columns.offsets, pa.array(_bytes_for_flags(values)))
    spans = pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(columns.turns).reshape(-1)), 4)
    table["turns"] = _list(pa, columns.turn_offsets, spans)
    table["turn_rewards"] = _list(pa, columns.turn_offsets, pa.array(columns.turn_rewards))
    table |= {name: pa.array(_bytes_for_flags(getattr(columns, name))) for name in FACTS}
    table["tasks"] = _dictionary(pa, columns.tasks, _text)
    table["groups"] = _dictionary(pa, columns.groups, _text)
    table["sampling"] = _dictionary(pa, columns.sampling, _parameters)
    shown = [image for images in columns.images for image in images]
    counts = np.cumsum([0, *map(len, columns.images)], dtype=np.int64)
    table["images"] = _list(pa, counts, _dictionary(pa, shown, bytes))
    batch = pa.RecordBatch.from_arrays(list(table.values()), names=list(table))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return np.frombuffer(sink.getvalue(), dtype=np.uint8)


def decode_columns(stream: Any) -> Columns:
    """What :func:`encode_columns` was given; the arrays are read-only views of ``stream``."""
    pa = arrow()
    batch = pa.ipc.open_stream(pa.py_buffer(stream)).read_next_batch()
    table = dict(zip(batch.schema.names, batch.columns, strict=True))
    lists = {name: _numpy(table[name].values) for name in (*PER_TOKEN, "turn_rewards") if name in table}
    facts = {name: _numpy(table[name]) for name in FACTS}
    facts |= {name: facts[name].view(np.bool_) for name in FLAGS}
    shown, counts = _entries(table["images"].values, bytes), _numpy(table["images"].offsets).tolist()
    return Columns(
        offsets=_numpy(table["tokens"].offsets),
        tokens=lists["tokens"],
        response_mask=lists["response_mask"].view(np.bool_),
        behavior_logprobs=lists["behavior_logprobs"],
        advantages=lists.get("advantages"),
        td_errors=lists.get("td_errors"),
        turn_offsets=_numpy(table["turns"].offsets),
        turns=_numpy(table["turns"].values.values).reshape(-1, 4),
        turn_rewards=lists["turn_rewards"],
        **facts,
        tasks=_entries(table["tasks"], _from_text),
        groups=_entries(table["groups"], _from_text),
        sampling=_entries(table["sampling"], _from_parameters),
        images=tuple(shown[start:stop] for start, stop in pairwise(counts)),
    )


def concatenate(parts: Sequence[Columns]) -> Columns:
    """All trajectories of ``parts``, in order: copies. Equal images become one object."""
    if not parts:
        return pack([])
    joined: dict[str, Any] = {}
    known: dict[bytes, bytes] = {}
    for name in (field.name for field in fields(Columns)):
        values = [getattr(part, name) for part in parts]
        if name in ("offsets", "turn_offsets"):
            joined[name] = np.cumsum(np.concatenate([np.zeros(1, np.int64), *map(np.diff, values)]))
        elif name in OPTIONAL:
            joined[name] = _optional(values, [len(part.tokens) for part in parts])
        elif name == "images":
            joined[name] = tuple(
                tuple(known.setdefault(image, image) for image in shown) for value in values for shown in value
            )
        elif name in PER_TRAJECTORY:
            joined[name] = tuple(entry for value in values for entry in value)
        else:
            joined[name] = np.concatenate(values)
    return Columns(**joined)


def _optional(values: Sequence[Any], sizes: Sequence[int]) -> NDArray[np.float32] | None:
    if all(value is None for value in values):
        return None
    filled = [np.zeros(size, np.float32) if value is None else value for value, size in zip(values, sizes, strict=True)]
    return np.concatenate(filled)


def _list(pa: Any, offsets: NDArray[np.int64], values: Any) -> Any:
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def _dictionary(pa: Any, values: Iterable[Any], convert: Callable[[Any], bytes]) -> Any:
    codes: dict[Any, int] = {}
    indices = np.array([codes.setdefault(value, len(codes)) for value in values], dtype=np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(list(map(convert, codes)), pa.large_binary()))


def _entries(column: Any, convert: Callable[[bytes], Any]) -> tuple[Any, ...]:
    entries = list(map(convert, column.dictionary.to_pylist()))
    return tuple(entries[code] for code in column.indices.to_numpy().tolist())


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")  # a name may hold surrogates, which Arrow's own strings refuse


def _from_text(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")


def _parameters(value: SamplingParams) -> bytes:
    return json.dumps([value.temperature, value.top_p, value.top_k]).encode()


def _from_parameters(value: bytes) -> SamplingParams:
    return SamplingParams(*json.loads(value))


def _numpy(column: Any) -> NDArray[Any]:
    values: NDArray[Any] = column.to_numpy(zero_copy_only=True)
    return values


def _bytes_for_flags(values: NDArray[Any]) -> NDArray[Any]:
    """Arrow packs truth values into bits, which costs a pass over them; as bytes they are taken as they are."""
    return values.view(np.uint8) if values.dtype == np.bool_ else values
