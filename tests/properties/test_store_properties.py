"""What a buffer keeps after any history of calls, against a plain list of items that follows the rules one by one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper import Exponential, ReplayBuffer, TaskReplay, Trajectory, Turn
from freshper.errors import CapacityError, SamplingError
from freshper.replay.store.arena import Arena
from freshper.replay.store.columns import pack

Make = Callable[..., Trajectory]
TAUS = {"a": 3.0, "b": 7.0}
# Tasks have bases of their own, so that no two priorities of different tasks are equal but for rounding.
BASES = {"a": (0.0, 1.0, 2.0, 4.0), "b": (0.0, 1.3, 2.7, 5.9)}
IMAGES = (b"", b"x" * 40, b"y" * 90, b"z" * 200)


@dataclass
class Item:
    key: int
    parts: tuple[Trajectory, ...]  # the trajectories it is made of: of a turn the whole episode
    base: float
    version: int
    uses: int = 0

    @property
    def name(self) -> tuple[str, str]:
        return self.parts[0].task, self.parts[0].group

    def log_priority(self, now: int) -> float:
        if self.base == 0:
            return -math.inf
        return math.log(self.base) - (now - self.version) / TAUS[self.parts[0].task]


@dataclass
class Rules:
    """Settings of a buffer, and what is left by them."""

    capacity: int
    unit: str
    evict: str
    max_bytes: int | None
    max_uses: int | None
    max_age: int | None
    quota: float
    items: list[Item] = field(default_factory=list)  # oldest first
    now: int = 0

    def buffer(self, directory: Path | None = None) -> ReplayBuffer:
        tasks = {
            "a": TaskReplay(freshness=Exponential(TAUS["a"]), quota=self.quota),
            "b": TaskReplay(freshness=Exponential(TAUS["b"])),
        }
        names = ("capacity", "unit", "evict", "max_bytes", "max_uses", "max_age")
        return ReplayBuffer(
            **{name: getattr(self, name) for name in names}, eps=0.0, tasks=tasks, seed=1, directory=directory
        )

    def size(self, extra: Sequence[Trajectory] = ()) -> int:
        """Every trajectory once, every image once."""
        kept = {id(part): part for item in self.items for part in item.parts} | {id(part): part for part in extra}
        images = {image for part in kept.values() for image in part.images}
        return sum(map(cost, kept.values())) + sum(map(len, images))

    @property
    def oldest_taken(self) -> int:
        """The age beyond which an item is refused."""
        return 10**9 if self.max_age is None else self.max_age

    def expire(self) -> None:
        if self.max_age is not None:
            self.items = [item for item in self.items if self.now - item.version <= self.max_age]

    def evict_one(self, task: str | None) -> None:
        candidates = [item for item in self.items if task in (None, item.name[0])]
        if self.evict == "lowest":
            chosen = min(candidates, key=lambda item: item.log_priority(self.now))  # min keeps the first of equals
        else:
            chosen = candidates[0]
        if self.evict == "group":
            self.items = [item for item in self.items if item.name != chosen.name]
        else:
            self.items.remove(chosen)

    def fits(self, new: Sequence[Item]) -> bool:
        parts = {id(part): part for item in new for part in item.parts}.values()
        images = {image for part in parts for image in part.images}
        needed = sum(map(cost, parts)) + sum(map(len, images))
        in_a = sum(item.name[0] == "a" for item in new)
        return (
            len(new) <= self.capacity
            and in_a <= max(1, math.floor(self.quota * self.capacity + 1e-9))
            and (self.max_bytes is None or needed <= self.max_bytes)
        )

    def add(self, new: Sequence[Item]) -> None:
        self.expire()
        for task, limit in (("a", max(1, math.floor(self.quota * self.capacity + 1e-9))), ("b", self.capacity)):
            coming = sum(item.name[0] == task for item in new)
            while coming and sum(item.name[0] == task for item in self.items) + coming > limit:
                self.evict_one(task)
        while len(self.items) + len(new) > self.capacity:
            self.evict_one(None)
        extra = [part for item in new for part in item.parts]
        while self.max_bytes is not None and self.size(extra) > self.max_bytes:
            self.evict_one(None)
        self.items += new


def cost(trajectory: Trajectory) -> int:
    return int(Arena().cost(pack([trajectory]))[0])


class History:
    """A buffer and the rules that live through the same calls, compared after each."""

    def __init__(self, make: Make, path: Path, rules: Rules, *, durable: bool = False) -> None:
        self.make, self.path, self.rules, self.durable = make, path, rules, durable
        self.buffer = rules.buffer(path if durable else None)
        self.given: set[int] = set()

    def close(self) -> None:
        self.buffer.close()

    def episode(self, task: str, group: int, lag: int, numbers: tuple[int, int, int]) -> Trajectory:
        base, length, image = numbers
        shown = 1 if image else 0
        reward = BASES[task][base]
        return self.make(
            tokens=np.zeros(length + 3, dtype=np.int32),
            response_mask=[False] + [True] * (length + 2),
            behavior_logprobs=[0.0] + [-1.0] * (length + 2),
            turns=(Turn(0, 1, 2, reward, shown), Turn(2, 2, length + 3, 0.0))
            if length % 2
            else (Turn(0, 1, length + 3, reward, shown),),
            images=(IMAGES[image],) * shown,
            policy_version=max(
                0, self.rules.now - min(lag, 10**9 if self.rules.max_age is None else self.rules.max_age)
            ),
            task=task,
            group=f"{task}/{group}",
        )

    def add(self, jump: int, task: str, group: int, episodes: Sequence[tuple[int, tuple[int, int, int]]]) -> None:
        before = self.rules.now
        self.rules.now += jump
        flat = [self.episode(task, group + (self.rules.unit != "group") * at, *one) for at, one in enumerate(episodes)]
        new = self.items(flat)
        items: Any = [flat] if self.rules.unit == "group" else flat
        if not self.rules.fits(new):
            self.rules.now = before
            with pytest.raises(CapacityError):
                self.buffer.add(items, policy_version=before + jump)
            return
        keys = self.buffer.add(items, policy_version=self.rules.now).tolist()
        assert not self.given & set(keys)
        self.given |= set(keys)
        for item, key in zip(new, keys, strict=True):
            item.key = key
        self.rules.add(new)

    def items(self, flat: Sequence[Trajectory]) -> list[Item]:
        if self.rules.unit == "group":
            mean = sum(part.episode_return for part in flat) / len(flat)
            return [Item(-1, tuple(flat), mean, min(part.policy_version for part in flat))]
        if self.rules.unit == "turn":
            return [Item(-1, (one,), turn.reward, one.policy_version) for one in flat for turn in one.turns]
        return [Item(-1, (one,), one.episode_return, one.policy_version) for one in flat]

    def update(self, place: int, base: int) -> None:
        if self.rules.items:
            item = self.rules.items[place % len(self.rules.items)]
            item.base = BASES[item.name[0]][base]
            assert self.buffer.update_priorities([item.key], [item.base]).updated == 1

    def remove(self, places: Sequence[int]) -> None:
        gone = {self.rules.items[place % len(self.rules.items)].key for place in places if self.rules.items}
        unknown = min(self.given - {item.key for item in self.rules.items}, default=-1)
        result = self.buffer.remove([*gone, unknown])
        assert (result.updated, result.refused.tolist()) == (len(gone), [unknown])
        self.rules.items = [item for item in self.rules.items if item.key not in gone]

    def sample(self, jump: int, size: int, method: Any) -> None:
        least = size if method == "without_replacement" else 1
        now = self.rules.now + jump
        left = [item for item in self.rules.items if now - item.version <= self.rules.oldest_taken]
        if sum(item.base > 0 for item in left) < least:  # then the clock does not even move
            with pytest.raises(SamplingError):
                self.buffer.sample(size, policy_version=now, method=method)
            return
        self.rules.now = now
        self.rules.expire()
        self.drawn(self.buffer.sample(size, policy_version=now, method=method).keys.tolist())

    def drawable(self) -> int:
        return sum(item.base > 0 for item in self.rules.items)

    def drawn(self, keys: Sequence[int]) -> None:
        by_key = {item.key: item for item in self.rules.items}
        for key in keys:
            by_key[key].uses += 1
        most = self.rules.max_uses or math.inf
        self.rules.items = [item for item in self.rules.items if item.uses < most]

    def again(self, checkpoint: bool) -> None:
        """Go on with a buffer that was saved and loaded, or whose directory was closed and opened."""
        if self.durable:
            if checkpoint:
                self.buffer.checkpoint()
            self.buffer.close()
            self.buffer = ReplayBuffer.load(self.path, fsync="checkpoint")
            assert self.buffer.policy_version <= self.rules.now
            self.rules.now = self.buffer.policy_version
        else:
            self.buffer.save(self.path)
            self.buffer = ReplayBuffer.load(self.path)

    def check(self) -> None:
        rules, buffer, store = self.rules, self.buffer, self.buffer._core.store
        assert buffer.keys().tolist() == [item.key for item in rules.items]
        assert buffer.policy_version == rules.now
        assert buffer.nbytes == rules.size() <= (rules.max_bytes or math.inf)
        assert len(store.arena) == len({id(part) for item in rules.items for part in item.parts})
        assert store.counts.tolist() == [sum(item.name[0] == task for item in rules.items) for task in "ab"]
        assert buffer.drawable == self.drawable()
        slots = store.occupied()
        np.testing.assert_allclose(buffer._core.sampler.bases[slots], [item.base for item in rules.items], rtol=1e-15)
        if not self.durable:
            assert store.uses[slots].tolist() == [item.uses for item in rules.items]

    def agrees(self, calls: Sequence[tuple[Any, ...]]) -> bool:
        try:
            with mock.patch("os.fsync"):  # nothing has to survive here, and a busy disk takes its time
                for name, *arguments in calls:
                    getattr(self, name)(*arguments)
                    self.check()
        finally:
            self.close()
        return True


places = st.integers(0, 20)
numbers = st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 3))
calls = st.one_of(
    *[
        st.tuples(
            st.just("add"),
            st.integers(0, 3),
            st.sampled_from("ab"),
            st.integers(0, 2),
            st.lists(st.tuples(st.integers(0, 4), numbers), min_size=1, max_size=4),
        )
    ]
    * 3,
    st.tuples(st.just("update"), places, st.integers(0, 3)),
    st.tuples(st.just("remove"), st.lists(places, max_size=3)),
    st.tuples(
        st.just("sample"),
        st.integers(0, 3),
        st.integers(1, 6),
        st.sampled_from(["stratified", "systematic", "without_replacement"]),
    ),
    st.tuples(st.just("again"), st.booleans()),
)
common = {
    "capacity": st.integers(1, 9),
    "unit": st.sampled_from(["trajectory", "turn", "group"]),
    "evict": st.sampled_from(["fifo", "lowest", "group"]),
    "max_bytes": st.none() | st.integers(400, 3000),
    "quota": st.sampled_from([1.0, 0.6, 0.29]),
}
rules = st.builds(Rules, **common, max_uses=st.none() | st.integers(1, 5), max_age=st.none() | st.integers(0, 6))
# How often an item was drawn, and the time told by a draw, is not written down between checkpoints.
durable_rules = st.builds(Rules, **common, max_uses=st.none(), max_age=st.none())


@settings(deadline=None, derandomize=True, max_examples=250)
@given(rules, st.lists(calls, min_size=5, max_size=40))
def test_any_history_leaves_what_the_rules_leave(
    make_trajectory: Make, tmp_path_factory: pytest.TempPathFactory, chosen: Rules, history: list[tuple[Any, ...]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "store-properties"
    assert History(make_trajectory, path, chosen).agrees(history)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(durable_rules, st.lists(calls, min_size=1, max_size=20))
def test_any_history_is_there_again_when_a_directory_is_opened(
    make_trajectory: Make, tmp_path_factory: pytest.TempPathFactory, chosen: Rules, history: list[tuple[Any, ...]]
) -> None:
    path = tmp_path_factory.mktemp("durable")
    assert History(make_trajectory, path, chosen, durable=True).agrees(history)


@pytest.mark.parametrize("evict", ["fifo", "lowest", "group"])
@pytest.mark.parametrize("seed", range(3))
def test_a_long_history_leaves_what_the_rules_leave(
    make_trajectory: Make, tmp_path: Path, evict: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)

    def call() -> tuple[Any, ...]:
        match rng.choice(["add", "update", "remove", "sample", "again"], p=[0.5, 0.2, 0.08, 0.2, 0.02]):
            case "add":
                episodes = [
                    (int(rng.integers(0, 5)), tuple(rng.integers(0, 4, 3).tolist())) for _ in range(rng.integers(1, 5))
                ]
                return "add", int(rng.integers(0, 2)), "ab"[rng.integers(2)], int(rng.integers(3)), episodes
            case "update":
                return "update", int(rng.integers(99)), int(rng.integers(4))
            case "remove":
                return "remove", rng.integers(0, 99, 2).tolist()
            case "sample":
                return "sample", int(rng.integers(0, 2)), int(rng.integers(1, 6)), "stratified"
            case _:
                return "again", True

    unit = ("trajectory", "turn", "group")[seed]
    for chosen in (Rules(11, unit, evict, None, 9, 14, 0.6), Rules(23, unit, evict, 2500, None, None, 1.0)):
        assert History(make_trajectory, tmp_path / "buffer", chosen).agrees([call() for _ in range(150)])
