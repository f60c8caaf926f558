"""Several tasks in one buffer: their parts of a draw, against a slow reference, and their own decays."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from freshper import Exponential, NoDecay, ReplayBuffer, Trajectory
from freshper.errors import ConfigError, SamplingError
from freshper.replay.draw.sampler import PrioritySampler
from freshper.replay.draw.tasks import TaskReplay, log_task_parts
from freshper.replay.freshness import Freshness, PowerLaw

Make = Callable[..., Trajectory]
QUICK = settings(deadline=None, derandomize=True, max_examples=200)
NONE = math.nan  # no share


def parts_of(masses: Any, shares: Any = None, caps: Any = None) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        logs = np.log(np.asarray(masses, dtype=np.float64))
    free = np.full(len(logs), NONE) if shares is None else np.asarray(shares, dtype=np.float64)
    whole = np.ones(len(logs)) if caps is None else np.asarray(caps, dtype=np.float64)
    return np.exp(log_task_parts(logs, free, whole))


@pytest.mark.parametrize(
    ("masses", "shares", "caps", "want"),
    [
        ([1, 3], None, None, [0.25, 0.75]),
        ([0, 3], None, None, [0, 1]),
        ([1, 3, 1], [0.5, NONE, NONE], None, [0.5, 0.375, 0.125]),
        ([1e-200, 3], [0.5, NONE], None, [0.5, 0.5]),  # a share asks nobody's mass
        ([0, 3, 1], [0.5, NONE, NONE], None, [0, 0.75, 0.25]),  # nothing drawable: to the others
        ([1, 0], [0.5, NONE], None, [1, 0]),
        ([5, 1], [0.25, 0.5], None, [1 / 3, 2 / 3]),  # shares that leave a rest nobody can take
        ([5, 1, 9], [0.25, 0.75, NONE], None, [0.25, 0.75, 0]),  # shares that leave no rest
        ([5, 1, 9, 2], [0.7, 0.2, 0.1, NONE], None, [0.7, 0.2, 0.1, 0]),  # which sum to 1 - 1e-16
        ([0, 0, 9], [0.25, 0.75, NONE], None, [0, 0, 1]),
        ([9, 1], None, [0.6, 1], [0.6, 0.4]),
        ([90, 6, 4], None, [0.6, 0.3, 1], [0.6, 0.24, 0.16]),
        ([90, 9, 1], None, [0.6, 0.3, 1], [0.6, 0.3, 0.1]),
        ([90, 9, 1], None, [0.3, 0.2, 0.1], [1 / 2, 1 / 3, 1 / 6]),  # a cap yields where nothing else could be drawn
        ([90, 0, 10], None, [0.3, 1, 0.1], [3 / 4, 0, 1 / 4]),
        ([1, 0], None, [0.1, 1], [1, 0]),
        ([1, 1, 1], [1, NONE, NONE], [1, 0.5, 0.5], [1, 0, 0]),
        ([1, 1, 1], [0.5, 0.5, NONE], [0.5, 0.5, 1], [0.5, 0.5, 0]),
        ([0, 1, 1], [0.6, 0.4, NONE], [1, 0.4, 1], [0, 0.4, 0.6]),
        ([0, 1, 7, 1], [0.6, 0.4, NONE, NONE], [1, 0.4, 0.2, 1], [0, 0.4, 0.2, 0.4]),
        ([0, 4, 1], [0.5, 0.5, NONE], [1, 0.5, 1], [0, 0.5, 0.5]),
        ([1, 1, 1], [0.5, NONE, NONE], [1, 0.1, 1], [0.5, 0.1, 0.4]),  # a share is kept while another has room
        ([1, 1, 1], [0.5, NONE, NONE], [1, 0.1, 0.2], [0.7, 0.1, 0.2]),  # and grows where none has
        ([1, 1, 1], [0.4, 0.2, NONE], [0.5, 1, 0.1], [0.5, 0.4, 0.1]),
    ],
)
def test_parts_by_hand(masses: Any, shares: Any, caps: Any, want: Any) -> None:
    np.testing.assert_allclose(parts_of(masses, shares, caps), want, rtol=1e-12, atol=0)


def filled_up(weights: NDArray[np.float64], caps: NDArray[np.float64]) -> NDArray[np.float64]:
    """min(cap, level * weight) with the level that makes them sum to 1, by bisection."""
    if np.sum(caps[weights > 0]) <= 1:
        return caps * (weights > 0) / np.sum(caps[weights > 0])
    low, high = 0.0, float(np.max(1 / weights[weights > 0])) + 1
    for _ in range(300):
        level = (low + high) / 2
        low, high = (level, high) if np.sum(np.minimum(caps, level * weights)) < 1 else (low, level)
    return np.minimum(caps, high * weights)


@QUICK
@given(st.lists(st.tuples(st.floats(1e-6, 1.0) | st.just(0.0), st.floats(0.01, 1.0)), min_size=1, max_size=6))
def test_caps_are_filled_like_water(tasks: list[tuple[float, float]]) -> None:
    weights, caps = (np.array(column) for column in zip(*tasks, strict=True))
    weights[0] = max(weights[0], 0.5)
    weights = weights / weights.sum()
    got = parts_of(weights, None, caps)
    np.testing.assert_allclose(got, filled_up(weights, caps), rtol=1e-7, atol=1e-12)
    assert got.sum() == pytest.approx(1.0, abs=1e-12)


@QUICK
@given(
    st.lists(
        st.tuples(st.floats(-900, 900), st.floats(0.01, 1.0) | st.none(), st.floats(0, 1)), min_size=1, max_size=5
    ),
    st.sampled_from([0.5, 1.0, 1.0 - 5e-10, 1.0 + 5e-10]),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_whatever_can_be_drawn_is_shared_out_whole(
    tasks: list[tuple[float, float | None, float]], whole: float, present: list[bool]
) -> None:
    """Parts sum to 1, nothing exceeds a cap that can be kept, and shares are kept where there is room."""
    masses = np.array([mass if here else -np.inf for (mass, _, _), here in zip(tasks, present, strict=False)])
    masses[0] = tasks[0][0]
    shares = np.array([NONE if share is None else share for _, share, _ in tasks])
    shares *= whole / max(float(np.nansum(shares)), 1.0)
    low = np.where(np.isnan(shares), 0.01, shares)
    caps = np.minimum(low + (1 - low) * np.array([room for _, _, room in tasks]), 1.0)
    parts = np.exp(log_task_parts(masses, shares, caps))
    drawable = masses > -np.inf
    assert parts.sum() == pytest.approx(1.0, abs=1e-12)
    assert np.all(parts[~drawable] == 0)
    if caps[drawable].sum() > 1:
        assert np.all(parts <= caps * (1 + 3e-9))
    free = drawable & np.isnan(shares)
    if caps[free].sum() >= 1 - shares[drawable & ~free].sum():
        fixed = drawable & ~free
        np.testing.assert_allclose(parts[fixed], shares[fixed], rtol=3e-9)


@QUICK
@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6), st.lists(st.floats(-5, 5), min_size=6, max_size=6))
def test_caps_that_sum_to_one_are_the_parts_whatever_the_rounding(caps: list[float], logs: list[float]) -> None:
    whole = np.array(caps) / np.sum(caps)
    np.testing.assert_allclose(parts_of(np.exp(logs[: len(whole)]), None, whole), whole, rtol=1e-8)


def test_caps_whose_sum_is_a_rounding_above_one_leave_nobody_without_room() -> None:
    logs = np.array([-0.8738487341810655, 0.8821264289249406, -4.529317539107181])
    caps = np.array([0.03089861908178661, 0.15749281170970653, 0.811608569208507])
    np.testing.assert_allclose(np.exp(log_task_parts(logs, np.full(3, NONE), caps)), caps, rtol=1e-9)


def test_a_part_too_small_for_a_float_is_still_known() -> None:
    logs = log_task_parts(np.array([0.0, -3000.0, -np.inf]), np.full(3, NONE), np.ones(3))
    np.testing.assert_allclose(logs, [0.0, -3000.0, -np.inf])
    shared = log_task_parts(np.array([0.0, -3000.0, 0.0]), np.array([NONE, NONE, 0.5]), np.ones(3))
    np.testing.assert_allclose(shared, np.array([0.0, -3000.0, 0.0]) + np.log(0.5))


@pytest.mark.parametrize("name", ["share", "max_share", "quota"])
@pytest.mark.parametrize("value", [0.0, -0.1, 1.1, np.nan, np.inf, "half", True])
def test_a_part_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name} .* of a task must lie in \(0, 1\]"):
        TaskReplay(**{name: value})


def test_settings_of_a_task_are_plain_floats_and_agree() -> None:
    task = TaskReplay(share=np.float32(0.5), quota=1)
    assert [type(value) for value in (task.share, task.max_share, task.quota)] == [float] * 3
    assert TaskReplay().share is None
    with pytest.raises(ConfigError, match=r"share 0\.5 of a task exceeds its max_share 0\.4"):
        TaskReplay(share=0.5, max_share=0.4)


class Several:
    """A sampler of several tasks, and the definition beside it; every task has 4 slots."""

    def __init__(self, decays: list[Freshness], alpha: float = 0.7, **parts: Any) -> None:
        count = len(decays)
        self.decays, self.alpha = decays, alpha
        self.sampler = PrioritySampler(
            4 * count, decays, alpha, 0, **({"shares": [NONE] * count, "caps": [1.0] * count} | parts)
        )
        rng = np.random.default_rng(1)
        self.slots = np.arange(4 * count)
        self.owners = np.repeat(np.arange(count), 4).astype(np.int16)
        self.bases, self.versions = rng.exponential(size=4 * count) + 0.1, rng.integers(0, 60, 4 * count)
        self.sampler.put(self.slots, self.bases, self.versions, self.owners)

    def at(self, now: int) -> NDArray[np.float64]:
        """P(i) of one distribution over all items, each with its own decay: no top level, no shares."""
        self.sampler.advance(now)
        self.sampler.refresh()
        rated = [getattr(decay, "rate", None) for decay in self.decays]
        logs = []
        for base, version, owner in zip(self.bases, self.versions, self.owners, strict=True):
            age = np.longdouble(now - version)
            rate = rated[owner]
            fresh = np.log(np.longdouble(self.decays[owner](np.array([age]))[0])) if rate is None else -age * rate
            logs.append(self.alpha * (np.log(np.longdouble(base)) + fresh))
        weights = np.exp(np.array(logs) - max(logs))
        return (weights / weights.sum()).astype(np.float64)


TAUS: list[list[Freshness]] = [
    [Exponential(5.0), Exponential(40.0)],
    [Exponential(40.0), Exponential(3.0), NoDecay()],
    [NoDecay(), NoDecay()],
    [PowerLaw(4.0, 2.0), Exponential(30.0)],
    [PowerLaw(4.0), PowerLaw(9.0), Exponential(7.0)],
]


@pytest.mark.parametrize("decays", TAUS)
def test_tasks_of_different_decays_are_one_distribution_at_every_clock(decays: list[Freshness]) -> None:
    """The masses of the top level carry what is common to a task, and no longer to all."""
    several = Several(decays)
    for now in (60, 61, 75, 100, 200, 1000, 4000):
        want = several.at(now)
        np.testing.assert_allclose(several.sampler.probabilities(several.slots), want, rtol=1e-11, atol=1e-290)
        assert math.fsum(several.sampler.probabilities(several.slots)) == pytest.approx(1.0, abs=1e-13)


def test_with_one_tau_the_top_level_changes_nothing() -> None:
    several = Several([Exponential(8.0)] * 3)
    alone = PrioritySampler(12, Exponential(8.0), 0.7, 0)
    alone.put(several.slots, several.bases, several.versions)
    for now in (60, 5000, 10**6):
        several.sampler.advance(now)
        got, want = several.sampler.probabilities(several.slots), alone.probabilities(several.slots)
        np.testing.assert_allclose(got, want, rtol=1e-10)


@pytest.mark.parametrize(
    ("parts", "want"),
    [
        ({"shares": [0.6, NONE, NONE]}, None),
        ({"shares": [0.2, 0.5, 0.3]}, [0.2, 0.5, 0.3]),
        ({"shares": [0.25, 0.75, NONE]}, [0.25, 0.75, 0.0]),
        ({"caps": [1.0, 1.0, 0.1]}, None),
    ],
)
@pytest.mark.parametrize("method", ["stratified", "systematic"])
def test_draws_are_shared_as_the_parts_say(parts: dict[str, Any], want: Any, method: Any) -> None:
    """Pearson's chi-square over 3000 single draws, error rate 1e-4 for each of the eight."""
    several = Several([Exponential(20.0), Exponential(60.0), NoDecay()], **parts)
    several.at(70)
    chances = several.sampler.probabilities(several.slots)
    by_task = chances.reshape(3, 4).sum(axis=1)
    if want is not None:
        np.testing.assert_allclose(by_task, want, rtol=1e-13)
    elif "caps" in parts:
        assert by_task[2] == pytest.approx(0.1, rel=1e-8)
    else:
        assert by_task[0] == pytest.approx(0.6, rel=1e-13)
    counts = np.zeros(12)
    for _ in range(3000):
        slots, probabilities = several.sampler.draw(1, method)
        np.testing.assert_array_equal(probabilities, chances[slots])
        counts[slots] += 1
    seen = chances > 0
    assert counts[~seen].sum() == 0
    expected = 3000 * chances[seen]
    freedom = np.count_nonzero(seen) - 1
    spread = 2 / (9 * freedom)
    assert np.sum((counts[seen] - expected) ** 2 / expected) < freedom * (1 - spread + 3.72 * np.sqrt(spread)) ** 3


