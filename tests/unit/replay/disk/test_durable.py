"""The durable directory: what it keeps, what it refuses, and who may write."""

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshper.errors import BufferLockedError, ConfigError, SnapshotError
from freshper.replay.disk.durable import DurableLog
from freshper.replay.disk.manifest import MANIFEST
from freshper.replay.store.columns import pack

spec = importlib.util.spec_from_file_location("durable_world", Path(__file__).with_name("durable_world.py"))
assert spec is not None
assert spec.loader is not None
world = importlib.util.module_from_spec(spec)
spec.loader.exec_module(world)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def add(log: DurableLog, serials: list[int], **meta: Any) -> None:
    log.add(np.array(serials), pack([world.trajectory(serial) for serial in serials]), meta, {})


def test_everything_comes_back_in_order(tmp_path: Path) -> None:
    arrays = {"bases": np.array([0.1, np.nan]), "used": np.array([[True], [False]])}
    with DurableLog.create(tmp_path / "new" / "d", meta={"capacity": 9}) as log:
        log.add(np.array([3, 7]), pack([world.trajectory(3), world.trajectory(7)]), {"version": 4}, arrays)
        log.change("updated", {"why": None}, {"keys": np.array([7])})
        log.add(np.zeros(0, dtype=np.int64), pack([]), {"nothing": True}, {})
        add(log, [8])
    log, found = DurableLog.open(tmp_path / "new" / "d")
    log.close()
    assert (found.mark, found.meta, found.initial, found.arrays) == (None, {"capacity": 9}, {"capacity": 9}, {})
    assert (found.live.tolist(), found.serials.tolist(), len(found.columns), found.notes) == ([], [], 0, [])
    assert [entry.kind for entry in found.entries] == ["add", "updated", "add", "add"]
    first, second, third, _ = found.entries
    assert first.serials is not None
    assert first.columns is not None
    assert first.serials.tolist() == [3, 7]
    assert first.meta == {"version": 4}
    for name, array in arrays.items():
        np.testing.assert_array_equal(first.arrays[name], array, strict=True)
    for found_one, number in zip(first.columns.trajectories(), (3, 7), strict=True):
        world.assert_same(found_one, world.trajectory(number))
    assert (second.meta, second.serials, second.columns) == ({"why": None}, None, None)
    assert third.serials is not None
    assert len(third.serials) == 0


def test_a_checkpoint_gives_its_state_in_the_order_asked(tmp_path: Path) -> None:
    with DurableLog.create(tmp_path / "d", meta={}) as log:
        add(log, list(range(10)))
        add(log, list(range(10, 20)))
        live = [15, 2, 19, 3, 0]
        mark = log.checkpoint({"rng": 2**100}, {"x": np.arange(5)}, np.array(live))
        add(log, [20])
    found = DurableLog.read(tmp_path / "d")
    assert found.mark == mark
    assert found.meta == {"rng": 2**100}
    assert found.arrays["x"].tolist() == [0, 1, 2, 3, 4]
    assert found.live.tolist() == found.serials.tolist() == live
    for item, serial in zip(found.columns.trajectories(), live, strict=True):
        world.assert_same(item, world.trajectory(serial))
    assert len(found.entries) == 1


def test_marks_are_kept_go_back_exactly_and_are_never_used_again(tmp_path: Path) -> None:
    with DurableLog.create(tmp_path / "d", meta={}, keep=3) as log:
        marks = []
        for number in range(5):
            add(log, [number])
            marks.append(log.checkpoint({"n": number}, {}, np.arange(number + 1)))
            log.change("later", {"n": number}, {})
        assert log.marks == tuple(marks[-3:])
    with pytest.raises(SnapshotError, match=f"no mark '{marks[1]}'; known: {', '.join(marks[-3:])}"):
        DurableLog.open(tmp_path / "d", mark=marks[1])
    for number in (2, 3, 4):
        found = DurableLog.read(tmp_path / "d", mark=marks[number])
        assert (found.meta, found.entries, found.serials.tolist()) == ({"n": number}, [], list(range(number + 1)))
    log, found = DurableLog.open(tmp_path / "d", mark=marks[3])
    with log:
        assert (found.meta, found.entries, log.marks) == ({"n": 3}, [], (marks[2], marks[3]))
        add(log, [4], again=True)  # the serial number of one that was discarded
        new = log.checkpoint({"n": "other"}, {}, np.arange(5))
    assert new not in marks
    assert DurableLog.read(tmp_path / "d").meta == {"n": "other"}
    with pytest.raises(SnapshotError, match="no mark"):
        DurableLog.read(tmp_path / "d", mark=marks[4])


