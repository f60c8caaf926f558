"""The facts of a draw: arrays of items, and the trajectories behind them."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from freshper import Exponential, ReplayBuffer, Trajectory

Make = Callable[..., Trajectory]
Filled = Callable[..., ReplayBuffer]


def grouped(make: Make) -> ReplayBuffer:
    """Groups of 1, 2, 3 and 4 members, each of its own seed; the oldest member is ``number`` versions old."""
    buffer = ReplayBuffer(
        8, unit="group", priority=lambda one: one.episode_return, freshness=Exponential(5.0), alpha=1.0
    )
    for number in range(4):
        members = [
            make(1.0 + number, 10 - number + member, group=f"g/{number}", seed=member) for member in range(number + 1)
        ]
        buffer.add([members], policy_version=14)
    return buffer


def test_a_draw_of_trajectories_has_one_each(make_buffer: Filled) -> None:
    buffer = make_buffer([1.0, 2.0, 3.0], [0, 4, 6], freshness=Exponential(5.0))
    batch = buffer.sample(16, policy_version=9, beta=0.5)
    assert len(batch) == len(batch.trajectories) == 16
    np.testing.assert_array_equal(batch.item_offsets, np.arange(17))
    np.testing.assert_array_equal([one.episode_return for one in batch.trajectories], batch.base_priorities)
    np.testing.assert_array_equal([9 - one.policy_version for one in batch.trajectories], batch.ages)
    np.testing.assert_array_equal(batch.trajectory_weights, batch.sampling_weights)
    assert batch.groups == tuple((one,) for one in batch.trajectories)
    assert batch.index_version == 9
    for name in ("keys", "probabilities", "base_priorities", "sampling_weights", "ages", "uses"):
        assert getattr(batch, name).shape == (16,), name
    assert batch.mean_sampling_weight == batch.sampling_weights.mean() < 1


def test_a_draw_of_groups_repeats_what_belongs_to_a_group_for_each_member(make_trajectory: Make) -> None:
    batch = grouped(make_trajectory).sample(20, policy_version=20, beta=1.0, normalization="mean")
    assert len(batch) == 20
    sizes = np.array([len(members) for members in batch.groups])
    np.testing.assert_array_equal(np.diff(batch.item_offsets), sizes)
    assert batch.item_offsets[0] == 0
    assert len(batch.trajectories) == sizes.sum() == batch.item_offsets[-1]
    weights, at = batch.trajectory_weights, 0
    for number, members in enumerate(batch.groups):
        group = sizes[number] - 1
        assert [one.seed for one in members] == list(range(sizes[number]))
        assert {one.group for one in members} == {f"g/{group}"}
        assert batch.ages[number] == 20 - (10 - group)
        assert batch.base_priorities[number] == 1.0 + group
        assert set(weights[at : at + sizes[number]]) == {batch.sampling_weights[number]}
        at += sizes[number]
    np.testing.assert_array_equal(batch.per_trajectory(batch.ages), np.repeat(batch.ages, sizes))
    assert batch.mean_sampling_weight == pytest.approx(1.0)


def test_uses_are_those_before_the_draw(make_buffer: Filled) -> None:
    buffer = make_buffer([1.0])
    assert [buffer.sample(size, policy_version=0).uses.tolist() for size in (1, 2, 1)] == [[0], [1, 1], [3]]


def test_what_happens_later_changes_nothing(make_buffer: Filled, make_trajectory: Make) -> None:
    buffer = make_buffer([1.0, 2.0], capacity=2)
    batch = buffer.sample(4, policy_version=0)
    names = ("keys", "probabilities", "base_priorities", "sampling_weights", "ages", "uses")
    before = {name: getattr(batch, name).copy() for name in names}
    returns = [one.episode_return for one in batch.trajectories]
    buffer.update_priorities(batch.keys, np.full(4, 7.0))
    buffer.add([make_trajectory(9.0, 5, seed=7), make_trajectory(8.0, 5, seed=8)], policy_version=5)
    buffer.sample(4, policy_version=50)
    for name in names:
        np.testing.assert_array_equal(getattr(batch, name), before[name])
    assert [one.episode_return for one in batch.trajectories] == returns
    assert {one.seed for one in batch.trajectories} == {0}


def test_facts_are_not_written_over(make_buffer: Filled) -> None:
    batch = make_buffer([1.0]).sample(1, policy_version=0)
    with pytest.raises(FrozenInstanceError):
        batch.keys = np.zeros(1, dtype=np.int64)  # type: ignore[misc]
