"""Stopped or refused by the system at every single call: nothing acknowledged is lost, nothing half done is seen."""

import errno
import importlib.util
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshper.errors import SnapshotError
from freshper.replay.disk.durable import DurableLog
from freshper.replay.disk.frames import MAGIC, Kind
from freshper.replay.store.columns import pack

spec = importlib.util.spec_from_file_location("durable_world", Path(__file__).with_name("durable_world.py"))
assert spec is not None
assert spec.loader is not None
world = importlib.util.module_from_spec(spec)
spec.loader.exec_module(world)

CALLS = ("pwritev", "fsync", "ftruncate", "truncate", "replace", "unlink", "open")
SEED, STEPS = 5, 9  # among these steps are adds, changes, a checkpoint, new log files and a compaction
SMALL = 6_000  # bytes of a log file: a frame or two, so files are finished and compacted all the time


class Killed(BaseException):
    """What the process would not live to see."""


class Interceptor:
    """Stands between the log and the system: the call of number ``at`` fails, and with a kill all later ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: Callable[[], BaseException]) -> None:
        self.count, self.at, self.error = 0, at, error
        for name in CALLS:
            monkeypatch.setattr(os, name, self._watched(getattr(os, name), name))

    def _watched(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.at or (self.count > self.at and self.error is Killed):
                if name == "pwritev" and self.count == self.at:  # half of it is written, as on a full disk
                    descriptor, parts, position = arguments
                    content = b"".join(bytes(part) for part in parts)
                    call(descriptor, [content[: len(content) // 2]], position)
                raise self.error()
            return call(*arguments, **options)

        return watched


def full() -> BaseException:
    return OSError(errno.ENOSPC, "No space left on device")


def abandon(log: DurableLog) -> None:
    """What the end of its process does to a log."""
    log._tail.close()
    log._lock.release()


def copied(directory: Path) -> int:
    """Frames that a compaction has written."""
    return sum(path.read_bytes().count(MAGIC + bytes([Kind.COPY])) for path in directory.glob("log-*"))


def history(directory: Path, operations: int, segment_bytes: int = SMALL) -> Any:
    """A directory after some operations, and the model; closed."""
    model = world.World(SEED)
    with DurableLog.create(directory, meta={}, keep=2, segment_bytes=segment_bytes) as log:
        while model.done < operations:
            model.step(log)
    return model


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has to survive a power cut here, and a busy disk takes its time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def copies(original: Path) -> Any:
    """Fresh copies of a directory, numbered from 1."""
    number = 0
    while True:
        number += 1
        yield number, Path(shutil.copytree(original, original.with_name(f"copy-{number}")))


def test_killed_at_any_call_what_was_acknowledged_is_there_once(tmp_path: Path) -> None:
    before = history(tmp_path / "original", 40)
    for number, directory in copies(tmp_path / "original"):
        log, _ = DurableLog.open(directory)
        model = world.World(SEED).to(before.done)
        with pytest.MonkeyPatch.context() as patch:
            interceptor = Interceptor(patch, number, Killed)
            try:
                while model.done < before.done + STEPS:
                    model.step(log)
            except Killed:
                pass
        abandon(log)
        seen = world.World.recover(SEED, DurableLog.read(directory))
        assert seen.done in (model.done, model.done + 1)
        seen.assert_equals(world.World(SEED).to(seen.done))
        log, recovered = DurableLog.open(directory)
        with log:
            again = world.World.recover(SEED, recovered)
            again.assert_equals(seen)
            for _ in range(3):
                again.step(log)
        world.check(directory, SEED, again.done)
        if interceptor.count < number:
            break
        shutil.rmtree(directory)
    assert number > 60
    assert copied(directory) > copied(tmp_path / "original")


def test_killed_while_going_back_to_a_mark_either_history_is_whole(tmp_path: Path) -> None:
    original = tmp_path / "original"
    late = history(original, 60)
    with DurableLog.open(original)[0] as log:
        marks = log.marks
    early = world.World.recover(SEED, DurableLog.read(original, mark=marks[0]))
    assert early.done < late.done
    outcomes = set()
    for number, directory in copies(original):
        with pytest.MonkeyPatch.context() as patch:
            interceptor = Interceptor(patch, number, Killed)
            try:
                log, _ = DurableLog.open(directory, mark=marks[0])
            except Killed:
                pass
            else:
                abandon(log)
        seen = world.World.recover(SEED, DurableLog.read(directory))
        seen.assert_equals(world.World(SEED).to(seen.done))
        assert seen.done in (early.done, late.done)
        outcomes.add(seen.done)
        log, recovered = DurableLog.open(directory, mark=marks[0])
        with log:
            again = world.World.recover(SEED, recovered)
            again.assert_equals(early)
            assert log.marks == (marks[0],)
            while again.done < late.done:
                again.step(log)
        world.check(directory, SEED, late.done)
        if interceptor.count < number:
            break
        shutil.rmtree(directory)
    assert outcomes == {early.done, late.done}
    assert number > 10


def test_killed_while_repairing_half_a_frame(tmp_path: Path) -> None:
    """What stands behind the end of a log file is never appended to: it would come back in the middle of it."""
    model = history(tmp_path / "original", 40, segment_bytes=1 << 20)
    log, _ = DurableLog.open(tmp_path / "original")
    log.add(*big_frame(model))
    abandon(log)
    os.truncate(log._tail.path, log._tail.path.stat().st_size - 1)
    for number, directory in copies(tmp_path / "original"):
        with pytest.MonkeyPatch.context() as patch:
            interceptor = Interceptor(patch, number, Killed)
            try:
                log, _ = DurableLog.open(directory)
            except Killed:
                pass
            else:
                abandon(log)
        world.check(directory, SEED, 40)
        log, recovered = DurableLog.open(directory)
        with log:
            again = world.World.recover(SEED, recovered)
            again.step(log)
            world.check(directory, SEED, 41)
        if interceptor.count < number:
            break
        shutil.rmtree(directory)
    assert number > 10


def big_frame(model: Any) -> tuple[Any, ...]:
    """An add that is longer than any of the steps' frames."""
    serials = np.arange(model.next_serial, model.next_serial + 30)
    return serials, pack([world.trajectory(int(serial)) for serial in serials]), {}, {}


