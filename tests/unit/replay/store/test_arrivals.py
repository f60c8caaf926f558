"""Trajectories become items: by unit, with their base priorities, tasks and versions; wrong shapes are refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from freshper import ReplayBuffer, StopReason, Trajectory, Turn
from freshper.errors import ClockError, ConfigError, PriorityError, TrajectoryError
from freshper.replay.store.arrivals import Arrivals, Unit, arrive, as_groups, group_priorities

Make = Callable[..., Trajectory]
Everything = Callable[[ReplayBuffer], bytes]


def came(given: Any, unit: Unit, version: int = 9, **settings: Any) -> Arrivals:
    return arrive(given, version, **({"unit": unit, "priority": "reward", "eps": 0.5, "owners": None} | settings))


def three_turns(make: Make, seed: int = 0, **parts: Any) -> Trajectory:
    turns = (Turn(0, 1, 2, 1.0), Turn(2, 2, 3, -2.0), Turn(3, 4, 6, 0.25))
    mask = np.array([0, 1, 1, 0, 1, 1], dtype=bool)
    whole = {"tokens": range(6), "response_mask": mask, "behavior_logprobs": -1.0 * mask, "turns": turns, "seed": seed}
    return make(**(whole | parts))


def test_every_trajectory_is_an_item(make_trajectory: Make) -> None:
    got = came((make_trajectory(reward, version=int(reward)) for reward in (1.0, 3.0, 2.0)), "trajectory")
    assert len(got) == 3
    np.testing.assert_array_equal(got.bases, [1.5, 3.5, 2.5])
    np.testing.assert_array_equal(got.versions, [1, 3, 2])
    np.testing.assert_array_equal(got.members, [0, 1, 2])
    np.testing.assert_array_equal(got.offsets, [0, 1, 2, 3])
    np.testing.assert_array_equal(got.owners, [0, 0, 0])
    assert got.turns is None


def test_every_turn_is_an_item_with_the_priority_of_its_own_part(make_trajectory: Make) -> None:
    advantages = np.array([0, 4, 1, 0, 2, 6], dtype=np.float32)
    items = [three_turns(make_trajectory, advantages=advantages), make_trajectory(5.0, 2, advantages=[0, 1, 0, 3])]
    got = came(items, "turn")
    assert len(got.columns) == 2  # the data once
    np.testing.assert_array_equal(got.members, [0, 0, 0, 1, 1])
    np.testing.assert_array_equal(got.turns, [0, 1, 2, 0, 1])
    np.testing.assert_array_equal(got.versions, [0, 0, 0, 2, 2])
    np.testing.assert_array_equal(got.offsets, np.arange(6))
    np.testing.assert_array_equal(got.bases, [1.5, 2.5, 0.75, 0.5, 5.5])  # |own reward| + eps
    np.testing.assert_array_equal(came(items, "turn", priority="advantage").bases, [4.5, 1.5, 4.5, 1.5, 3.5])


def test_a_group_is_as_old_as_its_oldest_and_worth_the_mean(make_trajectory: Make) -> None:
    groups = [
        [make_trajectory(1.0, 7), make_trajectory(2.0, 3), make_trajectory(6.0, 5)],
        (make_trajectory(4.0, 8, group="test/1"),),
        [make_trajectory(0.0, 9, group="test/2"), make_trajectory(1.0, 8, group="test/2")],
    ]
    got = came(groups, "group")
    np.testing.assert_array_equal(got.bases, [3.5, 4.5, 1.0])
    np.testing.assert_array_equal(got.versions, [3, 8, 8])
    np.testing.assert_array_equal(got.offsets, [0, 3, 4, 6])
    np.testing.assert_array_equal(got.members, np.arange(6))


def test_nothing_becomes_no_items(make_trajectory: Make) -> None:
    for unit in ("trajectory", "turn", "group"):
        got = came([], unit)
        assert len(got) == len(got.columns) == len(got.versions) == 0
        np.testing.assert_array_equal(got.offsets, [0])


def test_owners_are_those_of_the_tasks(make_trajectory: Make) -> None:
    owners = {"a": 2, "b": 0}
    items = [make_trajectory(task=task) for task in ("a", "b", "a")]
    np.testing.assert_array_equal(came(items, "trajectory", owners=owners).owners, [2, 0, 2])
    np.testing.assert_array_equal(came(items, "turn", owners=owners).owners, [2, 2, 0, 0, 2, 2])
    groups = [[items[1], items[1]], [items[0], items[2]]]
    np.testing.assert_array_equal(came(groups, "group", owners=owners).owners, [0, 2])
    with pytest.raises(ConfigError, match="a trajectory of task 'c' came to a buffer with tasks a, b"):
        came([*items, make_trajectory(task="c")], "trajectory", owners=owners)


R28 = [
    ("group", lambda make: [make(), make()], "item 0 is a Trajectory: a buffer with unit='group' takes a sequence"),
    ("group", lambda make: [[make()], make()], "item 1 is a Trajectory: a buffer with unit='group'"),
    ("group", lambda make: [iter([make()])], "item 0 is a list_iterator"),
    ("group", lambda make: [[make(), 3]], "group 0 holds a int"),
    ("group", lambda make: [[[make()]]], "group 0 holds a list"),
    ("group", lambda make: ["ab"], "group 0 holds a str"),
    ("trajectory", lambda make: [[make()], [make()]], "item 0 is a list: a flat sequence of Trajectory is needed"),
    ("trajectory", lambda make: [make(), (make(),)], "item 1 is a tuple: a flat sequence"),
    ("turn", lambda make: [[make()]], "item 0 is a list: a flat sequence"),
    ("trajectory", lambda make: make(), "a sequence of trajectories is needed, not one"),
    ("group", lambda make: make(), "a sequence of trajectories is needed, not one"),
]


@pytest.mark.parametrize("case", R28)
def test_r28_a_flat_batch_is_no_groups_and_groups_are_no_flat_batch(
    make_trajectory: Make, everything: Everything, case: tuple[Unit, Callable[[Make], Any], str]
) -> None:
    unit, items, message = case
    buffer = ReplayBuffer(4, unit=unit)
    before = everything(buffer)
    with pytest.raises(TypeError, match=message):
        buffer.add(items(make_trajectory), policy_version=3)
    assert everything(buffer) == before


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{}, {"group": "test/1"}], r"group 1 has members of 2 starts"),
        ([{}, {"task": "other"}], r"group 1 has members of 2 starts"),
        ([], "group 1 is empty"),
    ],
)
def test_members_of_a_group_share_their_start(make_trajectory: Make, parts: list[Any], message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        came([[make_trajectory()], [make_trajectory(**part) for part in parts]], "group")


@pytest.mark.parametrize("unit", ["trajectory", "turn", "group"])
def test_newer_or_failed_episodes_are_refused_in_every_unit(make_trajectory: Make, unit: Unit) -> None:
    def given(item: Trajectory) -> Any:
        return [[make_trajectory(), item]] if unit == "group" else [make_trajectory(), item]

    with pytest.raises(ClockError, match="trajectory 1 was written by policy version 10, but the policy is at 9"):
        came(given(make_trajectory(version=10)), unit)
    assert len(came(given(make_trajectory(version=9)), unit)) > 0
    with pytest.raises(TrajectoryError, match="trajectory 1 ended in an error"):
        came(given(make_trajectory(stop_reason=StopReason.ERROR)), unit)


def test_the_mean_of_a_group_is_checked_before_it_is_made(make_trajectory: Make) -> None:
    values = iter([1.0, np.inf, -1.0])
    with pytest.raises(PriorityError, match="trajectory 1 is inf"):
        came([[make_trajectory()] * 2], "group", priority=lambda _: next(values))
    groups = as_groups([[make_trajectory(1.0)], [make_trajectory(2.0), make_trajectory(4.0)]], "group")
    np.testing.assert_array_equal(group_priorities(groups, "reward", 0.0), [1.0, 3.0])


def test_base_priorities_of_a_buffer_are_by_item(make_trajectory: Make) -> None:
    groups = [[make_trajectory(1.0), make_trajectory(3.0)], [make_trajectory(5.0)]]
    np.testing.assert_array_equal(ReplayBuffer(4, unit="group", eps=0.0).base_priorities(groups), [2.0, 5.0])
    whole = three_turns(make_trajectory)
    turns = [whole.at_turn(number) for number in range(3)]
    buffer = ReplayBuffer(4, unit="turn", eps=0.0, alpha=1.0)
    buffer.add([whole], policy_version=0)
    bases = buffer.base_priorities(turns)
    np.testing.assert_array_equal(bases, [1.0, 2.0, 0.25])
    np.testing.assert_allclose(buffer.probabilities(), bases / bases.sum(), rtol=1e-14)


def test_the_mean_of_finite_priorities_is_finite(make_trajectory: Make) -> None:
    """Added up first, these would be infinite, and every probability of the buffer NaN."""
    buffer = ReplayBuffer(4, unit="group", priority=lambda _: 1.7e308)
    buffer.add([[make_trajectory()] * 3, [make_trajectory()]], policy_version=0)
    np.testing.assert_allclose(buffer.probabilities(), [0.5, 0.5])
    assert np.isfinite(buffer.summary()["base_priorities"]["mean"])


@pytest.mark.parametrize("priority", ["reward", "uniform", "success", lambda t: float(len(t)) + t.episode_return])
def test_a_turn_gets_the_priority_of_the_turn_with_all_that_was_before_it(make_trajectory: Make, priority: Any) -> None:
    """A function may look at the context, and then it is there."""
    episodes = [make_trajectory(reward=float(n)) for n in range(3)]
    buffer = ReplayBuffer(20, unit="turn", priority=priority)
    keys = buffer.add(episodes, policy_version=0)
    turns = [episode.at_turn(number) for episode in episodes for number in range(len(episode.turns))]
    expected = buffer.base_priorities(turns)
    assert [buffer.item(key)[0]["base_priority"] for key in keys.tolist()] == expected.tolist()