def test_a_batch_of_strata_gives_every_task_its_share_to_within_an_item() -> None:
    several = Several([Exponential(20.0), Exponential(60.0), NoDecay()], shares=[0.5, 0.3, 0.2])
    for method in ("stratified", "systematic"):
        slots, _ = several.sampler.draw(100, method)  # type: ignore[arg-type]
        counts = np.bincount(several.owners[slots], minlength=3)
        assert np.all(np.abs(counts - [50, 30, 20]) <= 1)


def test_a_task_whose_items_all_left_gives_its_share_away_and_gets_it_back() -> None:
    several = Several([Exponential(20.0), NoDecay()], shares=[0.9, NONE])
    several.sampler.remove(np.arange(4))
    chances = several.sampler.probabilities(several.slots)
    np.testing.assert_array_equal(chances[:4], 0)
    assert math.fsum(chances) == pytest.approx(1.0, abs=1e-14)
    assert set(several.sampler.draw(64)[0]) == {4, 5, 6, 7}
    several.sampler.put(np.array([2]), np.array([1e-9]), np.array([0]), np.array([0], dtype=np.int16))
    assert several.sampler.probabilities(np.array([2]))[0] == pytest.approx(0.9, rel=1e-14)
    several.sampler.set_bases(np.array([2]), np.array([0.0]))
    assert several.sampler.probabilities(np.array([2]))[0] == 0