class Interrupt:
    """Ctrl-C before line ``at`` of those that the log runs."""

    def __init__(self, at: int) -> None:
        self.count, self.at = 0, at

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(("durable.py", "log_file.py")):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
        return self


def test_interrupted_at_any_line_an_add_is_there_or_not(tmp_path: Path) -> None:
    """Afterwards memory and disk agree: the log goes on, and a checkpoint knows what is there."""
    first, second = (pack([world.trajectory(serial) for serial in serials]) for serials in ((0, 1), (1,)))
    outcomes = []
    for line in range(1, 200):
        path, interrupt = tmp_path / str(line), Interrupt(line)
        with DurableLog.create(path, meta={}) as log:
            before = sys.gettrace()
            sys.settrace(interrupt)
            try:
                log.add(np.array([0, 1]), first, {}, {})
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            there = len(DurableLog.read(path).entries)
            live = np.array([0, 1, 2] if there else [1])
            log.add(live[-1:], second, {}, {})  # also under a serial number that was given back
            log.checkpoint({}, {}, live)
        assert DurableLog.read(path).serials.tolist() == live.tolist()
        outcomes.append(there)
        if interrupt.count < line:
            break
    assert len(outcomes) > 20
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {0, 1}


def test_a_full_disk_at_any_call_changes_nothing_and_the_call_can_be_repeated(tmp_path: Path) -> None:
    before = history(tmp_path / "original", 40)
    failures = reopened = 0
    for number, directory in copies(tmp_path / "original"):
        log, _ = DurableLog.open(directory)
        model = world.World(SEED).to(before.done)
        with pytest.MonkeyPatch.context() as patch:
            interceptor = Interceptor(patch, number, full)
            while model.done < before.done + STEPS:
                try:
                    model.step(log)
                except OSError:
                    failures += 1
                    seen = world.World.recover(SEED, DurableLog.read(directory))
                    # Only a checkpoint can have happened all the same: when its last step, making the new name of
                    # the manifest durable, fails. Anything else is cut back.
                    assert seen.done in (model.done, model.done + 1)
                except SnapshotError:  # "close the buffer and open it again"
                    reopened += 1
                    log.close()
                    log, recovered = DurableLog.open(directory)
                    model = world.World.recover(SEED, recovered)
        log.close()
        world.check(directory, SEED, model.done)
        if interceptor.count < number:
            break
        shutil.rmtree(directory)
    assert failures > 40
    assert 0 < reopened < failures / 5


def test_a_file_that_may_not_grow_keeps_its_last_whole_frame(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = world.World(SEED)
    with DurableLog.create(tmp_path / "d", meta={}) as log:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(OSError, match="File too large") as refused:
                model.to_the_end(log)
            size = (tmp_path / "d" / "log-000001").stat().st_size
            with pytest.raises(OSError, match="File too large"):
                model.step(log)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert refused.value.errno == errno.EFBIG
        assert size < 100_000
        assert world.check(tmp_path / "d", SEED, model.done).notes == []
        for _ in range(20):
            model.step(log)
    world.check(tmp_path / "d", SEED, model.done)


def test_a_log_that_cannot_be_cut_back_refuses_to_go_on(tmp_path: Path) -> None:
    model = history(tmp_path / "d", 10)
    log, _ = DurableLog.open(tmp_path / "d")

    def fail(*_: Any) -> None:
        raise full()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        patch.setattr(os, "ftruncate", fail)
        with pytest.raises(OSError, match="No space left"):
            log.change("x", {}, {})
    with pytest.raises(SnapshotError, match="could not be cut back"):
        log.change("y", {}, {})
    log.close()
    log, recovered = DurableLog.open(tmp_path / "d")
    log.close()
    assert [entry.kind for entry in recovered.entries if entry.kind in "xy"] in ([], ["x"])
    assert model.done == 10
