"""Reading a directory back: a checkpoint, what came after it, and what to do about damage."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.errors import SnapshotError
from freshper.replay.disk.arrow_columns import concatenate
from freshper.replay.disk.entries import Entry, decode_entry
from freshper.replay.disk.frames import Buffer, Damage, Header, Kind, describe, read_frame, scan
from freshper.replay.disk.log_file import log_path
from freshper.replay.disk.manifest import Checkpoint, LogEntry, Manifest
from freshper.replay.disk.places import BLOCK, Places, block_crcs, decode_state, state_path
from freshper.replay.store.columns import Columns, take_rows


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """What a directory holds.

    ``mark`` names the checkpoint that was taken, None when there is none yet: then ``meta`` is what the directory
    was created with and nothing is live. ``live`` (n,) are the serial numbers that the checkpoint was given;
    ``serials`` (m,) are those whose trajectories, ``columns``, could be read, in the same order: all of them,
    unless a repair names a loss. ``entries`` are the frames after the checkpoint, in order; ``notes`` says in words
    what was repaired, ignored or lost.
    """

    mark: str | None
    initial: dict[str, Any]
    meta: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    live: NDArray[np.int64]
    serials: NDArray[np.int64]
    columns: Columns
    entries: list[Entry]
    notes: list[str]


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a writer needs besides: the files with their true ends, and where everything is."""

    recovered: Recovered
    places: Places
    logs: tuple[LogEntry, ...]  # sizes filled in, also of the last one
    checkpoints: tuple[Checkpoint, ...]
    sequence: int  # of the next frame
    last_serial: int
    appendable: bool  # whether the last log file may be continued


@dataclass(slots=True, eq=False)
class _Later:
    """The frames after a checkpoint. ``whole`` is false when log files between them are gone."""

    sequence: int
    last_serial: int
    entries: list[Entry] = field(default_factory=list)
    places: list[Places] = field(default_factory=list)
    whole: bool = True


