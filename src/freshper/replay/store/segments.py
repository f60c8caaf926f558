"""Segments: large blocks of rows in memory or in mapped files, and pools of them that hold spans of rows."""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from freshper.errors import CapacityError

Int = NDArray[np.int64]
SMALLEST_BYTES = 1 << 16  # a pool starts with segments of this size
_SHORT = 16  # rows: shorter spans are gathered, longer ones copied as slices
_HUGE_BYTES = 1 << 22  # from here on, as in numpy, two megabytes a page are no waste
_ALIGNMENT = 64  # of a column within a spilled file


@dataclass(frozen=True, slots=True)
class ColumnKind:
    """A column of a pool: ``shape`` is that of one row; an optional column may be absent, which reads as zeros."""

    name: str
    dtype: DTypeLike
    shape: tuple[int, ...] = ()
    optional: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return np.dtype(self.dtype).itemsize * int(np.prod(self.shape))


class Segment:
    """A block of ``rows`` rows, each column an array of its own; ``used`` are written, ``live`` still wanted."""

    __slots__ = ("arrays", "disk_bytes", "live", "ram_bytes", "rows", "serial", "used")

    def __init__(self, serial: int, rows: int) -> None:
        self.serial = serial
        self.rows = rows
        self.used = self.live = 0
        self.arrays: dict[str, NDArray[Any]] = {}
        self.ram_bytes = self.disk_bytes = 0

    @property
    def room(self) -> int:
        """Rows that can still be written."""
        return 0 if self.disk_bytes else self.rows - self.used

    def write(self, kinds: Sequence[ColumnKind], source: Mapping[str, NDArray[Any] | None], first: int, n: int) -> None:
        """Append the ``n`` rows of ``source`` from row ``first`` on."""
        here = slice(self.used, self.used + n)
        self.used += n  # first: should a column find no memory, these rows are never used again
        for kind in kinds:
            values = source[kind.name]
            if values is not None:  # rows that are never written are zeros
                self._array(kind)[here] = values[first : first + n]

    def column(self, kind: ColumnKind) -> NDArray[Any]:
        """All rows of a column; zeros for one that nothing in the segment has."""
        found = self.arrays.get(kind.name)
        return np.zeros((self.rows, *kind.shape), kind.dtype) if found is None else found

    def spill(self, directory: Path) -> None:
        """Move the rows into a mapped file without a name, which is gone with the segment or the process.

        Raises OSError when the file cannot be written; the rows then stay in memory.
        """
        places, end = {}, 0
        with tempfile.TemporaryFile(dir=directory, prefix="freshper-") as file:
            for name, array in self.arrays.items():
                end += -end % _ALIGNMENT
                file.seek(end)
                places[name] = end
                end += file.write(array[: self.used].data.cast("B"))
            file.flush()
            block = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ)
        # Only now, when every byte is written: a full disk must cost nothing.
        self.arrays = {
            name: np.frombuffer(block, array.dtype, array[: self.used].size, places[name]).reshape(-1, *array.shape[1:])
            for name, array in self.arrays.items()
        }
        self.ram_bytes, self.disk_bytes = 0, end

    def _array(self, kind: ColumnKind) -> NDArray[Any]:
        if kind.name not in self.arrays:
            size = self.rows * kind.row_bytes
            # Private pages of zeros, touched when written and returned at once, which malloc promises for neither.
            block = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)
            if size >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
                block.madvise(mmap.MADV_HUGEPAGE)  # spans lie far apart: with small pages each costs a walk of its own
            self.arrays[kind.name] = np.frombuffer(block, kind.dtype).reshape(-1, *kind.shape)
            self.ram_bytes += size
        return self.arrays[kind.name]


@dataclass(slots=True)
class Placement:
    """Where spans were written, before anybody may count on them: see :meth:`Pool.commit`."""

    segments: Int  # serial of the segment of every span, (n,)
    starts: Int  # first row of every span, (n,)
    written: dict[int, Segment] = field(default_factory=dict)
    open: Segment | None = None


