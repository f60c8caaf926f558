"""A nested state as files: tensors in safetensors, everything else as JSON. Never pickle.

Mappings, lists, tuples, tensors and JSON values come back as they were, to the bit and with their types; keys may be
any of the plain values. A tensor that occurs twice (tied weights) is written once.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from freshper.errors import SnapshotError

SHARD_BYTES = 1 << 30  # of one file: what has to be in memory on its way to the disk
_TENSOR, _TUPLE, _ITEMS = "$tensor", "$tuple", "$items"
_PLAIN = (str, int, float, bool, type(None))

FileFacts = dict[str, dict[str, int]]  # by name: "bytes" and "crc32"


def write_tensors(folder: Path, state: Any) -> tuple[Any, FileFacts]:
    """Write the tensors of ``state`` into ``folder``, durably; returns the rest, ready for JSON, and what was written.

    Tensors go through the CPU one file at a time. Raises :class:`SnapshotError` for a value that is neither a
    tensor nor plain, before anything is written, and OSError when the disk is full.
    """
    found = _Found()
    tree = found.encode(state, "")
    files: FileFacts = {}
    for number, shard in enumerate(_shards(found.tensors), start=1):
        content = safetensors.torch.save(_own_memory(shard))
        name = f"tensors-{number:05d}.safetensors"
        write_durably(folder / name, content)
        files[name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    return tree, files


def read_tensors(folder: Path, tree: Any, files: Mapping[str, Mapping[str, int]]) -> Any:
    """The state that :func:`write_tensors` was given; tensors on the CPU.

    Raises :class:`SnapshotError` naming the file and what is wrong when one is missing or damaged.
    """
    tensors: dict[str, Tensor] = {}
    for name, facts in files.items():
        content = read_whole(folder / name, facts["bytes"], facts["crc32"])
        try:
            tensors |= safetensors.torch.load(content)
        except SafetensorError as error:
            raise SnapshotError(f"{folder / name} is no safetensors file ({error})") from None
    try:
        return _decode(tree, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"{folder}: its parts do not belong together ({error!r})") from None


def write_json(path: Path, body: Any) -> None:
    """Write ``body`` with its own checksum, durably. Numbers that are not finite are kept."""
    inner = json.dumps(body)
    write_durably(
        path, json.dumps({"crc32": zlib.crc32(inner.encode())})[:-1].encode() + f', "body": {inner}}}\n'.encode()
    )


def read_json(path: Path) -> Any:
    """What :func:`write_json` wrote. Raises :class:`SnapshotError` when it is missing or damaged."""
    try:
        whole = json.loads(path.read_bytes())
        expected, body = whole["crc32"], whole["body"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"cannot read {path} ({error!r})") from None
    if zlib.crc32(json.dumps(body).encode()) != expected:
        raise SnapshotError(f"{path} is damaged: its checksum does not match")
    return body


def write_durably(path: Path, content: bytes) -> None:
    """A new file that is on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_whole(path: Path, size: int, crc32: int) -> bytes:
    """The bytes of a file. Raises :class:`SnapshotError` where they are not those that were written."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SnapshotError(f"cannot read {path} ({error.strerror or error})") from None
    if len(content) != size:
        raise SnapshotError(f"{path} has {len(content)} bytes, {size} were written")
    if zlib.crc32(content) != crc32:
        raise SnapshotError(f"{path} is damaged: the checksum of its {size} bytes does not match")
    return content


@dataclass(slots=True)
class _Found:
    """Takes a state apart: tensors by name, and what names them."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    _names: dict[tuple[object, ...], str] = field(default_factory=dict)

    def encode(self, value: Any, place: str) -> Any:
        """``value`` with every tensor replaced by its name; ``place`` says where it stands."""
        if isinstance(value, Tensor):
            return {_TENSOR: self._name(value, place)}
        if isinstance(value, Mapping):
            plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
            if plain:
                return {key: self.encode(inner, f"{place}.{key}") for key, inner in value.items()}
            return {_ITEMS: [[_plain_key(key, place), self.encode(value[key], f"{place}.{key}")] for key in value]}
        if isinstance(value, (list, tuple)):
            inner = [self.encode(one, f"{place}.{number}") for number, one in enumerate(value)]
            return {_TUPLE: inner} if isinstance(value, tuple) else inner
        if type(value) in _PLAIN:
            return value
        if isinstance(value, float):
            return float(value)  # numpy's float64, which is one to the bit
        raise SnapshotError(
            f"{place.removeprefix('.')} is a {type(value).__name__}: a checkpoint holds tensors and plain values only"
        )

    def _name(self, tensor: Tensor, place: str) -> str:
        """The name that it is written under: one for all that are the same piece of memory."""
        if tensor.layout is not torch.strided:
            raise SnapshotError(f"{place.removeprefix('.')} is a {tensor.layout} tensor: a checkpoint holds dense ones")
        same: tuple[object, ...] = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        name = self._names.setdefault(same if tensor.numel() else (place,), place.removeprefix("."))
        self.tensors[name] = tensor
        return name


def _plain_key(key: object, place: str) -> Any:
    if type(key) not in _PLAIN:
        raise SnapshotError(
            f"{place.removeprefix('.')} has a {type(key).__name__} as a key: only plain values can be one"
        )
    return key


def _decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(one, tensors) for one in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        return tensors[tree[_TENSOR]]
    if _TUPLE in tree:
        return tuple(_decode(one, tensors) for one in tree[_TUPLE])
    if _ITEMS in tree:
        return {key: _decode(value, tensors) for key, value in tree[_ITEMS]}
    return {key: _decode(value, tensors) for key, value in tree.items()}


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """``tensors`` in order, as many together as fit into one file."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def _own_memory(shard: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, and views of nothing larger: safetensors refuses what shares memory."""
    here: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in shard.items():
        own = tensor.detach().cpu().contiguous()
        if own.untyped_storage().nbytes() != own.nbytes or own.untyped_storage().data_ptr() in taken:
            own = own.clone()
        taken.add(own.untyped_storage().data_ptr())
        here[name] = own
    return here
