"""ReplayBuffer: what the four verbs return, and that a refused call changes nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshper import AutoTau, Exponential, NoDecay, ReplayBuffer, StopReason, Trajectory
from freshper.errors import (
    CapacityError,
    ClockError,
    ConfigError,
    SamplingError,
    SnapshotError,
    TrajectoryError,
    UnknownNameError,
)

Make = Callable[..., Trajectory]
Filled = Callable[..., ReplayBuffer]
Everything = Callable[[ReplayBuffer], bytes]


@pytest.mark.parametrize("capacity", [0, -1, 2.0, "8", True, None])
def test_a_capacity_that_is_no_count_is_refused(capacity: Any) -> None:
    with pytest.raises(ConfigError, match=r"capacity .* must be an int >= 1"):
        ReplayBuffer(capacity)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"priority": "rewrd"}, "Did you mean 'reward'"),
        ({"eps": -1.0}, "eps -1.0 must be finite"),
        ({"alpha": -1.0}, "alpha -1.0 must lie in"),
        ({"freshness": "exponential"}, "freshness 'exponential': the only one by name is 'auto'"),
        ({"freshness": Exponential}, "must be a decay"),
        ({"seed": None}, "seed None must be an int"),
    ],
)
def test_bad_settings_are_refused_when_the_buffer_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplayBuffer(8, **settings)


def test_defaults_are_those_of_the_method() -> None:
    buffer = ReplayBuffer(np.int64(8))
    assert (buffer.capacity, buffer.priority, buffer.alpha, buffer.eps) == (8, "reward", 0.6, 0.1)
    assert buffer.freshness == NoDecay()
    assert (len(buffer), buffer.drawable, buffer.policy_version) == (0, 0, 0)
    assert repr(buffer) == "ReplayBuffer(0 of 8, priority='reward', freshness=NoDecay(), alpha=0.6)"


def test_add_returns_keys_in_order_and_keeps_the_clock(make_trajectory: Make) -> None:
    buffer = ReplayBuffer(4)
    first = buffer.add([make_trajectory(version=3)], policy_version=5)
    rest = buffer.add([make_trajectory(version=4), make_trajectory(version=9)], policy_version=9)
    np.testing.assert_array_equal(buffer.keys(), [*first, *rest])
    assert buffer.policy_version == 9
    assert buffer.keys().dtype == np.int64


def test_adding_nothing_moves_only_the_clock(make_buffer: Filled) -> None:
    buffer = make_buffer([1.0, 2.0])
    assert buffer.add([], policy_version=7).shape == (0,)
    assert (len(buffer), buffer.policy_version) == (2, 7)


def test_a_sample_shows_the_facts_of_every_drawn_item(make_buffer: Filled) -> None:
    bases, versions = [1.0, 2.0, 4.0, 8.0], [0, 5, 7, 10]
    buffer = make_buffer(bases, versions, freshness=Exponential(6.0), alpha=0.5)
    batch = buffer.sample(500, policy_version=12, beta=0.5)
    assert len(batch) == 500
    by_key = dict(zip(buffer.keys().tolist(), zip(bases, versions, buffer.probabilities(), strict=True), strict=True))
    for number, key in enumerate(batch.keys.tolist()):
        base, version, probability = by_key[key]
        assert batch.base_priorities[number] == base == batch.trajectories[number].episode_return
        assert batch.ages[number] == 12 - version
        assert batch.probabilities[number] == probability
    assert batch.mean_sampling_weight == batch.sampling_weights.mean()
    assert set(batch.keys) == set(buffer.keys())


def test_what_a_sample_returns_is_no_view_of_the_buffer(make_buffer: Filled, everything: Everything) -> None:
    buffer = make_buffer([1.0, 2.0])
    batch = buffer.sample(4, policy_version=0)
    before = everything(buffer)
    for column in (batch.keys, batch.probabilities, batch.base_priorities, batch.sampling_weights, batch.ages):
        column[:] = 99
    buffer.keys()[:] = 99
    buffer.probabilities()[:] = 99
    assert everything(buffer) == before


@pytest.mark.parametrize("size", [0, -1, 1.0, True, "4", None])
def test_a_batch_size_that_is_no_count_is_refused(make_buffer: Filled, size: Any) -> None:
    with pytest.raises(ConfigError, match=r"batch_size .* must be an int >= 1"):
        make_buffer([1.0]).sample(size, policy_version=0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"beta": -1.0}, ConfigError),
        ({"beta": np.nan}, ConfigError),
        ({"beta": "x"}, ConfigError),
        ({"beta": 1.0, "toward": "fresh"}, UnknownNameError),
        ({"beta": 0.0, "toward": "fresh"}, UnknownNameError),
        ({"beta": 1.0, "normalization": "max"}, UnknownNameError),
        ({"policy_version": 2}, ClockError),
        ({"policy_version": 2**63}, ClockError),
        ({"policy_version": 4.0}, TypeError),
        ({"policy_version": True}, TypeError),
    ],
)
def test_a_refused_sample_leaves_no_trace(
    make_buffer: Filled, everything: Everything, arguments: dict[str, Any], error: type[Exception]
) -> None:
    """Neither in the random generator nor in the clock: the next draw is the one it would have been."""
    buffer = make_buffer([1.0, 2.0, 3.0], [1, 2, 3])
    before = everything(buffer)
    with pytest.raises(error):
        buffer.sample(2, **({"policy_version": 9} | arguments))
    assert everything(buffer) == before


def test_a_draw_from_an_empty_buffer_is_refused(everything: Everything) -> None:
    buffer = ReplayBuffer(4)
    before = everything(buffer)
    with pytest.raises(SamplingError, match="no stored item has a positive priority"):
        buffer.sample(1, policy_version=3)
    assert everything(buffer) == before


@pytest.mark.parametrize(
    "refusal",
    [
        (lambda make: make(), TypeError, r"a sequence of trajectories is needed"),
        (lambda make: [make(), "no"], TypeError, "item 1 is a str"),
        (lambda make: [[make()], [make()]], TypeError, "item 0 is a list: a flat sequence"),
        (lambda make: [make(), make(version=6)], ClockError, "trajectory 1 was written by policy version 6"),
        (lambda make: [make(), make(stop_reason=StopReason.ERROR)], TrajectoryError, "trajectory 1 ended in an error"),
        (lambda make: [make()] * 5, CapacityError, "5 items in one add, capacity 3"),
        (lambda make: 3, TypeError, "not iterable"),
    ],
)
def test_a_refused_add_changes_nothing(
    make_buffer: Filled,
    make_trajectory: Make,
    everything: Everything,
    refusal: tuple[Callable[[Make], Any], type[Exception], str],
) -> None:
    make_items, error, message = refusal
    buffer = make_buffer([1.0, 2.0, 3.0])
    before = everything(buffer)
    with pytest.raises(error, match=message):
        buffer.add(make_items(make_trajectory), policy_version=5)
    assert everything(buffer) == before


def test_the_largest_version_is_taken_and_ages_stay_exact(make_trajectory: Make) -> None:
    newest = 2**63 - 1
    buffer = ReplayBuffer(4, freshness=Exponential(3.0))
    buffer.add([make_trajectory(version=0), make_trajectory(version=newest)], policy_version=newest)
    batch = buffer.sample(50, policy_version=newest)
    np.testing.assert_array_equal(batch.ages, np.zeros(50))
    np.testing.assert_array_equal(buffer.probabilities(), [0.0, 1.0])


def test_an_update_reports_what_it_changed_and_what_it_refused(make_buffer: Filled) -> None:
    buffer = make_buffer([1.0, 1.0, 1.0, 1.0])
    result = buffer.update_priorities([0, 17, 2, -4], [2.0, 9.0, 4.0, 9.0])
    assert result.updated == 2
    np.testing.assert_array_equal(result.refused, [17, -4])
    np.testing.assert_allclose(buffer.probabilities(), np.array([2, 1, 4, 1]) / 8, rtol=1e-14)


@pytest.mark.parametrize("nothing", [[], np.empty(0), np.empty(0, dtype=np.int64)])
def test_an_update_of_nothing_changes_nothing(make_buffer: Filled, everything: Everything, nothing: Any) -> None:
    buffer = make_buffer([1.0, 2.0])
    before = everything(buffer)
    result = buffer.update_priorities(nothing, [])
    assert (result.updated, result.refused.shape) == (0, (0,))
    assert everything(buffer) == before


@pytest.mark.parametrize("name", ["reward", "advantage", "td_error", "uniform", "success"])
def test_base_priorities_are_those_that_add_would_give(make_trajectory: Make, name: str) -> None:
    columns = {"advantages": [0, 2, 0, -1], "td_errors": [0, 1, 0, 1]}
    items = [make_trajectory(3.0, **columns), make_trajectory(1.0, **columns)]
    buffer = ReplayBuffer(4, priority=name, alpha=1.0)
    buffer.add(items, policy_version=0)
    bases = buffer.base_priorities(items)
    np.testing.assert_allclose(buffer.probabilities(), bases / bases.sum(), rtol=1e-14)


def test_a_loaded_buffer_has_the_same_settings(make_trajectory: Make, tmp_path: Path) -> None:
    buffer = ReplayBuffer(5, priority="success", freshness=Exponential(7.5), alpha=0.3, eps=0.02, seed=4)
    buffer.add([make_trajectory(version=2)], policy_version=11)
    buffer.save(tmp_path / "b")
    loaded = ReplayBuffer.load(str(tmp_path / "b"))
    assert repr(loaded) == repr(buffer)
    assert (loaded.eps, loaded.policy_version, loaded.drawable) == (0.02, 11, 1)


def test_demonstrations_without_log_probs_are_left_out_of_what_is_observed(make_trajectory: Make) -> None:
    demonstration = make_trajectory(behavior_logprobs=None, logprobs_known=False)
    buffer = ReplayBuffer(4, priority="uniform")
    buffer.add([demonstration, make_trajectory()], policy_version=0)
    batch = buffer.sample(40, policy_version=5)
    known = batch.columns.logprobs_known
    assert 0 < known.sum() < 40
    buffer.observe(batch, np.where(known, 0.25, np.nan))
    (only,) = buffer.drift_by_age()
    assert (only.n, only.age_low) == (known.sum(), 5)
    assert only.ratio_max == pytest.approx(np.exp(0.25))
    with pytest.raises(ConfigError, match="log-ratio nan of trajectory"):
        buffer.observe(batch, np.full(40, np.nan))


def test_an_auto_decay_says_so_and_so_do_its_saved_numbers(tmp_path: Path) -> None:
    buffer = ReplayBuffer(4, freshness=AutoTau(tau=20.0))
    assert "auto, now Exponential(tau=20.0" in repr(buffer)
    assert buffer.summary()["tasks"]["all"]["auto"]
    buffer.set_freshness(NoDecay())
    assert "auto" not in repr(buffer)
    assert not buffer.summary()["tasks"]["all"]["auto"]


def test_a_mark_of_another_directory_is_refused(tmp_path: Path, make_trajectory: Make) -> None:
    marks = []
    for name in ("a", "b"):
        with ReplayBuffer(4, directory=tmp_path / name, keep_marks=2) as buffer:
            buffer.add([make_trajectory()], policy_version=0)
            marks.append([buffer.checkpoint() for _ in range(3)])
    with pytest.raises(SnapshotError, match="has no mark"):
        ReplayBuffer.load(tmp_path / "a", mark=marks[1][-1])
    with pytest.raises(SnapshotError, match=r"the last 2 are kept"):
        ReplayBuffer.load(tmp_path / "a", mark=marks[0][0])
    ReplayBuffer.load(tmp_path / "a", mark=marks[0][1]).close()


def test_who_only_looks_needs_no_function(tmp_path: Path, make_trajectory: Make) -> None:
    def decay(ages: Any) -> Any:
        return 1 / (1 + ages)

    buffer = ReplayBuffer(4, priority=lambda t: t.episode_return, freshness=decay)
    buffer.add([make_trajectory(reward=1.0), make_trajectory(reward=2.0, version=7)], policy_version=7)
    buffer.sample(1, policy_version=9)
    buffer.save(tmp_path / "b.npz")
    looked_at = ReplayBuffer.load(tmp_path / "b.npz", read_only=True)
    np.testing.assert_array_equal(looked_at.probabilities(), buffer.probabilities())
    assert looked_at.summary()["tasks"]["all"]["freshness"] == "a function"
    with pytest.raises(ConfigError, match="priority was a function: to add"):
        looked_at.add([make_trajectory()], policy_version=9)
