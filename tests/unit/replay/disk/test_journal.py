"""Snapshots: atomic when written, checked when read, the same when loaded."""

import errno
import json
import os
import pickle
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshper import Exponential, ReplayBuffer, SamplingParams, StopReason, Trajectory, Turn
from freshper.errors import ConfigError, SnapshotError
from freshper.replay.disk import journal
from freshper.replay.disk.journal import Snapshot
from freshper.replay.store.columns import pack

Make = Callable[..., Trajectory]
Filled = Callable[..., ReplayBuffer]
Everything = Callable[[ReplayBuffer], bytes]
WHOLE = ("tokens", "response_mask", "behavior_logprobs", "advantages", "td_errors")
PLAIN = ("turns", "stop_reason", "success", "policy_version", "task", "group", "seed", "sampling", "images")


def fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def varied(make: Make) -> list[Trajectory]:
    """Trajectories that differ in everything that a record can hold."""
    longer = {
        "tokens": np.array([2**31 - 1, 0, 7, 9, 11]),
        "response_mask": [0, 0, 1, 1, 1],
        "behavior_logprobs": np.array([0, 0, -1 / 3, -1e-30, -88.0], dtype=np.float32),
        "turns": (Turn(0, 2, 5, 0.1 + 0.2),),
        "group": 'ünïcode "quoted"\n',
    }
    return [
        make(0.1),
        make(-2.5, 3, advantages=[0, 0.25, 0, -1], stop_reason=StopReason.TURN_LIMIT, seed=2**62),
        make(1.0, 1, td_errors=[0, 1, 0, 2], sampling=SamplingParams(0.99, 0.9, 100), task=""),
        make(images=(b"one", b"two", b"one"), turns=(Turn(0, 1, 2, 0.0, 1), Turn(2, 3, 4, 1.0, 2))),
        make(**longer, advantages=[0, 0, 1, 2, 3], td_errors=[0, 0, 3, 2, 1], success=False),
    ]


