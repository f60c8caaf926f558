"""A buffer and its directory: whatever was acknowledged is there again, and what could not be written never was."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshper import AutoTau, Exponential, NoDecay, ReplayBuffer, TaskReplay, Trajectory
from freshper.errors import BufferLockedError, CapacityError, ConfigError, MissingExtraError, SnapshotError

pytest.importorskip("pyarrow")
Make = Callable[..., Trajectory]
Everything = Callable[[ReplayBuffer], bytes]
FACTS = ("keys", "probabilities", "base_priorities", "sampling_weights", "ages", "uses")


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
    """What must be there again: not how often an item was drawn, nor the random generator."""
    core = buffer._core
    slots = core.store.occupied()
    columns, offsets = core.store.read(slots)
    return {
        "keys": buffer.keys().tolist(),
        "bases": core.sampler.bases[slots].tolist(),
        "versions": core.sampler.versions[slots].tolist(),
        "owners": core.sampler.table.owners[slots].tolist(),
        "seeds": columns.seeds.tolist(),
        "tokens": columns.tokens.tolist(),
        "offsets": offsets.tolist(),
        "decays": [index.keying.freshness for index in core.sampler.indexes],
        "alpha": buffer.alpha,
        "autos": {number: auto.state() for number, auto in core.autos.items()},
        "bytes": buffer.nbytes,
        "clock": buffer.policy_version,
    }


SETTINGS: list[dict[str, Any]] = [
    {"evict": "fifo"},
    {"evict": "lowest", "freshness": Exponential(4.0)},
    {"evict": "group", "max_bytes": 2500},
    {"evict": "lowest", "unit": "turn", "max_age": 8},
    {"evict": "fifo", "unit": "group", "max_uses": 3},
    {"evict": "lowest", "tasks": {"a": TaskReplay(Exponential(2.0)), "b": TaskReplay(quota=0.5)}, "max_age": 9},
    {"evict": "lowest", "freshness": lambda ages: 1 / (1.0 + np.asarray(ages))},
]


class Life:
    """Random calls on a buffer, always ending with one that is written down."""

    def __init__(self, make: Make, seed: int) -> None:
        self.make, self.rng, self.version, self.count = make, np.random.default_rng(seed), 0, 0
        self.given: set[int] = set()

    def go(self, buffer: ReplayBuffer, rounds: int) -> None:
        rng = self.rng
        for _ in range(rounds):
            self.version += int(rng.integers(0, 3))
            if buffer.drawable:
                buffer.sample(3, policy_version=self.version)
            keys = buffer.keys()
            if len(keys) and rng.random() < 0.5:
                buffer.update_priorities(rng.choice(keys, 2), rng.choice([0.0, 0.5, 2.0, 4.0], 2))
            if len(keys) > 3 and rng.random() < 0.3:
                buffer.remove(rng.choice(keys, 2))
            items = [self.item() for _ in range(rng.integers(1, 4))]
            added = buffer.add([items] if buffer.unit == "group" else items, policy_version=self.version).tolist()
            assert not self.given & set(added)
            self.given |= set(added)

    def item(self) -> Trajectory:
        self.count += 1
        task = "ab"[self.version % 2]
        reward = float(self.rng.choice([0.0, 1.0, 2.0, 5.0]))
        return self.make(reward, max(0, self.version - 1), seed=self.count, task=task, group=f"{self.version // 2}")


def opened(path: Path, settings: dict[str, Any], **arguments: Any) -> ReplayBuffer:
    function = settings.get("freshness") if callable(settings.get("freshness")) else None
    given = None if isinstance(function, Exponential) else function
    return ReplayBuffer.load(path, freshness=given, **arguments)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_everything_is_there_after_a_crash(make_trajectory: Make, tmp_path: Path, settings: Any, seed: int) -> None:
    """Three crashes, with and without checkpoints; keys are never given to another item."""
    life = Life(make_trajectory, seed)
    buffer = ReplayBuffer(8, directory=tmp_path / "b", **settings)
    for number in range(4):
        life.go(buffer, 12)
        if number % 2:
            buffer.checkpoint()
            life.go(buffer, 3)
        before, counters = facts(buffer), buffer.summary()["counters"] | {"drawn": 0}
        crash(buffer)
        buffer = opened(tmp_path / "b", settings)
        assert facts(buffer) == before
        assert buffer.summary()["counters"] | {"drawn": 0} == counters
    buffer.close()


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_mark_is_exactly_that_moment_with_the_same_next_draws(
    make_trajectory: Make, tmp_path: Path, settings: Any
) -> None:
    life = Life(make_trajectory, 5)
    buffer = ReplayBuffer(8, directory=tmp_path / "b", **settings)
    life.go(buffer, 10)
    first = buffer.checkpoint()
    buffer.save(tmp_path / "first")
    life.go(buffer, 5)
    second = buffer.checkpoint()
    life.go(buffer, 5)
    buffer.close()
    with opened(tmp_path / "b", settings, mark=second, read_only=True) as other:
        assert len(other) > 0
    alone = opened(tmp_path / "first", settings)
    with opened(tmp_path / "b", settings, mark=first) as buffer:
        assert facts(buffer) == facts(alone)
        for version in range(life.version, life.version + 125):
            item = make_trajectory(1.0, version, task="a")
            for each in (buffer, alone):
                each.add([[item]] if each.unit == "group" else [item], policy_version=version)
            one, two = (each.sample(8, policy_version=version, beta=0.4) for each in (buffer, alone))
            for name in FACTS:
                np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    with pytest.raises(SnapshotError, match=f"no mark '{second}'"):  # what lay beyond the mark is gone for good
        opened(tmp_path / "b", settings, mark=second)


def test_a_killed_process_leaves_everything(make_trajectory: Make, tmp_path: Path) -> None:
    script = """
