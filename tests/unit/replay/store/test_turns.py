"""Turns cut out of columns are what Trajectory.at_turn gives, in every part."""

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from freshper import ReplayBuffer, Trajectory, Turn
from freshper.replay.priority import base_priorities
from freshper.replay.store.columns import ColumnsBuffer, pack
from freshper.replay.store.turns import at_turns

Make = Callable[..., Trajectory]


def same(one: Trajectory, other: Trajectory) -> None:
    for field in fields(Trajectory):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs, err_msg=field.name)
        else:
            assert mine == theirs, field.name


def random_trajectory(make: Make, rng: np.random.Generator) -> Trajectory:
    turns, mask, shown, start = [], [], 0, 0
    for _ in range(rng.integers(1, 5)):
        seen, reply, images = int(rng.integers(0, 4)), int(rng.integers(1, 5)), int(rng.integers(0, 3))
        turns.append(Turn(start, start + seen, start + seen + reply, float(rng.normal()), images))
        mask += [False] * seen + [True] * reply
        start, shown = start + seen + reply, shown + images
    values: dict[str, NDArray[np.float64]] = {
        name: np.where(mask, rng.normal(size=start), 0) for name in ("advantages", "td_errors") if rng.random() < 0.6
    }
    known = rng.random() < 0.8
    return make(
        **values,
        tokens=rng.integers(0, 2**31, start),
        response_mask=mask,
        behavior_logprobs=np.where(mask, -rng.exponential(size=start), 0) if known else None,
        logprobs_known=known,
        turns=tuple(turns),
        images=tuple(bytes([int(rng.integers(1, 9))]) * 3 for _ in range(shown)),
        policy_version=int(rng.integers(0, 9)),
    )


@pytest.mark.parametrize("seed", range(20))
def test_any_turn_of_any_trajectory_in_any_order(make_trajectory: Make, seed: int) -> None:
    rng = np.random.default_rng(seed)
    items = [random_trajectory(make_trajectory, rng) for _ in range(8)]
    chosen = rng.integers(0, 8, 12)
    turns = np.array([rng.integers(0, len(items[number].turns)) for number in chosen], dtype=np.int32)
    cut = at_turns(pack([items[number] for number in chosen]), turns).trajectories()
    for number, turn, got in zip(chosen, turns, cut, strict=True):
        same(got, items[number].at_turn(int(turn)))


def test_of_nothing_nothing_is_cut() -> None:
    assert len(at_turns(pack([]), np.empty(0, dtype=np.int32))) == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_buffer_of_turns_keeps_the_data_once_and_gives_turns(make_trajectory: Make, seed: int) -> None:
    rng = np.random.default_rng(seed)
    items = [random_trajectory(make_trajectory, rng) for _ in range(6)]
    turns = [item.at_turn(number) for item in items for number in range(len(item.turns))]
    buffer = ReplayBuffer(64, unit="turn", priority="uniform", seed=seed)
    keys = buffer.add(items, policy_version=9)
    assert len(keys) == len(buffer) == len(turns)
    assert len(buffer._core.store.arena) == 6
    expected = dict(zip(keys.tolist(), turns, strict=True))
    batch = buffer.sample(200, policy_version=9)
    assert len(batch) == len(batch.trajectories) == len(batch.trajectory_weights) == 200
    for key, got in zip(batch.keys.tolist(), batch.trajectories, strict=True):
        same(got, expected[key])
    np.testing.assert_array_equal(batch.item_offsets, np.arange(201))


def test_a_turn_drawn_into_used_memory_is_the_same(make_trajectory: Make) -> None:
    rng = np.random.default_rng(3)
    items = [random_trajectory(make_trajectory, rng) for _ in range(6)]
    buffers = [ReplayBuffer(64, unit="turn", seed=1) for _ in range(2)]
    out = ColumnsBuffer()
    for buffer in buffers:
        buffer.add(items, policy_version=9)
    for size in (3, 40, 2):
        plain = buffers[0].sample(size, policy_version=9)
        reused = buffers[1].sample(size, policy_version=9, out=out)
        for one, other in zip(plain.trajectories, reused.trajectories, strict=True):
            same(one, other)


