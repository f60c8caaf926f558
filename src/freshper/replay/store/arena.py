"""The arena: where trajectories live, as columns in large segments and a few facts per record."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freshper.errors import CapacityError, ConfigError
from freshper.replay.checks import shown
from freshper.replay.store.columns import OPTIONAL, Columns, ColumnsBuffer
from freshper.replay.store.images import ImageStore
from freshper.replay.store.segments import ColumnKind, Pool, Segment, spill_oldest
from freshper.trajectory import SamplingParams

Int = NDArray[np.int64]

TOKEN_COLUMNS = (
    ColumnKind("tokens", np.int32),
    ColumnKind("response_mask", np.bool_),
    ColumnKind("behavior_logprobs", np.float32),
    ColumnKind("advantages", np.float32, optional=True),
    ColumnKind("td_errors", np.float32, optional=True),
)
TURN_COLUMNS = (ColumnKind("turns", np.int32, (4,)), ColumnKind("turn_rewards", np.float64))
TOKEN_BYTES = sum(kind.row_bytes for kind in TOKEN_COLUMNS if not kind.optional)
OPTIONAL_BYTES = TOKEN_COLUMNS[-1].row_bytes
TURN_BYTES = sum(kind.row_bytes for kind in TURN_COLUMNS)

# Facts of a record: those that come with the trajectory, and where its rows are (segment and first row).
_GIVEN = {
    "policy_versions": np.int64,
    "seeds": np.int64,
    "stop_reasons": np.uint8,
    "successes": np.bool_,
    "logprobs_known": np.bool_,
    "has_advantages": np.bool_,
    "has_td_errors": np.bool_,
}
_REFERENCES = ("tasks", "groups", "sampling", "images")
_FACTS: dict[str, Any] = {
    **_GIVEN,
    "lengths": np.int64,
    "turn_counts": np.int64,
    "costs": np.int64,
    "live": np.bool_,
    "token_segments": np.int64,
    "token_starts": np.int64,
    "turn_segments": np.int64,
    "turn_starts": np.int64,
    "free": np.int64,  # a stack of the numbers to use again; it has nothing to do with the record of that number
    **dict.fromkeys(_REFERENCES, np.object_),
}
FACT_BYTES = sum(np.dtype(dtype).itemsize for dtype in _FACTS.values())
REFERENCE_BYTES = 8
_SHARED_SAMPLING = 1024  # distinct settings remembered; beyond it only sharing is lost


class Arena:
    """Trajectories by record number: packed rows in segments, facts in arrays, images once each.

    A record number stays the record's own until :meth:`free`, and is then used again. Nothing is evicted here.
    Not thread-safe: the owner holds the lock, also while it uses what :meth:`read` put into an ``out``.

    Args:
        segment_bytes: of the largest segment, without optional columns. A small arena has smaller ones.
        ram_bytes: memory for segments; beyond it the oldest full ones are moved to mapped files, one open file
            each. Images and facts stay in memory and do not count.
        spill_directory: for those files, which have no name there; needed with ``ram_bytes`` and only then.

    Raises :class:`ConfigError` for settings out of range or a directory that cannot be made.
    """

    def __init__(
        self, *, segment_bytes: int = 32 << 20, ram_bytes: int | None = None, spill_directory: Path | None = None
    ) -> None:
        for name, value, least in (("segment_bytes", segment_bytes, 1), ("ram_bytes", ram_bytes, 0)):
            if name == "ram_bytes" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
                raise ConfigError(f"{name} {shown(value)} must be an int >= {least}")
        if (ram_bytes is None) != (spill_directory is None):
            raise ConfigError(
                f"ram_bytes {ram_bytes} and spill_directory {spill_directory} go together: the one says when "
                "segments leave memory, the other where to"
            )
        if spill_directory is not None:
            try:
                Path(spill_directory).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"spill_directory {spill_directory} cannot be used: {error}") from error
        self._ram_bytes = ram_bytes
        self._spill_directory = spill_directory
        serials = count(1)  # 0 is the segment of a number without a record
        self._tokens = Pool(TOKEN_COLUMNS, segment_bytes, serials)
        self._turns = Pool(TURN_COLUMNS, segment_bytes, serials)
        self._images = ImageStore()
        self._sampling: dict[SamplingParams, SamplingParams] = {}
        self._facts: dict[str, NDArray[Any]] = {name: np.zeros(0, dtype) for name, dtype in _FACTS.items()}
        self._records = self._numbers = self._charged = 0  # live records; numbers ever given out; their bytes

    def __len__(self) -> int:
        """Number of live records."""
        return self._records

    @property
    def live_bytes(self) -> int:
        """What the live records are charged, and their distinct images."""
        return self._charged + self._images.total_bytes

    @property
    def allocated_bytes(self) -> int:
        """Memory of all segments. Pages of an unfinished one that were never written take none yet."""
        return sum(segment.ram_bytes for pool in (self._tokens, self._turns) for segment in pool.segments)

    @property
    def spilled_bytes(self) -> int:
        """Bytes of segments in mapped files."""
        return sum(segment.disk_bytes for pool in (self._tokens, self._turns) for segment in pool.segments)

    @property
    def image_bytes(self) -> int:
        """Bytes of the distinct images."""
        return self._images.total_bytes

    @property
    def images(self) -> ImageStore:
        """The images of the live records."""
        return self._images

    def fact(self, name: str) -> NDArray[Any]:
        """A fact of all records by number, read-only: ``arena.fact("lengths")[records]``; until the next add.

        ``policy_versions``, ``seeds``, ``stop_reasons``, ``successes``, ``logprobs_known``, ``has_advantages``,
        ``has_td_errors``, ``lengths``, ``turn_counts``, ``costs`` (bytes), ``live``, and as Python objects
        ``tasks``, ``groups``, ``sampling``, ``images``. At a number that is not live the value means nothing.
        """
        view = self._facts[name][: self._numbers]
        view.flags.writeable = False
        return view

    def cost(self, columns: Columns) -> Int:
        """Bytes that each trajectory is charged, (n,): rows, facts and names, but not its images.

        It depends on the trajectory alone, so the charges of any history add up. Names count for every record,
        although records of the same name share it.
        """
        optional = columns.has_advantages.astype(np.int64) + columns.has_td_errors
        turns = np.diff(columns.turn_offsets)
        names = zip(columns.tasks, columns.groups, columns.images, strict=True)
        other = [_size(task) + _size(group) + REFERENCE_BYTES * len(images) for task, group, images in names]
        rows = columns.lengths * (TOKEN_BYTES + OPTIONAL_BYTES * optional) + turns * TURN_BYTES
        charged: Int = rows + FACT_BYTES + np.array(other, np.int64)
        return charged

    def new_image_bytes(self, columns: Columns) -> int:
        """Bytes by which :attr:`image_bytes` would grow with these trajectories."""
        return self._images.new_bytes(image for images in columns.images for image in images)

    def add(self, columns: Columns) -> Int:
        """Keep n trajectories; returns their record numbers (n,), freed ones first.

        All or nothing. Raises :class:`CapacityError` when segments have to leave memory and the disk is full.
        """
        n, costs = len(columns), self.cost(columns)
        lengths, turn_counts = columns.lengths, np.diff(columns.turn_offsets)
        tokens = self._tokens.place({kind.name: getattr(columns, kind.name) for kind in TOKEN_COLUMNS}, lengths)
        turns = self._turns.place({kind.name: getattr(columns, kind.name) for kind in TURN_COLUMNS}, turn_counts)
        self._make_room([*tokens.written.values(), *turns.written.values()], [tokens.open, turns.open])
        references: dict[str, NDArray[np.object_]] = {
            "tasks": _objects(sys.intern(str(task)) for task in columns.tasks),
            "groups": _objects(sys.intern(str(group)) for group in columns.groups),
            "sampling": _objects(self._shared(sampling) for sampling in columns.sampling),
        }
        records = self._take_numbers(n)
        # Nothing below can fail.
        self._tokens.commit(tokens, lengths)
        self._turns.commit(turns, turn_counts)
        facts: dict[str, Any] = {
            **{name: getattr(columns, name) for name in _GIVEN},
            "lengths": lengths,
            "turn_counts": turn_counts,
            "costs": costs,
            "live": True,
            "token_segments": tokens.segments,
            "token_starts": tokens.starts,
            "turn_segments": turns.segments,
            "turn_starts": turns.starts,
            "images": _objects(self._images.keep(images) for images in columns.images),
            **references,
        }
        for name, values in facts.items():
            self._facts[name][records] = values
        self._records += n
        self._charged += int(costs.sum())
        self._compact()
        return records

    def free(self, records: ArrayLike) -> None:
        """Forget ``records`` (n,): their rows, facts, and the images that nobody else uses.

        Raises IndexError for a number that is not live or occurs twice; then nothing has changed.
        """
        numbers = self._checked(records)
        if len(np.unique(numbers)) < len(numbers):
            raise IndexError(f"{len(numbers)} records to free hold duplicates: each can be freed once")
        facts = self._facts
        self._tokens.free(facts["token_segments"][numbers], facts["lengths"][numbers])
        self._turns.free(facts["turn_segments"][numbers], facts["turn_counts"][numbers])
        for images in facts["images"][numbers].tolist():
            self._images.drop(images)
        self._charged -= int(facts["costs"][numbers].sum())
        for name in _REFERENCES:
            facts[name][numbers] = None
        facts["live"][numbers] = False
        facts["token_segments"][numbers] = facts["turn_segments"][numbers] = 0
        spare = self._numbers - self._records
        facts["free"][spare : spare + len(numbers)] = numbers[::-1]
        self._records -= len(numbers)
        self._compact()

    def read(self, records: ArrayLike, out: ColumnsBuffer | None = None) -> Columns:
        """Copies of ``records`` (n,), in that order; a number may occur more than once.

        With ``out`` the per-token and per-turn arrays lie in its memory and hold until it is used again. Images
        are the kept objects themselves. Raises IndexError for a number that is not live.
        """
        numbers = self._checked(records)
        lengths, turn_counts = self._facts["lengths"][numbers], self._facts["turn_counts"][numbers]
        parts: dict[str, Any] = {"offsets": _offsets(lengths), "turn_offsets": _offsets(turn_counts)}
        for name in _GIVEN:
            parts[name] = self._facts[name][numbers]
        for name in _REFERENCES:
            parts[name] = tuple(self._facts[name][numbers].tolist())
        for name in OPTIONAL:
            parts[name] = None
        wanted = [kind for kind in TOKEN_COLUMNS if not kind.optional or parts[f"has_{kind.name}"].any()]
        tokens = self._facts["token_segments"][numbers], self._facts["token_starts"][numbers], lengths
        turns = self._facts["turn_segments"][numbers], self._facts["turn_starts"][numbers], turn_counts
        parts |= self._tokens.read(wanted, *tokens, _room(wanted, lengths, out))
        parts |= self._turns.read(TURN_COLUMNS, *turns, _room(TURN_COLUMNS, turn_counts, out))
        return Columns(**parts)

    def close(self) -> None:
        """Forget everything, and give the memory and the files back."""
        self.free(np.flatnonzero(self._facts["live"]))
        self._tokens.clear()
        self._turns.clear()

    def _checked(self, records: ArrayLike) -> Int:
        numbers = np.asarray(records)
        if numbers.size == 0:
            numbers = numbers.astype(np.int64)
        if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
            raise TypeError(f"records have shape {numbers.shape} and dtype {numbers.dtype}: they must be (n,) integers")
        numbers = numbers.astype(np.int64, copy=False)
        known = (numbers >= 0) & (numbers < self._numbers)
        known[known] = self._facts["live"][numbers[known]]
        if not known.all():
            raise IndexError(f"record {numbers[~known][0]} is not live: it was freed or never given out")
        return numbers

    def _take_numbers(self, n: int) -> Int:
        """Room for n records: freed numbers first, then new ones. Changes nothing that a later failure would show."""
        spare = self._numbers - self._records
        again = min(spare, n)
        numbers = self._numbers + n - again
        have = len(self._facts["live"])
        if numbers > have:
            grown = {name: np.zeros(max(numbers, 2 * have), array.dtype) for name, array in self._facts.items()}
            for name, array in self._facts.items():
                grown[name][:have] = array
            self._facts = grown
        records = np.concatenate([self._facts["free"][spare - again : spare][::-1], np.arange(self._numbers, numbers)])
        self._numbers = numbers
        return records

    def _make_room(self, written: Sequence[Segment], open_: Sequence[Segment | None]) -> None:
        """Spill until the segments, ``written`` ones too, are within ``ram_bytes``; never the ``open_`` ones."""
        if self._ram_bytes is None or self._spill_directory is None:
            return
        segments = {*self._tokens.segments, *self._turns.segments, *written}
        excess = sum(segment.ram_bytes for segment in segments) - self._ram_bytes
        spill_oldest([segment for segment in segments if segment not in open_], excess, self._spill_directory)

    def _shared(self, sampling: SamplingParams) -> SamplingParams:
        if len(self._sampling) >= _SHARED_SAMPLING:
            self._sampling.clear()
        return self._sampling.setdefault(sampling, sampling)

    def _compact(self) -> None:
        """Move the emptiest segments together while a pool holds too many rows.

        When the disk is full this stops, and the next :meth:`add` says so.
        """
        for pool, kind, counts in ((self._tokens, "token", "lengths"), (self._turns, "turn", "turn_counts")):
            segments, starts = self._facts[f"{kind}_segments"], self._facts[f"{kind}_starts"]
            while (segment := pool.overdue()) is not None:
                numbers = np.flatnonzero(segments == segment.serial)
                numbers = numbers[np.argsort(starts[numbers])]  # a mapped file is read once through
                places = pool.move(segment, segments[numbers], starts[numbers], self._facts[counts][numbers])
                segments[numbers], starts[numbers] = places
                try:
                    self._make_room([], [self._tokens.open, self._turns.open])
                except CapacityError:
                    return


def _room(kinds: Sequence[ColumnKind], counts: Int, out: ColumnsBuffer | None) -> dict[str, NDArray[Any]]:
    total = int(counts.sum())
    return {} if out is None else {kind.name: out.room(kind.name, total, kind.dtype, kind.shape) for kind in kinds}


def _offsets(counts: Int) -> Int:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _objects(values: Iterable[Any]) -> NDArray[np.object_]:
    return np.fromiter(values, np.object_)  # never looks into a tuple


def _size(name: str) -> int:
    return len(name.encode("utf-8", "surrogatepass"))
