"""Save and load, whatever the settings: bit for bit the same next draws, on the same counters, for either index."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from freshper import (
    AutoTau,
    Exponential,
    Floored,
    NoDecay,
    PowerLaw,
    ReplayBuffer,
    SampledBatch,
    TaskReplay,
    Trajectory,
)
from freshper.replay.disk import journal

Make = Callable[..., Trajectory]
FACTS = ("keys", "probabilities", "base_priorities", "sampling_weights", "ages", "uses", "item_offsets")


def halving(ages: Any) -> Any:
    return 0.5 ** (np.asarray(ages) / 8.0)


DECAYS: dict[str, Any] = {
    "none": NoDecay(),
    "exponential": Exponential(6.0),
    "ending": Exponential(6.0, max_age=30),
    "power": PowerLaw(4.0, 1.2),
    "floor": Floored(Exponential(3.0), 0.05),
    "function": halving,
    "auto": AutoTau(tau=40.0, memory=256),
}
UNITS = ("trajectory", "turn", "group")
METHODS = ("stratified", "systematic", "without_replacement")
EVICTIONS = ("fifo", "lowest", "group")
TOWARD = ("uniform", "freshness")
# Every pair of decay and unit; tasks, methods and evictions take turns so that each meets every decay and unit.
COMBINATIONS = [
    (
        decay,
        unit,
        number % 2 == 1,
        METHODS[(number + number // 3) % 3],
        EVICTIONS[(number // 3) % 3],
        TOWARD[number % 2],
    )
    for number, (decay, unit) in enumerate(itertools.product(DECAYS, UNITS))
]


def made(decay: str, unit: Any, tasks: bool, evict: Any, **settings: Any) -> ReplayBuffer:
    by_task = {"x": TaskReplay(DECAYS[decay], max_share=0.8), "y": TaskReplay(Exponential(11.0), share=0.3, quota=0.5)}
    return ReplayBuffer(
        24,
        freshness=NoDecay() if tasks else DECAYS[decay],
        tasks=by_task if tasks else None,
        unit=unit,
        evict=evict,
        alpha=0.8,
        max_uses=60,
        max_age=45,
        max_bytes=9000,
        seed=3,
        **settings,
    )


class Driver:
    """Does the same to any buffer that it is given: adds, updates, removals, draws, measurements."""

    def __init__(self, make: Make, method: str, toward: str, seed: int) -> None:
        self.make, self.method, self.toward = make, method, toward
        self.rng = np.random.default_rng(seed)
        self.version = 0

    def go(self, rounds: int, *buffers: ReplayBuffer) -> list[tuple[SampledBatch, ...]]:
        drawn = []
        for round_ in range(rounds):
            self.version += int(self.rng.integers(0, 3))
            items = self.items(round_)
            values, place = self.rng.exponential(size=2), int(self.rng.integers(99))
            for buffer in buffers:
                given: Any = [items] if buffer.unit == "group" else items
                buffer.add(given, policy_version=self.version)
                keys = buffer.keys()
                buffer.update_priorities(np.take(keys, [place, place + 1], mode="wrap"), values)
                if round_ % 7 == 3 and len(keys) > 12:
                    buffer.remove([keys[place % len(keys)]])
            drawn.append(tuple(self.draw(buffer) for buffer in buffers))
            for buffer, batch in zip(buffers, drawn[-1], strict=True):
                noise = np.random.default_rng(round_).normal(size=len(batch.columns))
                buffer.observe(batch, noise * np.sqrt(0.01 * batch.per_trajectory(batch.ages)))
        return drawn

    def draw(self, buffer: ReplayBuffer, size: int = 8) -> SampledBatch:
        method: Any = self.method
        count = min(size, buffer.drawable) if method == "without_replacement" else size
        toward: Any = self.toward
        return buffer.sample(count, policy_version=self.version, beta=0.5, toward=toward, method=method)

    def items(self, round_: int) -> list[Trajectory]:
        task = "xy"[round_ % 2]
        rewards = self.rng.choice([0.0, 0.5, 1.0, 3.0], self.rng.integers(1, 4))
        return [
            self.make(float(reward), self.version - round_ % 3 if self.version > 2 else 0, task=task, group=f"{round_}")
            for reward in rewards
        ]


def same(batches: tuple[SampledBatch, ...]) -> None:
    mine, theirs = batches
    for name in FACTS:
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)
    np.testing.assert_array_equal(mine.columns.tokens, theirs.columns.tokens)
    np.testing.assert_array_equal(mine.columns.seeds, theirs.columns.seeds)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda parts: "-".join(map(str, parts)))
def test_r21_the_next_thousand_draws_are_the_same_bit_for_bit(
    make_trajectory: Make, tmp_path: Path, combination: tuple[str, str, bool, str, str, str]
) -> None:
    decay, unit, tasks, method, evict, toward = combination
    buffer = made(decay, unit, tasks, evict)
    driver = Driver(make_trajectory, method, toward, 7)
    driver.go(40, buffer)
    buffer.save(tmp_path / "b")
    freshness: Any = None if decay != "function" else {"x": halving} if tasks else halving
    loaded = ReplayBuffer.load(tmp_path / "b", freshness=freshness)
    assert loaded.summary() == buffer.summary()
    assert loaded.drift_by_age() == buffer.drift_by_age() != []
    assert [auto.state() for auto in loaded._core.autos.values()] == [a.state() for a in buffer._core.autos.values()]
    given = set(range(int(buffer.keys().max()) + 1))
    for batches in driver.go(125, buffer, loaded):
        same(batches)
    assert loaded.summary() == buffer.summary()
    assert loaded.freshness_of("x" if tasks else None) == buffer.freshness_of("x" if tasks else None)
    np.testing.assert_array_equal(loaded.keys(), buffer.keys())
    assert not given & set(buffer.keys().tolist()), "after 125 rounds everything is new"


@pytest.mark.parametrize("unit", UNITS)
def test_a_plain_copy_draws_a_thousand_times_alike(make_trajectory: Make, tmp_path: Path, unit: str) -> None:
    """Nothing but draws, one at a time: a random generator that is out of step by one shows at once."""
    buffer = ReplayBuffer(50, unit=unit, freshness=Exponential(9.0), seed=2)  # type: ignore[arg-type]
    Driver(make_trajectory, "stratified", "uniform", 1).go(30, buffer)
    buffer.save(tmp_path / "b")
    loaded = ReplayBuffer.load(tmp_path / "b")
    keys = [[int(each.sample(1, policy_version=99).keys[0]) for _ in range(1000)] for each in (buffer, loaded)]
    assert keys[0] == keys[1]
    assert len(set(keys[0])) > 10


TWIN = """
import sys
import numpy as np
sys.path[:0] = {places!r}
from conftest import _trajectory
from test_cases_storage import METHODS, Driver, made
from freshper import ReplayBuffer