def test_going_back_twice_to_marks_between_which_nothing_was_appended(tmp_path: Path) -> None:
    with DurableLog.create(tmp_path / "d", meta={}) as log:
        add(log, [0, 1])
        first, second = (log.checkpoint({"n": n}, {}, np.array([0, 1])) for n in (1, 2))
    for mark, left in ((second, (first, second)), (first, (first,)), (first, (first,))):
        log, found = DurableLog.open(tmp_path / "d", mark=mark)
        log.close()
        assert log.marks == left
        assert found.serials.tolist() == [0, 1]


def test_going_back_never_writes_over_what_a_reader_may_be_reading(tmp_path: Path) -> None:
    """A byte of a log file has one content for ever; the file that was cut is not continued."""
    with DurableLog.create(tmp_path / "d", meta={}) as log:
        add(log, [0])
        mark = log.checkpoint({}, {}, np.array([0]))
        before = (tmp_path / "d" / "log-000001").read_bytes()
        add(log, [1])
        log._tail.close()  # as when the process is killed
        log._lock.release()
    with DurableLog.open(tmp_path / "d", mark=mark)[0] as log:
        add(log, [1])
    assert (tmp_path / "d" / "log-000001").read_bytes() == before
    assert (tmp_path / "d" / "log-000002").stat().st_size > 0


def test_files_of_another_buffer_are_noticed(tmp_path: Path) -> None:
    """Whole frames with the right numbers at the right places: only the serial numbers tell."""
    for name, serials in (("one", [3, 9, 12]), ("other", [4, 9, 12])):
        with DurableLog.create(tmp_path / name, meta={}) as log:
            log.add(np.array(serials), pack([world.trajectory(3)] * 3), {}, {})
            log.checkpoint({}, {}, np.array(serials))
    (tmp_path / "other" / "log-000001").replace(tmp_path / "one" / "log-000001")
    with pytest.raises(SnapshotError, match="log-000001, byte 0: the frame holds other trajectories"):
        DurableLog.read(tmp_path / "one")


@pytest.mark.parametrize(
    ("serials", "count", "complaint"),
    [
        ([5], 1, "must rise.*last one is 5"),
        ([7, 7], 2, "must rise"),
        ([8, 7], 2, "must rise"),
        ([6], 2, "1 serial numbers for 2 trajectories"),
        ([[6]], 1, "shape"),
        ([6.0], 1, "float64"),
    ],
)
def test_wrong_serial_numbers_are_refused_and_nothing_changes(
    tmp_path: Path, serials: Any, count: int, complaint: str
) -> None:
    with DurableLog.create(tmp_path / "d", meta={}) as log:
        add(log, [4, 5])
        with pytest.raises(SnapshotError, match=complaint):
            log.add(np.array(serials), pack([world.trajectory(n) for n in range(count)]), {}, {})
        add(log, [6])
    entries = DurableLog.read(tmp_path / "d").entries
    assert [entry.serials.tolist() for entry in entries if entry.serials is not None] == [[4, 5], [6]]


