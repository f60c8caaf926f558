"""R22: one buffer, many threads, for half a minute; every field of an item carries its number."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from freshper import ReplayBuffer, StopReason, Trajectory, Turn
from freshper.errors import ClockError
from freshper.replay.draw.sum_tree import SumTree
from freshper.replay.freshness import Freshness, PowerLaw

DURATION = 30.0  # seconds
PATIENCE = 60.0
CAPACITY = 300


def base_of(number: int) -> float:
    """What the base priority of item ``number`` begins with; updates change its fraction only."""
    return 1.0 + number % 997


def logprob_of(number: int) -> float:
    return -0.25 * (1 + number % 7)


def item(number: int, version: int) -> Trajectory:
    """2 to 11 tokens, all of them ``number``."""
    length = 2 + number % 10
    mask = np.arange(length) > 0
    return Trajectory(
        tokens=np.full(length, number),
        response_mask=mask,
        behavior_logprobs=np.where(mask, logprob_of(number), 0.0),
        turns=(Turn(0, 1, length, base_of(number)),),
        stop_reason=StopReason.TERMINATED,
        success=number % 2 == 0,
        policy_version=version,
        task=f"task {number % 5}",
        group=f"group/{number}",
        seed=number,
    )


def own_return(trajectory: Trajectory) -> float:
    return trajectory.episode_return


def check_item(one: Trajectory, base: float) -> None:
    number = one.seed
    assert len(one.tokens) == 2 + number % 10
    assert np.all(one.tokens == number)
    assert np.all(one.behavior_logprobs[1:] == logprob_of(number))
    assert (one.task, one.group, one.success) == (f"task {number % 5}", f"group/{number}", number % 2 == 0)
    assert (one.turns[0].start, one.turns[0].end, one.episode_return) == (0, len(one.tokens), base_of(number))
    assert int(base) == base_of(number)


class Crowd:
    """Threads that repeat a piece of work until they are told to stop, or one of them fails."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self.rounds: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[int], None]) -> None:
        def repeat() -> None:
            try:
                while not self.stop.is_set():
                    work(self.rounds.get(name, 0))
                    self.rounds[name] = self.rounds.get(name, 0) + 1
            except BaseException as error:  # noqa: BLE001 - raised again by join
                self.errors.append(error)
                self.stop.set()

        self._threads.append(threading.Thread(target=repeat, name=name))
        self._threads[-1].start()

    def join(self, duration: float) -> None:
        self.stop.wait(duration)
        self.stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{thread.name} hangs"
        if self.errors:
            raise self.errors[0]