path, mode, compiled = sys.argv[1:]
for method in METHODS:
    if mode == "save":
        buffer = made("exponential", "trajectory", True, "lowest")
        Driver(_trajectory, method, "freshness", 7).go(30, buffer)
        buffer.save(path + method)
    buffer = ReplayBuffer.load(path + method)
    assert buffer._core.sampler.indexes[0].tree.compiled == (compiled == "1")
    driver = Driver(_trajectory, method, "freshness", 8)
    driver.version = 200
    batches = [batch for batch, in driver.go(45, buffer)]
    np.savez(path + method + mode, **{{
        name: np.concatenate([getattr(batch, name) for batch in batches])
        for name in ("keys", "probabilities", "sampling_weights", "ages")
    }})
"""


@pytest.mark.parametrize("first", ["0", "1"])
def test_numpy_and_the_compiled_twin_go_on_with_each_others_files(tmp_path: Path, first: str) -> None:
    pytest.importorskip("numba")
    here, script = Path(__file__).parent, tmp_path / "twin.py"
    script.write_text(TWIN.format(places=[str(here), str(here.parents[1])]))
    for mode, compiled in (("save", first), ("load", "10"[int(first)])):
        environment = os.environ | {"FRESHPER_COMPILED": compiled}
        command = [sys.executable, script, str(tmp_path / "b"), mode, compiled]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    draws = 0
    for method in METHODS:
        with np.load(tmp_path / f"b{method}save.npz") as mine, np.load(tmp_path / f"b{method}load.npz") as theirs:
            draws += len(mine["keys"])
            for name in mine.files:
                np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
    assert draws > 1000


R32 = """
import resource
import sys
import numpy as np
from freshper import ReplayBuffer, Trajectory, Turn, StopReason

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