class Pool:
    """Spans of rows in segments that double with what lives, up to ``largest_bytes``; a longer span gets its own.

    The pool never holds more than ``2 live + 2 s`` rows, with ``s`` the rows of a new segment (at most as many as
    are live, within the smallest and the largest size): beyond that the emptiest segments are moved together.
    """

    def __init__(self, kinds: Sequence[ColumnKind], largest_bytes: int, serials: Iterator[int]) -> None:
        self.kinds = tuple(kinds)
        row_bytes = sum(kind.row_bytes for kind in kinds if not kind.optional)
        self._largest = max(largest_bytes // row_bytes, 1)
        self._smallest = max(min(SMALLEST_BYTES, largest_bytes) // row_bytes, 1)
        self._serials = serials
        self._segments: dict[int, Segment] = {}
        self._open: Segment | None = None
        self.live = 0  # rows
        self.rows = 0  # rows of all segments, written or not

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, oldest first."""
        return tuple(self._segments.values())

    @property
    def open(self) -> Segment | None:
        """The segment that is being filled."""
        return self._open

    @property
    def sealed(self) -> list[Segment]:
        """The segments that nothing more is written to."""
        return [segment for segment in self._segments.values() if segment is not self._open]

    def segment_rows(self, coming: int = 0) -> int:
        """Rows of the next segment when ``coming`` rows are to be added."""
        return min(max(self.live + coming, self._smallest), self._largest)

    def place(self, source: Mapping[str, NDArray[Any] | None], counts: Int) -> Placement:
        """Write spans of ``counts`` (n,) rows, in a row in ``source``; forgotten unless committed."""
        n, ends = len(counts), np.cumsum(counts)
        placement = Placement(np.empty(n, np.int64), np.empty(n, np.int64), open=self._open)
        size = self.segment_rows(int(ends[-1]) if n else 0)
        done = first = 0
        while done < n:
            segment = placement.open
            room = segment.room if segment is not None else 0
            fit = int(np.searchsorted(ends, first + room, side="right"))
            if segment is None or fit == done:
                span = int(counts[done])
                segment = Segment(next(self._serials), max(span, size))
                if span <= self._largest:
                    placement.open = segment
                fit = int(np.searchsorted(ends, first + segment.rows, side="right"))
            last = int(ends[fit - 1])
            placement.segments[done:fit] = segment.serial
            placement.starts[done:fit] = segment.used + (ends[done:fit] - counts[done:fit] - first)
            segment.write(self.kinds, source, first, last - first)
            placement.written[segment.serial] = segment
            done, first = fit, last
        return placement

    def commit(self, placement: Placement, counts: Int) -> None:
        """Take over what was placed."""
        for serial, segment in placement.written.items():
            if serial not in self._segments:
                self._segments[serial] = segment
                self.rows += segment.rows
        self._open = placement.open
        self._add_live(placement.segments, counts)

    def free(self, segments: Int, counts: Int) -> None:
        """Give spans back; a segment without a live row is released."""
        self._add_live(segments, -counts)
        for serial in np.unique(segments).tolist():
            segment = self._segments[serial]
            if not segment.live:
                self._release(segment)

    def read(
        self, kinds: Sequence[ColumnKind], segments: Int, starts: Int, counts: Int, out: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """The rows of these spans in a row, for every column of ``kinds``; copied into ``out`` where that has it."""
        total = int(counts.sum())
        spans = _runs(segments, starts, starts + counts)
        gather = total < _SHORT * len(spans[0])
        plan = _gather_plan(*spans) if gather else []
        used = [self._segments[serial] for serial in np.unique(segments).tolist()]
        result = {}
        for kind in kinds:
            target = result[kind.name] = out[kind.name] if out else np.empty((total, *kind.shape), kind.dtype)
            sources = {segment.serial: segment.column(kind) for segment in used}
            if gather:
                for serial, rows, places in plan:
                    target[places] = sources[serial][rows]
            else:
                _copy_spans(target, sources, *spans)
        return result

    def overdue(self) -> Segment | None:
        """The segment to empty next, if the pool holds more rows than it may."""
        size = self.segment_rows()
        if self.rows <= 2 * (self.live + size):
            return None
        if self._open is not None and self._open.rows > 2 * size:
            self._open = None  # made for a larger pool: it may be emptied like any other
        emptiest = min(self.sealed, key=lambda segment: segment.live / segment.rows)
        return emptiest if 2 * emptiest.live < emptiest.rows else None

    def move(self, segment: Segment, segments: Int, starts: Int, counts: Int) -> tuple[Int, Int]:
        """Move the live spans of ``segment`` to others and release it; returns their new places (n,) and (n,)."""
        kinds = [kind for kind in self.kinds if kind.name in segment.arrays]
        rows: dict[str, NDArray[Any] | None] = {kind.name: None for kind in self.kinds}
        rows.update(self.read(kinds, segments, starts, counts, {}))
        placement = self.place(rows, counts)
        self._add_live(segments, -counts)
        self._release(segment)
        self.commit(placement, counts)
        return placement.segments, placement.starts

    def clear(self) -> None:
        """Release every segment."""
        self._segments.clear()
        self._open = None
        self.live = self.rows = 0

    def _add_live(self, segments: Int, counts: Int) -> None:
        serials, where = np.unique(segments, return_inverse=True)
        for serial, change in zip(serials.tolist(), np.bincount(where, counts).tolist(), strict=True):
            self._segments[serial].live += int(change)
            self.live += int(change)

    def _release(self, segment: Segment) -> None:
        del self._segments[segment.serial]
        self.rows -= segment.rows
        if segment is self._open:
            self._open = None


def spill_oldest(segments: Sequence[Segment], excess: int, directory: Path) -> None:
    """Move segments to files in ``directory``, the oldest first, until ``excess`` bytes of memory are free.

    Raises :class:`CapacityError` when a file cannot be written; that segment and the later ones stay in memory.
    """
    for segment in sorted(segments, key=lambda segment: segment.serial):
        size = segment.ram_bytes
        if excess <= 0:
            return
        if size:
            try:
                segment.spill(directory)
            except OSError as error:
                raise CapacityError(
                    f"a segment of {size} bytes cannot move from memory to {directory}: {error}. Nothing is lost: it "
                    "stays in memory; make room there, or keep fewer trajectories or more of them in memory"
                ) from error
            excess -= size


def _runs(segments: Int, starts: Int, stops: Int) -> tuple[Int, Int, Int]:
    """The same spans, those that follow each other in memory as one: segments, starts and stops (m,) each."""
    if not len(segments):
        return segments, starts, stops
    breaks = np.flatnonzero((segments[1:] != segments[:-1]) | (starts[1:] != stops[:-1]))
    if len(breaks) == len(segments) - 1:
        return segments, starts, stops
    firsts = np.concatenate([[0], breaks + 1])
    return segments[firsts], starts[firsts], stops[np.concatenate([breaks, [len(segments) - 1]])]


def _copy_spans(out: NDArray[Any], sources: Mapping[int, NDArray[Any]], segments: Int, starts: Int, stops: Int) -> None:
    """Slice by slice. Memory views cost half of what views of arrays do, a quarter of a microsecond less each."""
    width = math.prod(out.shape[1:])
    target, views = _flat(out), {serial: _flat(array) for serial, array in sources.items()}
    spans = zip(segments.tolist(), (starts * width).tolist(), (stops * width).tolist(), strict=True)
    at = 0
    for serial, start, stop in spans:
        end = at + stop - start
        target[at:end] = views[serial][start:stop]
        at = end


def _gather_plan(segments: Int, starts: Int, stops: Int) -> list[tuple[int, Int, Int]]:
    """Serial of every segment, the rows to take from it and where they go, (k,) each."""
    counts = stops - starts
    order = np.argsort(segments, kind="stable")
    sorted_counts, places_of = counts[order], (np.cumsum(counts) - counts)[order]
    ends = np.cumsum(sorted_counts)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - sorted_counts, sorted_counts)
    rows = within + np.repeat(starts[order], sorted_counts)
    places = within + np.repeat(places_of, sorted_counts)
    serials, firsts = np.unique(segments[order], return_index=True)
    bounds = [*(ends - sorted_counts)[firsts].tolist(), len(rows)]
    cuts = [slice(first, last) for first, last in pairwise(bounds)]
    return [(serial, rows[cut], places[cut]) for serial, cut in zip(serials.tolist(), cuts, strict=True)]


def _flat(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).data