@pytest.fixture
def saved(make_trajectory: Make, tmp_path: Path) -> Path:
    buffer = ReplayBuffer(3, freshness=Exponential(5.0))
    for item in varied(make_trajectory):
        buffer.add([item], policy_version=9)
    buffer.sample(5, policy_version=10, beta=0.4, toward="freshness")
    buffer.save(tmp_path / "buffer")
    return tmp_path / "buffer"


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Save the members again, with a header that ``change`` has changed and with good checksums."""
    with np.load(path) as file:
        members = dict(file)
    header = json.loads(members["header"].tobytes())
    change(header)
    members["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    with path.open("wb") as file:
        np.savez(file, **members)


def test_every_part_of_a_trajectory_comes_back(make_trajectory: Make, tmp_path: Path) -> None:
    items = varied(make_trajectory)
    arrays, serials = {"x": np.array([0.1, np.pi])}, np.array([3, 4, 8, 9, 30])
    journal.write_snapshot(tmp_path / "s", Snapshot({"a": [1, None]}, arrays, serials, pack(items)))
    snapshot = journal.read_snapshot(tmp_path / "s")
    assert snapshot.facts == {"a": [1, None]}
    assert list(snapshot.arrays) == ["x"]
    np.testing.assert_array_equal(snapshot.arrays["x"], [0.1, np.pi])
    np.testing.assert_array_equal(snapshot.serials, serials)
    loaded = snapshot.columns.trajectories()
    assert len(loaded) == len(items)
    for item, again in zip(items, loaded, strict=True):
        for name in WHOLE:
            mine, theirs = getattr(item, name), getattr(again, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.dtype == theirs.dtype
                np.testing.assert_array_equal(mine, theirs)
        assert [getattr(item, name) for name in PLAIN] == [getattr(again, name) for name in PLAIN]


def test_numpy_scalars_in_a_record_do_not_prevent_saving(make_trajectory: Make, tmp_path: Path) -> None:
    item = make_trajectory(
        turns=(Turn(np.int64(0), np.int32(1), np.int64(4), np.float32(0.5)),),
        response_mask=[0, 1, 1, 1],
        behavior_logprobs=[0, -1, -1, -1],
        success=np.True_,
        policy_version=np.int64(3),
        seed=np.uint32(7),
        sampling=SamplingParams(np.float32(0.5), np.float64(1.0), np.int64(5)),
    )
    journal.write_snapshot(tmp_path / "s", Snapshot({}, {}, np.zeros(1, dtype=np.int64), pack([item])))
    (again,) = journal.read_snapshot(tmp_path / "s").columns.trajectories()
    assert [getattr(item, name) for name in PLAIN] == [getattr(again, name) for name in PLAIN]


def test_no_trajectories_are_a_snapshot_too(everything: Everything, tmp_path: Path) -> None:
    buffer = ReplayBuffer(3, seed=8)
    buffer.save(tmp_path / "empty")
    assert everything(ReplayBuffer.load(tmp_path / "empty")) == everything(buffer)


def test_saving_what_was_loaded_gives_the_same_bytes(saved: Path, everything: Everything) -> None:
    assert everything(ReplayBuffer.load(saved)) == saved.read_bytes()


@pytest.mark.parametrize("place", [(np, "savez"), (os, "fsync"), (Path, "replace")])
def test_a_failing_write_keeps_the_old_file_and_leaves_no_other(
    saved: Path, make_trajectory: Make, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]
) -> None:
    before = saved.read_bytes()
    buffer = ReplayBuffer.load(saved)
    buffer.add([make_trajectory()], policy_version=10)
    monkeypatch.setattr(*place, fail)
    with pytest.raises(OSError, match="No space left"):
        buffer.save(saved)
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]
    assert len(ReplayBuffer.load(saved)) == 3


def test_a_disk_that_fills_up_while_writing_keeps_the_old_file(saved: Path) -> None:
    """The system's own limit on the size of a file stops the write in the middle."""
    before = saved.read_bytes()
    buffer = ReplayBuffer.load(saved)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            buffer.save(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


def test_what_a_killed_process_left_is_no_obstacle(saved: Path) -> None:
    buffer = ReplayBuffer.load(saved)
    before = saved.read_bytes()
    saved.with_name(f".{saved.name}.{os.getpid()}.{threading.get_ident()}.tmp").write_bytes(before[:100])
    buffer.save(saved)
    assert os.listdir(saved.parent) == [saved.name]
    assert saved.read_bytes() == before


def test_a_folder_that_does_not_exist_is_an_error_of_the_system(saved: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ReplayBuffer.load(saved).save(saved.parent / "no" / "buffer")
    with pytest.raises(FileNotFoundError):
        ReplayBuffer.load(saved.parent / "nothing")
    assert os.listdir(saved.parent) == [saved.name]


def test_a_truncated_file_is_refused_at_every_length(saved: Path) -> None:
    whole = saved.read_bytes()
    for length in [*range(0, len(whole), 37), len(whole) - 1]:
        saved.write_bytes(whole[:length])
        with pytest.raises(SnapshotError, match="not a whole freshper snapshot"):
            ReplayBuffer.load(saved)


@pytest.mark.parametrize("share", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_a_changed_byte_is_refused_or_changes_nothing_at_every_position(
    saved: Path, everything: Everything, share: int
) -> None:
    """Zip has bytes that nobody reads (dates, attributes). Everything else must be noticed."""
    whole = saved.read_bytes()
    positions = range(0, len(whole), share)
    refused = 0
    with saved.open("r+b", buffering=0) as file:
        for position in positions:
            byte = whole[position]
            os.pwrite(file.fileno(), bytes([byte ^ (0x01, 0x0C, 0x20, 0x80, 0xFF)[position % 5]]), position)
            try:
                loaded = ReplayBuffer.load(saved)
            except SnapshotError:
                refused += 1
            else:
                assert everything(loaded) == whole, f"byte {position}"
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert refused > 0.75 * len(positions)


@pytest.mark.parametrize(
    ("member", "was", "now"),
    [
        ("array/sampler/bases", b"<f8", b"<f4"),  # numpy would read half of the bytes and stop before the checksum
        ("array/sampler/bases", b"<f8", b"<f2"),
        ("array/sampler/bases", b"(2000,)", b"(0000,)"),
        ("array/sampler/leaves/0/weights", b"<f8", b">f8"),
        ("column/offsets", b"<i8", b"<i4"),
        ("column/tokens", b"<i4", b"<i1"),
        ("column/behavior_logprobs", b"<f4", b"<f2"),
        ("column/tokens", b"(8000,)", b"(8000 )"),
    ],
)
def test_a_damaged_array_header_of_a_large_member_is_refused(
    make_buffer: Filled, tmp_path: Path, member: str, was: bytes, now: bytes
) -> None:
    path = tmp_path / "large"
    make_buffer(np.ones(2000)).save(path)
    whole = path.read_bytes()
    at = whole.index(was, whole.index(member.encode() + b".npy"))
    path.write_bytes(whole[:at] + now + whole[at + len(was) :])
    with pytest.raises(SnapshotError, match="not a whole freshper snapshot"):
        ReplayBuffer.load(path, priority=len)


@pytest.mark.parametrize("method", [8, 12, 14])
def test_a_member_that_claims_to_be_compressed_is_refused(saved: Path, method: int) -> None:
    """Deflate, bzip2, LZMA: unpacking what was never packed would raise whatever these libraries raise."""
    damaged = bytearray(saved.read_bytes())
    damaged[damaged.index(b"PK\x01\x02") + 10] = method
    saved.write_bytes(damaged)
    with pytest.raises(SnapshotError, match=r"header\.npy is compressed, which no snapshot is"):
        ReplayBuffer.load(saved)


@pytest.mark.parametrize("cut", [(0, 10), (100, 101), (1000, 1500)])
def test_a_hole_in_the_file_is_refused(saved: Path, cut: tuple[int, int]) -> None:
    whole = saved.read_bytes()
    saved.write_bytes(whole[: cut[0]] + whole[cut[1] :])
    with pytest.raises(SnapshotError):
        ReplayBuffer.load(saved)


def write_foreign(path: Path, kind: str) -> None:
    with path.open("wb") as file:
        match kind:
            case "text":
                file.write(b"this is no snapshot")
            case "pickle":
                pickle.dump({"a": 1}, file)
            case "npy":
                np.save(file, np.arange(3))
            case "npz":
                np.savez(file, a=np.arange(3))
            case "header":
                np.savez(file, header=np.arange(3))
            case "list":
                np.savez(file, header=np.frombuffer(b"[]", dtype=np.uint8))
            case "objects":
                np.savez(file, header=np.array([{"a": 1}], dtype=object), allow_pickle=True)
            case "compressed":
                np.savez_compressed(file, header=np.arange(3))


@pytest.mark.parametrize("kind", ["empty", "text", "pickle", "npy", "npz", "header", "list", "objects", "compressed"])
def test_a_foreign_file_is_refused(tmp_path: Path, kind: str) -> None:
    write_foreign(tmp_path / "foreign", kind)
    with pytest.raises(SnapshotError, match=r"foreign is not a whole freshper snapshot.*nothing was loaded"):
        ReplayBuffer.load(tmp_path / "foreign")


@pytest.mark.parametrize("change", [{"format_version": 3}, {"format_version": 0}, {"format": "other"}])
def test_another_format_is_named_with_the_one_that_is_read(saved: Path, change: dict[str, Any]) -> None:
    rewrite(saved, lambda header: header.update(change))
    told = f"{change.get('format', 'freshper-buffer')} {change.get('format_version', 2)}"
    with pytest.raises(SnapshotError, match=f"has format {told}; this version reads freshper-buffer 1, 2$"):
        ReplayBuffer.load(saved)


def shortened(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda members: members.update({name: members[name][:-1]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shortened("serials"), "3 trajectories under 2 numbers"),
        (
            lambda members: members.update(serials=members["serials"] + 1),
            "1 trajectories .* are missing, e.g. number 2",
        ),
        (shortened("column/seeds"), "2 values of seeds for 3 rows"),
        (shortened("column/tokens"), r"values of response_mask for \d+ rows"),
        (shortened("column/offsets"), "offsets"),
        (shortened("array/store/uses"), "2 values of uses for 3 items"),
        (shortened("array/store/keys"), "values of uses for 2 items"),
        (shortened("array/store/member_offsets"), "3 members of items"),
        (lambda members: members.update({"array/store/keys": np.array([2, 3, 3])}), "keys do not fill the slots"),
        (shortened("array/sampler/bases"), "parts do not belong together"),
        (shortened("array/drift/ages"), "saved drift has lengths"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    saved: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    buffer = ReplayBuffer.load(saved)
    buffer.observe(buffer.sample(2, policy_version=10), [0.1, 0.2])
    buffer.save(saved)
    with np.load(saved) as file:
        members = dict(file)
    change(members)
    with saved.open("wb") as file:
        np.savez(file, **members)
    with pytest.raises(SnapshotError, match=message):
        ReplayBuffer.load(saved)


@pytest.mark.parametrize("name", ["settings", "store", "counters", "sampler", "decays"])
def test_missing_facts_are_noticed(saved: Path, name: str) -> None:
    rewrite(saved, lambda header: header["facts"].pop(name))
    with pytest.raises(SnapshotError, match=name):
        ReplayBuffer.load(saved)


def test_missing_settings_are_named(saved: Path) -> None:
    rewrite(saved, lambda header: header["facts"]["settings"].pop("max_uses"))
    with pytest.raises(SnapshotError, match="settings are not those of a buffer: max_uses is missing"):
        ReplayBuffer.load(saved)


def test_a_missing_array_is_noticed(saved: Path) -> None:
    rewrite(saved, lambda header: header["arrays"].append("uses"))
    with pytest.raises(SnapshotError, match="array/uses"):
        ReplayBuffer.load(saved)


def test_a_function_as_priority_must_be_passed_again(make_buffer: Filled, tmp_path: Path, saved: Path) -> None:
    buffer = make_buffer([1.0, 2.0])
    buffer.save(tmp_path / "function")
    with pytest.raises(ConfigError, match="was a function: pass it to load"):
        ReplayBuffer.load(tmp_path / "function")
    loaded = ReplayBuffer.load(tmp_path / "function", priority=buffer.priority)
    np.testing.assert_array_equal(loaded.probabilities(), buffer.probabilities())
    with pytest.raises(ConfigError, match="priority was 'reward'; load was given 'success'"):
        ReplayBuffer.load(saved, priority="success")
