"""Segments in mapped files, a disk that is full, and what the process really takes in memory."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshper import Trajectory, Turn
from freshper.errors import CapacityError
from freshper.replay.store.arena import Arena
from freshper.replay.store.columns import Columns, ColumnsBuffer, pack
from freshper.replay.store.segments import ColumnKind, Pool, Segment

Make = Callable[..., Trajectory]
SMALL = 2000  # bytes of a segment: 222 tokens, 83 turns
LINUX = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")


def many(make: Make, lengths: list[int], first: int = 0) -> Columns:
    """Each of its own length and full of its own number; every third has advantages."""
    batch = []
    for number, length in enumerate(lengths, first):
        mask = np.arange(length) >= length // 2
        batch.append(
            make(
                seed=number,
                tokens=np.full(length, number),
                response_mask=mask,
                behavior_logprobs=np.where(mask, -number / 1000, 0),
                turns=(Turn(0, length // 2, length, float(number)),),
                advantages=None if number % 3 else np.where(mask, number, 0),
            )
        )
    return pack(batch)


def contents(arena: Arena, out: ColumnsBuffer | None = None) -> dict[int, list[Any]]:
    """Every field of every live record, arrays as bytes."""
    records = np.flatnonzero(arena.fact("live"))
    found = {}
    for record, item in zip(records.tolist(), arena.read(records, out).trajectories(), strict=True):
        values = [getattr(item, field.name) for field in fields(Trajectory)]
        found[record] = [value.tobytes() if isinstance(value, np.ndarray) else value for value in values]
    return found


def spilling(directory: Path, ram_bytes: int = 2 * SMALL) -> Arena:
    return Arena(segment_bytes=SMALL, ram_bytes=ram_bytes, spill_directory=directory)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond 100 bytes: the system itself refuses the write, halfway through."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_spilled_arena_reads_as_one_in_memory(make_trajectory: Make, tmp_path: Path) -> None:
    rng, out = np.random.default_rng(0), ColumnsBuffer()
    plain, spilled = Arena(segment_bytes=SMALL), spilling(tmp_path / "new" / "folder")
    for first in range(0, 400, 20):
        columns = many(make_trajectory, rng.integers(1, 300, 20).tolist(), first)
        np.testing.assert_array_equal(plain.add(columns), spilled.add(columns))
        doomed = rng.choice(np.flatnonzero(plain.fact("live")), 10, replace=False)
        plain.free(doomed)
        spilled.free(doomed)
        assert contents(spilled) == contents(plain) == contents(spilled, out)
        assert spilled.live_bytes == plain.live_bytes
    assert spilled.spilled_bytes > 10 * SMALL


@pytest.mark.parametrize("ram_bytes", [0, SMALL, 10 * SMALL])
def test_memory_is_bounded_by_the_limit_or_the_open_segments(
    make_trajectory: Make, tmp_path: Path, ram_bytes: int
) -> None:
    arena = spilling(tmp_path, ram_bytes)
    rng = np.random.default_rng(0)
    open_bytes = SMALL * 13 // 9 + SMALL + 60  # with one optional column; a segment may round up to a whole trajectory
    for first in range(0, 400, 8):
        arena.add(many(make_trajectory, rng.integers(1, 200, 8).tolist(), first))
        assert arena.allocated_bytes <= max(ram_bytes, open_bytes)
    arena.free(np.flatnonzero(np.arange(400) % 7))  # compaction brings rows back, and they leave again
    assert arena.allocated_bytes <= max(ram_bytes, open_bytes)
    assert arena.spilled_bytes > 0


def test_nothing_is_spilled_below_the_limit(make_trajectory: Make, tmp_path: Path) -> None:
    arena = spilling(tmp_path, 1 << 20)
    arena.add(many(make_trajectory, [100] * 100))
    assert arena.spilled_bytes == 0
    assert arena.allocated_bytes > 10 * SMALL


def test_the_oldest_segment_leaves_first(make_trajectory: Make, tmp_path: Path) -> None:
    arena = spilling(tmp_path, 10 * SMALL)
    while not arena.spilled_bytes:
        records = arena.add(many(make_trajectory, [200]))
    before = arena.spilled_bytes
    arena.free(records)  # the newest
    assert arena.spilled_bytes == before
    arena.free([0])
    assert arena.spilled_bytes == 0


def test_compaction_of_spilled_segments(make_trajectory: Make, tmp_path: Path) -> None:
    arena = spilling(tmp_path)
    for first in range(0, 1000, 100):
        arena.add(many(make_trajectory, [30] * 100, first))
    before = contents(arena)
    arena.free(np.flatnonzero(np.arange(1000) % 50))
    assert contents(arena) == {number: before[number] for number in range(0, 1000, 50)}
    rows = 20 * (30 * 13 + 24)
    assert arena.allocated_bytes + arena.spilled_bytes <= 2 * rows + 4 * SMALL * 13 // 9


@LINUX
def test_files_have_no_name_and_go_with_their_segment(make_trajectory: Make, tmp_path: Path) -> None:
    def mapped() -> int:
        return sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())

    one, two = spilling(tmp_path), spilling(tmp_path)  # they share the directory
    descriptors = len(os.listdir("/proc/self/fd"))
    for arena, first in ((one, 0), (two, 1000)):
        arena.add(many(make_trajectory, [100] * 50, first))
        assert list(tmp_path.iterdir()) == []
    assert mapped() > 20
    assert contents(one) != contents(two)
    one.free(np.arange(50))
    assert one.spilled_bytes == 0
    assert contents(two) == dict(enumerate(contents(two).values()))
    two.close()
    assert mapped() == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_full_disk_refuses_the_add_and_loses_nothing(make_trajectory: Make, tmp_path: Path) -> None:
    arena = spilling(tmp_path)
    arena.add(many(make_trajectory, [50] * 8))
    before, live, spilled = contents(arena), arena.live_bytes, arena.spilled_bytes
    columns = many(make_trajectory, [90] * 30, first=8)
    for _ in range(3):  # a refused add may be tried again
        with full_disk(), pytest.raises(CapacityError, match="Nothing is lost") as caught:
            arena.add(columns)
        assert str(tmp_path) in str(caught.value)
        assert (contents(arena), arena.live_bytes, arena.spilled_bytes) == (before, live, spilled)
        assert len(arena) == 8
    assert list(tmp_path.iterdir()) == []
    arena.add(columns)
    assert arena.spilled_bytes > spilled
    after = contents(arena)
    assert {record: after[record] for record in before} == before
    assert [after[record][0] for record in range(8, 38)] == [item.tokens.tobytes() for item in columns.trajectories()]


@pytest.mark.parametrize("working", [0, 1, 2, 3, 4, 5])
def test_a_disk_that_fills_up_halfway(
    make_trajectory: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, working: int
) -> None:
    arena = spilling(tmp_path)
    arena.add(many(make_trajectory, [50] * 8))
    before = contents(arena)
    calls, spill = count(), Segment.spill

    def failing(self: Segment, directory: Path) -> None:
        if next(calls) >= working:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        spill(self, directory)

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "spill", failing)
        with pytest.raises(CapacityError, match="No space left"):
            arena.add(many(make_trajectory, [90] * 30, first=8))
    assert contents(arena) == before
    arena.add(many(make_trajectory, [1], first=8))  # the segment that was open may have left already
    arena.add(many(make_trajectory, [90] * 30, first=9))
    assert {record: values for record, values in contents(arena).items() if record < 8} == before
    assert len(arena) == 39


def test_freeing_works_on_a_full_disk(make_trajectory: Make, tmp_path: Path) -> None:
    arena = spilling(tmp_path)
    for first in range(0, 1000, 100):
        arena.add(many(make_trajectory, [30] * 100, first))
    before = contents(arena)
    with full_disk():
        arena.free(np.flatnonzero(np.arange(1000) % 9))
        assert contents(arena) == {number: before[number] for number in range(0, 1000, 9)}
    arena.free([0])  # with room on the disk, what was put off is done
    arena.add(many(make_trajectory, [30], first=2000))
    assert arena.allocated_bytes <= 2 * SMALL * 13 // 9 + 60


def test_no_memory_for_the_second_pool_is_no_half_added_trajectory(
    make_trajectory: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(segment_bytes=SMALL)
    arena.add(many(make_trajectory, [5, 6]))
    before, live = contents(arena), arena.live_bytes
    place = Pool.place

    def failing(self: Pool, source: Any, counts: Any) -> Any:
        if "turns" in source:
            raise MemoryError
        return place(self, source, counts)

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "place", failing)
        with pytest.raises(MemoryError):
            arena.add(many(make_trajectory, [7, 300, 8], first=2))
    assert (contents(arena), arena.live_bytes, len(arena)) == (before, live, 2)
    assert arena.add(many(make_trajectory, [7, 300, 8], first=2)).tolist() == [2, 3, 4]
    assert [arena.fact("lengths")[record] for record in range(5)] == [5, 6, 7, 300, 8]


def test_no_memory_for_one_column_leaves_nothing_of_the_others(
    make_trajectory: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(segment_bytes=SMALL)
    mask = np.array([0, 1, 0, 1])
    plain, both = make_trajectory(), make_trajectory(advantages=mask, td_errors=mask)
    records = [arena.add(pack([plain]))]
    make = Segment._array

    def failing(self: Segment, kind: ColumnKind) -> Any:
        if kind.name == "td_errors":
            raise MemoryError
        return make(self, kind)

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "_array", failing)
        with pytest.raises(MemoryError):
            arena.add(pack([both]))
    assert len(arena) == 1
    records += [arena.add(pack([plain])), arena.add(pack([both]))]
    np.testing.assert_array_equal(arena.read(np.concatenate(records)).advantages, [0] * 8 + [0, 1, 0, 1])


@pytest.mark.parametrize("width", [(), (4,)])
@pytest.mark.parametrize("longest", [1, 5, 15, 17, 60])
def test_short_and_long_spans_are_read_alike(width: tuple[int, ...], longest: int) -> None:
    rng = np.random.default_rng(longest)
    pool = Pool([ColumnKind("x", np.int32, width)], 500, count())
    counts = rng.integers(1, longest + 1, 300)
    ends = np.cumsum(counts)
    rows = rng.integers(0, 2**31, (int(ends[-1]), *width)).astype(np.int32)
    placement = pool.place({"x": rows}, counts)
    pool.commit(placement, counts)
    for picked in (np.arange(300), np.arange(300)[::-1], rng.integers(0, 300, 500), np.arange(0), np.arange(7, 8)):
        want = [rows[ends[at] - counts[at] : ends[at]] for at in picked]
        places = placement.segments[picked], placement.starts[picked], counts[picked]
        got = pool.read(pool.kinds, *places, {})["x"]
        np.testing.assert_array_equal(got, np.concatenate([rows[:0], *want]))


PRELUDE = """
import os
from dataclasses import replace
import numpy as np
from freshper import Trajectory, Turn
from freshper.replay.store.arena import Arena
from freshper.replay.store.columns import pack
def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def one(length, turns, columns={}):
    mask = np.arange(length) % (length // turns) > 0
    spans = [(at * length // turns, (at + 1) * length // turns) for at in range(turns)]
    return Trajectory(tokens=np.arange(length), response_mask=mask, behavior_logprobs=np.where(mask, -1, 0),
        turns=tuple(Turn(start, start + 1, end, 0.5) for start, end in spans), stop_reason="terminated", success=True,
        policy_version=0, task="t", group="g", seed=0, **{name: np.where(mask, 1, 0) for name in columns})
"""


def printed(program: str) -> list[float]:
    command = [sys.executable, "-c", PRELUDE + program]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return [float(word) for word in result.stdout.split()]


@LINUX
@pytest.mark.parametrize("columns", [(), ("advantages",), ("advantages", "td_errors")])
def test_memory_per_trajectory(columns: tuple[str, ...]) -> None:
    """20,000 of 1,000 tokens and 10 turns: 10 KiB each, and 4 KiB (of 1,024 tokens) for every optional column."""
    kib, charged = printed(f"""
arena, batch = Arena(), pack([one(1000, 10, {columns!r})] * 100)
arena.free(arena.add(batch))
before = rss()
for number in range(200):
    arena.add(replace(batch, groups=tuple(f"group {{number}} {{item}}" for item in range(100))))
print((rss() - before) / 20_000 / 1024, arena.live_bytes / 20_000 / 1024)
""")
    assert 9 < kib <= 10 + 4 * len(columns)
    assert charged == pytest.approx(kib, rel=0.05)


@LINUX
def test_memory_is_flat_under_churn() -> None:
    """Case R32 at the level of the arena: 300,000 trajectories of 10 tokens through 1,000 places."""
    early, late = printed("""
arena, batch, held, sizes = Arena(), pack([one(10, 2)] * 100), [], []
for number in range(3000):
    held.append(arena.add(replace(batch, groups=tuple(f"group {number} {item}" for item in range(100)))))
    if len(held) > 10:
        arena.free(held.pop(0))
    if number in (1000, 2999):
        sizes.append(rss())
print(*sizes)
""")
    assert late - early < 1 << 20
