"""The manifest: which files of a directory count, how far, and which checkpoints there are. Replaced atomically."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from freshper.errors import SnapshotError
from freshper.replay.disk.log_file import write_file

FORMAT = "freshper-replay"
FORMAT_VERSION = 1
MANIFEST, COPY = "manifest.json", "manifest.copy.json"
_PREFIX, _AFTER = b'{"crc32": "', b'", '  # the checksum between them is that of every byte after them
_SUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A log file. ``first`` is the number of its first frame; ``size`` is None as long as frames are appended.

    ``gaps`` are the spans (start, stop) that a repair has given up.
    """

    number: int
    first: int
    size: int | None
    gaps: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved state, and where the log stood: the next frame is ``sequence``, at ``offset`` of log file ``log``.

    ``logs`` are the log files that hold its trajectories; ``crcs`` are the checksums of its state file of
    ``size`` bytes, one per block.
    """

    mark: str
    log: int
    offset: int
    sequence: int
    last_serial: int
    size: int
    crcs: tuple[int, ...]
    logs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that says what a directory holds. ``generation`` rises with every replacement.

    Numbers of log files and marks are never used again, also after going back to an older mark: a name stands
    for one content for ever.
    """

    generation: int
    identity: str  # of this directory: a part of its marks, so that no other directory takes them for its own
    initial: dict[str, Any]  # what the buffer was created with
    keep: int
    segment_bytes: int
    next_log: int
    next_mark: int
    logs: tuple[LogEntry, ...]
    checkpoints: tuple[Checkpoint, ...]  # oldest first

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that can be opened, oldest first."""
        return tuple(checkpoint.mark for checkpoint in self.checkpoints)

    def needed_logs(self) -> set[int]:
        """Log files that some checkpoint needs, or that hold frames after the newest one."""
        start = self.checkpoints[-1].log if self.checkpoints else 0
        later = {log.number for log in self.logs if log.number >= start}
        return later.union(*(checkpoint.logs for checkpoint in self.checkpoints))

    def write(self, directory: Path) -> None:
        """Replace the copy of the manifest, then the manifest itself: with that the change has happened."""
        body = {"format": FORMAT, "format_version": FORMAT_VERSION} | asdict(self)
        rest = json.dumps(body)[1:].encode() + b"\n"
        content = _PREFIX + _checksum(rest) + _AFTER + rest
        write_file(directory / COPY, content)
        write_file(directory / MANIFEST, content)


def read_manifest(directory: Path, *, repair: bool = False) -> tuple[Manifest, list[str]]:
    """The manifest of ``directory`` and notes of what was wrong with it.

    Raises :class:`SnapshotError` when there is none, when it is damaged (with ``repair`` its copy is taken) and
    when a newer version wrote it.
    """
    path = directory / MANIFEST
    try:
        return _read(path), []
    except (FileNotFoundError, _DamagedError) as error:
        if not (directory / COPY).exists():
            if isinstance(error, _DamagedError):
                raise
            directory.stat()  # a directory that does not exist is an error of its own
            raise SnapshotError(f"{directory} holds no replay buffer: there is no {MANIFEST} in it") from None
        what = str(error) if isinstance(error, _DamagedError) else f"{path} is missing"
        if not repair:
            raise SnapshotError(f"{what}; nothing was loaded. repair=True goes on with its copy {COPY}") from None
        return _read(directory / COPY), [f"{what}; its copy {COPY} was taken"]


class _DamagedError(SnapshotError):
    """The bytes are not those that were written."""


def _read(path: Path) -> Manifest:
    content = path.read_bytes()
    start = len(_PREFIX) + _SUM_BYTES + len(_AFTER)
    rest = content[start:]
    if content[:start] != _PREFIX + _checksum(rest) + _AFTER:
        raise _DamagedError(f"{path}: the checksum does not match bytes 0 to {len(content)}: the manifest is damaged")
    body = json.loads(b"{" + rest)
    if body.pop("format") != FORMAT:
        raise SnapshotError(f"{path} belongs to something else: its format is not {FORMAT}")
    version = body.pop("format_version")
    if version not in _READERS:
        raise SnapshotError(
            f"{path} has format version {version}; this version of freshper reads "
            f"{', '.join(map(str, _READERS))}. A newer freshper wrote it: upgrade, or export the buffer there"
        )
    return _READERS[version](body)


def _read_version_1(body: dict[str, Any]) -> Manifest:
    logs = tuple(
        LogEntry(**log | {"gaps": tuple((start, stop) for start, stop in log["gaps"])}) for log in body["logs"]
    )
    checkpoints = tuple(
        Checkpoint(**entry | {"crcs": tuple(entry["crcs"]), "logs": tuple(entry["logs"])})
        for entry in body["checkpoints"]
    )
    return Manifest(**body | {"logs": logs, "checkpoints": checkpoints})


# Every format version that can be read. A new one gets a reader of its own, the old ones stay.
_READERS: dict[int, Callable[[dict[str, Any]], Manifest]] = {1: _read_version_1}


def _checksum(content: bytes) -> bytes:
    return f"{zlib.crc32(content):0{_SUM_BYTES}x}".encode()