def test_an_episode_is_freed_with_its_last_turn(make_trajectory: Make) -> None:
    """Capacity 3: two episodes of two turns each. The first loses a turn to eviction and its data with the other."""
    buffer = ReplayBuffer(3, unit="turn")
    first = buffer.add([make_trajectory(seed=1)], policy_version=0)
    one = buffer.nbytes
    buffer.add([make_trajectory(seed=2)], policy_version=0)
    assert (len(buffer), buffer.nbytes) == (3, 2 * one)
    assert buffer.keys()[0] == first[1]
    assert buffer.remove(first).refused.tolist() == [first[0]]
    assert (len(buffer), buffer.nbytes) == (2, one)
    left = buffer.sample(20, policy_version=0)
    assert {item.seed for item in left.trajectories} == {2}


def whole_turn(item: Trajectory, number: int) -> Trajectory:
    """The turn without what came before it."""
    turn, cut = item.turns[number], item.at_turn(number)
    shown = len(cut.images) - turn.images
    columns = {name: getattr(cut, name) for name in ("behavior_logprobs", "advantages", "td_errors")}
    if not item.logprobs_known:
        columns["behavior_logprobs"] = None
    return replace(
        cut,
        **{name: None if column is None else column[turn.start :] for name, column in columns.items()},
        tokens=cut.tokens[turn.start :],
        response_mask=cut.response_mask[turn.start :],
        turns=(Turn(0, turn.reply_start - turn.start, turn.end - turn.start, turn.reward, turn.images),),
        images=cut.images[shown:],
    )


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_turns_of_rows_in_any_order_with_and_without_their_context(
    make_trajectory: Make, seed: int, context: bool
) -> None:
    rng = np.random.default_rng(seed)
    items = [random_trajectory(make_trajectory, rng) for _ in range(6)]
    rows = rng.integers(0, 6, 15)
    turns = np.array([rng.integers(0, len(items[row].turns)) for row in rows], dtype=np.int32)
    columns = at_turns(pack(items), turns, rows, context=context)
    assert len(columns) == 15
    views = []
    for row, turn, got in zip(rows, turns.tolist(), columns.trajectories(), strict=True):
        views.append(items[row].at_turn(turn))
        same(got, views[-1] if context else whole_turn(items[row], turn))
        assert got.success == items[row].success
    for priority in ("reward", "uniform", "success"):
        got_bases = base_priorities(columns.trajectories(), priority, 0.1)
        np.testing.assert_array_equal(got_bases, base_priorities(views, priority, 0.1))
    with_columns = [at for at, view in enumerate(views) if view.advantages is not None]
    chosen = [columns.trajectories()[at] for at in with_columns]
    want = base_priorities([views[at] for at in with_columns], "advantage", 0.1)
    np.testing.assert_array_equal(base_priorities(chosen, "advantage", 0.1), want)


def test_without_context_a_long_episode_gives_its_tokens_once(make_trajectory: Make) -> None:
    turns, mask = (
        tuple(Turn(4 * at, 4 * at + 3, 4 * at + 4, 1.0) for at in range(500)),
        [False, False, False, True] * 500,
    )
    item = make_trajectory(
        tokens=np.arange(2000), response_mask=mask, behavior_logprobs=np.where(mask, -1.0, 0.0), turns=turns
    )
    each = np.arange(500, dtype=np.int32)
    cut = at_turns(pack([item]), each, rows=np.zeros(500, dtype=np.int64), context=False)
    np.testing.assert_array_equal(cut.tokens, item.tokens)
    np.testing.assert_array_equal(cut.lengths, np.full(500, 4))


@pytest.mark.parametrize("context", [True, False])
def test_of_no_rows_nothing_is_cut(make_trajectory: Make, context: bool) -> None:
    nothing = np.empty(0, dtype=np.int64)
    got = at_turns(pack([make_trajectory()]), nothing.astype(np.int32), rows=nothing, context=context)
    assert (len(got), got.trajectories()) == (0, ())
