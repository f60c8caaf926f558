"""Damage to a buffer's directory: what is lost is named, everything else keeps its key and its place."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshper import Exponential, ReplayBuffer, Trajectory
from freshper.errors import SnapshotError

pytest.importorskip("pyarrow")
Make = Callable[..., Trajectory]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)  # a killed process loses nothing that was written


def crash(buffer: ReplayBuffer) -> None:
    """As a kill would: files and lock are let go, nothing more is written."""
    assert buffer._disk is not None
    log = buffer._disk._log
    log._tail._file.close()
    log._lock.release()


def facts(buffer: ReplayBuffer) -> dict[str, Any]:
    core = buffer._core
    slots = core.store.occupied()
    columns, offsets = core.store.read(slots)
    return {
        "keys": buffer.keys().tolist(),
        "bases": core.sampler.bases[slots].tolist(),
        "versions": core.sampler.versions[slots].tolist(),
        "seeds": columns.seeds.tolist(),
        "tokens": columns.tokens.tolist(),
        "offsets": offsets.tolist(),
        "bytes": buffer.nbytes,
        "clock": buffer.policy_version,
    }


def flip(path: Path, what: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(what) + 1] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_lost_add_is_repaired_around_with_every_other_key_in_its_place(
    make_trajectory: Make, tmp_path: Path, checkpointed: bool
) -> None:
    """Of three adds the second is damaged. The third evicted the first: both leave, and its own key stays its own."""
    path = tmp_path / "b"
    buffer = ReplayBuffer(4, directory=path, priority=lambda item: float(item.seed + 1))
    for seed in (1, 2, 3):
        tokens = np.full(4, 1000 + seed, dtype=np.int32)
        buffer.add([make_trajectory(seed=seed, tokens=tokens)] * 2, policy_version=seed)
        if seed == 2 and checkpointed:
            buffer.checkpoint()
    buffer.update_priorities([3, 5], [33.0, 55.0])
    whole = facts(buffer)
    crash(buffer)
    (log,) = path.glob("log-*")
    flip(log, np.full(4, 1002, dtype=np.int32).tobytes())
    with pytest.raises(SnapshotError, match="repair=True"):
        ReplayBuffer.load(path, priority=len)
    with pytest.warns(UserWarning, match="lost|given up") as notes:
        buffer = ReplayBuffer.load(path, priority=len, repair=True)
    assert any("b: " in str(note.message) for note in notes)
    left = facts(buffer)
    assert left["keys"] == [4, 5] == whole["keys"][2:]
    assert (left["seeds"], left["bases"]) == ([3, 3], [4.0, 55.0])
    assert buffer.nbytes == 2 * whole["bytes"] // 4
    buffer.close()
    buffer = ReplayBuffer.load(path, priority=len)
    new = buffer.add([make_trajectory(seed=9, tokens=np.full(4, 9, dtype=np.int32))] * 2, policy_version=9)
    assert len(buffer) == 4
    assert min(new) > 1 << 20  # far from every key that a lost item may have had
    told = facts(buffer)
    buffer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ReplayBuffer.load(path, priority=len) as again:
            assert facts(again) == told


def test_an_item_in_the_way_of_a_later_one_leaves(make_trajectory: Make, tmp_path: Path) -> None:
    """Capacity 2, three adds of two: the lost second one was to evict the first, and the third takes its slots."""
    path = tmp_path / "b"
    buffer = ReplayBuffer(2, directory=path)
    for seed in (1, 2, 3):
        tokens = np.full(4, 1000 + seed, dtype=np.int32)
        buffer.add([make_trajectory(seed=seed, tokens=tokens)] * 2, policy_version=seed)
    whole = facts(buffer)
    crash(buffer)
    flip(next(iter(path.glob("log-*"))), np.full(4, 1002, dtype=np.int32).tobytes())
    with pytest.warns(UserWarning, match="lost|given up"), ReplayBuffer.load(path, repair=True) as buffer:
        assert facts(buffer) == whole


def test_damaged_checkpoints_fall_back_to_the_first_moment(make_trajectory: Make, tmp_path: Path) -> None:
    """Nothing but the log is left: the buffer is made again from its settings and everything that was done."""
    path = tmp_path / "b"
    buffer = ReplayBuffer(4, directory=path, freshness=Exponential(2.0), unit="turn")
    buffer.add([make_trajectory(1.5, 2), make_trajectory(2.5, 3)], policy_version=5)
    buffer.update_priorities([1], [9.0])
    before = facts(buffer)
    crash(buffer)
    for state in path.glob("state-*"):
        state.write_bytes(b"")
    with pytest.raises(SnapshotError, match=re.escape("repair=True goes back to the beginning of the log")):
        ReplayBuffer.load(path)
    with pytest.warns(UserWarning, match="given up"), ReplayBuffer.load(path, repair=True) as buffer:
        assert facts(buffer) == before


def test_a_torn_end_is_no_damage_and_no_warning(make_trajectory: Make, tmp_path: Path) -> None:
    half = ReplayBuffer(3, directory=tmp_path / "b")
    half.add([make_trajectory()], policy_version=2)
    before = facts(half)
    half.add([make_trajectory(9.0, 3)], policy_version=3)
    crash(half)
    (log,) = (tmp_path / "b").glob("log-*")
    log.write_bytes(log.read_bytes()[:-5])
    with ReplayBuffer.load(tmp_path / "b") as buffer:
        assert facts(buffer) == before
