"""Damage of any kind is an error that names it, or it made no difference; a repair says what it lost."""

import importlib.util
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshper.errors import SnapshotError
from freshper.replay.disk.durable import DurableLog, Recovered
from freshper.replay.disk.frames import HEADER_BYTES, MAGIC
from freshper.replay.disk.manifest import COPY, MANIFEST, read_manifest
from freshper.replay.disk.recovery import Recovery

spec = importlib.util.spec_from_file_location("durable_world", Path(__file__).with_name("durable_world.py"))
assert spec is not None
assert spec.loader is not None
world = importlib.util.module_from_spec(spec)
spec.loader.exec_module(world)

SEED, DONE = 8, 26


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Several log files, checkpoints, moved trajectories, and frames after the newest checkpoint; writer killed."""
    model = world.World(SEED)
    log = DurableLog.create(tmp_path / "d", meta={"made": "here"}, keep=2, segment_bytes=9_000)
    while model.done < DONE:
        model.step(log)
    log._tail.close()
    log._lock.release()
    return tmp_path / "d"


def files(directory: Path, pattern: str = "*") -> list[Path]:
    return sorted(path for path in directory.glob(pattern) if path.name != "LOCK")


def places(content: bytes) -> Iterator[int]:
    """Bytes to flip: all of every header and of what follows it, and a dense sample of the rest."""
    chosen = set(range(0, len(content), 61))
    for match in re.finditer(MAGIC, content):
        chosen |= set(range(match.start(), match.start() + HEADER_BYTES + 16, 4))
    chosen |= set(range(40)) | set(range(len(content) - 9, len(content)))
    return iter(sorted(place for place in chosen if 0 <= place < len(content)))


def summary(recovered: Recovered) -> Any:
    """Everything but the notes, comparable."""
    entries = [
        (
            e.kind,
            e.meta,
            {k: v.tolist() for k, v in e.arrays.items()},
            None if e.serials is None else e.serials.tolist(),
        )
        for e in recovered.entries
    ]
    arrays = {name: array.tolist() for name, array in recovered.arrays.items()}
    return recovered.mark, recovered.meta, arrays, recovered.live.tolist(), recovered.serials.tolist(), entries


def assert_no_wrong_row(recovered: Recovered) -> None:
    """Whatever survived a repair is what was written."""
    for serial, found in zip(recovered.serials.tolist(), recovered.columns.trajectories(), strict=True):
        world.assert_same(found, world.trajectory(serial))
    for entry in recovered.entries:
        if entry.columns is not None and entry.serials is not None:
            for serial, found in zip(entry.serials.tolist(), entry.columns.trajectories(), strict=True):
                world.assert_same(found, world.trajectory(serial))


def attempt(directory: Path) -> Recovered | str:
    """What a reader gets, or is told."""
    try:
        return Recovery(directory, read_manifest(directory)[0]).run(None).recovered
    except SnapshotError as error:
        return str(error)


def repaired(directory: Path) -> Recovered:
    """What a repair would give, with nothing changed on disk."""
    manifest, notes = read_manifest(directory, repair=True)
    return Recovery(directory, manifest, repair=True, notes=notes).run(None).recovered


def test_the_directory_has_all_that_can_be_damaged(directory: Path) -> None:
    manifest, _ = read_manifest(directory)
    recovered = world.check(directory, SEED, DONE)
    assert len(manifest.logs) > 2
    assert len(manifest.checkpoints) == 2
    assert len(recovered.entries) > 2
    assert len(recovered.serials) > 5
    assert recovered.notes == []


def test_every_flipped_byte_is_an_error_or_makes_no_difference(directory: Path) -> None:
    expected = summary(DurableLog.read(directory))
    refused = 0
    for path in files(directory):
        content = bytearray(path.read_bytes())
        for place in places(bytes(content)):
            content[place] ^= 1 << (place % 8)
            path.write_bytes(content)
            found = attempt(directory)
            if isinstance(found, str):
                refused += 1
                assert path.name in found
                spans = [tuple(map(int, span)) for span in re.findall(r"bytes (\d+) to (\d+)", found)]
                assert any(start <= place < stop for start, stop in spans)
            else:
                assert summary(found) == expected
                assert found.notes == []
            content[place] ^= 1 << (place % 8)
        path.write_bytes(content)
    assert refused > 200


def test_a_repair_goes_on_without_what_is_damaged_and_names_it(directory: Path) -> None:
    expected = summary(DurableLog.read(directory))
    losses = 0
    for path in files(directory):
        content = bytearray(path.read_bytes())
        for place in list(places(bytes(content)))[::4]:
            content[place] ^= 1 << (place % 8)
            path.write_bytes(content)
            found = repaired(directory)
            assert_no_wrong_row(found)
            if summary(found) != expected:
                losses += 1
                assert any(path.name in note for note in found.notes)
            content[place] ^= 1 << (place % 8)
        path.write_bytes(content)
    assert losses > 60


def test_the_log_cut_at_every_length(directory: Path) -> None:
    """The last file may end in half a frame, which was never acknowledged; nothing else may be cut."""
    whole = DurableLog.read(directory)
    manifest, _ = read_manifest(directory)
    last = manifest.checkpoints[-1]
    noted = refused = 0
    for log in manifest.logs:
        path = directory / f"log-{log.number:06d}"
        content = path.read_bytes()
        for size in range(len(content) - 1, -1, -61):
            path.write_bytes(content[:size])
            found = attempt(directory)
            if isinstance(found, str):
                refused += 1
                assert path.name in found
                assert log.size is not None or size < last.offset or log.number < last.log
            else:
                assert_no_wrong_row(found)
                if log.size is None:
                    kinds = [entry.meta["op"] for entry in whole.entries]
                    assert [entry.meta["op"] for entry in found.entries] == kinds[: len(found.entries)]
                    noted += bool(found.notes)
                else:
                    assert summary(found) == summary(whole)
        path.write_bytes(content)
    assert noted > 10
    assert refused > 60


def test_a_torn_tail_is_cut_off_when_a_writer_opens_and_ignored_by_a_reader(directory: Path) -> None:
    tail = files(directory, "log-*")[-1]
    size = tail.stat().st_size
    with tail.open("r+b") as file:
        file.truncate(size - 5)
    found = DurableLog.read(directory)
    assert len(found.notes) == 1
    assert tail.name in found.notes[0]
    assert "cut short" in found.notes[0]
    assert tail.stat().st_size == size - 5
    model = world.World.recover(SEED, found)
    assert model.done == DONE - 1
    log, recovered = DurableLog.open(directory)
    assert recovered.notes == found.notes
    with log:
        model.step(log)
    assert world.check(directory, SEED, DONE).notes == []


def test_after_a_clean_close_nothing_may_be_missing_at_all(directory: Path) -> None:
    DurableLog.open(directory)[0].close()
    tail = files(directory, "log-*")[-1]
    content = tail.read_bytes()
    for size in range(len(content) - 1, -1, -101):
        tail.write_bytes(content[:size])
        with pytest.raises(SnapshotError, match=tail.name):
            DurableLog.read(directory)


def test_a_repair_is_made_once_and_for_all(directory: Path) -> None:
    manifest, _ = read_manifest(directory)
    path = directory / f"log-{manifest.checkpoints[-1].logs[0]:06d}"
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 200] ^= 4
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=re.escape("repair=True")):
        DurableLog.open(directory)
    log, recovered = DurableLog.open(directory, repair=True)
    lost = set(recovered.live.tolist()) - set(recovered.serials.tolist())
    assert lost
    assert any(f"{len(lost)} of {len(recovered.live)} trajectories" in note for note in recovered.notes)
    next_serial = np.array([10_000])
    log.add(next_serial, world.pack([world.trajectory(10_000)]), {}, {})
    log.close()
    again = DurableLog.read(directory)
    assert set(again.live.tolist()) - set(again.serials.tolist()) == lost
    assert again.entries[-1].serials == next_serial
    log, _ = DurableLog.open(directory)
    with log:
        log.checkpoint({}, {}, again.serials)
    after = DurableLog.read(directory)
    assert after.notes == []
    assert after.live.tolist() == after.serials.tolist() == again.serials.tolist()


def test_a_file_that_is_missing(directory: Path) -> None:
    expected = DurableLog.read(directory)
    for path in files(directory):
        kept = path.with_name("elsewhere")
        shutil.move(path, kept)
        found = attempt(directory)
        needed = isinstance(found, str)
        if isinstance(found, str):
            assert path.name in found
            assert "missing" in found
        else:
            assert summary(found) == summary(expected)
        again = repaired(directory)
        assert_no_wrong_row(again)
        assert any(path.name in note for note in again.notes) == needed
        shutil.move(kept, path)
        if path.name.startswith("log-"):
            copy = Path(shutil.copytree(directory, directory.with_name(f"without-{path.name}")))
            (copy / path.name).unlink()
            with DurableLog.open(copy, repair=True)[0] as log:
                log.change("x", {}, {})
            assert DurableLog.read(copy).entries[-1].kind == "x"


def test_a_damaged_state_goes_back_a_checkpoint_and_replays_what_is_still_there(directory: Path) -> None:
    expected = world.World(SEED).to(DONE)
    newest = files(directory, "state-*")[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(SnapshotError, match=f"{newest.name} has .* goes back to checkpoint"):
        DurableLog.open(directory)
    mark = newest.name.removeprefix("state-").removesuffix(".safetensors")
    with pytest.raises(SnapshotError, match="choose another mark"):
        DurableLog.open(directory, mark=mark, repair=True)
    log, recovered = DurableLog.open(directory, repair=True)
    assert mark not in log.marks
    log.close()
    assert recovered.mark is not None
    assert recovered.mark < mark
    assert any(newest.name in note for note in recovered.notes)
    found = dict.fromkeys(recovered.serials.tolist())
    found |= dict.fromkeys(s for e in recovered.entries if e.serials is not None for s in e.serials.tolist())
    lost_later = any("everything after" in note for note in recovered.notes)
    assert lost_later or set(expected.values) <= set(found)


def test_frames_that_changed_places_are_refused(directory: Path) -> None:
    """Each is whole, so only its number tells."""
    tail = files(directory, "log-*")[-1]
    content = tail.read_bytes()
    starts = [match.start() for match in re.finditer(MAGIC, content)]
    offset = read_manifest(directory)[0].checkpoints[-1].offset
    later = [start for start in starts if start >= offset]
    assert len(later) > 2
    one, two, three = later[:3]
    tail.write_bytes(content[:one] + content[two:three] + content[one:two] + content[three:])
    with pytest.raises(SnapshotError, match="stands where frame"):
        DurableLog.read(directory)
    tail.write_bytes(content[:two] + content[one:])
    with pytest.raises(SnapshotError, match="stands where frame"):
        DurableLog.read(directory)
    found = repaired(directory)
    assert summary(found) == summary_without_notes(directory, content)


def summary_without_notes(directory: Path, content: bytes) -> Any:
    files(directory, "log-*")[-1].write_bytes(content)
    return summary(DurableLog.read(directory))


def test_a_newer_format_is_refused_naming_both_versions(directory: Path) -> None:
    for name in (MANIFEST, COPY):
        content = (directory / name).read_bytes()
        body = json.loads(content) | {"format_version": 2}
        del body["crc32"]
        rest = json.dumps(body)[1:].encode()
        (directory / name).write_bytes(b'{"crc32": "%08x", ' % zlib.crc32(rest) + rest)
    for repair in (False, True):
        with pytest.raises(SnapshotError, match=r"format version 2; .* reads 1\."):
            DurableLog.open(directory, repair=repair)
