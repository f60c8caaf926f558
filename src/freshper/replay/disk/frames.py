"""Frames: what a log file consists of. A header of fixed size, a payload, a checksum over each of them."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"freshlog"
# Magic, kind, trajectories, bytes of the payload, sequence number, crc of the payload, room, crc of all that.
_HEADER = struct.Struct("<8sIIQQI24xI")
HEADER_BYTES = _HEADER.size
ALIGNMENT = 64  # of frames in a file and of arrays in a payload: Arrow asks for it, and numpy is faster for it
_CRC = struct.Struct("<I")
_HEAD_BYTES = struct.Struct("<Q")

Buffer = bytes | memoryview


class Kind(IntEnum):
    """What a frame holds."""

    ADD = 1  # trajectories, as one call added them
    CHANGE = 2  # something small that happened between adds
    COPY = 3  # trajectories of another log file, moved here so that it can be deleted; adds nothing


_KINDS = frozenset(map(int, Kind))


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part of a frame. ``sequence`` counts frames over all files; ``count`` is its trajectories."""

    kind: Kind
    count: int
    length: int  # bytes of the payload
    sequence: int
    crc: int  # of the payload

    @property
    def frame_bytes(self) -> int:
        """Header and payload."""
        return HEADER_BYTES + self.length

    def pack(self) -> bytes:
        """The ``HEADER_BYTES`` bytes that stand in the file."""
        body = _HEADER.pack(MAGIC, self.kind, self.count, self.length, self.sequence, self.crc, 0)[: -_CRC.size]
        return body + _CRC.pack(zlib.crc32(body))


class Damage(Exception):
    """Bytes that are not what was written. Internal: who reads a directory turns it into an error or a note.

    ``stop`` is where reading can go on; ``torn`` says that a frame is cut short by the end of what there is.
    """

    def __init__(self, what: str, start: int, stop: int, *, torn: bool = False) -> None:
        super().__init__(what)
        self.what, self.start, self.stop, self.torn = what, start, stop, torn


def parse_header(data: Buffer) -> Header | None:
    """The header in ``HEADER_BYTES`` bytes; None when they are not one, or not as they were written."""
    magic, kind, count, length, sequence, crc, own = _HEADER.unpack(data)
    if magic != MAGIC or own != zlib.crc32(memoryview(data)[: -_CRC.size]) or kind not in _KINDS:
        return None
    return Header(Kind(kind), count, length, sequence, crc)


def read_frame(data: Buffer, start: int) -> tuple[Header, memoryview]:
    """The frame at ``start`` of a file's bytes: its header and payload, both checked. Raises :class:`Damage`."""
    if start + HEADER_BYTES > len(data):
        raise Damage(f"the header of a frame is cut short after {len(data) - start} bytes", start, len(data), torn=True)
    view = memoryview(data)
    header = parse_header(view[start : start + HEADER_BYTES])
    if header is None:
        stop = _next_header(data, start + 1)
        raise Damage("the header of a frame is damaged, so its length is unknown", start, stop)
    stop = start + header.frame_bytes
    if stop > len(data):
        raise Damage(
            f"{describe(header)} is cut short: {header.frame_bytes} bytes, {len(data) - start} are there",
            start,
            len(data),
            torn=True,
        )
    payload = view[start + HEADER_BYTES : stop]
    if zlib.crc32(payload) != header.crc:
        raise Damage(f"the checksum of {describe(header)} does not match its {header.length} bytes", start, stop)
    return header, payload


def scan(data: Buffer, start: int, gaps: Mapping[int, int]) -> Iterator[tuple[int, Header, memoryview] | Damage]:
    """The frames of a file from ``start`` on, each with its place; damage is yielded too, and passed over.

    ``gaps`` are the places that an earlier repair has given up: start and stop.
    """
    while start < len(data):
        if start in gaps:
            start = gaps[start]
            continue
        try:
            header, payload = read_frame(data, start)
        except Damage as damage:
            yield damage
            start = damage.stop
        else:
            yield start, header, payload
            start += header.frame_bytes


def describe(header: Header) -> str:
    """A frame in words."""
    holds = f" ({header.count} trajectories)" if header.count else ""
    return f"frame {header.sequence}, {header.kind.name.lower()}{holds},"


def encode_frame(kind: Kind, count: int, sequence: int, payload: bytes) -> tuple[bytes, bytes]:
    """Header and payload as they are written."""
    return Header(kind, count, len(payload), sequence, zlib.crc32(payload)).pack(), payload


def encode_payload(head: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """``head`` (JSON) and ``arrays`` as bytes, a multiple of :data:`ALIGNMENT`.

    Raises :class:`TypeError` for what JSON or plain numbers cannot hold.
    """
    ready = plain_arrays(arrays)
    table, position = [], 0
    for name, array in ready.items():
        table.append([name, array.dtype.str, list(array.shape), position])
        position += _aligned(array.nbytes)
    text = json.dumps({"head": head, "arrays": table}).encode()
    parts: list[Any] = [_HEAD_BYTES.pack(len(text)), text, bytes(_pad(_HEAD_BYTES.size + len(text)))]
    for array in ready.values():
        parts += [array.reshape(-1).view(np.uint8).data, bytes(_pad(array.nbytes))]
    return b"".join(parts)


def decode_payload(payload: Buffer) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """What :func:`encode_payload` was given; the arrays are read-only views of ``payload``."""
    size = _HEAD_BYTES.unpack_from(payload)[0]
    content = json.loads(bytes(payload[_HEAD_BYTES.size : _HEAD_BYTES.size + size]))
    start = _aligned(_HEAD_BYTES.size + size)
    arrays = {}
    for name, dtype, shape, position in content["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        flat = np.frombuffer(payload, dtype=np.dtype(dtype), count=count, offset=start + position if count else 0)
        arrays[name] = flat.reshape(shape)
        arrays[name].flags.writeable = False
    return content["head"], arrays


def plain_arrays(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The arrays as every format here can hold them: contiguous, little-endian. Raises :class:`TypeError`."""
    ready = {}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(f"array {name!r} is {kind}: only plain numbers of at most 8 bytes can be saved")
        ready[name] = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    return ready


def _next_header(data: Buffer, start: int) -> int:
    """Where the next whole header stands; the end when there is none."""
    view = memoryview(data)
    while start + HEADER_BYTES <= len(data):
        # Frames are aligned within their file, so only aligned places have to be looked at.
        start = _aligned(start)
        if start + HEADER_BYTES <= len(data) and parse_header(view[start : start + HEADER_BYTES]) is not None:
            return start
        start += 1
    return len(data)


def _aligned(size: int) -> int:
    return size + _pad(size)


def _pad(size: int) -> int:
    return -size % ALIGNMENT
