"""The arena against a plain dict of trajectories, over random histories of add, free and read."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from freshper import SamplingParams, StopReason, Trajectory, Turn
from freshper.errors import CapacityError
from freshper.replay.store.arena import FACT_BYTES, Arena
from freshper.replay.store.columns import ColumnsBuffer, pack
from freshper.replay.store.segments import Segment

PICTURES = (b"red", b"blue!", b"a longer picture than the others", b"re")
OPTIONAL_FACTOR = 17 / 9  # what two optional columns add to a row of 9 bytes


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Any valid trajectory, from one token to several segments of them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.sampled_from([1, 2, 3, 10, 40, 70]), min_size=1, max_size=4))
    turns, mask, start, shown = [], [], 0, []
    for length in lengths:
        observation = int(rng.integers(0, length))
        images = draw(st.lists(st.sampled_from(PICTURES), max_size=2))
        turns.append(Turn(start, start + observation, start + length, float(rng.normal()), len(images)))
        mask += [False] * observation + [True] * (length - observation)
        start += length
        shown += [bytes(bytearray(image)) for image in images]  # equal, and never the same object
    known = draw(st.booleans())
    columns = {
        name: np.where(mask, rng.normal(size=start), 0) if draw(st.booleans()) else None
        for name in ("advantages", "td_errors")
    }
    return Trajectory(
        tokens=rng.integers(0, 2**31, start),
        response_mask=np.array(mask),
        behavior_logprobs=np.where(mask, -rng.exponential(size=start), 0) if known else None,  # type: ignore[arg-type]
        turns=tuple(turns),
        stop_reason=draw(st.sampled_from(StopReason)),
        success=draw(st.booleans()),
        policy_version=draw(st.integers(0, 2**63 - 1)),
        task=draw(st.sampled_from(["", "sokoban"])),
        group=draw(st.text(max_size=3)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        sampling=SamplingParams(draw(st.sampled_from([0.0, 1.0])), 0.9, draw(st.integers(0, 2))),
        images=tuple(shown),
        logprobs_known=known,
        **columns,
    )


def facts(item: Trajectory) -> list[Any]:
    """Every field; arrays as dtype and bytes, so that NaN equals NaN."""
    values = [getattr(item, field.name) for field in fields(Trajectory)]
    return [(value.dtype, value.tobytes()) if isinstance(value, np.ndarray) else value for value in values]


def charged(item: Trajectory) -> int:
    """The cost of one, counted from what the documentation says of it."""
    optional = (item.advantages is not None) + (item.td_errors is not None)
    names = len((item.task + item.group).encode())
    return len(item) * (9 + 4 * optional) + 24 * len(item.turns) + FACT_BYTES + names + 8 * len(item.images)


@contextmanager
def full_disk_after(working: int) -> Iterator[None]:
    """The first ``working`` segments still find room."""
    calls, spill = count(), Segment.spill

    def failing(self: Segment, directory: Path) -> None:
        if next(calls) >= working:
            raise OSError(28, "No space left on device")
        spill(self, directory)

    with mock.patch.object(Segment, "spill", failing):
        yield


class ArenaHistory(RuleBasedStateMachine):
    """Segments so small that a few trajectories fill, empty, move and spill them."""

    @initialize(
        segment_bytes=st.sampled_from([1, 50, 400, 1500, 1 << 20]), ram_bytes=st.sampled_from([None, 0, 1000, 5000])
    )
    def make(self, segment_bytes: int, ram_bytes: int | None) -> None:
        self.folder = tempfile.TemporaryDirectory()
        directory = None if ram_bytes is None else Path(self.folder.name)
        self.arena = Arena(segment_bytes=segment_bytes, ram_bytes=ram_bytes, spill_directory=directory)
        self.segment_bytes, self.ram_bytes = segment_bytes, ram_bytes
        self.model: dict[int, Trajectory] = {}
        self.out = ColumnsBuffer()
        self.longest = 0

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(batch=st.lists(trajectories(), max_size=6), working=st.sampled_from([None, None, 0, 1, 3]))
    def add(self, batch: list[Trajectory], working: int | None) -> None:
        columns = pack(batch)
        np.testing.assert_array_equal(self.arena.cost(columns), [charged(item) for item in batch])
        grows, before = self.arena.new_image_bytes(columns), self.arena.image_bytes
        with nullcontext() if working is None else full_disk_after(working):
            try:
                records = self.arena.add(columns)
            except CapacityError:
                assert working is not None
                return  # the invariants see to it that nothing has changed
        assert records.dtype == np.int64
        assert not set(records.tolist()) & set(self.model)
        assert self.arena.image_bytes == before + grows
        self.model |= dict(zip(records.tolist(), batch, strict=True))
        self.longest = max([self.longest, *map(len, batch)])
        self.full = working is not None

    @precondition(lambda self: self.model)
    @rule(data=st.data(), share=st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    def free(self, data: st.DataObject, share: float) -> None:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        doomed = rng.permutation(list(self.model))[: max(1, int(share * len(self.model)))]
        self.arena.free(doomed)
        for record in doomed.tolist():
            del self.model[record]
        self.full = False

    @precondition(lambda self: self.model)
    @rule(data=st.data(), reuse=st.booleans())
    def read(self, data: st.DataObject, reuse: bool) -> None:
        picked = data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=12))
        columns = self.arena.read(picked, self.out if reuse else None)
        expected = pack([self.model[record] for record in picked])
        for name in ("offsets", "turn_offsets", "advantages", "td_errors", "tokens"):
            np.testing.assert_array_equal(getattr(columns, name), getattr(expected, name))
        for got, record in zip(columns.trajectories(), picked, strict=True):
            assert facts(got) == facts(self.model[record])

    @invariant()
    def it_holds_exactly_the_model(self) -> None:
        if not hasattr(self, "arena"):
            return
        assert len(self.arena) == len(self.model)
        live = np.flatnonzero(self.arena.fact("live"))
        assert live.tolist() == sorted(self.model)
        np.testing.assert_array_equal(self.arena.fact("lengths")[live], [len(self.model[n]) for n in live.tolist()])
        pictures = {image for item in self.model.values() for image in item.images}
        assert self.arena.image_bytes == sum(map(len, pictures))
        assert self.arena.live_bytes == sum(map(charged, self.model.values())) + self.arena.image_bytes

    @invariant()
    def its_segments_are_bounded(self) -> None:
        if not hasattr(self, "arena"):
            return
        rows = sum(9 * len(item) + 24 * len(item.turns) for item in self.model.values())
        # Two pools; a new segment has at most segment_bytes or one row, and never much more than what lives.
        one = min(self.segment_bytes, max(rows, 1 << 16)) + 24
        held = self.arena.allocated_bytes + self.arena.spilled_bytes
        assert held <= OPTIONAL_FACTOR * (2 * rows + 4 * one)
        if self.ram_bytes is not None and not getattr(self, "full", True):
            longest = OPTIONAL_FACTOR * 9 * max(map(len, self.model.values()), default=0)
            assert self.arena.allocated_bytes <= max(self.ram_bytes, OPTIONAL_FACTOR * 2 * one + longest)


ArenaHistory.TestCase.settings = settings(deadline=None, derandomize=True, max_examples=100, stateful_step_count=25)
TestArenaHistory = ArenaHistory.TestCase


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(trajectories(), max_size=5))
def test_columns_of_any_trajectories_come_back(batch: list[Trajectory]) -> None:
    assert [facts(item) for item in pack(batch).trajectories()] == [facts(item) for item in batch]