class World:
    """A buffer under a background refresh, and what its users know of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.decays: tuple[Freshness, ...] = (PowerLaw(20.0, 2.0), PowerLaw(50.0))
        self.buffer = ReplayBuffer(
            CAPACITY, priority=own_return, freshness=self.decays[0], alpha=0.8, refresh="background"
        )
        self.numbers: dict[int, int] = {}  # of every item ever added, by key
        self.versions: dict[int, int] = {}  # its policy version, by number
        self.written: list[dict[int, float]] = [{}, {}]  # by writer: the last value it wrote to each key
        self.added = self.refused = 0

    def add(self, _: int) -> None:
        version = self.buffer.policy_version
        items = [item(number, max(0, version - number % 30)) for number in range(self.added, self.added + 5)]
        self.versions |= {one.seed: one.policy_version for one in items}
        try:
            keys = self.buffer.add(items, policy_version=version)
        except ClockError:  # somebody has moved the clock meanwhile
            return
        assert not self.numbers.keys() & set(keys.tolist())
        self.numbers |= dict(zip(keys.tolist(), range(self.added, self.added + 5), strict=True))
        self.added += 5

    def sample(self, turn: int) -> None:
        version = turn + 40
        how: Any = {
            "toward": ("uniform", "freshness")[turn % 2],
            "method": ("stratified", "without_replacement")[turn % 2],
        }
        batch = self.buffer.sample(32, policy_version=version, beta=1.0, **how)
        assert np.all((batch.probabilities > 0) & (batch.probabilities <= 1))
        assert np.all(np.isfinite(batch.sampling_weights))
        assert batch.index_version <= version
        for at, one in enumerate(batch.trajectories):
            check_item(one, batch.base_priorities[at])
            assert batch.ages[at] == version - one.policy_version
            assert one.policy_version == self.versions[one.seed]
            known = self.numbers.get(int(batch.keys[at]))  # a new one may not be noted yet
            assert known in (None, one.seed)

    def update(self, writer: int, turn: int) -> None:
        """Each writer has its own keys, so that the last value of each is known."""
        keys = [key for key in self.buffer.keys()[-200:].tolist() if key % 2 == writer and key in self.numbers]
        fraction = (turn % 1000 + 1) / 1024
        values = [base_of(self.numbers[key]) + fraction for key in keys]
        refused = set(self.buffer.update_priorities(keys, values).refused.tolist())
        self.refused += len(refused)
        self.written[writer] |= {key: value for key, value in zip(keys, values, strict=True) if key not in refused}

    def save(self, _: int) -> None:
        self.buffer.save(self.path)
        loaded = ReplayBuffer.load(self.path, priority=own_return)
        assert len(loaded) == CAPACITY
        batch = loaded.sample(len(loaded), policy_version=loaded.policy_version, method="without_replacement")
        for one, base in zip(batch.trajectories, batch.base_priorities, strict=True):
            check_item(one, base)
        loaded.close()

    def look(self, turn: int) -> None:
        summary = self.buffer.summary()
        assert summary["items"] == summary["drawable"] == CAPACITY
        assert summary["index_version"] <= summary["policy_version"]
        assert abs(self.buffer.probabilities().sum() - 1) < 1e-12
        if turn % 40 == 39:
            self.buffer.set_freshness(self.decays[turn // 40 % 2])
            self.buffer.set_alpha((0.5, 0.8)[turn // 40 % 2])

    def check_end(self) -> None:
        buffer, core = self.buffer, self.buffer._core
        for _ in range(2):
            buffer.wait_for_refresh()
            buffer.sample(1, policy_version=buffer.policy_version)
        keys = buffer.keys()
        slots = core.store.find(keys)
        bases = dict(zip(keys.tolist(), core.sampler.bases[slots].tolist(), strict=True))
        written = self.written[0] | self.written[1]
        for key, base in bases.items():
            assert base == written.get(key, base_of(self.numbers[key]))
        index = core.sampler.indexes[0]
        for tree in index.sums.values():
            again = SumTree(CAPACITY)
            again.restore(tree.leaves(), tree.reference)
            assert tree.total == again.total
        ages = buffer.policy_version - core.sampler.versions[slots]
        weights = (np.array(list(bases.values())) * np.asarray(buffer.freshness(ages))) ** buffer.alpha
        np.testing.assert_allclose(buffer.probabilities(), weights / weights.sum(), rtol=1e-11)
        assert core.index_version == buffer.policy_version


def test_r22_threads_add_sample_update_refresh_save_and_look(tmp_path: Path) -> None:
    world = World(tmp_path / "buffer")
    while world.added < CAPACITY:
        world.add(0)
    crowd = Crowd()
    crowd.start("add", world.add)
    crowd.start("sample", world.sample)
    for writer in (0, 1):
        crowd.start(f"update {writer}", lambda turn, writer=writer: world.update(writer, turn))  # type: ignore[misc]
    crowd.start("save", world.save)
    crowd.start("look", world.look)
    crowd.join(DURATION)
    world.check_end()
    world.buffer.close()
    assert min(crowd.rounds.values()) >= 20, crowd.rounds
    assert len(crowd.rounds) == 6
    assert world.added > 2 * CAPACITY
    assert len(world.written[0]) > 50
    assert len(world.written[1]) > 50
