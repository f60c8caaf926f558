"""Files that a replay buffer writes: whole ones atomically, log files frame by frame, all-or-nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from freshper.errors import SnapshotError
from freshper.replay.disk.frames import Kind, encode_frame


def log_path(directory: Path, number: int) -> Path:
    """Where log file ``number`` stands."""
    return directory / f"log-{number:06d}"


def sync_directory(directory: Path) -> None:
    """Make names that were added, renamed or removed survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``: whoever reads meets the old or the new file, also after a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb", buffering=0) as file:
            _write_at(file.fileno(), 0, [content])
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


class End(NamedTuple):
    """Where a log ends: the size of its file in bytes and the number of its next frame."""

    size: int
    sequence: int


class LogWriter:
    """Appends frames to one log file. A frame is there wholly or, when anything fails, not at all."""

    def __init__(self, directory: Path, number: int, end: End) -> None:
        self.number = number
        self.end = end
        self.path = log_path(directory, number)
        self._file = self.path.open("r+b", buffering=0)
        self._uncut: OSError | None = None

    @classmethod
    def create(cls, directory: Path, number: int, sequence: int) -> LogWriter:
        """A new, empty log file, whose name is durable."""
        log_path(directory, number).open("wb").close()
        sync_directory(directory)
        return cls(directory, number, End(0, sequence))

    def append(self, kind: Kind, count: int, payload: bytes, *, sync: bool) -> None:
        """Write a frame at the end and, with ``sync``, to the disk itself. Raises :class:`OSError`, e.g. disk full."""
        if self._uncut is not None:
            raise SnapshotError(
                f"{self.path} could not be cut back to its last whole frame ({self._uncut}), so nothing can be "
                "appended; close the buffer and open it again"
            )
        before = self.end
        parts = encode_frame(kind, count, before.sequence, payload)
        try:
            size = before.size + _write_at(self._file.fileno(), before.size, list(parts))
            if sync:
                self.sync()
            self.end = End(size, before.sequence + 1)
        finally:
            if self.end is before:
                self.cut_back(before)

    def cut_back(self, end: End) -> None:
        """Forget every frame from ``end`` on."""
        self.end = end
        try:
            os.ftruncate(self._file.fileno(), end.size)
        except OSError as error:
            self._uncut = error  # appending would leave half a frame in the middle of the file

    def sync(self) -> None:
        """Force everything that was appended to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _write_at(descriptor: int, position: int, parts: list[bytes]) -> int:
    """Write all of ``parts``, however many calls it takes; returns the number of bytes."""
    start, left = position, [memoryview(part) for part in parts]
    while left:
        written = os.pwritev(descriptor, left, position)
        position += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
    return position - start
