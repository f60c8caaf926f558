"""Saving and loading 50,000 trajectories of 1,000 tokens: the durable directory, pickle and torch.save.

The directory is written as a buffer writes it, 64 trajectories a call, then a checkpoint; loading gives columns.
Pickle and torch.save get the trajectories as dictionaries of arrays (tensors), one file, flushed to the disk. All
in one run, so the ratios are what counts. Loading happens in a fresh process (median of three), from the page
cache, as after a crash. Pickle and torch.save hold three arrays a trajectory and check nothing; the directory holds
whole trajectories, each byte with a checksum, and every add is safe from kill -9 when it returns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from freshper.replay.disk.arrow_columns import arrow
from freshper.replay.disk.durable import DurableLog
from freshper.replay.store.columns import Columns, pack
from freshper.trajectory import StopReason, Trajectory, Turn

BATCH = 64
LOADS = 3
NAMES = ("tokens", "response_mask", "behavior_logprobs")


def trajectories(count: int, length: int) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    half = length // 2
    mask = np.arange(length) >= half
    turns = (Turn(0, half, length, 1.0),)
    made = []
    for number in range(count):
        logprobs = np.where(mask, -rng.random(length, dtype=np.float32), np.float32(0))
        made.append(
            Trajectory(
                tokens=rng.integers(0, 50_000, length, dtype=np.int32),
                response_mask=mask,
                behavior_logprobs=logprobs,
                turns=turns,
                stop_reason=StopReason.TERMINATED,
                success=True,
                policy_version=number // 512,
                task="bench",
                group=f"bench/{number // 8}",
                seed=number,
            )
        )
    return made


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def load_durable(path: Path) -> int:
    return len(DurableLog.read(path).columns)


def load_pickle(path: Path) -> int:
    with path.open("rb") as file:
        return len(pickle.load(file))  # noqa: S301  # what this benchmark has just written


def load_torch(path: Path) -> int:
    import torch

    return len(torch.load(path))


LOADERS = {"durable": load_durable, "pickle": load_pickle, "torch": load_torch}


def load_apart(system: str, path: Path, count: int) -> float:
    """Seconds to load in a process of its own: here, memory that is already paged in would favor the later ones."""
    seconds = []
    for _ in range(LOADS):
        command = [sys.executable, __file__, "--load", system, str(path)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        assert int(output[0]) == count
        seconds.append(float(output[1]))
    return statistics.median(seconds)


def load_here(system: str, path: Path) -> None:
    if system == "durable":
        arrow()
    elif system == "torch":
        import torch  # noqa: F401  # the import is not what is measured
    seconds, count = timed(lambda: LOADERS[system](path))
    print(count, seconds)


def durable(folder: Path, batches: Sequence[Columns], fsync: Any) -> dict[str, float]:
    """Seconds, and milliseconds of an add."""
    path, total = folder / f"durable-{fsync}", sum(map(len, batches))
    log = DurableLog.create(path, meta={}, fsync=fsync)
    adds, start = [], 0
    for columns in batches:
        serials = np.arange(start, start + len(columns))
        start += len(columns)
        adds.append(timed_add(log, serials, columns))
    state = {"bases": np.ones(total)}
    first, _ = timed(lambda: log.checkpoint({}, state, np.arange(total)))
    again, _ = timed(lambda: log.checkpoint({}, state, np.arange(total)))
    log.close()
    found = DurableLog.read(path).columns
    assert np.array_equal(found.tokens, np.concatenate([columns.tokens for columns in batches]))
    return {
        "write": sum(adds) + first,
        "load": load_apart("durable", path, total),
        "size": sum(file.stat().st_size for file in path.iterdir()),
        "add_ms": statistics.median(adds) * 1e3,
        "checkpoint": again,
    }


def timed_add(log: DurableLog, serials: Any, columns: Columns) -> float:
    start = time.perf_counter()
    log.add(serials, columns, {}, {})
    return time.perf_counter() - start


def one_file(system: str, path: Path, save: Callable[[Any], None], count: int) -> dict[str, float]:
    def write() -> None:
        with path.open("wb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())

    wrote, _ = timed(write)
    result = {"write": wrote, "load": load_apart(system, path, count), "size": path.stat().st_size}
    path.unlink()
    return result


def pickled(folder: Path, items: Sequence[Trajectory]) -> dict[str, float]:
    rows = [{name: getattr(item, name) for name in NAMES} for item in items]
    return one_file("pickle", folder / "pickle", lambda file: pickle.dump(rows, file, protocol=5), len(rows))


def torch_saved(folder: Path, items: Sequence[Trajectory]) -> dict[str, float]:
    import torch

    rows = [{name: torch.tensor(getattr(item, name)) for name in NAMES} for item in items]
    return one_file("torch", folder / "torch", lambda file: torch.save(rows, file), len(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=1_000)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--load", nargs=2, metavar=("SYSTEM", "PATH"), help="only load, and print how long it took")
    options = parser.parse_args()
    if options.load:
        load_here(options.load[0], Path(options.load[1]))
        return
    items = trajectories(options.trajectories, options.tokens)
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batches = [pack(items[start : start + BATCH]) for start in range(0, len(items), BATCH)]
        figures["durable, fsync=checkpoint"] = durable(folder, batches, "checkpoint")
        figures["durable, fsync=always"] = durable(folder, batches, "always")
        del batches
        figures["pickle"] = pickled(folder, items)
        figures["torch.save"] = torch_saved(folder, items)
    base = figures["durable, fsync=checkpoint"]
    print(
        f"{options.trajectories} trajectories of {options.tokens} tokens; {platform.machine()}, {os.cpu_count()} CPUs"
    )
    print(f"{'':28}{'write s':>10}{'load s':>10}{'both':>10}{'MB':>8}")
    for system, row in figures.items():
        ratio = (row["write"] + row["load"]) / (base["write"] + base["load"])
        print(f"{system:28}{row['write']:10.2f}{row['load']:10.2f}{ratio:9.1f}x{row['size'] / 1e6:8.0f}")
    for system, row in figures.items():
        if "add_ms" in row:
            print(f"{system}: add of {BATCH} {row['add_ms']:.2f} ms, next checkpoint {row['checkpoint'] * 1e3:.1f} ms")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
