"""The directory stays bounded, a checkpoint costs what is new, and readers are not disturbed."""

import importlib.util
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshper.errors import SnapshotError
from freshper.replay.disk import durable
from freshper.replay.disk.durable import DurableLog
from freshper.replay.store.columns import Columns, pack

spec = importlib.util.spec_from_file_location("durable_world", Path(__file__).with_name("durable_world.py"))
assert spec is not None
assert spec.loader is not None
world = importlib.util.module_from_spec(spec)
spec.loader.exec_module(world)

SEGMENT = 40_000


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def batch(start: int, count: int, scale: int = 60) -> tuple[np.ndarray[Any, Any], Columns]:
    serials = np.arange(start, start + count)
    return serials, pack([world.trajectory(int(serial), scale) for serial in serials])


def used(directory: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in directory.glob(pattern))


def oldest_out(live: list[int], rng: np.random.Generator) -> list[int]:
    return live[-100:]


def any_out(live: list[int], rng: np.random.Generator) -> list[int]:
    return sorted(rng.choice(live, min(100, len(live)), replace=False).tolist())


def all_but_some(live: list[int], rng: np.random.Generator) -> list[int]:
    """The worst for files: a few of every one stay for ever."""
    return [serial for serial in live if serial % 25 == 0][-80:] + live[-20:]


@pytest.mark.parametrize("evict", [oldest_out, any_out, all_but_some])
@pytest.mark.parametrize("keep", [1, 3])
def test_the_directory_stays_within_its_bound_under_churn(
    tmp_path: Path, evict: Callable[..., list[int]], keep: int
) -> None:
    rng, directory = np.random.default_rng(0), tmp_path / "d"
    live: list[int] = []
    written = worst = 0
    with DurableLog.create(directory, meta={}, keep=keep, segment_bytes=SEGMENT) as log:
        for number in range(120):
            serials, columns = batch(number * 20, 20)
            before = used(directory, "log-*")
            log.add(serials, columns, {}, {})
            frame = used(directory, "log-*") - before
            written += frame
            live = sorted({*evict([*live, *serials.tolist()], rng)})
            if number % 4 == 3:
                log.checkpoint({}, {}, np.array(live))
                state = used(directory, "state-*")
                # Every frame has 20 of much the same size; the manifests are counted too.
                largest = frame / 20 * 100 * 1.5
                assert used(directory) <= keep * (4 * largest + 2 * SEGMENT) + state + frame + 20_000
                worst = max(worst, used(directory))
        found = DurableLog.read(directory)
    assert found.serials.tolist() == live
    for item, serial in zip(found.columns.trajectories(), live, strict=True):
        world.assert_same(item, world.trajectory(serial, 60))
    assert written > 2 * worst  # or the bound would say nothing


def test_compaction_moves_nothing_twice_and_marks_survive_it(tmp_path: Path) -> None:
    """A trajectory in every file stays; after many rounds each mark still gives exactly its own."""
    directory, keepers = tmp_path / "d", []
    with DurableLog.create(directory, meta={}, keep=4, segment_bytes=SEGMENT) as log:
        states = {}
        for number in range(40):
            serials, columns = batch(number * 10, 10)
            log.add(serials, columns, {}, {})
            keepers.append(int(serials[3]))
            mark = log.checkpoint({"n": number}, {}, np.array(keepers))
            states[mark] = list(keepers)
        marks = log.marks
    assert not (directory / "log-000001").exists()
    for mark in marks:
        found = DurableLog.read(directory, mark=mark)
        assert found.serials.tolist() == states[mark]
        for item, serial in zip(found.columns.trajectories(), states[mark], strict=True):
            world.assert_same(item, world.trajectory(serial, 60))
    log, recovered = DurableLog.open(directory)
    with log:
        serials, columns = batch(10_000, 2)
        log.add(serials, columns, {}, {})
    assert recovered.entries == []
    assert [entry.kind for entry in DurableLog.read(directory).entries] == ["add"]


def test_a_checkpoint_costs_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2,000 live trajectories, the second checkpoint writes 32 bytes for each, and the fixed parts."""
    written = []
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: written.append(real(fd, parts, at)) or written[-1])
    with DurableLog.create(tmp_path / "d", meta={}, segment_bytes=200_000) as log:
        for number in range(20):
            serials, columns = batch(number * 100, 100)
            log.add(serials, columns, {}, {})
        log.checkpoint({}, {}, np.arange(2_000))
        total = sum(written)
        for new in (0, 1):
            written.clear()
            serials, columns = batch(2_000, new)
            log.add(serials, columns, {}, {})
            added = sum(written)
            log.checkpoint({}, {}, np.arange(2_000 + new))
            assert sum(written) - added < 2_001 * 32 + 12_000
    assert total > 1_000_000


def test_images_are_written_once_per_call_and_kept_as_one_object(tmp_path: Path) -> None:
    serials = np.arange(0, 900, 9)  # all of them show the same picture
    with DurableLog.create(tmp_path / "d", meta={}) as log:
        log.add(serials, pack([world.trajectory(int(serial), 3) for serial in serials]), {}, {})
        log.checkpoint({}, {}, serials)
    content = (tmp_path / "d" / "log-000001").read_bytes()
    assert content.count(world.PICTURES[0]) == 1
    shown = {id(image) for images in DurableLog.read(tmp_path / "d").columns.images for image in images}
    assert len(shown) == 1


def _write(directory: Path, seed: int, ready: Event, stop: Event) -> None:
    os.fsync = lambda _: None  # type: ignore[assignment]
    model = world.World(seed)
    with DurableLog.create(directory, meta={}, keep=1, segment_bytes=5_000) as log:
        ready.set()
        while not stop.is_set():
            model.step(log)


@pytest.mark.parametrize("times", [1, 5])
def test_a_reader_whose_files_vanish_looks_again(tmp_path: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer makes a checkpoint, which deletes files, whenever the reader has just read the manifest."""
    real, numbers = durable.read_manifest, iter(range(times))
    with DurableLog.create(tmp_path / "d", meta={}, keep=1, segment_bytes=1) as log:
        serials, columns = batch(0, 1)
        log.add(serials, columns, {}, {})
        log.checkpoint({"n": -1}, {}, serials)

        def disturbed(directory: Path, *, repair: bool = False) -> Any:
            found = real(directory, repair=repair)
            if (number := next(numbers, None)) is not None:
                log.add(*batch(number + 1, 1), {}, {})
                log.checkpoint({"n": number}, {}, np.array([number + 1]))
            return found

        monkeypatch.setattr(durable, "read_manifest", disturbed)
        assert DurableLog.read(tmp_path / "d").meta == {"n": times - 1}
        numbers = iter(range(times, times + 1000))
        with pytest.raises(SnapshotError, match="changed 20 times while it was read"):
            DurableLog.read(tmp_path / "d")


def test_a_reader_beside_a_writer_sees_whole_states(tmp_path: Path) -> None:
    """The writer appends, checkpoints, compacts and deletes as fast as it can."""
    context = multiprocessing.get_context("fork")
    ready, stop = context.Event(), context.Event()
    writer = context.Process(target=_write, args=(tmp_path / "d", 5, ready, stop))
    writer.start()
    try:
        assert ready.wait(60)
        model, seen = world.World(5), []
        while len(seen) < 60 or len(set(seen)) <= 20:
            assert writer.is_alive()
            found = world.World.recover(5, DurableLog.read(tmp_path / "d"))
            assert found.done >= model.done
            found.assert_equals(model.to(found.done))
            seen.append(found.done)
    finally:
        stop.set()
        writer.join(60)
    assert writer.exitcode == 0
