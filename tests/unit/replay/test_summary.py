"""The buffer in numbers, against a slow reading of its own facts."""

import json
from typing import Any

import numpy as np
import pytest

from freshper import Exponential, NoDecay, PowerLaw, ReplayBuffer, TaskReplay
from freshper.errors import SnapshotError


def test_an_empty_buffer_has_a_summary_too():
    summary = ReplayBuffer(5).summary()
    assert (summary["items"], summary["drawable"], summary["next_draw"], summary["ages"]) == (0, 0, None, None)
    assert summary["drift"] == []
    assert json.loads(json.dumps(summary)) == summary


def _filled(make_trajectory):
    buffer = ReplayBuffer(50, freshness=Exponential(7.0), alpha=0.5, eps=0.5)
    buffer.add([make_trajectory(reward=n / 10, version=n) for n in range(30)], policy_version=40)
    for version in (40, 41):
        buffer.sample(20, policy_version=version)
    return buffer


def test_the_numbers_are_those_of_the_items(make_trajectory):
    buffer = _filled(make_trajectory)
    summary = buffer.summary()
    ages, bases = 41 - np.arange(30), np.arange(30) / 10 + 0.5
    weights = (bases * np.exp(-ages / 7.0)) ** 0.5
    chances = weights / weights.sum()
    assert (summary["items"], summary["capacity"], summary["drawable"]) == (30, 50, 30)
    assert (summary["policy_version"], summary["index_version"]) == (41, 41)
    assert summary["ages"] == pytest.approx(
        {"min": 12, "p10": 14.9, "median": 26.5, "p90": 38.1, "max": 41, "mean": ages.mean()}
    )
    assert summary["base_priorities"]["max"] == pytest.approx(3.4)
    assert summary["uses"]["mean"] == pytest.approx(40 / 30)
    assert summary["bytes"]["stored"] == buffer.nbytes
    assert summary["counters"] == {
        "added": 30, "drawn": 40, "evicted": 0, "expired": 0, "used_up": 0, "removed": 0,
    }  # fmt: skip
    draw = summary["next_draw"]
    assert draw["effective_items"] == pytest.approx(1 / (chances**2).sum())
    assert draw["age_mean"] == pytest.approx(float(chances @ ages))
    assert draw["top_1_percent"] == pytest.approx(chances.max())
    assert [one["key"] for one in draw["largest"]] == [29, 28, 27, 26, 25]
    assert draw["largest"][0] == pytest.approx({"key": 29, "probability": chances[29], "age": 12, "base_priority": 3.4})
    young_first = np.cumsum(chances[::-1])
    expected = [int(ages[::-1][np.flatnonzero(young_first >= part)[0]]) for part in (0.1, 0.5, 0.9)]
    assert list(draw["ages"].values()) == expected
    assert json.loads(json.dumps(summary)) == summary


def test_a_summary_is_no_draw(make_trajectory):
    buffer, twin = _filled(make_trajectory), _filled(make_trajectory)
    buffer.summary()
    np.testing.assert_array_equal(buffer.sample(20, policy_version=41).keys, twin.sample(20, policy_version=41).keys)


def test_tasks_are_told_apart(make_trajectory):
    tasks = {"maze": TaskReplay(freshness=Exponential(3.0), share=0.25), "search": TaskReplay()}
    buffer = ReplayBuffer(10, freshness=NoDecay(), tasks=tasks)
    buffer.add([make_trajectory(task="maze")] * 2 + [make_trajectory(task="search")], policy_version=0)
    parts = buffer.summary()["tasks"]
    assert [(name, part["items"], part["tau"]) for name, part in parts.items()] == [
        ("maze", 2, 3.0),
        ("search", 1, None),
    ]
    assert [part["part_of_draw"] for part in parts.values()] == pytest.approx([0.25, 0.75])


def test_an_item_is_found_by_its_key_and_not_used(make_trajectory):
    buffer = _filled(make_trajectory)
    facts, (member,) = buffer.item(29)
    assert facts["key"] == 29
    assert facts["age"] == 12
    assert facts["base_priority"] == pytest.approx(3.4)
    assert facts["probability"] == pytest.approx(buffer.probabilities()[29])
    assert member.policy_version == 29
    assert buffer.item(29)[0] == facts
    buffer.remove([29])
    with pytest.raises(KeyError, match="no item has the key 29: it has left, or never was"):
        buffer.item(29)


def test_all_trajectories_come_once_and_in_order_and_those_that_left_are_left_out(make_trajectory):
    buffer = ReplayBuffer(6_000, unit="turn", priority="uniform")
    buffer.add([make_trajectory(seed=n) for n in range(3_000)], policy_version=0)
    assert [t.seed for t in buffer.trajectories()] == list(range(3_000))
    going = buffer.trajectories()
    first = next(going).seed
    turns = [2_200, 2_201, 2_400, 5_998, 5_999]  # of portions that have not been read yet; two each but for one
    buffer.remove(buffer.keys()[turns])
    assert [first, *(t.seed for t in going)] == [n for n in range(3_000) if n not in (1_100, 2_999)]


@pytest.mark.parametrize("look", ["probabilities", "summary"])
def test_interrupted_while_its_trees_are_brought_up_to_date_a_buffer_is_not_gone_on_with(
    look: str, make_trajectory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = ReplayBuffer(4, freshness=PowerLaw(1.0, 2.0))
    buffer.add([make_trajectory(1.0, 0), make_trajectory(1.0, 9)], policy_version=9)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(buffer._core.sampler, "refresh", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(buffer, look)()
    with pytest.raises(SnapshotError, match="KeyboardInterrupt arrived in the middle of a change"):
        getattr(buffer, look)()
