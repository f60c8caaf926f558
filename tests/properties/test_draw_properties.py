"""Static keys, recomputing before a draw and in the background: one distribution, beside a slow reference."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from freshper import Exponential, NoDecay, ReplayBuffer, Trajectory
from freshper.errors import ConfigError
from freshper.replay.draw.sampler import PrioritySampler
from freshper.replay.freshness import Floored, Freshness, PowerLaw

Make = Callable[..., Trajectory]
PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)
CAPACITY = 7


def own_return(trajectory: Trajectory) -> float:
    return trajectory.episode_return


@dataclass(frozen=True)
class Plain:
    """A decay as a function: what it does is not said by a rate, so it is recomputed."""

    decay: Freshness

    def __call__(self, ages: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(self.decay(ages), dtype=np.float64)


class Reference:
    """(b f(age))^alpha / sum, item by item in extended precision; the oldest item goes first."""

    def __init__(self, freshness: Freshness, alpha: float) -> None:
        self.freshness, self.alpha = freshness, alpha
        self.items: list[tuple[int, float, int]] = []  # key, base, version

    def add(self, keys: Iterable[int], bases: Iterable[float], versions: Iterable[int]) -> None:
        self.items += zip(keys, bases, versions, strict=True)
        self.items = self.items[-CAPACITY:]

    def update(self, keys: Sequence[int], bases: Sequence[float]) -> None:
        last = dict(zip(keys, bases, strict=True))
        self.items = [(key, last.get(key, base), version) for key, base, version in self.items]

    def remove(self, keys: Sequence[int]) -> None:
        self.items = [item for item in self.items if item[0] not in keys]

    def weight(self, base: float, age: int) -> np.longdouble:
        rate, max_age = getattr(self.freshness, "rate", None), getattr(self.freshness, "max_age", None)
        if rate is None:
            fresh = np.longdouble(np.asarray(self.freshness(np.array([age])))[0])
        else:
            fresh = np.exp(-np.longdouble(age) * np.longdouble(rate)) * (max_age is None or age <= max_age)
        whole = np.longdouble(base) * fresh
        return whole**self.alpha if whole > 0 else np.longdouble(0)

    def probabilities(self, now: int) -> list[float]:
        weights = [self.weight(base, now - version) for _, base, version in self.items]
        total = sum(weights)
        return [float(weight / total) if total else 0.0 for weight in weights]


class Ways:
    """The same history in a buffer of static keys, one that recomputes, and one that does so in the background."""

    def __init__(self, make: Make, decay: Freshness, alpha: float) -> None:
        self.make, self.now = make, 0
        self.reference = Reference(decay, alpha)
        self.buffers = [
            ReplayBuffer(CAPACITY, priority=own_return, freshness=freshness, alpha=alpha, refresh=refresh)
            for freshness, refresh in ((decay, "sync"), (Plain(decay), "sync"), (Plain(decay), "background"))
        ]

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()

    def keys_of(self, places: Sequence[int]) -> list[int]:
        return [self.reference.items[place % len(self.reference.items)][0] for place in places]

    def add(self, parts: Sequence[tuple[float, int]]) -> None:
        versions = [max(0, self.now - lag) for _, lag in parts]
        items = [self.make(base, version) for (base, _), version in zip(parts, versions, strict=True)]
        keys = [buffer.add(items, policy_version=self.now).tolist() for buffer in self.buffers]
        assert keys[0] == keys[1] == keys[2]
        self.reference.add(keys[0], [base for base, _ in parts], versions)

    def update(self, changes: Sequence[tuple[int, float]]) -> None:
        if self.reference.items:
            keys, bases = self.keys_of([place for place, _ in changes]), [base for _, base in changes]
            for buffer in self.buffers:
                assert buffer.update_priorities(keys, bases).refused.size == 0
            self.reference.update(keys, bases)

    def remove(self, places: Sequence[int]) -> None:
        if self.reference.items:
            keys = self.keys_of(places)
            for buffer in self.buffers:
                buffer.remove(keys)
            self.reference.remove(keys)

    def advance(self, jump: int) -> None:
        self.now += jump

    def check(self, toward: Any, method: Any) -> None:
        want = self.reference.probabilities(self.now)
        if not any(want):
            return
        possible = np.count_nonzero(want) if method == "without_replacement" else 9
        batches = []
        for buffer in self.buffers:
            for _ in range(2):  # a background refresh is asked for by the first draw, and the second one has it
                batch = buffer.sample(possible, policy_version=self.now, beta=0.7, toward=toward, method=method)
                buffer.wait_for_refresh()
            assert batch.index_version == self.now or buffer is self.buffers[2]
            batches.append(buffer.sample(possible, policy_version=self.now, beta=0.7, toward=toward, method=method))
            assert batches[-1].index_version == self.now
            assert buffer.keys().tolist() == [key for key, _, _ in self.reference.items]
            np.testing.assert_allclose(buffer.probabilities(), want, rtol=1e-11, atol=1e-290)
            assert buffer.drawable == np.count_nonzero(want)
            assert math.fsum(buffer.probabilities()) == pytest.approx(1.0, abs=1e-13)
        for other in batches[1:]:  # the same random numbers: the same draw, but for a border within rounding
            np.testing.assert_array_equal(other.keys, batches[0].keys)
            np.testing.assert_allclose(other.probabilities, batches[0].probabilities, rtol=1e-9)
            np.testing.assert_allclose(other.sampling_weights, batches[0].sampling_weights, rtol=1e-9)
            np.testing.assert_array_equal(other.ages, batches[0].ages)

    def agree(self, calls: Sequence[tuple[Any, ...]], ways: Sequence[tuple[Any, Any]]) -> bool:
        for at, (name, argument) in enumerate(calls):
            getattr(self, name)(argument)
            self.check(*ways[at % len(ways)])
        return True


bases = st.sampled_from([0.0, 1e-6, 0.1, 1.0, 11.0]) | st.floats(1e-3, 20.0)
lags = st.sampled_from([0, 1, 3, 30])
calls = st.one_of(
    st.tuples(st.just("add"), st.lists(st.tuples(bases, lags), min_size=1, max_size=3)),
    st.tuples(st.just("update"), st.lists(st.tuples(st.integers(0, 6), bases), min_size=1, max_size=3)),
    st.tuples(st.just("remove"), st.lists(st.integers(0, 6), min_size=1, max_size=2)),
    st.tuples(st.just("advance"), st.sampled_from([1, 2, 7, 40])),
)
methods = st.sampled_from(["stratified", "systematic", "without_replacement"])
ways = st.lists(st.tuples(st.sampled_from(["uniform", "freshness"]), methods), min_size=1, max_size=4)
decays = st.sampled_from(
    [NoDecay(), Exponential(4.0), Exponential(500.0), Exponential(9.0, max_age=12), Exponential(50.0, max_age=0)]
)


@PROPERTY
@given(decays, st.sampled_from([0.0, 0.6, 1.0]), st.lists(calls, min_size=1, max_size=14), ways)
def test_static_keys_and_both_refreshes_are_one_distribution(
    make_trajectory: Make, decay: Freshness, alpha: float, history: list[Any], kinds: list[Any]
) -> None:
    world = Ways(make_trajectory, decay, alpha)
    try:
        assert world.agree([("add", [(1.0, 0), (3.0, 0), (0.5, 0)]), *history], kinds)
    finally:
        world.close()


@pytest.mark.parametrize("decay", [Exponential(6.0), Exponential(20.0, max_age=25), NoDecay()])
def test_they_stay_one_over_a_long_history(make_trajectory: Make, decay: Freshness) -> None:
    rng = np.random.default_rng(3)
    history: list[Any] = []
    for _ in range(150):
        match rng.choice(["add", "update", "remove", "advance"], p=[0.35, 0.3, 0.05, 0.3]):
            case "add":
                history.append(("add", [(float(rng.exponential()), int(rng.integers(0, 9)))]))
            case "update":
                history.append(("update", [(int(rng.integers(0, 7)), float(rng.exponential()))]))
            case "remove":
                history.append(("remove", [int(rng.integers(0, 7))]))
            case _:
                history.append(("advance", int(rng.integers(1, 12))))
    world = Ways(make_trajectory, decay, 0.6)
    try:
        assert world.agree(history, [("freshness", "stratified"), ("uniform", "without_replacement")])
    finally:
        world.close()


ALL = st.sampled_from(
    [
        NoDecay(),
        Exponential(3.0),
        Exponential(500.0),
        Exponential(30.0, max_age=20),
        PowerLaw(5.0, 1.5),
        Floored(Exponential(4.0), 0.01),
        Plain(Exponential(8.0)),
    ]
)
settings_changes = st.lists(
    st.tuples(ALL, st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.0]), st.booleans(), st.integers(0, 30)),
    min_size=1,
    max_size=6,
)


def probabilities(buffer: ReplayBuffer) -> NDArray[np.float64]:
    buffer.sample(1, policy_version=buffer.policy_version)
    return buffer.probabilities()


@PROPERTY
@given(ALL, st.lists(st.tuples(bases, st.integers(0, 40)), min_size=1, max_size=CAPACITY), settings_changes)
def test_a_live_change_of_tau_and_alpha_equals_a_fresh_buffer(
    make_trajectory: Make, first: Freshness, parts: list[tuple[float, int]], changes: list[Any]
) -> None:
    """And goes on like one: bases are never forgotten, whatever alpha and ages did to the weights before."""
    parts = [(9.0, 40), *parts][:CAPACITY]
    buffer = ReplayBuffer(CAPACITY, priority=own_return, freshness=first, alpha=0.6)
    buffer.add([make_trajectory(base, version) for base, version in parts], policy_version=40)
    now = 40
    for freshness, alpha, alpha_first, jump in changes:
        for part in (0, 1):
            if (part == 0) == alpha_first:
                buffer.set_alpha(alpha)
            else:
                buffer.set_freshness(freshness)
        assert (buffer.alpha, buffer.freshness) == (alpha, freshness)
        fresh = ReplayBuffer(CAPACITY, priority=own_return, freshness=freshness, alpha=alpha)
        fresh.add([make_trajectory(base, version) for base, version in parts], policy_version=now)
        reference = Reference(freshness, alpha)
        reference.add(range(len(parts)), *zip(*parts, strict=True))
        if any(want := reference.probabilities(now)):
            np.testing.assert_allclose(probabilities(buffer), want, rtol=1e-11, atol=1e-290)
            np.testing.assert_allclose(probabilities(buffer), probabilities(fresh), rtol=1e-12, atol=1e-290)
        changed = float(now)
        buffer.update_priorities(buffer.keys()[-1:], [changed])
        parts[-1] = (changed, parts[-1][1])
        now += jump
        buffer.add([], policy_version=now)
    core = buffer._core
    np.testing.assert_array_equal(core.sampler.bases[core.store.occupied()], [base for base, _ in parts])


@pytest.mark.parametrize(
    ("change", "bad"),
    [
        ("set_alpha", -0.1),
        ("set_alpha", math.nan),
        ("set_alpha", 1e7),
        ("set_freshness", "exponential"),
        ("set_freshness", lambda ages: 1.0 + ages),
        ("set_freshness", lambda ages: np.where(ages == 33, np.nan, 1.0)),  # wrong only at an age that is there
    ],
)
def test_a_change_that_is_refused_changes_nothing(
    make_buffer: Callable[..., ReplayBuffer], everything: Callable[[ReplayBuffer], bytes], change: str, bad: Any
) -> None:
    buffer = make_buffer([1.0, 2.0, 0.0], [0, 7, 40], freshness=Exponential(9.0), alpha=0.6)
    buffer.sample(5, policy_version=40, beta=1.0, toward="freshness")
    before = everything(buffer)
    with pytest.raises(ConfigError):
        getattr(buffer, change)(bad)
    assert everything(buffer) == before


@pytest.mark.parametrize("start", [0, 10**12])
def test_r18_the_clock_is_exact_over_ten_million_updates(start: int) -> None:
    """In steps of 100 with an item at every thousandth: then all of them against extended precision."""
    sampler = PrioritySampler(64, Exponential(50_000.0), 0.6, 0)
    versions, bases_now = np.zeros(64, dtype=np.int64), np.zeros(64)
    rng = np.random.default_rng(0)
    for count, now in enumerate(range(start, start + 10**7 + 1, 100)):
        sampler.advance(now)
        if count % 1000 == 0:
            slot = np.array([count // 1000 % 64])
            versions[slot], bases_now[slot] = now, rng.exponential()
            sampler.put(slot, bases_now[slot], versions[slot])
        elif count % 10 == 0 and count > 64_000:
            slot = rng.integers(0, 64, 1)
            bases_now[slot] = rng.exponential()
            sampler.set_bases(slot, bases_now[slot])
    assert sampler.now == start + 10**7
    ages = (sampler.now - versions).astype(np.longdouble)
    weights = (bases_now.astype(np.longdouble) * np.exp(-ages / 50_000)) ** np.longdouble(0.6)
    got = sampler.probabilities(np.arange(64))
    np.testing.assert_allclose(got, (weights / weights.sum()).astype(np.float64), rtol=1e-12)