mask = np.array([False] * 4 + [True] * 6)
parts = dict(tokens=np.arange(10), response_mask=mask, behavior_logprobs=-1.0 * mask, turns=(Turn(0, 4, 10, 1.0),),
             stop_reason=StopReason.TERMINATED, success=True, task="t", seed=0)
pool = [Trajectory(**parts, policy_version=0, group=f"g{n}") for n in range(2000)]
buffer = ReplayBuffer(1000, evict=sys.argv[2], max_age=10**9, max_bytes=10**7)
total, marks = int(sys.argv[1]), []
for start in range(0, total, 500):
    buffer.add(pool[start % 2000 : start % 2000 + 500], policy_version=start)
    buffer.sample(4, policy_version=start)
    if start % (total // 10) == 0:
        marks.append(rss())
assert len(buffer) == 1000
print(*marks)
"""


@pytest.mark.parametrize(
    ("total", "evict"),
    [(200_000, "fifo"), (15_000, "lowest"), (50_000, "group"), pytest.param(10**6, "fifo", marks=pytest.mark.slow)],
)
def test_r32_memory_stays_flat_under_churn(tmp_path: Path, total: int, evict: str) -> None:
    """RSS after the first tenth of the adds, against every later tenth: 2 MiB apart at most."""
    script = tmp_path / "churn.py"
    script.write_text(R32)
    done = subprocess.run([sys.executable, script, str(total), evict], capture_output=True, text=True, check=True)
    marks = np.array(done.stdout.split(), dtype=np.int64)
    assert len(marks) == 10
    assert marks[1:].max() - marks[1] < 2 << 20, marks


def test_a_file_saved_while_others_add_is_of_one_moment(make_trajectory: Make, tmp_path: Path) -> None:
    """Items come in blocks of 10 with a version and a seed of their own, and base = seed + 1: each file is whole."""
    buffer = ReplayBuffer(40, priority=lambda item: float(item.seed + 1), max_uses=30)
    blocks = [[make_trajectory(version=n, seed=n)] * 10 for n in range(500)]
    stop = threading.Event()
    failures: list[Exception] = []

    def work(change: Callable[[int], object]) -> None:
        try:
            for number in itertools.count():
                if stop.is_set():
                    return
                change(number)
        except (ValueError, RuntimeError, LookupError, TypeError) as error:  # has to reach the test
            failures.append(error)

    changes: list[Callable[[int], object]] = [
        lambda number: buffer.add(blocks[min(number, 499)], policy_version=500),
        lambda _: len(buffer) > 20 and buffer.sample(5, policy_version=500),
    ]
    threads = [threading.Thread(target=work, args=(change,)) for change in changes]
    for thread in threads:
        thread.start()
    try:
        for _ in range(25):
            buffer.save(tmp_path / "b")
            loaded = ReplayBuffer.load(tmp_path / "b", priority=buffer.priority)
            slots = loaded._core.store.occupied()
            columns = loaded._core.store.read(slots)[0]
            np.testing.assert_array_equal(loaded._core.sampler.bases[slots], columns.seeds + 1.0)
            np.testing.assert_array_equal(loaded._core.sampler.versions[slots], columns.policy_versions)
            assert (np.diff(columns.seeds) >= 0).all()
            counters = loaded.summary()["counters"]
            assert counters["added"] - counters["evicted"] - counters["used_up"] == len(slots)
            assert counters["added"] % 10 == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_facts_of_a_save_are_of_the_moment_of_the_call(make_buffer: Any, make_trajectory: Make, tmp_path: Path) -> None:
    """Another thread goes on as soon as the state is taken, while it is being written."""
    buffer = make_buffer([1.0, 2.0, 3.0])
    buffer.save(tmp_path / "before")
    write = journal.write_snapshot

    def late(path: Path, snapshot: journal.Snapshot) -> None:
        buffer.add([make_trajectory()] * 2, policy_version=5)
        buffer.sample(2, policy_version=6)
        buffer.remove(buffer.keys()[:1])
        write(path, snapshot)

    with mock.patch.object(journal, "write_snapshot", late):
        buffer.save(tmp_path / "after")
    assert (tmp_path / "after").read_bytes() == (tmp_path / "before").read_bytes()
