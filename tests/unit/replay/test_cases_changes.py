"""Cases of adds, updates and snapshots that broke other systems (shared/cases/replay.md), with their neighbors."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshper import Exponential, NoDecay, ReplayBuffer, Trajectory
from freshper.errors import ClockError, PriorityError, TrajectoryError
from freshper.replay.freshness import Freshness

Make = Callable[..., Trajectory]
Filled = Callable[..., ReplayBuffer]
Everything = Callable[[ReplayBuffer], bytes]


def test_r1_a_key_of_an_evicted_item_never_reaches_the_new_tenant(make_buffer: Filled, make_trajectory: Make) -> None:
    buffer = make_buffer([1.0, 1.0, 1.0, 1.0])
    first, second = buffer.keys()[:2]
    assert first in buffer.sample(64, policy_version=0).keys
    (new,) = buffer.add([make_trajectory(2.0)], policy_version=0)
    result = buffer.update_priorities([first, second], [100.0, 5.0])
    assert result.updated == 1
    np.testing.assert_array_equal(result.refused, [first])
    assert buffer.keys()[-1] == new != first
    np.testing.assert_allclose(buffer.probabilities(), np.array([5, 1, 1, 2]) / 9, rtol=1e-14)


@pytest.mark.parametrize("rounds", [1, 2, 50])
def test_r1_keys_stay_dead_however_often_the_ring_turns(
    make_buffer: Filled, make_trajectory: Make, everything: Everything, rounds: int
) -> None:
    buffer = make_buffer([1.0, 2.0, 3.0])
    dead = list(buffer.keys())
    for _ in range(rounds):
        dead += list(buffer.keys())
        buffer.add([make_trajectory(1.0)] * 3, policy_version=0)
    before = everything(buffer)
    result = buffer.update_priorities(dead, np.full(len(dead), 100.0))
    assert result.updated == 0
    np.testing.assert_array_equal(result.refused, dead)
    assert everything(buffer) == before


BAD = [np.nan, np.inf, -np.inf, -1.0, -1e-300]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("place", [None, 0, 1, 2])
def test_r8_a_bad_update_names_key_and_value_and_changes_nothing(
    make_buffer: Filled, everything: Everything, value: float, place: int | None
) -> None:
    buffer = make_buffer([1.0, 2.0, 3.0])
    before = everything(buffer)
    keys, values = buffer.keys(), np.array([7.0, 8.0, 9.0])
    if place is None:
        keys, values, place = keys[1:2], values[1:2], 0
    values[place] = value
    with pytest.raises(PriorityError, match=rf"key {keys[place]} is {value}: it must be finite and >= 0") as caught:
        buffer.update_priorities(keys, values)
    assert isinstance(caught.value, ValueError)
    assert everything(buffer) == before


@pytest.mark.parametrize("value", BAD)
def test_r8_a_bad_value_for_a_dead_key_is_refused_too(
    make_buffer: Filled, everything: Everything, value: float
) -> None:
    buffer = make_buffer([1.0, 2.0])
    before = everything(buffer)
    with pytest.raises(PriorityError, match="key 99"):
        buffer.update_priorities([0, 99], [5.0, value])
    assert everything(buffer) == before


@pytest.mark.parametrize("value", BAD)
def test_r8_a_bad_value_at_the_add_changes_nothing(make_trajectory: Make, everything: Everything, value: float) -> None:
    values = iter([1.0, 2.0, 1.0, value, 1.0])
    buffer = ReplayBuffer(4, priority=lambda _: next(values))
    buffer.add([make_trajectory()] * 2, policy_version=0)
    before = everything(buffer)
    with pytest.raises(PriorityError, match=f"trajectory 1 is {value}"):
        buffer.add([make_trajectory(version=1)] * 3, policy_version=1)
    assert everything(buffer) == before


@pytest.mark.parametrize("name", ["reward", "advantage", "td_error"])
def test_r9_a_named_measure_of_zero_gets_eps(make_trajectory: Make, name: str) -> None:
    zero = make_trajectory(0.0, advantages=np.zeros(4), td_errors=np.zeros(4))
    one = make_trajectory(0.9, advantages=[0, 0.9, 0, -0.9], td_errors=[0, 0.9, 0, 0.9])
    buffer = ReplayBuffer(4, priority=name, alpha=1.0, eps=0.1)
    buffer.add([zero, one], policy_version=0)
    np.testing.assert_allclose(buffer.probabilities(), [1 / 11, 10 / 11], rtol=1e-6)


@pytest.mark.parametrize("through", ["add", "update"])
@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_r9_a_final_zero_is_never_drawn_and_nobody_elses_weight_suffers(
    make_buffer: Filled, through: str, alpha: float
) -> None:
    buffer = make_buffer([1.0, 0.0 if through == "add" else 3.0, 1.0], alpha=alpha)
    if through == "update":
        buffer.update_priorities(buffer.keys()[1:2], [0.0])
    assert buffer.drawable == 2
    for _ in range(50):
        batch = buffer.sample(20, policy_version=0, beta=1.0, normalization="none")
        assert buffer.keys()[1] not in batch.keys
        np.testing.assert_allclose(batch.sampling_weights, 1.0, rtol=1e-14)
        np.testing.assert_array_equal(batch.probabilities, 0.5)


def test_r9_a_zero_can_come_back(make_buffer: Filled) -> None:
    buffer = make_buffer([1.0, 0.0], [0, 10**6], freshness=Exponential(1.0))
    buffer.update_priorities([1], [1.0])
    np.testing.assert_array_equal(buffer.probabilities(), [0.0, 1.0])
    buffer.update_priorities([1], [0.0])
    np.testing.assert_array_equal(buffer.probabilities(), [1.0, 0.0])


@pytest.mark.parametrize("key", [4, 5, 10_000_000, -1, -(2**63), 2**63 - 1, np.uint64(2**64 - 1), np.uint64(2**63)])
def test_r12_an_unknown_key_is_refused_and_its_neighbors_are_changed(make_buffer: Filled, key: Any) -> None:
    buffer = make_buffer([1.0, 1.0, 1.0, 1.0])
    keys = np.array([3, key]) if not isinstance(key, np.uint64) else np.array([3, key], dtype=np.uint64)
    result = buffer.update_priorities(keys, [5.0, 100.0])
    assert (result.updated, len(result.refused)) == (1, 1)
    np.testing.assert_allclose(buffer.probabilities(), np.array([1, 1, 1, 5]) / 8, rtol=1e-14)


@pytest.mark.parametrize(
    "keys", [[0.0, 1.0], ["0", "1"], [True, False], [None, 0], [2**70, 0], [[0, 1]], 0, np.array(0), "01"]
)
def test_r12_keys_of_another_type_raise_and_change_nothing(
    make_buffer: Filled, everything: Everything, keys: Any
) -> None:
    buffer = make_buffer([1.0, 2.0])
    before = everything(buffer)
    with pytest.raises(TypeError, match="keys have"):
        buffer.update_priorities(keys, [5.0, 6.0])
    assert everything(buffer) == before


@pytest.mark.parametrize(("keys", "values"), [([0, 0], [3.0, 7.0]), ([0, 1, 0, 9, 0], [9.0, 1.0, 8.0, 5.0, 7.0])])
def test_r12_of_duplicates_the_last_wins(make_buffer: Filled, keys: list[int], values: list[float]) -> None:
    buffer = make_buffer([1.0, 1.0])
    result = buffer.update_priorities(keys, values)
    assert result.updated == len(set(keys) & {0, 1})
    np.testing.assert_allclose(buffer.probabilities(), [7 / 8, 1 / 8], rtol=1e-14)


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0], [], 1.0, [[1.0, 2.0]]])
def test_r13_lengths_that_differ_are_refused(make_buffer: Filled, everything: Everything, values: Any) -> None:
    buffer = make_buffer([1.0, 2.0, 3.0])
    before = everything(buffer)
    with pytest.raises(ValueError, match=r"base priorities have shape .* but there are 2 items"):
        buffer.update_priorities([0, 1], values)
    assert everything(buffer) == before


@pytest.mark.parametrize("freshness", [NoDecay(), Exponential(0.5)])
def test_r14_a_thousand_updates_do_not_make_the_root_drift(
    make_buffer: Filled, make_trajectory: Make, freshness: Freshness
) -> None:
    rng = np.random.default_rng(0)
    buffer = make_buffer(np.ones(37), range(37), capacity=38, freshness=freshness)
    for _ in range(1000):
        buffer.update_priorities(rng.integers(0, 37, 3), rng.uniform(0.1, 5.0, 3))
    tree = buffer._core.sampler.indexes[0].tree
    assert tree.total == pytest.approx(math.fsum(tree.leaves()), rel=1e-12)
    buffer.update_priorities(range(37), np.full(37, 0.7))
    buffer.add([make_trajectory(0.5, 36)], policy_version=36)
    ratio = buffer.probabilities()[-1] / buffer.probabilities()[-2]
    assert ratio == pytest.approx(0.5 / 0.7, rel=1e-12)
    assert tree.total == pytest.approx(math.fsum(tree.leaves()), rel=1e-12)


def test_r16_a_past_outlier_does_not_lift_new_items(make_buffer: Filled, make_trajectory: Make) -> None:
    buffer = make_buffer([1.0, 1.0], capacity=3)
    buffer.update_priorities([0], [1e6])
    buffer.update_priorities([0], [1.0])
    buffer.add([make_trajectory(0.5)], policy_version=0)
    np.testing.assert_allclose(buffer.probabilities(), [0.4, 0.4, 0.2], rtol=1e-13)


@pytest.mark.parametrize("toward", ["uniform", "freshness"])
@pytest.mark.parametrize("asked_before", [False, True])
def test_r21_a_loaded_buffer_goes_on_bit_for_bit(
    make_buffer: Filled, make_trajectory: Make, tmp_path: Path, toward: Any, asked_before: bool
) -> None:
    """Also when the ring has turned, and when both go on with adds, updates and a re-base."""
    rng = np.random.default_rng(5)
    settings = {"capacity": 20, "freshness": Exponential(3.0), "alpha": 0.7, "seed": 11}
    buffer = make_buffer(rng.uniform(0, 3, 17), range(17), **settings)
    if asked_before:  # then its second index has seen later changes, and the loaded one must not choose anew
        buffer.sample(3, policy_version=17, beta=0.4, toward="freshness")
    for version in range(17, 40):
        buffer.add([make_trajectory(rng.uniform(0, 3), version)], policy_version=version)
        buffer.update_priorities(buffer.keys()[:2], rng.uniform(0, 3, 2))
    buffer.save(tmp_path / "b")
    other = ReplayBuffer.load(tmp_path / "b", priority=buffer.priority)
    for round_ in range(100):
        for name in ("keys", "probabilities"):
            np.testing.assert_array_equal(getattr(buffer, name)(), getattr(other, name)())
        version = 40 + round_ * 7
        mine, theirs = (
            each.sample(16, policy_version=version, beta=0.4, toward=toward, normalization="none")
            for each in (buffer, other)
        )
        for name in ("keys", "probabilities", "base_priorities", "sampling_weights", "ages"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
        bases, item = rng.uniform(0, 3, 16), make_trajectory(rng.uniform(0, 3), version)
        for each in (buffer, other):
            each.update_priorities(mine.keys, bases)
            if round_ % 3 == 0:
                each.add([item], policy_version=version)


@pytest.mark.parametrize("good", [0, 1, 2])
def test_r25_a_priority_function_that_raises_stops_the_add(
    make_trajectory: Make, everything: Everything, good: int
) -> None:
    left = iter([1.0, 2.0] + [1.0] * good)

    def limited(_: Trajectory) -> float:
        try:
            return next(left)
        except StopIteration:
            raise ZeroDivisionError("a bug in the function of the user") from None

    buffer = ReplayBuffer(3, priority=limited)
    buffer.add([make_trajectory()] * 2, policy_version=0)
    before = everything(buffer)
    with pytest.raises(ZeroDivisionError, match="a bug in the function"):
        buffer.add([make_trajectory(version=3)] * 3, policy_version=3)
    assert everything(buffer) == before


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        (None, "behavior_logprobs is missing"),
        ([0, np.nan, 0, -1], r"behavior_logprobs\[1\] is nan"),
        ([0, -1, 0], r"behavior_logprobs has shape \(3,\)"),
        ([-0.1, -1, 0, -1], r"behavior_logprobs\[0\] is -0\.1.* on a token that was not sampled"),
        ([], r"behavior_logprobs has shape \(0,\)"),
        ([0, -1, 0, -np.inf], r"behavior_logprobs\[3\] is -inf"),
        ([0, 0.7, 0, -1], "a log-probability is at most 0"),
    ],
)
def test_r26_bad_behavior_logprobs_are_refused(make_trajectory: Make, logprobs: Any, message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        make_trajectory(behavior_logprobs=logprobs)


def test_r27_an_item_newer_than_the_policy_is_refused_with_its_whole_batch(
    make_buffer: Filled, make_trajectory: Make, everything: Everything
) -> None:
    buffer = make_buffer([1.0, 2.0], [3, 4])
    before = everything(buffer)
    with pytest.raises(ClockError, match=r"trajectory 1 was written by policy version 6.*at 5.*freshness would exceed"):
        buffer.add([make_trajectory(version=5), make_trajectory(version=6)], policy_version=5)
    assert everything(buffer) == before


@pytest.mark.parametrize("verb", ["add", "sample"])
@pytest.mark.parametrize("told_by", ["add", "sample"])
def test_r27_a_version_older_than_any_earlier_one_is_refused(
    make_buffer: Filled, make_trajectory: Make, everything: Everything, verb: str, told_by: str
) -> None:
    buffer = make_buffer([1.0, 2.0], [3, 4])
    calls = {
        "add": lambda version: buffer.add([make_trajectory(version=0)], policy_version=version),
        "sample": lambda version: buffer.sample(2, policy_version=version),
    }
    calls[told_by](10)
    before = everything(buffer)
    with pytest.raises(ClockError, match="policy_version 9 is older than 10"):
        calls[verb](9)
    assert everything(buffer) == before
    calls[verb](10)


def test_r27_no_age_is_ever_negative_and_no_freshness_above_one(make_buffer: Filled, make_trajectory: Make) -> None:
    buffer = make_buffer([1.0], [0], capacity=5, freshness=Exponential(2.0))
    rng = np.random.default_rng(0)
    version = 0
    for _ in range(100):
        version += int(rng.integers(0, 3))
        buffer.add([make_trajectory(1.0, int(rng.integers(0, version + 1)))], policy_version=version)
        batch = buffer.sample(10, policy_version=version)
        assert batch.ages.min() >= 0
        assert buffer.freshness(batch.ages).max() <= 1.0
