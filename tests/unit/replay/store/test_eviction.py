"""What leaves and in which order: against slow references, with quotas, ages, uses and byte budgets."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from freshper import Exponential, PowerLaw, ReplayBuffer, TaskReplay, Trajectory, Turn
from freshper.errors import CapacityError, ClockError, SamplingError
from freshper.replay.store.arena import Arena
from freshper.replay.store.columns import pack

Make = Callable[..., Trajectory]
Everything = Callable[[ReplayBuffer], bytes]


def own_return(trajectory: Trajectory) -> float:
    return trajectory.episode_return


def of_length(make: Make, tokens: int, **parts: Any) -> Trajectory:
    mask = np.ones(tokens, dtype=bool)
    return make(
        **{"tokens": np.zeros(tokens), "response_mask": mask, "behavior_logprobs": -mask.astype(float)}
        | {"tokens": np.zeros(tokens, dtype=np.int32), "turns": (Turn(0, 0, tokens, 1.0),)}
        | parts
    )


def cost(*items: Trajectory) -> int:
    return int(Arena().cost(pack(items)).sum())


def leavers(buffer: ReplayBuffer, add: Callable[[], Any]) -> list[int]:
    """Keys that are gone after ``add``, oldest first."""
    before = buffer.keys().tolist()
    add()
    left = set(buffer.keys().tolist())
    return [key for key in before if key not in left]


DECAYS: list[tuple[Any, Callable[[int], float]]] = [
    (Exponential(4.0), lambda age: -age / 4.0),
    (Exponential(4.0, max_age=9), lambda age: -age / 4.0 if age <= 9 else -math.inf),
    (PowerLaw(2.0, 1.5), lambda age: -1.5 * math.log1p(age / 2.0)),
    (lambda ages: np.where(ages < 6, 1.0, 0.0), lambda age: 0.0 if age < 6 else -math.inf),
]


def lowest(items: dict[int, tuple[float, int]], now: int, log_fresh: Callable[[int], float]) -> int:
    """The key of the smallest b f; of equal ones the first, that is, the oldest."""

    def value(key: int) -> float:
        base, version = items[key]
        return -math.inf if base == 0 else round(math.log(base) + log_fresh(now - version), 9)

    return min(items, key=value)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("seed", range(3))
def test_the_lowest_present_priority_leaves(make_trajectory: Make, decay: Any, seed: int) -> None:
    """150 adds one by one, with updates and draws between; of equals the oldest, what cannot be drawn before all."""
    freshness, log_fresh = decay
    rng = np.random.default_rng(seed)
    buffer = ReplayBuffer(12, priority=own_return, freshness=freshness, evict="lowest", seed=seed)
    items: dict[int, tuple[float, int]] = {}  # base and version by key, in order of arrival
    for _ in range(150):
        now = buffer.policy_version + int(rng.integers(0, 2))
        base = float(rng.choice([0.0, 1.0, 2.0, 2.0, 3.0]))
        if items and rng.random() < 0.4:
            key = int(rng.choice(list(items)))
            buffer.update_priorities([key], [base])
            items[key] = base, items[key][1]
        if buffer.drawable > 2:
            buffer.sample(2, policy_version=now)  # a recomputed freshness is that of the last draw
        else:
            now = buffer.policy_version
        version = max(0, now - int(rng.integers(0, 3)))
        expected = [lowest(items, now, log_fresh)] if len(items) == 12 else []
        before = buffer.keys()
        (new,) = buffer.add([make_trajectory(base, version)], policy_version=now).tolist()
        assert np.setdiff1d(before, buffer.keys()).tolist() == expected
        for key in expected:
            del items[key]
        items[new] = base, version


def test_tasks_are_compared_by_their_priorities_at_the_present_clock(make_trajectory: Make) -> None:
    """Task a loses a factor e every 2 versions, b every 1,000: who is lowest changes with the clock alone."""
    tasks = {"a": TaskReplay(Exponential(2.0)), "b": TaskReplay(Exponential(1000.0))}
    rng = np.random.default_rng(0)
    for late in (0, 3, 40, 5000, 10**9):
        buffer = ReplayBuffer(16, priority=own_return, evict="lowest", tasks=tasks)
        facts = []
        for number in range(16):
            task, base, version = "ab"[number % 2], float(rng.uniform(0.1, 9)), int(rng.integers(0, 20))
            buffer.add([make_trajectory(base, version, task=task)], policy_version=20)
            tau = 2.0 if task == "a" else 1000.0
            facts.append(math.log(base) - (20 + late - version) / tau)
        order = np.argsort(facts).tolist()
        new = make_trajectory(1e300, 20 + late, task="a")
        for expected in order[:10]:
            assert leavers(buffer, lambda: buffer.add([new], policy_version=20 + late)) == [expected]  # noqa: B023


@pytest.mark.parametrize("evict", ["fifo", "lowest"])
def test_several_leave_for_a_batch_and_the_order_is_that_of_single_ones(make_trajectory: Make, evict: Any) -> None:
    rng = np.random.default_rng(5)
    items = [make_trajectory(float(base)) for base in rng.integers(0, 5, 20)]
    more = [make_trajectory(9.0)] * 13
    one, many = (ReplayBuffer(20, priority=own_return, evict=evict) for _ in range(2))
    for buffer in (one, many):
        buffer.add(items, policy_version=0)
        buffer.remove([3, 7])
    for item in more:
        one.add([item], policy_version=0)
    many.add(more, policy_version=0)
    assert set(many.keys() % 20) == set(one.keys() % 20)
    old = one.keys() < 20
    np.testing.assert_array_equal(many.keys()[old], one.keys()[old])
    assert many.summary()["counters"]["evicted"] == 11


def test_a_group_leaves_whole_with_its_oldest_member(make_trajectory: Make) -> None:
    names = ["g0", "g1", "g0", "g2", "g1", "g0"]
    buffer = ReplayBuffer(6, evict="group")
    for name in names:
        buffer.add([make_trajectory(group=name)], policy_version=0)
    assert leavers(buffer, lambda: buffer.add([make_trajectory(group="g0")], policy_version=0)) == [0, 2, 5]
    assert leavers(buffer, lambda: buffer.add([make_trajectory(group="g3")] * 3, policy_version=0)) == [1, 4]
    other = make_trajectory(group="g2", task="other")  # the same name in another task is another group
    buffer.add([other], policy_version=0)
    assert leavers(buffer, lambda: buffer.add([make_trajectory()], policy_version=0)) == [3]
    assert other.task in {item.task for item in buffer.sample(300, policy_version=0).trajectories}


def test_a_member_that_grew_too_old_in_the_same_add_leaves_once(make_trajectory: Make) -> None:
    """Of group g one member is overdue, the other leaves for want of room; the counters tell them apart."""
    buffer = ReplayBuffer(3, evict="group", max_age=5)
    for version, group in ((0, "g"), (4, "g"), (4, "h")):
        buffer.add([make_trajectory(version=version, group=group)], policy_version=4)
    buffer.add([make_trajectory(version=6, group="i")] * 2, policy_version=6)
    assert buffer.keys().tolist() == [2, 0 + 3, 1 + 3]
    counters = buffer.summary()["counters"]
    assert (counters["expired"], counters["evicted"], counters["added"]) == (1, 1, 5)


def test_r23_a_budget_is_kept_and_the_over_long_one_is_refused(make_trajectory: Make, everything: Everything) -> None:
    """Episodes of 30, 60, 9 and 101 tokens into the budget of one episode of 100 tokens."""
    budget = cost(of_length(make_trajectory, 100))
    lengths = [30, 60, 9, 101]
    items = [of_length(make_trajectory, tokens, seed=tokens) for tokens in lengths]
    buffer = ReplayBuffer(10, max_bytes=budget)
    kept: list[Trajectory] = []
    for item in items:
        if cost(item) > budget:
            before = everything(buffer)
            message = f"trajectory 0 of 101 tokens takes {cost(item)} bytes, the budget is max_bytes {budget}: it is"
            with pytest.raises(CapacityError, match=message):
                buffer.add([item], policy_version=0)
            assert everything(buffer) == before
            continue
        buffer.add([item], policy_version=0)
        kept.append(item)
        while cost(*kept) > budget:
            kept.pop(0)
        assert buffer.nbytes == cost(*kept) <= budget
        drawn = {item.seed for item in buffer.sample(100, policy_version=0).trajectories}
        assert drawn == {item.seed for item in kept}
    buffer.add([of_length(make_trajectory, 100)], policy_version=0)
    assert (len(buffer), buffer.nbytes) == (1, budget)  # exactly the budget fits
    with pytest.raises(CapacityError, match=r"2 trajectories in one add take \d+ bytes and 0 of images"):
        buffer.add([of_length(make_trajectory, 60), of_length(make_trajectory, 61)], policy_version=0)
    assert buffer.nbytes == budget


def test_images_are_charged_once_and_leave_with_the_last_that_shows_them(make_trajectory: Make) -> None:
    def shown(*images: bytes) -> Trajectory:
        turns = (Turn(0, 1, 2, 0.0, len(images)), Turn(2, 3, 4, 1.0))
        return make_trajectory(images=images, turns=turns)

    big, small = b"b" * 5000, b"s" * 300
    each = cost(shown(big))
    buffer = ReplayBuffer(10, max_bytes=3 * each + 5300)
    for _ in range(3):
        buffer.add([shown(big)], policy_version=0)
    assert buffer.nbytes == 3 * each + 5000
    assert leavers(buffer, lambda: buffer.add([shown(small)], policy_version=0)) == [0]
    assert buffer.nbytes == 3 * each + 5300  # the big one is still shown by two
    assert leavers(buffer, lambda: buffer.add([shown(b"n" * 400)], policy_version=0)) == [1, 2]
    assert buffer.nbytes == 2 * each + 700
    with pytest.raises(CapacityError, match="and 9000 of images"):
        buffer.add([shown(b"h" * 9000)], policy_version=0)


def test_quotas_are_kept_by_evicting_from_the_task_itself(make_trajectory: Make) -> None:
    buffer = ReplayBuffer(10, tasks={"a": TaskReplay(quota=0.3), "b": TaskReplay()})
    buffer.add([make_trajectory(task="b")] * 4, policy_version=0)
    buffer.add([make_trajectory(task="a")] * 3, policy_version=0)
    assert leavers(buffer, lambda: buffer.add([make_trajectory(task="a")] * 2, policy_version=0)) == [4, 5]
    buffer.add([make_trajectory(task="b")] * 3, policy_version=0)
    assert leavers(buffer, lambda: buffer.add([make_trajectory(task="b")], policy_version=0)) == [0]
    with pytest.raises(CapacityError, match="4 items of one task in one add, its quota is 3 of 10"):
        buffer.add([make_trajectory(task="a")] * 4, policy_version=0)
    counts = buffer.summary()["tasks"]
    assert (counts["a"]["items"], counts["b"]["items"]) == (3, 7)


@pytest.mark.parametrize("verb", ["add", "sample"])
def test_max_age_takes_out_what_is_older_and_nothing_else(make_trajectory: Make, verb: str) -> None:
    buffer = ReplayBuffer(10, max_age=5)
    keys = buffer.add([make_trajectory(version=version) for version in (3, 0, 5, 4, 3)], policy_version=5)
    with pytest.raises(ClockError, match="item 1 was written by policy version 0, older than max_age 5 at 6"):
        buffer.add([make_trajectory(version=4), make_trajectory(version=0)], policy_version=6)
    assert buffer.keys().tolist() == keys.tolist()
    calls: dict[str, Callable[[int], Any]] = {
        "add": lambda version: buffer.add([], policy_version=version),
        "sample": lambda version: buffer.sample(1, policy_version=version),
    }
    for now, left in [(5, [0, 1, 2, 3, 4]), (6, [0, 2, 3, 4]), (8, [0, 2, 3, 4]), (9, [2, 3]), (10, [2])]:
        calls[verb](now)
        assert buffer.keys().tolist() == keys[left].tolist()
    if verb == "sample":
        with pytest.raises(SamplingError, match="1 items are older than max_age 5 then, and only 0 could be drawn"):
            calls[verb](11)
        assert (buffer.keys().tolist(), buffer.policy_version) == ([keys[2]], 10), "a refused draw moves no clock"
    calls["add"](11)
    assert buffer.summary()["counters"]["expired"] == 5
    assert buffer.nbytes == 0


def test_ages_of_items_that_left_in_another_way_take_no_memory(make_trajectory: Make) -> None:
    buffer = ReplayBuffer(8, max_age=10**6)
    for _ in range(1200):
        buffer.add([make_trajectory()] * 4, policy_version=0)
    assert len(buffer._core.evictor._ages) <= 2 * 8 + 1024 + 4
    buffer.add([], policy_version=10**6)
    assert len(buffer) == 8
    buffer.add([], policy_version=10**6 + 1)
    assert len(buffer) == 0


def test_max_uses_counts_every_draw_and_lets_the_batch_finish(make_trajectory: Make) -> None:
    """A counter for each key by hand; an item leaves after the batch in which it reaches the limit."""
    buffer = ReplayBuffer(6, max_uses=4, seed=3)
    keys = buffer.add([make_trajectory(float(base)) for base in range(1, 7)], policy_version=0)
    uses = dict.fromkeys(keys.tolist(), 0)
    while len(buffer):
        before = dict(uses)
        batch = buffer.sample(3, policy_version=0)
        assert batch.uses.tolist() == [before[key] for key in batch.keys.tolist()]
        for key in batch.keys.tolist():
            uses[key] += 1
        assert buffer.keys().tolist() == [key for key in keys.tolist() if uses[key] < 4]
    assert all(4 <= count <= 6 for count in uses.values())
    counters = buffer.summary()["counters"]
    assert (counters["used_up"], counters["drawn"]) == (6, sum(uses.values()))
    assert buffer.add([make_trajectory()], policy_version=0) not in keys


def test_repeats_within_a_batch_are_uses_too(make_trajectory: Make) -> None:
    buffer = ReplayBuffer(2)
    keys = buffer.add([make_trajectory()] * 2, policy_version=0)
    first = buffer.sample(11, policy_version=0).keys
    later = buffer.sample(20, policy_version=0)
    counts = dict(zip(*np.unique(first, return_counts=True), strict=True))
    assert set(counts) == set(keys)
    assert later.uses.tolist() == [counts[key] for key in later.keys]


def test_removed_items_are_gone_and_refused_afterwards(make_trajectory: Make) -> None:
    buffer = ReplayBuffer(4)
    keys = buffer.add([make_trajectory(seed=seed) for seed in range(4)], policy_version=0)
    result = buffer.remove([keys[1], 99, keys[1], keys[3], -1])
    assert (result.updated, result.refused.tolist()) == (2, [99, -1])
    assert buffer.keys().tolist() == keys[[0, 2]].tolist()
    assert {item.seed for item in buffer.sample(50, policy_version=0).trajectories} == {0, 2}
    assert buffer.remove(keys[[1, 3]]).refused.tolist() == keys[[1, 3]].tolist()
    assert buffer.update_priorities(keys[[1]], [5.0]).refused.tolist() == keys[[1]].tolist()
    with pytest.raises(TypeError, match="keys have dtype float64"):
        buffer.remove([0.5])
    assert buffer.remove([]).updated == 0
    again = buffer.add([make_trajectory()] * 2, policy_version=0)
    assert not set(again.tolist()) & set(keys.tolist())


def test_the_lowest_priority_is_the_present_one_also_when_freshness_is_recomputed(make_trajectory: Make) -> None:
    """Without a draw in between, so that nothing else has brought the freshness up to date."""
    buffer = ReplayBuffer(
        2, priority=lambda t: t.episode_return, freshness=PowerLaw(1.0, 1.0), evict="lowest", alpha=1.0
    )
    old = buffer.add([make_trajectory(reward=1.0, version=0)], policy_version=0)
    young = [int(buffer.add([make_trajectory(reward=0.5, version=100)], policy_version=100)[0]) for _ in range(2)]
    assert buffer.keys().tolist() == young
    assert int(old[0]) not in young
    young_facts, _ = buffer.item(young[0])
    assert young_facts["probability"] == pytest.approx(0.5)


def test_what_is_known_of_an_item_is_known_as_of_now(make_trajectory: Make) -> None:
    buffer = ReplayBuffer(2, priority="uniform", freshness=PowerLaw(1.0, 1.0), alpha=1.0)
    buffer.add([make_trajectory(version=0)], policy_version=0)
    buffer.add([make_trajectory(version=99)], policy_version=99)
    assert buffer.item(0)[0]["probability"] == pytest.approx(0.01 / 1.01)
