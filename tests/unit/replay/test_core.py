"""The parts of a buffer together: whatever fails, on the way in or out, leaves everything as it was."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshper import AutoTau, Exponential, NoDecay, ReplayBuffer, TaskReplay, Trajectory
from freshper.errors import CapacityError, ConfigError, SamplingError
from freshper.replay.store.arrivals import arrive

Make = Callable[..., Trajectory]
Everything = Callable[[ReplayBuffer], bytes]


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class Stubborn:
    """f(age) = 1 / (1 + age), but at ages from ``end`` to 99 it is no freshness."""

    def __init__(self, end: int) -> None:
        self.end = end

    def __call__(self, ages: Any) -> Any:
        ages = np.asarray(ages)
        return np.where((ages >= self.end) & (ages < 100), np.nan, 1 / (1.0 + ages))


SETTINGS: list[dict[str, Any]] = [
    {"evict": "fifo"},
    {"evict": "lowest", "freshness": Exponential(3.0)},
    {"evict": "group", "max_age": 6},
    {"evict": "lowest", "unit": "turn", "max_bytes": 1500},
    {"evict": "lowest", "max_age": 3, "tasks": {"test": TaskReplay(Exponential(2.0), quota=0.5)}},
]


def filled(make: Make, settings: dict[str, Any]) -> ReplayBuffer:
    buffer = ReplayBuffer(4, **settings)
    for version in range(4):
        buffer.add([make(float(version % 3), version, group=f"g{version % 2}")], policy_version=version)
    return buffer


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_an_add_that_cannot_be_written_down_changes_nothing(
    make_trajectory: Make, everything: Everything, settings: dict[str, Any], error: BaseException
) -> None:
    """``write`` is told the truth about what would have happened, and raises."""
    buffer, other = filled(make_trajectory, settings), filled(make_trajectory, settings)
    for one in (buffer, other):
        one.set_alpha(0.6)  # all leaves are recomputed
    before = everything(buffer)
    told = []

    def write(done: Any) -> None:
        told.append({name: array.tolist() for name, array in done.items()})
        raise error

    arrivals = arrive(
        [make_trajectory(5.0, 7)],
        9,
        unit=buffer.unit,
        priority="reward",
        eps=0.1,
        owners=buffer._core.owners,
    )
    for _ in range(2):
        with pytest.raises(type(error)):
            buffer._core.add(arrivals, 9, write)
        assert everything(buffer) == before
        assert everything(buffer) == everything(other)
        assert (buffer.nbytes, len(buffer._core.store.arena)) == (other.nbytes, len(other._core.store.arena))
    gone = set(buffer.keys().tolist())
    keys = buffer.add([make_trajectory(5.0, 7)], policy_version=9)
    assert told[0] == told[1]
    assert told[0]["keys"] == keys.tolist()
    gone -= set(buffer.keys().tolist())
    assert set(told[0]["evicted"]) <= gone
    assert len(gone) - len(told[0]["evicted"]) == buffer.summary()["counters"]["expired"]


def test_a_decay_with_an_end_gives_the_same_chances_after_a_failed_add(make_trajectory: Make) -> None:
    """Its horizon had moved: what is beyond it can be drawn again. Equal, though no longer bit for bit."""
    buffer = ReplayBuffer(4, freshness=Exponential(2.0, max_age=4))
    buffer.add([make_trajectory(1.0, version) for version in (0, 2, 5)], policy_version=5)
    before = buffer.probabilities()
    for index in buffer._core.sampler.indexes:
        assert index.keying.horizon == 1
    arrivals = _arrivals(make_trajectory, 9)
    with pytest.raises(OSError, match="No space"):
        buffer._core.add(arrivals, 9, no_space)
    assert buffer.policy_version == 5
    np.testing.assert_allclose(buffer.probabilities(), before, rtol=1e-14)
    buffer.add([], policy_version=9)
    np.testing.assert_array_equal(buffer.probabilities() > 0, [False, False, True])


def _arrivals(make: Make, version: int) -> Any:
    return arrive([make(2.0, version)], version, unit="trajectory", priority="reward", eps=0.0, owners=None)


def test_an_add_that_cannot_be_spilled_changes_nothing(
    make_trajectory: Make, everything: Everything, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = ReplayBuffer(4, ram_bytes=0, spill_directory=tmp_path / "spill")
    buffer.add([make_trajectory(seed=seed) for seed in range(4)], policy_version=0)
    before = everything(buffer)
    monkeypatch.setattr("freshper.replay.store.arena.Arena._make_room", _full)
    with pytest.raises(CapacityError, match="disk is full"):
        buffer.add([make_trajectory(seed=9)], policy_version=3)
    monkeypatch.undo()
    assert everything(buffer) == before
    assert {item.seed for item in buffer.sample(99, policy_version=0).trajectories} == {0, 1, 2, 3}


def _full(*_: Any) -> None:
    raise CapacityError("the disk is full")


def test_a_freshness_that_fails_for_a_new_item_refuses_the_add(make_trajectory: Make, everything: Everything) -> None:
    buffer = ReplayBuffer(2, freshness=Stubborn(50))
    buffer.add([make_trajectory(version=60), make_trajectory(version=61)], policy_version=61)
    buffer.sample(1, policy_version=61)
    before = everything(buffer)
    with pytest.raises(ConfigError, match="is nan at age 61"):
        buffer.add([make_trajectory(version=0)], policy_version=61)
    assert everything(buffer) == before
    buffer.add([make_trajectory(version=30)], policy_version=61)


def test_a_freshness_that_fails_for_a_draw_refuses_it(make_trajectory: Make, everything: Everything) -> None:
    buffer = ReplayBuffer(2, freshness=Stubborn(50))
    buffer.add([make_trajectory(version=10)], policy_version=20)
    buffer.sample(3, policy_version=20)
    before = everything(buffer)
    with pytest.raises(ConfigError, match="is nan at age 60"):
        buffer.sample(3, policy_version=70)
    assert everything(buffer) == before
    buffer.sample(3, policy_version=30)


def test_a_freshness_that_fails_is_not_taken(make_trajectory: Make, everything: Everything) -> None:
    buffer = ReplayBuffer(2)
    buffer.add([make_trajectory(version=0)], policy_version=60)
    before = everything(buffer)
    with pytest.raises(ConfigError, match="is nan at age 60"):
        buffer.set_freshness(Stubborn(50))
    assert everything(buffer) == before
    assert buffer.freshness == NoDecay()
    told: list[Any] = []
    with pytest.raises(ConfigError, match="is nan at age 60"):
        buffer._core.change(0, Stubborn(50), lambda *change: told.append(change))
    assert told == []  # it is not written down either
    buffer._core.change(0, Exponential(2.0), lambda *change: told.append((*change, buffer.freshness)))
    assert told == [(0, Exponential(2.0), NoDecay())]


@pytest.mark.parametrize(("method", "size"), [("stratified", 1), ("without_replacement", 3)])
def test_an_impossible_draw_leaves_no_trace(make_buffer: Any, everything: Everything, method: Any, size: int) -> None:
    buffer = make_buffer([0.0, 0.0] if size == 1 else [1.0, 2.0])
    before = everything(buffer)
    with pytest.raises(SamplingError, match=f"a draw of {size}"):
        buffer.sample(size, policy_version=7, method=method)
    assert everything(buffer) == before


@pytest.mark.parametrize(("part", "limit"), [(0.29, 29), (0.57, 57), (0.5, 50), (0.999, 99), (1.0, 100), (1e-9, 1)])
def test_a_quota_is_rounded_down_but_not_by_the_rounding_of_floats(
    make_trajectory: Make, part: float, limit: int
) -> None:
    buffer = ReplayBuffer(100, tasks={"test": TaskReplay(quota=part)})
    for _ in range(101):
        buffer.add([make_trajectory()], policy_version=0)
    assert len(buffer) == limit


def drift(buffer: ReplayBuffer, rng: np.random.Generator, version: int) -> tuple[Any, ...]:
    """An update on 64 trajectories whose divergence grows by 0.01 nats a version."""
    batch = buffer.sample(64, policy_version=version)
    ages = batch.per_trajectory(batch.ages)
    return buffer.observe(batch, rng.normal(-0.01 * ages, np.sqrt(0.02 * ages)))


def test_a_tau_that_cannot_be_written_down_is_not_taken(make_trajectory: Make, everything: Everything) -> None:
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer(64, freshness=AutoTau(tau=500.0))
    buffer.add([make_trajectory(version=version) for version in range(64)], policy_version=64)
    for _ in range(3):
        assert drift(buffer, rng, 70) == ()
    failed = 0
    core = buffer._core
    for _ in range(40):
        batch = buffer.sample(64, policy_version=70)
        ages = batch.ages
        ratios = rng.normal(-0.01 * ages, np.sqrt(0.02 * ages))
        owners, before = np.zeros(64, dtype=np.int64), everything(buffer)
        try:
            core.observe(owners, ages, ratios, batch.probabilities, None, write=no_space)
        except OSError:
            failed += 1
            assert everything(buffer) == before
            assert (buffer.freshness, buffer.tau_changes) == (Exponential(500.0), ())
    assert failed > 1
    (change,) = core.observe(owners, ages, ratios, batch.probabilities, None)
    assert buffer.freshness == Exponential(change.new)
    assert buffer.tau_changes == (change,)
    assert core.autos[0].tau == change.new != 500.0


def test_a_decay_that_is_set_by_hand_is_not_fitted_any_more(make_trajectory: Make) -> None:
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer(64, freshness="auto")
    buffer.add([make_trajectory(version=version) for version in range(64)], policy_version=64)
    buffer.set_freshness(Exponential(500.0))
    for _ in range(40):
        assert drift(buffer, rng, 70) == ()
    assert buffer.freshness == Exponential(500.0)
    assert buffer.drift_by_age() != []


@pytest.mark.parametrize(
    ("ratios", "message"), [([0.1], r"shape \(1,\)"), ([0.1, np.nan], "log-ratio nan"), ("ab", "must be numbers")]
)
def test_measurements_that_are_none_are_refused(
    make_buffer: Any, everything: Everything, ratios: Any, message: str
) -> None:
    buffer = make_buffer([1.0, 2.0], freshness=Exponential(3.0))
    batch = buffer.sample(2, policy_version=3)
    before = everything(buffer)
    with pytest.raises(ConfigError, match=message):
        buffer.observe(batch, ratios)
    with pytest.raises(ConfigError, match="clip"):
        buffer.observe(batch, [0.1, 0.2], [0.5, 1.5])
    assert everything(buffer) == before


def test_measurements_of_several_tasks_go_to_their_own_tau(make_trajectory: Make) -> None:
    """Task a drifts, b does not; c has a fixed decay."""
    rng = np.random.default_rng(1)
    tasks = {"a": TaskReplay("auto"), "b": TaskReplay("auto"), "c": TaskReplay(Exponential(9.0))}
    buffer = ReplayBuffer(90, tasks=tasks, alpha=0.5)
    items = [make_trajectory(version=version, task="abc"[version % 3]) for version in range(90)]
    buffer.add(items, policy_version=90)
    for _ in range(60):
        batch = buffer.sample(90, policy_version=95)
        drifting = np.array([task == "a" for task in batch.columns.tasks])
        kl = np.where(drifting, 0.01, 1e-5) * batch.ages
        buffer.observe(batch, rng.normal(-kl, np.sqrt(2 * kl)))
    taus = {task: buffer.freshness_of(task) for task in "abc"}
    assert taus["c"] == Exponential(9.0)
    assert taus["a"].tau < 20 < taus["b"].tau  # type: ignore[attr-defined]
    assert {change.new for change in buffer.tau_changes} >= {taus["a"].tau}  # type: ignore[attr-defined]