class Recovery:
    """Reads what ``manifest`` names in ``directory``. Nothing on disk is changed.

    Damage raises :class:`SnapshotError`; with ``repair`` it is passed over and named in the notes. A frame that is
    cut short at the end of the last log file is no damage: its writer was stopped before it could acknowledge it.
    """

    def __init__(self, directory: Path, manifest: Manifest, *, repair: bool = False, notes: Sequence[str] = ()) -> None:
        self._directory = directory
        self._manifest = manifest
        self._repair = repair
        self._repaired = bool(notes)
        self._notes = list(notes)
        self._logs = {log.number: log for log in manifest.logs}
        self._gaps = {log.number: dict(log.gaps) for log in manifest.logs}
        self._missing: set[int] = set()
        self._data: dict[int, Buffer] = {}
        self._frames: dict[tuple[int, int], tuple[NDArray[np.int64], Columns] | None] = {}

    def run(self, mark: str | None) -> Found:
        """Everything, as of checkpoint ``mark``; by default of the newest checkpoint and all that came later."""
        candidates = self._up_to(mark)
        kept, (meta, arrays, places) = self._state(candidates, exact=mark is not None)
        checkpoint = kept[-1] if kept else None
        fell_back = len(kept) < len(candidates)
        self._open(checkpoint, later=mark is None)
        columns, found = self.gather(places)
        start = (checkpoint.sequence, checkpoint.last_serial) if checkpoint else (0, -1)
        later, cut = _Later(*start), mark is not None
        if mark is None:
            self._scan(checkpoint, later)
            if fell_back and not later.whole:
                later, cut = self._nothing_later(checkpoint), True
        recovered = Recovered(
            mark=checkpoint.mark if checkpoint else None,
            initial=self._manifest.initial,
            meta=meta,
            arrays=arrays,
            live=places.serials,
            serials=places.serials[found],
            columns=columns,
            entries=later.entries,
            notes=self._notes,
        )
        return Found(
            recovered=recovered,
            places=Places.joined([places.take(found), *later.places]),
            logs=self._true_logs(checkpoint if cut else None),
            checkpoints=kept,
            sequence=later.sequence,
            last_serial=later.last_serial,
            appendable=not cut and not self._repaired,
        )

    def gather(self, places: Places) -> tuple[Columns, NDArray[np.bool_]]:
        """The trajectories at ``places`` (n,), in order, and which of them are there, (n,): all, but for a repair."""
        found = np.ones(len(places), dtype=np.bool_)
        changes = np.flatnonzero((np.diff(places.logs) != 0) | (np.diff(places.offsets) != 0)) + 1
        edges = [0, *changes.tolist(), len(places)] if len(places) else []
        parts = []
        for start, stop in pairwise(edges):
            number, offset, rows = int(places.logs[start]), int(places.offsets[start]), places.rows[start:stop]
            frame = self._frame(number, offset)
            if frame is not None and not np.array_equal(frame[0][rows], places.serials[start:stop]):
                self._give_up(number, offset, offset, "the frame holds other trajectories than the checkpoint says")
                frame = None
            if frame is None:
                found[start:stop] = False
            else:
                parts.append(take_rows(frame[1], rows.astype(np.int64)))
        if not found.all():
            lost = places.serials[~found]
            self._notes.append(
                f"{len(lost)} of {len(found)} trajectories of the checkpoint are lost: serial numbers "
                f"{_listed(lost.tolist())}"
            )
        return concatenate(parts), found

    def _up_to(self, mark: str | None) -> tuple[Checkpoint, ...]:
        marks = self._manifest.marks
        if mark is None:
            return self._manifest.checkpoints
        if mark not in marks:
            raise SnapshotError(
                f"{self._directory} has no mark {mark!r}; known: {', '.join(marks) or 'none yet'} (the last "
                f"{self._manifest.keep} are kept). Nothing was loaded"
            )
        return self._manifest.checkpoints[: marks.index(mark) + 1]

    def _state(
        self, candidates: tuple[Checkpoint, ...], *, exact: bool
    ) -> tuple[tuple[Checkpoint, ...], tuple[dict[str, Any], dict[str, NDArray[Any]], Places]]:
        """The newest checkpoint whose state file is whole, with its elders, and its state."""
        for number in reversed(range(len(candidates))):
            content, what = self._state_file(candidates[number])
            if what is None:
                return candidates[: number + 1], decode_state(content)
            if exact or not self._repair:
                back = f"checkpoint {candidates[number - 1].mark}" if number else "the beginning of the log"
                advice = "choose another mark" if exact else f"repair=True goes back to {back}"
                raise SnapshotError(f"{what}. Nothing was loaded; {advice}")
            self._repaired = True
            self._notes.append(f"{what}; checkpoint {candidates[number].mark} was given up")
        return (), (self._manifest.initial, {}, Places.joined([]))

    def _state_file(self, checkpoint: Checkpoint) -> tuple[bytes, str | None]:
        path = state_path(self._directory, checkpoint.mark)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return b"", f"{path} is missing"
        if len(content) != checkpoint.size:
            return content, f"{path} has {len(content)} bytes, {checkpoint.size} were written"
        for number, (now, then) in enumerate(zip(block_crcs(content), checkpoint.crcs, strict=True)):
            if now != then:
                stop = min((number + 1) * BLOCK, len(content))
                return content, f"{path}: the checksum does not match bytes {number * BLOCK} to {stop}"
        return content, None

    def _nothing_later(self, checkpoint: Checkpoint | None) -> _Later:
        if checkpoint is None:
            raise SnapshotError(
                f"{self._directory}: no checkpoint can be read, and the first frames of the log were deleted when "
                "they were no longer needed: there is nothing to go on from"
            )
        self._notes.append(
            f"frames that only the damaged checkpoints contained were deleted, so everything after checkpoint "
            f"{checkpoint.mark} is lost"
        )
        return _Later(checkpoint.sequence, checkpoint.last_serial)

    def _open(self, checkpoint: Checkpoint | None, *, later: bool) -> None:
        """Get hold of every file that will be read, before a writer can delete one."""
        start = checkpoint.log if checkpoint else 0
        needed = {start, *checkpoint.logs} if checkpoint else set()
        for number in sorted(self._logs):
            if number in needed or (later and number >= start):
                self._read(number)

    def _read(self, number: int) -> Buffer:
        """The bytes of a log file as far as they count. Those of a finished file are mapped: they never change."""
        if number not in self._data:
            log, path = self._logs[number], log_path(self._directory, number)
            positions = [c.offset for c in self._manifest.checkpoints if c.log == number]
            written = max([0, *positions]) if log.size is None else log.size
            data: Buffer = b""
            try:
                with path.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size if log.size is None else log.size
                    size = min(size, os.fstat(file.fileno()).st_size)
                    if log.size is None:
                        data = file.read(size)
                    elif size:
                        data = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
            except FileNotFoundError:
                self._give_up(number, 0, written, "the file is missing")
                self._missing.add(number)
            else:
                if len(data) < written and len(data) not in self._gaps[number]:
                    self._give_up(number, len(data), written, f"the file ends here, {written} bytes were written")
            self._data[number] = data
        return self._data[number]

    def _frame(self, number: int, offset: int) -> tuple[NDArray[np.int64], Columns] | None:
        """Serial numbers and trajectories of the frame at ``offset``; None when a repair has given it up."""
        key = (number, offset)
        if key not in self._frames:
            self._frames[key] = None
            if number not in self._logs or number in self._missing:
                return None
            data = self._read(number)
            if any(start <= offset < stop for start, stop in self._gaps[number].items()):
                return None
            try:
                _, payload = read_frame(data, offset)
            except Damage as damage:
                self._give_up(number, damage.start, damage.stop, damage.what)
            else:
                entry = decode_entry(payload)
                if entry.serials is not None and entry.columns is not None:
                    self._frames[key] = entry.serials, entry.columns
        return self._frames[key]

    def _scan(self, checkpoint: Checkpoint | None, later: _Later) -> None:
        """Read everything after ``checkpoint`` into ``later``."""
        first = checkpoint.log if checkpoint else 0
        for log in self._manifest.logs:
            if log.number < first or log.number in self._missing:
                continue
            inside = checkpoint is not None and log.number == first
            if not inside and log.first != later.sequence:
                self._notes.append(f"frames {later.sequence} to {log.first - 1} are gone")
                later.sequence, later.whole = log.first, False
            self._scan_file(log, checkpoint.offset if checkpoint and inside else 0, later)

    def _scan_file(self, log: LogEntry, start: int, later: _Later) -> None:
        data, path = self._read(log.number), log_path(self._directory, log.number)
        stop = start  # of the last good frame
        for item in scan(data, start, self._gaps[log.number]):
            if isinstance(item, Damage):
                if item.torn and log.size is None:
                    self._notes.append(f"{path}, byte {item.start}: {item.what}; it was never acknowledged")
                    self._data[log.number] = data[: item.start]
                    return
                self._give_up(log.number, item.start, item.stop, item.what)
                continue
            place, header, payload = item
            after_gap = place != stop and header.sequence > later.sequence
            if header.sequence != later.sequence and not after_gap:
                what = f"{describe(header)} stands where frame {later.sequence} belongs"
                self._give_up(log.number, place, place + header.frame_bytes, what)
                continue
            if after_gap:
                self._notes.append(f"{path}: frames {later.sequence} to {header.sequence - 1} are lost")
            stop = place + header.frame_bytes
            later.sequence = header.sequence + 1
            if header.kind is not Kind.COPY:
                self._take_up(log.number, place, header, decode_entry(payload), later)

    def _take_up(self, number: int, place: int, header: Header, entry: Entry, later: _Later) -> None:
        later.entries.append(entry)
        if entry.serials is not None and entry.columns is not None and len(entry.serials):
            lengths = entry.columns.lengths
            later.places.append(Places.of_frame(entry.serials, number, place, header.frame_bytes, lengths))
            later.last_serial = int(entry.serials[-1])

    def _give_up(self, number: int, start: int, stop: int, what: str) -> None:
        """Raise, or with ``repair`` note that the bytes from ``start`` to ``stop`` of a log file are lost."""
        where = f"{log_path(self._directory, number)}, byte {start}: {what}"
        if not self._repair:
            raise SnapshotError(
                f"{where}. Nothing was loaded; repair=True goes on without bytes {start} to {stop} and says which "
                "frames and trajectories are lost with them"
            )
        self._repaired = True
        self._notes.append(f"{where}; bytes {start} to {stop} were given up")
        self._gaps[number][start] = stop

    def _true_logs(self, cut_at: Checkpoint | None) -> tuple[LogEntry, ...]:
        """The log files as they are, or as they were at a checkpoint."""
        logs = []
        for log in self._manifest.logs:
            number = log.number
            if number in self._missing or (cut_at is not None and number > cut_at.log):
                continue
            size = len(self._data[number]) if number in self._data or log.size is None else log.size
            if cut_at is not None and number == cut_at.log:
                size = min(size, cut_at.offset)
            logs.append(replace(log, size=size, gaps=tuple(sorted(self._gaps[number].items()))))
        return tuple(logs)


def _listed(numbers: Sequence[int], most: int = 8) -> str:
    more = f", ... {numbers[-1]}" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more
