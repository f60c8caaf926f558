"""Replayed trajectories in the fresh batch: how many, which, and with what weights."""

from dataclasses import replace

import numpy as np
import pytest

from freshper import NoDecay, ReplayBuffer, StopReason, Trajectory, Turn
from freshper.training.config_file import make_config
from freshper.training.mixing import fresh_batch, groups_of


def trajectory(reward, *, group="g", advantage=1.0, version=0):
    mask = np.array([False, True, True])
    return Trajectory(
        [1, 2, 3],
        mask,
        np.where(mask, -1.0, 0),
        (Turn(0, 1, 3, reward),),
        StopReason.TERMINATED,
        reward > 0,
        version,
        "test",
        group,
        0,
        advantages=np.where(mask, advantage, 0.0),
    )


def config_of(**sections):
    return make_config({"rollout": {"episodes": 8}} | sections)


def stored(*rewards, unit="trajectory", **options):
    buffer = ReplayBuffer(100, priority="reward", freshness=NoDecay(), unit=unit, seed=0)
    items = [trajectory(reward, **options) for reward in rewards]
    buffer.add([items[at : at + 2] for at in range(0, len(items), 2)] if unit == "group" else items, policy_version=1)
    return buffer


def mixed(fresh, buffer, config):
    return fresh_batch(fresh, buffer, config, policy_version=5, progress=0.5)


def test_without_settings_the_batch_is_the_fresh_one_and_nothing_is_drawn():
    fresh, buffer = [trajectory(1.0)] * 8, stored(*[1.0] * 50)
    before = buffer.sample(4, policy_version=5).keys
    other = stored(*[1.0] * 50)
    batch = mixed(fresh, other, config_of())
    assert batch.trajectories == tuple(fresh)
    assert batch.sampling_weights is None
    assert (batch.mixed, batch.backfilled) == (0, 0)
    np.testing.assert_array_equal(other.sample(4, policy_version=5).keys, before)


@pytest.mark.parametrize(("share", "replayed"), [(0.2, 2), (0.5, 8), (0.75, 24)])
def test_a_share_of_the_whole_batch_is_replayed_and_distinct(share, replayed):
    fresh = [trajectory(1.0, version=5)] * 8
    buffer = stored(*np.arange(1, 51).tolist())
    batch = mixed(fresh, buffer, config_of(mix={"share": share}))
    assert batch.mixed == replayed == len(batch.trajectories) - 8
    assert batch.mixed / len(batch.trajectories) == pytest.approx(share, abs=0.05)
    returns = [one.episode_return for one in batch.trajectories[8:]]
    assert len(set(returns)) == replayed
    assert batch.sampling_weights.tolist() == [1.0] * (8 + replayed)


def test_the_replayed_ones_carry_their_sampling_weights():
    correction = {"correction": {"beta_start": 1.0, "beta_end": 1.0, "normalization": "batch_max"}}
    batch = mixed(
        [trajectory(1.0)] * 8, stored(*np.arange(1, 51).tolist()), config_of(mix={"share": 0.5}, replay=correction)
    )
    assert batch.sampling_weights[:8].tolist() == [1.0] * 8
    replayed = batch.sampling_weights[8:]
    assert replayed.max() == 1.0
    rewards = [one.episode_return for one in batch.trajectories[8:]]
    assert np.argmax(rewards) == np.argmin(replayed)  # the likeliest counts least


def test_a_buffer_with_too_little_leaves_the_batch_alone():
    fresh = [trajectory(1.0)] * 8
    for buffer in (stored(), stored(1.0, 2.0)):
        assert mixed(fresh, buffer, config_of(mix={"share": 0.5})).trajectories == tuple(fresh)


GROUPED = {
    "rollout": {"episodes": 8, "group_size": 2},
    "algorithm": {"advantage": "grpo"},
    "storage": {"unit": "group"},
    "mix": {"backfill": True},
}


def fresh_groups(*advantages):
    return [
        trajectory(1.0, group=f"fresh-{number}", advantage=advantage)
        for number, advantage in enumerate(advantages)
        for _ in range(2)
    ]


def test_groups_that_teach_nothing_are_replaced_by_stored_ones_that_do():
    buffer = stored(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, unit="group", group="old")
    fresh = fresh_groups(0.0, 1.0, 0.0, 2.0)
    batch = mixed(fresh, buffer, make_config(GROUPED))
    names = [group[0].group for group in groups_of(batch.trajectories)]
    assert batch.backfilled == 2
    assert len(batch.trajectories) == 8
    assert names == ["old", "fresh-1", "old", "fresh-3"]
    pairs = [tuple(one.episode_return for one in batch.trajectories[at : at + 2]) for at in (0, 4)]
    assert set(pairs) <= {(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)}
    assert pairs[0] != pairs[1]


def test_stored_groups_that_teach_nothing_stand_in_for_none():
    buffer = stored(1.0, 1.0, 2.0, 2.0, unit="group", advantage=0.0)
    fresh = fresh_groups(0.0, 1.0)
    batch = mixed(fresh, buffer, make_config(GROUPED))
    assert batch.backfilled == 0
    assert batch.trajectories == tuple(fresh)


def test_where_every_group_teaches_nothing_is_drawn():
    buffer, twin = (stored(*range(1, 21), unit="group") for _ in range(2))
    mixed(fresh_groups(1.0, 2.0), buffer, make_config(GROUPED))
    np.testing.assert_array_equal(buffer.sample(3, policy_version=5).keys, twin.sample(3, policy_version=5).keys)


def test_neighbors_of_one_group_are_a_group():
    items = [replace(trajectory(1.0), behavior_logprobs=np.array([0, -1.0, -1.0]), group=name) for name in "aabcc"]
    assert [len(group) for group in groups_of(items)] == [2, 1, 2]
    assert groups_of([]) == []