def test_what_cannot_be_written_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    one = pack([world.trajectory(1)])
    with DurableLog.create(tmp_path / "d", meta={}) as log:
        add(log, [0])
        for meta, arrays in (({"x": {1, 2}}, {}), ({}, {"x": np.array([None])})):
            with pytest.raises(TypeError):
                log.add(np.array([1]), one, meta, arrays)
            with pytest.raises(TypeError):
                log.checkpoint(meta, arrays, np.array([0]))
        with pytest.raises(SnapshotError, match="would be taken for trajectories"):
            log.change("add", {}, {})
        with pytest.raises(SnapshotError, match=r"1 of 2 live .* serial number 9"):
            log.checkpoint({}, {}, np.array([0, 9]))
        with pytest.raises(SnapshotError, match="twice"):
            log.checkpoint({}, {}, np.array([0, 0]))
        log.checkpoint({}, {}, np.zeros(0, dtype=np.int64))
        with pytest.raises(SnapshotError, match=r"serial number 0.* no longer had them"):
            log.checkpoint({}, {}, np.array([0]))
        assert len(log.marks) == 1
    assert DurableLog.read(tmp_path / "d").entries == []


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [({"keep": 0}, "keep 0"), ({"fsync": "never"}, "fsync 'never'"), ({"segment_bytes": 0}, "segment_bytes 0")],
)
def test_settings_that_make_no_sense(tmp_path: Path, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        DurableLog.create(tmp_path / "d", meta={}, **settings)
    assert not (tmp_path / "d").exists()


def test_a_directory_is_never_taken_over(tmp_path: Path) -> None:
    with DurableLog.create(tmp_path / "d", meta={}) as log:
        add(log, [0])
    with pytest.raises(SnapshotError, match="already holds a replay buffer"):
        DurableLog.create(tmp_path / "d", meta={})
    for path in (tmp_path / "d").glob("manifest*"):
        path.unlink()
    with pytest.raises(SnapshotError, match=r"already holds a replay buffer \(log-000001\)"):
        DurableLog.create(tmp_path / "d", meta={})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    DurableLog.create(tmp_path / "other", meta={}).close()
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"


def test_no_buffer_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DurableLog.open(tmp_path / "missing")
    for attempt in (DurableLog.open, DurableLog.read):
        with pytest.raises(SnapshotError, match="holds no replay buffer"):
            attempt(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / MANIFEST).write_text(json.dumps({"format": "other"}))
    with pytest.raises(SnapshotError, match="damaged"):
        DurableLog.open(tmp_path)


def test_a_second_writer_is_refused_in_this_process_and_in_another(tmp_path: Path) -> None:
    path = tmp_path / "d"
    script = f"from freshper.replay.disk.durable import DurableLog\nDurableLog.open({str(path)!r})"
    with DurableLog.create(path, meta={}) as log:
        add(log, [0])
        with pytest.raises(BufferLockedError, match=f"{path} is open for writing in process {os.getpid()}"):
            DurableLog.open(path)
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert other.returncode == 1
        assert f"{path} is open for writing in process {os.getpid()}" in other.stderr
        add(log, [1])
        assert len(DurableLog.read(path).entries) == 2
    log, _ = DurableLog.open(path)
    log.close()


def test_a_forked_child_neither_writes_nor_keeps_the_lock(tmp_path: Path) -> None:
    log = DurableLog.create(tmp_path / "d", meta={})
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    held = context.Event()

    def child() -> None:
        try:
            log.change("x", {}, {})
            theirs.send("written")
        except SnapshotError as error:
            theirs.send(str(error))
        held.wait(60)

    process = context.Process(target=child)
    process.start()
    assert "belongs to the parent" in ours.recv()
    log.change("y", {}, {})
    log.close()
    again, recovered = DurableLog.open(tmp_path / "d")  # while the child lives
    again.close()
    held.set()
    process.join(60)
    assert process.exitcode == 0
    assert [entry.kind for entry in recovered.entries] == ["y"]


def test_a_closed_log_refuses_and_may_be_closed_again(tmp_path: Path) -> None:
    log = DurableLog.create(tmp_path / "d", meta={})
    log.close()
    log.close()
    for call in (
        lambda: add(log, [0]),
        lambda: log.change("x", {}, {}),
        lambda: log.checkpoint({}, {}, np.zeros(0, dtype=np.int64)),
    ):
        with pytest.raises(SnapshotError, match="was closed"):
            call()


@pytest.mark.parametrize(("fsync", "synced"), [("always", True), ("checkpoint", False)])
def test_when_the_disk_is_waited_for(tmp_path: Path, fsync: Any, synced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: files.append(os.readlink(f"/proc/self/fd/{number}")))
    with DurableLog.create(tmp_path / "d", meta={}, fsync=fsync) as log:
        replaced = [".manifest.copy.json.tmp", "d", ".manifest.json.tmp", "d"]
        assert [Path(name).name for name in files] == ["d", *replaced]  # the name of the first log file comes first
        files.clear()
        add(log, [0])
        log.change("x", {}, {})
        assert files == [str(tmp_path / "d" / "log-000001")] * (2 if synced else 0)
        mark = log.checkpoint({}, {}, np.array([0]))
        names = [Path(name).name for name in files[2 if synced else 0 :]]
        # The log before the state, the state before the manifest; each new name with its directory.
        assert names == ["log-000001", f".state-{mark}.safetensors.tmp", "d", *replaced]