def test_items_of_a_task_without_a_part_are_no_candidates() -> None:
    several = Several([NoDecay(), NoDecay(), NoDecay()], shares=[0.25, 0.75, NONE])
    assert several.sampler.drawable == 12
    slots, _ = several.sampler.draw(8, "without_replacement")
    assert sorted(slots.tolist()) == list(range(8))
    with pytest.raises(SamplingError, match="a draw of 9 without replacement was asked for, but only 8 items can be"):
        several.sampler.draw(9, "without_replacement")
    drawn = np.arange(8)
    chances = several.sampler.probabilities(drawn)
    for toward in ("uniform", "freshness"):  # all of equal age: the same target
        weights = several.sampler.sampling_weights(drawn, chances, 1.0, toward, "none")  # type: ignore[arg-type]
        target = np.full(8, 1 / 8) if toward == "uniform" else np.repeat([0.25, 0.75], 4) / 4
        np.testing.assert_allclose(weights, target / chances, rtol=1e-13)


def test_a_task_that_underflows_beside_another_is_drawn_when_the_other_is_used_up() -> None:
    several = Several([Exponential(1.0), NoDecay()])
    several.at(10**6)
    assert several.sampler.probabilities(np.arange(4)).max() == 0
    for _ in range(20):
        slots, _ = several.sampler.draw(6, "without_replacement")
        assert sorted(slots[:4].tolist()) == [4, 5, 6, 7]
        assert set(slots[4:].tolist()) < {0, 1, 2, 3}


