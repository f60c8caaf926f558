"""The durable directory of a replay buffer: what was added survives a crash, and checkpoints cost what is new.

Layout: ``manifest.json`` (and its copy) says what counts; ``log-N`` are append-only frames, one per call, each with
a checksum; ``state-MARK.safetensors`` is the state of a checkpoint; ``LOCK`` keeps a second writer out.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freshper.errors import ConfigError, SnapshotError
from freshper.replay.disk.directory_lock import DirectoryLock
from freshper.replay.disk.entries import ADD, Entry, encode_entry
from freshper.replay.disk.frames import Kind
from freshper.replay.disk.log_file import End, LogWriter, log_path, write_file
from freshper.replay.disk.manifest import Checkpoint, LogEntry, Manifest, read_manifest
from freshper.replay.disk.names import is_ours, refuse_another
from freshper.replay.disk.places import Places, block_crcs, encode_state, state_path
from freshper.replay.disk.recovery import Found, Recovered, Recovery
from freshper.replay.store.columns import Columns

__all__ = ["DurableLog", "Entry", "Fsync", "Recovered"]

Fsync = Literal["always", "checkpoint"]
SEGMENT_BYTES = 64 << 20  # a log file is finished when it has reached this size
COMPACT_BELOW = 0.25  # a finished log file with a smaller share of live bytes is rewritten
READ_ATTEMPTS = 20  # of a reader whose files a writer replaces meanwhile


class DurableLog:
    """A directory that one process writes. Made by :meth:`create` and :meth:`open`; not safe for threads.

    **Durability.** A killed process (SIGKILL included) loses nothing that :meth:`add` or :meth:`change` returned
    from; a call that did not return is there wholly or not at all. With ``fsync="always"`` a power cut loses
    nothing either; with ``"checkpoint"`` it may lose what came after the last :meth:`checkpoint`, and may leave
    damage at the end of the log that only ``repair=True`` passes over. A failed call changes nothing and can be
    repeated.

    **Space.** After a checkpoint the directory holds at most ``keep * (4 * L + 2 * segment_bytes + S)`` bytes and
    what one call added at most, with L what the live trajectories of a kept checkpoint took when they were added
    and S the size of a state file: files without a trajectory that a kept checkpoint needs are deleted, and of a
    file that is less than a quarter live the live part is moved to the end of the log. To this comes what was
    appended after the newest checkpoint; without any checkpoint nothing is deleted.
    """

    def __init__(self, directory: Path, lock: DirectoryLock, manifest: Manifest, *, fsync: Fsync) -> None:
        self._directory = directory
        self._lock = lock
        self._manifest = manifest
        self._always = fsync == "always"
        self._stale = False  # whether the manifest on disk may be newer than the one here
        self._places: list[Places] = []
        self._last_serial = -1
        self._tail: LogWriter

    @classmethod
    def create(
        cls,
        directory: str | Path,
        *,
        meta: dict[str, Any],
        fsync: Fsync = "always",
        keep: int = 3,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> DurableLog:
        """A new buffer in ``directory``, which is made when it is missing. ``meta`` (JSON) says what it is.

        The last ``keep`` checkpoints stay loadable. Raises :class:`SnapshotError` when the directory already holds
        a buffer, or files of one, or is open elsewhere.
        """
        _check_settings(fsync, keep, segment_bytes)
        path = Path(directory).absolute()
        path.mkdir(parents=True, exist_ok=True)
        refuse_another(path)
        with _locked(path) as lock:
            refuse_another(path)
            identity = secrets.token_hex(4)
            manifest = Manifest(
                0, identity, meta, keep, segment_bytes, next_log=1, next_mark=1, logs=(), checkpoints=()
            )
            log = cls(path, lock, manifest, fsync=fsync)
            log._tail = log._new_tail(sequence=0)
            return log

    @classmethod
    def open(
        cls, directory: str | Path, *, fsync: Fsync = "always", mark: str | None = None, repair: bool = False
    ) -> tuple[DurableLog, Recovered]:
        """Go on with the buffer in ``directory``: what it holds, and the log to append to.

        With ``mark`` the state is exactly that of the checkpoint, and everything after it is discarded for good.
        Damage raises :class:`SnapshotError` naming file and place; ``repair=True`` goes on without what is damaged
        and says in the notes what was lost.
        """
        path = Path(directory).absolute()
        read_manifest(path, repair=repair)  # a directory without a buffer gets no lock file
        with _locked(path) as lock:
            manifest, notes = read_manifest(path, repair=repair)
            _check_settings(fsync, manifest.keep, manifest.segment_bytes)
            found = Recovery(path, manifest, repair=repair, notes=notes).run(mark)
            log = cls(path, lock, manifest, fsync=fsync)
            log._take_over(found)
            return log, found.recovered

    @staticmethod
    def read(directory: str | Path, *, mark: str | None = None) -> Recovered:
        """What ``directory`` holds, without changing it; also while another process writes there.

        Needs as many file descriptors as there are log files.
        """
        path = Path(directory).absolute()
        failure: tuple[int, str] | None = None
        for _ in range(READ_ATTEMPTS):
            manifest, _notes = read_manifest(path)
            try:
                return Recovery(path, manifest).run(mark).recovered
            except SnapshotError as error:
                # A file may have been deleted, or a half-written frame met, meanwhile. The same complaint twice
                # about the same manifest is no such thing.
                if failure == (manifest.generation, str(error)):
                    raise
                failure = (manifest.generation, str(error))
        raise SnapshotError(f"{path} changed {READ_ATTEMPTS} times while it was read ({failure}); try again")

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that can be opened, oldest first."""
        return self._manifest.marks

    def add(
        self, serials: NDArray[np.int64], columns: Columns, meta: dict[str, Any], arrays: dict[str, NDArray[Any]]
    ) -> None:
        """Append the trajectories ``columns`` (n) under ``serials`` (n,), which rise from call to call, as one frame.

        Raises :class:`OSError` when the disk is full; then nothing was added.
        """
        numbers = _serial_numbers(serials)
        if len(numbers) != len(columns):
            raise SnapshotError(f"{len(numbers)} serial numbers for {len(columns)} trajectories; nothing was added")
        if np.any(np.diff(numbers, prepend=self._last_serial) <= 0):
            raise SnapshotError(
                f"serial numbers must rise, from call to call too: the last one is {self._last_serial}, these run from "
                f"{int(numbers.min())} to {int(numbers.max())}; nothing was added"
            )
        payload = encode_entry(ADD, meta, arrays, numbers, columns)
        with self._appending() as tail:
            start = tail.end.size
            tail.append(Kind.ADD, len(numbers), payload, sync=self._always)
            if len(numbers):
                length = tail.end.size - start
                self._places.append(Places.of_frame(numbers, tail.number, start, length, columns.lengths))
                self._last_serial = int(numbers[-1])

    def change(self, kind: str, meta: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        """Append something small that happened, e.g. priorities that were updated. ``kind`` is anything but "add"."""
        if kind == ADD:
            raise SnapshotError(f'a change of kind "{ADD}" would be taken for trajectories when it is read back')
        payload = encode_entry(kind, meta, arrays)
        with self._appending() as tail:
            tail.append(Kind.CHANGE, 0, payload, sync=self._always)

    def checkpoint(self, meta: dict[str, Any], arrays: dict[str, NDArray[Any]], live: NDArray[np.int64]) -> str:
        """Save the state; returns its mark. ``live`` (n,) are the serial numbers of the trajectories that it needs.

        Writes ``meta``, ``arrays``, 32 bytes per live trajectory, and what has to be moved so that files can be
        deleted: no trajectory again that stays where it is. What is not in ``live`` cannot be live later.
        """
        wanted = _serial_numbers(live)
        if len(np.unique(wanted)) != len(wanted):
            raise SnapshotError("live names a trajectory twice; no checkpoint was made")
        self._check_usable()
        stored = Places.joined(self._places)
        places = self._compacted(stored.take(stored.find(wanted)))
        self._tail.sync()
        manifest, end = self._manifest, self._tail.end
        mark = f"{manifest.identity}-{manifest.next_mark:06d}"
        content = encode_state(meta, arrays, places)
        write_file(state_path(self._directory, mark), content)
        checkpoint = Checkpoint(
            mark=mark,
            log=self._tail.number,
            offset=end.size,
            sequence=end.sequence,
            last_serial=self._last_serial,
            size=len(content),
            crcs=block_crcs(content),
            logs=tuple(np.unique(places.logs).tolist()),
        )
        kept = (*manifest.checkpoints, checkpoint)[-manifest.keep :]
        self._replace_manifest(replace(manifest, next_mark=manifest.next_mark + 1, checkpoints=kept))
        self._places = [places]
        self._clean()
        return mark

    def close(self) -> None:
        """Write everything to the disk, note where the log ends, and let others in."""
        if not self._lock.held:
            return
        try:
            self._tail.sync()
            if not self._stale and self._lock.in_place():  # another buffer may be where this one was
                self._replace_manifest(self._manifest, size=self._tail.end.size)
        finally:
            self._tail.close()
            self._lock.release()

    def __enter__(self) -> Self:
        """The log itself, closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _take_over(self, found: Found) -> None:
        """Make what was found the truth on disk, and get ready to append.

        The manifest comes first: from then on what lies beyond a mark or belongs to half a frame does not count,
        and whoever is stopped on the way finds the rest to do again.
        """
        was_open = {log.number for log in self._manifest.logs if log.size is None}
        self._replace_manifest(replace(self._manifest, logs=found.logs, checkpoints=found.checkpoints))
        for log in self._manifest.logs:
            path = log_path(self._directory, log.number)
            # A file that was finished once may be mapped by a reader, and is never cut.
            if log.number in was_open and log.size is not None and path.stat().st_size > log.size:
                os.truncate(path, log.size)
        self._clean()
        self._places, self._last_serial = [found.places], found.last_serial
        last = self._manifest.logs[-1] if self._manifest.logs else None
        if last is not None and found.appendable and self._goes_on(last):
            self._replace_manifest(replace(self._manifest, logs=(*self._manifest.logs[:-1], replace(last, size=None))))
            self._tail = LogWriter(self._directory, last.number, End(last.size or 0, found.sequence))
        else:
            self._tail = self._new_tail(found.sequence)

    def _goes_on(self, last: LogEntry) -> bool:
        """Whether to append to the last log file: there is room, and nothing stands behind its end."""
        size = log_path(self._directory, last.number).stat().st_size
        return size == last.size and size < self._manifest.segment_bytes

    def _new_tail(self, sequence: int, *, size: int | None = None) -> LogWriter:
        """Start another log file; with ``size`` the one before is finished at that size."""
        manifest, logs = self._manifest, self._manifest.logs
        if size is not None:
            logs = (*logs[:-1], replace(logs[-1], size=size))
        logs = (*logs, LogEntry(manifest.next_log, sequence, None))
        tail = LogWriter.create(self._directory, manifest.next_log, sequence)
        done = False
        try:
            self._replace_manifest(replace(manifest, next_log=manifest.next_log + 1, logs=logs))
            done = True
        finally:
            if not done:
                tail.close()
        return tail

    def _replace_manifest(self, manifest: Manifest, *, size: int | None = None) -> None:
        """Make ``manifest`` the one that counts, without log files that it does not need."""
        needed = manifest.needed_logs()
        logs = tuple(log for log in manifest.logs if log.number in needed)
        if size is not None:
            logs = (*logs[:-1], replace(logs[-1], size=size))
        manifest = replace(manifest, generation=manifest.generation + 1, logs=logs)
        done = False
        try:
            manifest.write(self._directory)
            self._manifest = manifest
            done = True
        finally:
            if not done:
                self._stale = not self._on_disk()

    def _on_disk(self) -> bool:
        """Whether the manifest on disk is the one that is known here, after an attempt to replace it failed."""
        try:
            return read_manifest(self._directory)[0].generation == self._manifest.generation
        except (OSError, SnapshotError):
            return False

    @contextlib.contextmanager
    def _appending(self) -> Iterator[LogWriter]:
        """The file to append to; when the block fails, nothing that it appended or noted remains."""
        self._check_usable()
        if self._tail.end.size >= self._manifest.segment_bytes:
            self._roll()
        end, noted, last_serial = self._tail.end, len(self._places), self._last_serial
        done = False
        try:
            yield self._tail
            done = True
        finally:
            if not done:
                del self._places[noted:]
                self._last_serial = last_serial
                if self._tail.end != end:
                    self._tail.cut_back(end)

    def _roll(self) -> None:
        """Finish the log file and start another one."""
        self._tail.sync()
        finished = self._tail
        self._tail = self._new_tail(finished.end.sequence, size=finished.end.size)
        finished.close()

    def _compacted(self, places: Places) -> Places:
        """The places of the live trajectories once those in nearly dead files have been copied to the end of the log.

        The copies count from the next manifest on. Until then the originals do.
        """
        moved = places.take(np.arange(len(places)))
        for log in self._manifest.logs:
            rows = np.flatnonzero(places.logs == log.number)
            if log.size is None or len(rows) == 0:
                continue
            size = log_path(self._directory, log.number).stat().st_size
            if places.nbytes[rows].sum() >= COMPACT_BELOW * size:
                continue
            columns, _ = Recovery(self._directory, self._manifest).gather(places.take(rows))
            serials = places.serials[rows]
            payload = encode_entry("copy", {}, {}, serials, columns)
            with self._appending() as tail:
                start = tail.end.size
                tail.append(Kind.COPY, len(rows), payload, sync=False)
                moved.put(rows, Places.of_frame(serials, tail.number, start, tail.end.size - start, columns.lengths))
        return moved

    def _clean(self) -> None:
        """Delete what no longer counts. What cannot be deleted now is tried again the next time."""
        names = {log_path(self._directory, log.number).name for log in self._manifest.logs}
        names |= {state_path(self._directory, mark).name for mark in self._manifest.marks}
        for path in self._directory.iterdir():
            if path.name not in names and is_ours(path.name):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _check_usable(self) -> None:
        if self._lock.held and not self._lock.in_place():
            raise SnapshotError(
                f"{self._directory} was moved, deleted or replaced while this buffer wrote to it: nothing more is "
                "written. Load it from where it is now"
            )
        if not self._lock.held:
            raise SnapshotError(f"{self._directory} was closed, or belongs to the parent of this process")
        if self._stale:
            raise SnapshotError(
                f"the manifest of {self._directory} could not be made durable, so it is unknown which of its versions "
                "counts: close the buffer and open it again. Nothing was written"
            )


def _serial_numbers(values: ArrayLike) -> NDArray[np.int64]:
    numbers = np.asarray(values)
    if numbers.ndim != 1 or (len(numbers) and not np.issubdtype(numbers.dtype, np.integer)):
        raise SnapshotError(f"serial numbers have dtype {numbers.dtype} and shape {numbers.shape}: (n,) integers")
    return numbers.astype(np.int64)


def _check_settings(fsync: str, keep: int, segment_bytes: int) -> None:
    if fsync not in ("always", "checkpoint"):
        raise ConfigError(f'fsync {fsync!r} must be "always" or "checkpoint"')
    if keep < 1:
        raise ConfigError(f"keep {keep} must be >= 1: without a checkpoint nothing could be loaded")
    if segment_bytes < 1:
        raise ConfigError(f"segment_bytes {segment_bytes} must be >= 1")


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[DirectoryLock]:
    """The lock of ``directory``, released again when the block fails."""
    lock = DirectoryLock(directory)
    done = False
    try:
        yield lock
        done = True
    finally:
        if not done:
            lock.release()