import os, sys
from freshper import Exponential, ReplayBuffer
sys.path.insert(0, sys.argv[2])
from conftest import _trajectory as make
buffer = ReplayBuffer(4, directory=sys.argv[1], freshness=Exponential(5.0))
buffer.add([make(float(n), n, seed=n) for n in range(3)], policy_version=3)
buffer.checkpoint()
buffer.add([make(7.0, 4, seed=7), make(8.0, 4, seed=8)], policy_version=4)
buffer.update_priorities([1], [6.0])
buffer.remove([2])
buffer.set_freshness(Exponential(9.0))
buffer.set_alpha(0.25)
print(*buffer.keys(), *buffer.probabilities().tolist(), flush=True)
os._exit(9)
"""
    tests = Path(__file__).parents[3]
    command = [sys.executable, "-c", script, str(tmp_path / "b"), str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    numbers = [float(number) for number in done.stdout.split()]
    with ReplayBuffer.load(tmp_path / "b") as buffer:
        assert [*buffer.keys(), *buffer.probabilities()] == numbers
        assert (buffer.freshness, buffer.alpha, buffer.policy_version) == (Exponential(9.0), 0.25, 4)
        assert {item.seed for item in buffer.sample(60, policy_version=4).trajectories} == {1, 7, 8}


def test_the_clock_of_a_draw_is_known_with_the_next_thing_that_is_written_down(
    make_trajectory: Make, tmp_path: Path
) -> None:
    buffer = ReplayBuffer(4, directory=tmp_path / "b", max_age=30)
    buffer.add([make_trajectory(version=version) for version in (15, 40)], policy_version=40)
    buffer.sample(2, policy_version=50)
    buffer.update_priorities(buffer.keys(), [3.0])
    before = facts(buffer)
    assert (before["clock"], before["keys"]) == (50, [1])
    crash(buffer)
    with ReplayBuffer.load(tmp_path / "b") as buffer:
        assert facts(buffer) == before


def function(ages: Any) -> Any:
    return 1 / (1.0 + np.asarray(ages))


def test_decays_that_were_changed_after_the_checkpoint_are_the_ones_that_come_back(
    make_trajectory: Make, tmp_path: Path
) -> None:
    """A function has to be given again when it was the last one, and only then."""
    path = tmp_path / "b"
    buffer = ReplayBuffer(4, directory=path, tasks={"test": TaskReplay("auto"), "z": TaskReplay()})
    buffer.add([make_trajectory(version=version) for version in (0, 3)], policy_version=3)
    buffer.set_freshness(function, task="test")
    crash(buffer)
    with pytest.raises(ConfigError, match=r"decay \(task test\) was a function"):
        ReplayBuffer.load(path)
    buffer = ReplayBuffer.load(path, freshness={"test": function})
    assert (buffer.freshness_of("test"), buffer.freshness_of("z")) == (function, NoDecay())
    assert buffer._core.autos == {}
    buffer.set_freshness(Exponential(3.0), task="test")
    probabilities = buffer.probabilities()
    crash(buffer)
    with pytest.raises(ConfigError, match="leave it out"):
        ReplayBuffer.load(path, freshness={"test": function})
    with ReplayBuffer.load(path) as buffer:
        assert buffer.freshness_of("test") == Exponential(3.0)
        np.testing.assert_allclose(buffer.probabilities(), probabilities, rtol=1e-15)


def test_a_fitted_tau_comes_back_with_its_evidence_in_its_place(make_trajectory: Make, tmp_path: Path) -> None:
    """The add after the change evicts by the new tau, and the fit goes on from where it was."""
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer(64, directory=tmp_path / "b", freshness=AutoTau(tau=500.0), evict="lowest")
    buffer.add([make_trajectory(1 + version % 9, version) for version in range(64)], policy_version=64)
    while not buffer.tau_changes:
        batch = buffer.sample(64, policy_version=70)
        buffer.observe(batch, rng.normal(-0.01 * batch.ages, np.sqrt(0.02 * batch.ages)))
    buffer.add([make_trajectory(2.0, 70)] * 9, policy_version=70)
    before = facts(buffer)
    assert before["decays"] == [Exponential(buffer.tau_changes[0].new)]
    crash(buffer)
    with ReplayBuffer.load(tmp_path / "b") as buffer:
        assert facts(buffer) == before


@pytest.fixture
def half(make_trajectory: Make, tmp_path: Path) -> Iterator[ReplayBuffer]:
    """A full buffer of three items, drawn from, with a limit on uses."""
    buffer = ReplayBuffer(3, directory=tmp_path / "b", freshness=Exponential(4.0), max_uses=2, max_age=50)
    buffer.add([make_trajectory(float(n), n) for n in range(3)], policy_version=3)
    buffer.sample(1, policy_version=3)
    yield buffer
    buffer.close()


WRITES: dict[str, Callable[[ReplayBuffer, Make], object]] = {
    "add": lambda buffer, make: buffer.add([make(9.0, 14)] * 2, policy_version=3 + 60),
    "update": lambda buffer, make: buffer.update_priorities(buffer.keys(), [7.0, 8.0, 9.0]),
    "remove": lambda buffer, make: buffer.remove(buffer.keys()[1:]),
    "set_freshness": lambda buffer, make: buffer.set_freshness(Exponential(99.0)),
    "set_alpha": lambda buffer, make: buffer.set_alpha(0.1),
    "sample": lambda buffer, make: buffer.sample(50, policy_version=3),
    "checkpoint": lambda buffer, make: buffer.checkpoint(),
}


@pytest.mark.parametrize("verb", WRITES)
def test_a_full_disk_refuses_the_call_and_nothing_has_changed(
    half: ReplayBuffer, make_trajectory: Make, everything: Everything, tmp_path: Path, verb: str
) -> None:
    """Half of the frame is written before the disk is full. Then there is room again, and the same call works."""
    before = everything(half)
    original = os.pwritev

    def full(descriptor: int, parts: Any, position: int) -> int:
        original(descriptor, [bytes(parts[0])[: len(parts[0]) // 2]], position)
        raise OSError(errno.ENOSPC, "No space left on device")

    os.pwritev = full
    try:
        with pytest.raises(OSError, match="No space left"):
            WRITES[verb](half, make_trajectory)
    finally:
        os.pwritev = original
    assert everything(half) == before
    told = facts(half)
    with ReplayBuffer.load(tmp_path / "b", read_only=True) as reader:
        assert facts(reader) == told
    WRITES[verb](half, make_trajectory)
    told = facts(half)
    crash(half)
    half._disk = None
    with ReplayBuffer.load(tmp_path / "b") as buffer:
        assert facts(buffer) == told


def test_a_refused_add_is_not_written_down(half: ReplayBuffer, make_trajectory: Make, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in (tmp_path / "b").iterdir())
    with pytest.raises(CapacityError):
        half.add([make_trajectory()] * 4, policy_version=3)
    assert half.update_priorities([77], [1.0]).updated == half.remove([77]).updated == 0
    assert sum(path.stat().st_size for path in (tmp_path / "b").iterdir()) == size


def test_two_writers_are_refused_and_readers_are_not(half: ReplayBuffer, make_trajectory: Make, tmp_path: Path) -> None:
    with pytest.raises(BufferLockedError, match=f"open for writing in process {os.getpid()}"):
        ReplayBuffer.load(tmp_path / "b")
    with pytest.raises(SnapshotError, match="already holds a replay buffer"):
        ReplayBuffer(3, directory=tmp_path / "b")
    files = {path: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    with ReplayBuffer.load(tmp_path / "b", read_only=True) as reader:
        assert facts(reader) == facts(half)
        reader.add([make_trajectory(3.0, 3)], policy_version=3)  # a copy of its own
        reader.remove(reader.keys()[:1])
    assert {path: path.read_bytes() for path in (tmp_path / "b").iterdir()} == files
    with pytest.raises(ConfigError, match="cannot be read_only"):
        ReplayBuffer.load(tmp_path / "b", read_only=True, repair=True)


@pytest.mark.parametrize("library", ["pyarrow", "safetensors"])
def test_without_the_extra_nothing_is_made(
    half: ReplayBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=rf"{library} is needed here: pip install 'freshper\[disk\]'"):
        ReplayBuffer(3, directory=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(MissingExtraError, match=library):
        ReplayBuffer.load(tmp_path / "b", read_only=True)


def test_a_buffer_without_a_directory_has_no_marks(make_trajectory: Make, tmp_path: Path) -> None:
    buffer = ReplayBuffer(3)
    with pytest.raises(ConfigError, match="no directory"):
        buffer.checkpoint()
    buffer.save(tmp_path / "file")
    with pytest.raises(ConfigError, match="is a single file"):
        ReplayBuffer.load(tmp_path / "file", mark="000001")


def test_a_directory_that_was_never_finished_lets_go_and_opens_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freshper.replay.disk.durable.DurableLog.checkpoint", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        ReplayBuffer(3, directory=tmp_path / "b", alpha=0.25)
    with ReplayBuffer.load(tmp_path / "b") as buffer:
        assert (len(buffer), buffer.capacity, buffer.alpha) == (0, 3, 0.25)
