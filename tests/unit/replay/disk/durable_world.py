"""A history of a durable directory that anybody can compute: what it must hold after any number of operations.

Operation ``i`` of a seed is always the same, so a writer can be stopped anywhere, and what is recovered compared
with the model after as many operations as were acknowledged.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from freshper.replay.disk.durable import DurableLog, Recovered
from freshper.replay.store.columns import pack
from freshper.trajectory import SamplingParams, StopReason, Trajectory, Turn

PICTURES = (b"picture-0" * 40, b"picture-1" * 40, b"picture-2" * 40)
COLUMNS = ("tokens", "response_mask", "behavior_logprobs", "advantages", "td_errors")
PLAIN = ("turns", "stop_reason", "success", "policy_version", "task", "group", "seed", "sampling", "images")


@lru_cache(maxsize=4096)
def trajectory(serial: int, scale: int = 6) -> Trajectory:
    """The one trajectory of that serial number; neighbors differ in every field."""
    rng = np.random.default_rng((17, serial))
    counts = rng.integers(1, scale, size=(int(rng.integers(1, 4)), 2))
    turns, position = [], 0
    for number, (seen, said) in enumerate(counts.tolist()):
        shows = int(serial % 3 == 0 and number == 0)
        turns.append(Turn(position, position + seen, position + seen + said, float(rng.normal()), shows))
        position += seen + said
    mask = np.zeros(position, dtype=np.bool_)
    for turn in turns:
        mask[turn.reply_start : turn.end] = True
    known = serial % 7 != 5

    def column() -> np.ndarray[Any, Any]:
        return np.where(mask, rng.normal(size=position), 0).astype(np.float32)

    return Trajectory(
        tokens=rng.integers(0, 2**31, position),
        response_mask=mask,
        behavior_logprobs=-np.abs(column()) if known else None,  # type: ignore[arg-type]
        turns=tuple(turns),
        stop_reason=[StopReason.TERMINATED, StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT][serial % 3],
        success=serial % 2 == 0,
        policy_version=serial * 3,
        task=f"task {serial % 2}",
        group=f"grüppe {serial // 4}\n",
        seed=int(rng.integers(-(2**63), 2**63 - 1)),
        sampling=SamplingParams(0.99, 0.9, 100) if serial % 5 == 0 else SamplingParams(),
        advantages=column() if serial % 2 else None,
        td_errors=column() if serial % 4 == 3 else None,
        images=(PICTURES[serial % 9 // 3],) if serial % 3 == 0 else (),
        logprobs_known=known,
    )


def assert_same(found: Trajectory, expected: Trajectory) -> None:
    """Every field, bit for bit (log-probs that are unknown are NaN)."""
    for name in COLUMNS:
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == other.dtype, name
            assert one.tobytes() == other.tobytes(), name
    for name in (*PLAIN, "logprobs_known"):
        assert getattr(found, name) == getattr(expected, name), name


class World:
    """The model after ``done`` operations: the value of every live trajectory, oldest first."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.done = 0
        self.next_serial = 0
        self.values: dict[int, float] = {}

    def step(self, log: DurableLog | None = None) -> None:
        """The next operation; with ``log`` it is written there first."""
        kind, rng = self._next()
        meta = {"op": self.done}
        if kind == "add":
            serials = np.arange(self.next_serial, self.next_serial + int(rng.integers(1, 5)))
            values = rng.normal(size=len(serials))
            if log is not None:
                log.add(serials, pack([trajectory(int(serial)) for serial in serials]), meta, {"values": values})
            self._add(serials, values)
        elif kind == "checkpoint":
            if log is not None:
                log.checkpoint(meta | {"next": self.next_serial}, self._arrays(), self._live())
        else:
            picked = self._live()[rng.random(len(self.values)) < (0.5 if kind == "update" else 0.25)]
            values = rng.normal(size=len(picked))
            if log is not None:
                log.change(kind, meta, {"serials": picked, "values": values})
            self._change(kind, picked, values)
        self.done += 1

    def to_the_end(self, log: DurableLog) -> None:
        """Go on until the log refuses."""
        while True:
            self.step(log)

    def to(self, done: int) -> World:
        """Go on, in the model alone, until ``done`` operations have happened."""
        while self.done < done:
            self.step()
        return self

    @classmethod
    def recover(cls, seed: int, recovered: Recovered) -> World:
        """The model as a buffer would build it from what was read back; its trajectories are checked on the way."""
        world = cls(seed)
        assert recovered.serials.tolist() == recovered.live.tolist()
        found = dict(zip(recovered.serials.tolist(), recovered.columns.trajectories(), strict=True))
        if recovered.mark is not None:
            world.values = dict(zip(recovered.live.tolist(), recovered.arrays["values"].tolist(), strict=True))
            world.next_serial, world.done = recovered.meta["next"], recovered.meta["op"] + 1
        for entry in recovered.entries:
            while world.done < entry.meta["op"] and world._next()[0] == "checkpoint":
                world.done += 1  # made after a reader had read the manifest: it changes nothing and leaves no frame
            assert entry.meta["op"] == world.done
            if entry.kind == "add":
                assert entry.serials is not None
                assert entry.columns is not None
                found |= dict(zip(entry.serials.tolist(), entry.columns.trajectories(), strict=True))
                world._add(entry.serials, entry.arrays["values"])
            else:
                world._change(entry.kind, entry.arrays["serials"], entry.arrays["values"])
            world.done += 1
        for serial in world.values:
            assert_same(found[serial], trajectory(serial))
        return world

    def assert_equals(self, other: World) -> None:
        """Same operations done, same trajectories in the same order, same values."""
        assert (self.done, self.next_serial) == (other.done, other.next_serial)
        assert list(self.values.items()) == list(other.values.items())

    def _next(self) -> tuple[str, np.random.Generator]:
        rng = np.random.default_rng((self.seed, self.done))
        return str(rng.choice(["add", "update", "remove", "checkpoint"], p=[0.5, 0.15, 0.2, 0.15])), rng

    def _live(self) -> np.ndarray[Any, Any]:
        return np.array(list(self.values), dtype=np.int64)

    def _arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        return {"values": np.array(list(self.values.values()), dtype=np.float64)}

    def _add(self, serials: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
        self.values |= dict(zip(serials.tolist(), values.tolist(), strict=True))
        self.next_serial = int(serials[-1]) + 1

    def _change(self, kind: str, serials: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
        for serial, value in zip(serials.tolist(), values.tolist(), strict=True):
            if kind == "update":
                self.values[serial] = value
            else:
                del self.values[serial]


def check(directory: Path, seed: int, done: int, mark: str | None = None) -> Recovered:
    """Read ``directory`` and compare it with the model after ``done`` operations."""
    recovered = DurableLog.read(directory, mark=mark)
    World.recover(seed, recovered).assert_equals(World(seed).to(done))
    return recovered
