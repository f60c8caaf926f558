"""kill -9 at random moments: what a writer acknowledged is there exactly once, and the next one goes on from it."""

import importlib.util
import os
import random
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freshper.replay.disk.durable import DurableLog
from freshper.replay.disk.manifest import read_manifest

HERE = Path(__file__)
OPERATIONS = 4_000  # of one writer: more than it will live to do

spec = importlib.util.spec_from_file_location(
    "durable_world", HERE.parents[1] / "unit" / "replay" / "disk" / "durable_world.py"
)
assert spec is not None
assert spec.loader is not None
world = importlib.util.module_from_spec(spec)
spec.loader.exec_module(world)


class Nursery:
    """The process that forks writers, and what they say."""

    def __init__(self) -> None:
        command = [sys.executable, str(HERE.with_name("kill_writer.py"))]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self.rest = b""
        assert self.line() == ["ready"]

    def line(self) -> list[str]:
        while b"\n" not in self.rest:
            more = os.read(self.output.fileno(), 1 << 16)
            assert more, "the writers' parent has died"
            self.rest += more
        line, _, self.rest = self.rest.partition(b"\n")
        return line.decode().split()

    def kill_one(self, directory: Path, seed: int, patience: float, after: int) -> tuple[int, bool]:
        """Let a writer acknowledge ``after`` operations, kill it a moment later; returns what it acknowledged."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{directory} {seed} {OPERATIONS}\n".encode())
        self.process.stdin.flush()
        pid, done, acknowledged, killed = 0, -1, 0, False
        while (words := self.line()) != ["ended"]:
            if words[0] == "writer":
                pid = int(words[1])
            elif words[0] in ("open", "done"):
                done = int(words[1])
                acknowledged += 1
            if pid and acknowledged > after and not killed:
                select.select([], [], [], patience)  # the moment is random, so that it falls within an operation
                os.kill(pid, signal.SIGKILL)
                killed = True
        return done, killed

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.output.close()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def kill_many(nursery: Nursery, directory: Path, seed: int, kills: int, chance: random.Random) -> dict[str, Any]:
    """Kill ``kills`` writers of one directory in turn; each goes on where the one before it was killed."""
    DurableLog.create(directory, meta={"seed": seed}, keep=2, segment_bytes=30_000).close()
    model, torn, ahead, back = world.World(seed), 0, 0, 0
    for _ in range(kills):
        acknowledged, killed = nursery.kill_one(directory, seed, chance.random() * 0.02, chance.randrange(25))
        assert killed
        recovered = DurableLog.read(directory)
        found = world.World.recover(seed, recovered)
        assert found.done >= acknowledged >= model.done
        torn += bool(recovered.notes)
        ahead += found.done > acknowledged
        found.assert_equals(model.to(found.done))
        if chance.random() < 0.1:
            mark = chance.choice(read_manifest(directory)[0].marks)
            log, recovered = DurableLog.open(directory, fsync="checkpoint", mark=mark)
            log.close()
            early = world.World.recover(seed, recovered)
            early.assert_equals(world.World(seed).to(early.done))
            model = early
            back += 1
    return {"torn": torn, "ahead": ahead, "back": back, "done": model.done}


def test_a_hundred_kills(nursery: Nursery, tmp_path: Path) -> None:
    counted = kill_many(nursery, tmp_path / "d", seed=11, kills=100, chance=random.Random(0))
    assert counted["done"] > 300
    assert counted["back"] > 3
    used = sum(path.stat().st_size for path in (tmp_path / "d").iterdir())
    assert used < 3_000_000  # files were deleted and compacted all the while


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_five_hundred_kills(nursery: Nursery, tmp_path: Path, seed: int) -> None:
    counted = kill_many(nursery, tmp_path / "d", seed=seed, kills=500, chance=random.Random(seed))
    assert counted["done"] > 300
    shutil.rmtree(tmp_path / "d")