Tasks = Mapping[str, TaskReplay]


def buffer_of(tasks: Tasks, make: Make, items: int = 6, **arguments: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(12, priority=lambda one: one.episode_return, tasks=tasks, **arguments)
    names = list(tasks)
    for number in range(items):
        version = 3 * number
        buffer.add([make(1.0 + number, version, task=names[number % len(names)])], policy_version=version)
    return buffer


def test_a_buffer_gives_each_task_its_own_decay(make_trajectory: Make) -> None:
    tasks = {"a": TaskReplay(Exponential(5.0)), "b": TaskReplay(), "c": TaskReplay(lambda ages: 1 / (1.0 + ages))}
    buffer = buffer_of(tasks, make_trajectory, freshness=Exponential(50.0), alpha=1.0)
    buffer.sample(3, policy_version=40)
    ages, bases = 40 - 3 * np.arange(6), 1.0 + np.arange(6)
    curves = (np.exp(-ages / 5), np.exp(-ages / 50), 1 / (1 + ages))
    fresh = np.choose(np.arange(6) % 3, curves)
    want = bases * fresh / np.sum(bases * fresh)
    np.testing.assert_allclose(buffer.probabilities(), want, rtol=1e-12)
    buffer.set_freshness(NoDecay(), task="c")
    want = bases * np.where(np.arange(6) % 3 == 2, 1.0, fresh)
    np.testing.assert_allclose(buffer.probabilities(), want / want.sum(), rtol=1e-12)


def test_a_quota_evicts_the_tasks_own_items(make_trajectory: Make) -> None:
    tasks = {"a": TaskReplay(quota=0.25), "b": TaskReplay()}
    buffer = buffer_of(tasks, make_trajectory, items=14)
    batch = buffer.sample(10, policy_version=50, method="without_replacement")
    names = sorted(one.task for one in batch.trajectories)
    assert names == ["a"] * 3 + ["b"] * 7
    assert sorted(one.policy_version for one in batch.trajectories if one.task == "a") == [24, 30, 36]


@pytest.mark.parametrize("name", ["share", "max_share", "quota"])
@pytest.mark.parametrize("value", [np.ones(2), [0.5], 1j, np.complex128(0.5), 10**400, 10**4000, {}])
def test_a_part_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name} .* of a task must lie in"):
        TaskReplay(**{name: value})


@pytest.mark.parametrize(
    ("freshness", "message"),
    [("x", "the only one by name is 'auto'"), (500, "did you mean Exponential"), (np.ones(3), "must be a decay")],
)
def test_a_freshness_that_is_none_is_refused_when_the_task_is_made(freshness: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TaskReplay(freshness)


@pytest.mark.parametrize("apart", [1e9, 1e17])
def test_masses_far_from_1_take_no_digits_from_the_parts(apart: float) -> None:
    logs = np.array([apart, apart + 1, 0.0])
    parts = np.exp(log_task_parts(logs, np.full(3, NONE), np.array([0.6, 1.0, 1.0])))
    assert parts.sum() == pytest.approx(1, abs=1e-14)
    if apart < 1e12:
        np.testing.assert_allclose(parts, [1 / (1 + np.e), np.e / (1 + np.e), 0], rtol=1e-12)
