"""The arena: what goes in comes out, costs what it says, and gives its memory back."""

import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshper import SamplingParams, Trajectory, Turn
from freshper.errors import ConfigError
from freshper.replay.store.arena import FACT_BYTES, Arena
from freshper.replay.store.columns import Columns, ColumnsBuffer, pack
from freshper.replay.store.segments import Pool, Segment

Make = Callable[..., Trajectory]
SMALL = 2000  # bytes of a segment: 222 tokens, 83 turns


def sized(make: Make, length: int, number: int = 0, **parts: Any) -> Trajectory:
    """One of ``length`` tokens, all of them ``number``."""
    mask = np.arange(length) >= length // 2
    turns = (Turn(0, length // 2, length, float(number)),)
    logprobs = np.where(mask, -number / 1000, 0)
    whole = {"tokens": np.full(length, number), "response_mask": mask, "behavior_logprobs": logprobs, "turns": turns}
    return make(seed=number, policy_version=number, **(whole | parts))


def many(make: Make, lengths: list[int], first: int = 0) -> Columns:
    return pack([sized(make, length, first + number) for number, length in enumerate(lengths)])


def facts(item: Trajectory) -> list[Any]:
    """Every field, arrays as dtype and bytes: NaN equals NaN."""
    values = [getattr(item, field.name) for field in fields(Trajectory)]
    return [(value.dtype, value.tobytes()) if isinstance(value, np.ndarray) else value for value in values]


def contents(arena: Arena) -> dict[int, list[Any]]:
    records = np.flatnonzero(arena.fact("live"))
    return dict(zip(records.tolist(), map(facts, arena.read(records).trajectories()), strict=True))


def whole(arena: Arena) -> tuple[Any, ...]:
    return contents(arena), len(arena), arena.live_bytes, arena.image_bytes


def bound(arena: Arena, segment_bytes: int) -> int:
    """Of the bytes of all segments, in memory and on disk, while no trajectory has an optional column."""
    live = np.flatnonzero(arena.fact("live"))
    rows = 9 * arena.fact("lengths")[live].sum() + 24 * arena.fact("turn_counts")[live].sum()
    return int(2 * rows + 4 * segment_bytes)  # two pools, two segments of each


def test_an_empty_arena_holds_nothing() -> None:
    arena = Arena()
    assert len(arena) == arena.live_bytes == arena.allocated_bytes == arena.spilled_bytes == arena.image_bytes == 0
    assert len(arena.read([])) == len(arena.read([], ColumnsBuffer())) == 0
    assert arena.add(pack([])).shape == (0,)
    arena.free([])


def test_read_gives_what_was_added_in_the_order_asked(make_trajectory: Make) -> None:
    arena = Arena(segment_bytes=SMALL)
    batch = [sized(make_trajectory, length, length) for length in (3, 50, 1, 200, 90, 222, 223, 1000)]
    records = arena.add(pack(batch))
    assert len(set(records.tolist())) == len(arena) == len(batch)
    order = np.array([7, 0, 0, 3, 6, 5, 3, 1, 2, 4])
    back = arena.read(records[order]).trajectories()
    assert [facts(item) for item in back] == [facts(batch[at]) for at in order]


@pytest.mark.parametrize("segment_bytes", [1, 100, SMALL, 32 << 20])
def test_optional_columns_of_some(make_trajectory: Make, segment_bytes: int) -> None:
    mask = np.array([0, 1, 0, 1])
    kinds = [{}, {"advantages": 2.0 * mask}, {"td_errors": -mask}, {"advantages": mask, "td_errors": mask}]
    kinds += [{"logprobs_known": False, "behavior_logprobs": None}]
    batch = [make_trajectory(**parts) for parts in kinds]
    arena = Arena(segment_bytes=segment_bytes)
    records = np.concatenate([arena.add(pack([item])) for item in batch])
    assert [facts(item) for item in arena.read(records).trajectories()] == [facts(item) for item in batch]
    plain = arena.read(records[[0, 4]])
    assert plain.advantages is plain.td_errors is None
    mixed = arena.read(records[[0, 1, 4]])
    np.testing.assert_array_equal(mixed.advantages, [0, 0, 0, 0, 0, 2, 0, 2, 0, 0, 0, 0])


def test_a_column_does_not_show_values_of_an_earlier_tenant(make_trajectory: Make) -> None:
    arena = Arena(segment_bytes=SMALL)
    mask = np.array([0, 1, 0, 1])
    arena.free(arena.add(pack([make_trajectory(advantages=5 * mask)])))
    plain = make_trajectory()
    records = np.concatenate([arena.add(pack([plain])), arena.add(pack([make_trajectory(advantages=mask)]))])
    np.testing.assert_array_equal(arena.read(records).advantages, [0, 0, 0, 0, 0, 1, 0, 1])


def test_facts_by_record(make_trajectory: Make) -> None:
    arena = Arena()
    batch = [make_trajectory(1.0, 3, group="a"), sized(make_trajectory, 9, 5, success=False, group="b")]
    records = arena.add(pack(batch))
    wanted = {"lengths": [4, 9], "policy_versions": [3, 5], "successes": [True, False], "turn_counts": [2, 1]}
    wanted |= {"seeds": [0, 5], "groups": ["a", "b"], "tasks": ["test", "test"], "live": [True, True]}
    for name, values in wanted.items():
        assert arena.fact(name)[records].tolist() == values
    np.testing.assert_array_equal(arena.fact("costs")[records], arena.cost(pack(batch)))
    with pytest.raises(ValueError, match="read-only"):
        arena.fact("lengths")[0] = 1


def test_cost_is_rows_facts_and_names(make_trajectory: Make) -> None:
    mask = np.array([0, 1, 0, 1])
    batch = [
        make_trajectory(task="", group=""),
        make_trajectory(task="ab", group="c\u00e4"),
        make_trajectory(task="", group="", advantages=mask),
        make_trajectory(task="", group="", advantages=mask, td_errors=mask),
        make_trajectory(task="", group="\ud800", images=(b"x", b"y"), turns=(Turn(0, 1, 2, 0, 2), Turn(2, 3, 4, 0))),
    ]
    base = 4 * 9 + 2 * 24 + FACT_BYTES
    wanted = [base, base + 2 + 3, base + 16, base + 32, base + 3 + 16]
    np.testing.assert_array_equal(Arena().cost(pack(batch)), wanted)


def test_images_are_shared_counted_once_and_freed_with_their_last_user(make_trajectory: Make) -> None:
    arena = Arena()
    turns = (Turn(0, 1, 2, 0.0, 1), Turn(2, 3, 4, 0.0, 1))
    red, blue = b"red", b"blue!"
    shown = [(red, blue), (bytes(bytearray(red)), red), ()]
    batch = [make_trajectory(images=images, **({"turns": turns} if images else {})) for images in shown]
    columns = pack(batch)
    assert arena.new_image_bytes(columns) == 8
    records = arena.add(columns)
    assert arena.new_image_bytes(columns) == 0
    assert arena.image_bytes == 8
    assert arena.live_bytes == arena.cost(columns).sum() + 8
    first, second, third = arena.read(records).images
    assert (first, second, third) == ((red, blue), (red, red), ())
    assert first[0] is second[0] is second[1]
    arena.free(records[:1])
    assert (arena.image_bytes, len(arena.images)) == (3, 1)
    arena.free(records[1:])
    assert arena.live_bytes == arena.image_bytes == 0


def test_record_numbers_are_dense_and_used_again(make_trajectory: Make) -> None:
    arena = Arena()
    assert arena.add(many(make_trajectory, [2] * 5)).tolist() == [0, 1, 2, 3, 4]
    arena.free([3, 1])
    assert sorted(arena.add(many(make_trajectory, [2] * 3, first=10)).tolist()) == [1, 3, 5]
    assert len(arena) == 6
    assert sorted(arena.read(np.arange(6)).seeds.tolist()) == [0, 2, 4, 10, 11, 12]


def test_a_reused_buffer_holds_the_latest_read(make_trajectory: Make) -> None:
    arena, out = Arena(segment_bytes=SMALL), ColumnsBuffer()
    records = arena.add(many(make_trajectory, [5, 40, 7, 100, 60] * 4))
    first = arena.read(records, out)
    again = arena.read(records[::-1], out)
    assert np.shares_memory(first.tokens, again.tokens)
    for got, want in zip(again.trajectories(), arena.read(records[::-1]).trajectories(), strict=True):
        assert facts(got) == facts(want)
    fresh = arena.read(records)
    assert not np.shares_memory(fresh.tokens, again.tokens)


def test_what_was_read_outlives_the_record(make_trajectory: Make) -> None:
    arena = Arena(segment_bytes=SMALL)
    records = arena.add(many(make_trajectory, [30, 40]))
    columns = arena.read(records)
    before = [facts(item) for item in columns.trajectories()]
    arena.free(records)
    arena.add(many(make_trajectory, [50, 50], first=7))
    assert [facts(item) for item in columns.trajectories()] == before


@pytest.mark.parametrize("verb", ["read", "free"])
@pytest.mark.parametrize(
    ("records", "error"),
    [
        ([0, 1, 0, 2], IndexError),  # 1 was freed
        ([0, 99], IndexError),
        ([-1], IndexError),
        ([0.0], TypeError),
        ([True, False], TypeError),
        ([[0]], TypeError),
    ],
)
def test_wrong_records_are_refused(make_trajectory: Make, verb: str, records: Any, error: type[Exception]) -> None:
    arena = Arena()
    arena.add(many(make_trajectory, [4, 5, 6]))
    arena.free([1])
    before = whole(arena)
    with pytest.raises(error, match="record"):
        getattr(arena, verb)(records)
    assert whole(arena) == before


def test_no_record_is_freed_twice(make_trajectory: Make) -> None:
    arena = Arena()
    arena.add(many(make_trajectory, [4, 5]))
    before = whole(arena)
    with pytest.raises(IndexError, match="duplicates"):
        arena.free([1, 0, 1])
    assert whole(arena) == before


@pytest.mark.parametrize("survivors", [1, 2, 3, 50, 10**9])
@pytest.mark.parametrize("shuffled", [False, True])
def test_fragmentation_is_bounded(make_trajectory: Make, survivors: int, shuffled: bool) -> None:
    rng = np.random.default_rng(survivors)
    arena = Arena(segment_bytes=SMALL)
    for first in range(0, 1000, 50):
        arena.add(many(make_trajectory, rng.integers(1, 60, 50).tolist(), first))
        assert arena.allocated_bytes <= bound(arena, SMALL)
    before = contents(arena)
    doomed = np.flatnonzero(np.arange(1000) % survivors)
    for some in np.array_split(rng.permutation(doomed) if shuffled else doomed, 40):
        arena.free(some)
        assert arena.allocated_bytes <= bound(arena, SMALL)
    alive = {number: fact for number, fact in before.items() if number % survivors == 0}
    assert contents(arena) == alive


def test_fragmentation_is_bounded_after_every_call(make_trajectory: Make) -> None:
    rng = np.random.default_rng(0)
    arena = Arena(segment_bytes=SMALL)
    for number in range(1500):
        live = np.flatnonzero(arena.fact("live"))
        if len(live) > rng.integers(1, 60):
            arena.free(rng.permutation(live)[: rng.integers(1, len(live))])
        else:
            arena.add(many(make_trajectory, [int(rng.choice([1, 30, 115, 220]))], number))
        assert arena.allocated_bytes <= bound(arena, SMALL)


def test_freed_records_keep_nothing_alive(make_trajectory: Make) -> None:
    image, group = b"a picture of its own", "a group of its own".upper()
    before = sys.getrefcount(image), sys.getrefcount(group)
    arena = Arena()
    shows = (Turn(0, 1, 2, 0.0, 1), Turn(2, 3, 4, 0.0))
    arena.free(arena.add(pack([make_trajectory(images=(image,), turns=shows, group=group)])))
    assert (sys.getrefcount(image), sys.getrefcount(group)) == before


def test_equal_names_and_settings_are_one_object(make_trajectory: Make) -> None:
    arena = Arena()
    for _ in range(2):
        name = "".join(["gro", "up"])
        arena.add(pack([make_trajectory(task=name, group=name + "/1", sampling=SamplingParams(0.5))]))
    for kind in ("tasks", "groups", "sampling"):
        first, second = arena.fact(kind)
        assert first is second


def test_moving_costs_less_than_adding(make_trajectory: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []
    move = Pool.move

    def counted(self: Pool, segment: Segment, segments: Any, starts: Any, counts: Any) -> Any:
        moved.append(int(counts.sum()))
        return move(self, segment, segments, starts, counts)

    monkeypatch.setattr(Pool, "move", counted)
    rng = np.random.default_rng(0)
    arena, added = Arena(segment_bytes=SMALL), 0
    batch = many(make_trajectory, rng.integers(1, 60, 50).tolist())
    for _ in range(200):  # one in ten stays: it holds its segment open until it is moved
        records = arena.add(batch)
        added += len(batch.tokens) + len(batch.turns)
        arena.free(rng.permutation(records)[:45])
    assert 0 < sum(moved) <= added


def test_an_arena_that_shrinks_gives_its_memory_back(make_trajectory: Make) -> None:
    arena = Arena(segment_bytes=1 << 20)
    records = arena.add(many(make_trajectory, [2000] * 200))
    assert arena.allocated_bytes > 3 << 20
    arena.free(records[1:])
    assert arena.allocated_bytes < 1 << 19
    arena.free(records[:1])
    assert arena.allocated_bytes < 1 << 19
    assert arena.live_bytes == 0


def test_a_small_arena_has_small_segments(make_trajectory: Make) -> None:
    arena = Arena()
    arena.add(many(make_trajectory, [10]))
    assert arena.allocated_bytes <= 1 << 18


def test_closing_forgets_everything(make_trajectory: Make, tmp_path: Path) -> None:
    arena = Arena(segment_bytes=SMALL, ram_bytes=SMALL, spill_directory=tmp_path)
    arena.add(many(make_trajectory, [100] * 20))
    assert arena.spilled_bytes
    arena.close()
    assert len(arena) == arena.live_bytes == arena.allocated_bytes == arena.spilled_bytes == 0
    assert len(arena.read(arena.add(many(make_trajectory, [4])))) == 1


@pytest.mark.parametrize(
    "parts",
    [{"segment_bytes": 0}, {"ram_bytes": 1}, {"spill_directory": Path("x")}, {"ram_bytes": -1, "spill_directory": "x"}],
)
def test_settings_that_make_no_sense(parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Arena(**parts)


def test_a_spill_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        Arena(ram_bytes=1, spill_directory=tmp_path / "file")


@pytest.mark.parametrize("value", [-1, 1.5, True, "1", None, np.ones(2), {}])
@pytest.mark.parametrize("name", ["ram_bytes", "segment_bytes"])
def test_a_size_that_is_no_count_is_refused_alone(tmp_path: Path, name: str, value: Any) -> None:
    given = {"ram_bytes": 0, "spill_directory": tmp_path} | {name: value}
    message = "go together" if (name, value is None) == ("ram_bytes", True) else rf"^{name} .* must be an int >= \d$"
    with pytest.raises(ConfigError, match=message):
        Arena(**given)
