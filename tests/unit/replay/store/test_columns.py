"""Columns: many trajectories as flat arrays, and back again without a loss."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freshper import SamplingParams, StopReason, Trajectory, Turn
from freshper.errors import TrajectoryError, UnknownNameError
from freshper.replay.store.columns import PER_TOKEN, Columns, ColumnsBuffer, pack

Make = Callable[..., Trajectory]


def assert_same(got: Trajectory, want: Trajectory) -> None:
    """Every field, arrays by dtype and byte: NaN equals NaN, and -0 is not 0."""
    for field in fields(Trajectory):
        mine, theirs = getattr(got, field.name), getattr(want, field.name)
        if isinstance(theirs, np.ndarray):
            assert (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes()), field
        else:
            assert mine == theirs, field
            assert type(mine) is type(theirs), field


def rich() -> Trajectory:
    """Nothing in it has a default value."""
    mask = np.array([False, False, True, True, False, True])
    return Trajectory(
        tokens=[3, 0, 2**31 - 1, 9, 4, 7],
        response_mask=mask,
        behavior_logprobs=np.where(mask, [0, 0, -0.25, -1.5, 0, -1e-3], 0),
        turns=(Turn(0, 2, 4, -0.1, 2), Turn(4, 5, 6, 10.7, 1)),
        stop_reason=StopReason.TURN_LIMIT,
        success=True,
        policy_version=2**40,
        task="frozenlake",
        group="frozenlake/17 \u00e4\u4e16",
        seed=-(2**63),
        sampling=SamplingParams(0.99, 0.9, 100),
        advantages=np.where(mask, [0, 0, 1.5, -2, 0, 0.125], 0),
        td_errors=np.where(mask, [0, 0, -3, 4, 0, 5e-8], 0),
        images=(b"\x89PNG", b"GIF", b"\x89PNG"),
    )


def demonstration(make: Make) -> Trajectory:
    return make(logprobs_known=False, behavior_logprobs=None, stop_reason=StopReason.TOKEN_LIMIT, success=False)


def with_column(make: Make, name: str, values: Sequence[float]) -> Trajectory:
    return make(**{name: np.array([0, values[0], 0, values[1]])})


def kinds(make: Make) -> dict[str, list[Trajectory]]:
    """Batches that have every mixture of optional parts."""
    advantage = with_column(make, "advantages", (1.0, -2.0))
    error = with_column(make, "td_errors", (3.0, 0.0))
    long = make(
        tokens=np.arange(9),
        response_mask=[False] * 3 + [True] * 6,
        behavior_logprobs=[0.0] * 3 + [-2.0] * 6,
        turns=(Turn(0, 3, 9, 1.0),),
    )
    return {
        "none": [],
        "plain": [make(2.5, 7), make(-1.0, 0)],
        "rich": [rich()],
        "every kind": [make(), rich(), demonstration(make), long, advantage, error, rich()],
        "unknown log-probs": [demonstration(make), make(), demonstration(make)],
        "one column in the middle": [make(), advantage, make()],
        "two columns on different ones": [advantage, error],
        "lengths": [long, make(), long, long],
    }


NAMES = tuple(kinds(lambda *_, **__: rich()))


@pytest.fixture(params=NAMES)
def batch(request: pytest.FixtureRequest, make_trajectory: Make) -> list[Trajectory]:
    return kinds(make_trajectory)[request.param]


def test_a_round_trip_keeps_every_field(batch: list[Trajectory]) -> None:
    back = pack(batch).trajectories()
    assert len(back) == len(batch)
    for got, want in zip(back, batch, strict=True):
        assert_same(got, want)


def test_packing_twice_gives_the_same_columns(batch: list[Trajectory]) -> None:
    once = pack(batch)
    twice = pack(once.trajectories())
    for field in fields(Columns):
        first, second = getattr(once, field.name), getattr(twice, field.name)
        if isinstance(first, np.ndarray):
            assert (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes())
        else:
            assert first == second


def test_the_trajectories_are_valid_when_checked_again(batch: list[Trajectory]) -> None:
    for back in pack(batch).trajectories():
        assert_same(back.with_columns(), back)  # with_columns makes a new record, with every check


def test_shapes_and_dtypes_are_as_documented(batch: list[Trajectory]) -> None:
    columns, n = pack(batch), len(batch)
    tokens, turns = sum(map(len, batch)), sum(len(item.turns) for item in batch)
    given = {field.name: getattr(columns, field.name) for field in fields(Columns)}
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "offsets": ((n + 1,), np.int64),
        "tokens": ((tokens,), np.int32),
        "response_mask": ((tokens,), np.bool_),
        "behavior_logprobs": ((tokens,), np.float32),
        "turn_offsets": ((n + 1,), np.int64),
        "turns": ((turns, 4), np.int32),
        "turn_rewards": ((turns,), np.float64),
        "policy_versions": ((n,), np.int64),
        "seeds": ((n,), np.int64),
        "stop_reasons": ((n,), np.uint8),
        **dict.fromkeys(("successes", "logprobs_known", "has_advantages", "has_td_errors"), ((n,), np.bool_)),
    }
    for name, shape in shapes.items():
        assert (given[name].shape, given[name].dtype) == (shape[0], np.dtype(shape[1])), name
    for name in ("advantages", "td_errors"):
        if any(getattr(item, name) is not None for item in batch):
            assert (given[name].shape, given[name].dtype) == ((tokens,), np.float32)
        else:
            assert given[name] is None
    assert (
        len(columns) == n == len(columns.tasks) == len(columns.groups) == len(columns.sampling) == len(columns.images)
    )


def test_lengths_are_the_tokens_of_each(batch: list[Trajectory]) -> None:
    np.testing.assert_array_equal(pack(batch).lengths, [len(item) for item in batch])


def test_a_column_that_some_lack_is_zero_there(make_trajectory: Make) -> None:
    plain, item = make_trajectory(), with_column(make_trajectory, "advantages", (1.0, -2.0))
    columns = pack([plain, item, plain])
    assert columns.advantages is not None
    np.testing.assert_array_equal(columns.advantages, [0, 0, 0, 0, 0, 1, 0, -2, 0, 0, 0, 0])
    np.testing.assert_array_equal(columns.has_advantages, [False, True, False])
    assert columns.td_errors is None


def test_unknown_logprobs_are_nan_on_the_mask(make_trajectory: Make) -> None:
    columns = pack([demonstration(make_trajectory), make_trajectory()])
    np.testing.assert_array_equal(columns.behavior_logprobs, np.array([0, np.nan, 0, np.nan, 0, -0.5, 0, -0.5], "f4"))
    np.testing.assert_array_equal(columns.logprobs_known, [False, True])


def test_columns_are_copies_and_trajectories_are_views(make_trajectory: Make) -> None:
    item = make_trajectory()
    columns = pack([item])
    columns.tokens[0] = 99
    assert item.tokens[0] == 5
    (view,) = columns.trajectories()
    assert view.tokens[0] == 99
    assert np.shares_memory(view.tokens, columns.tokens)
    for name in ("tokens", "response_mask", "behavior_logprobs"):
        assert not getattr(view, name).flags.writeable
    assert columns.tokens.flags.writeable


@pytest.mark.parametrize("column", PER_TOKEN)
def test_the_padded_view_is_right_padded(make_trajectory: Make, column: str) -> None:
    batch = [rich(), *(make_trajectory(advantages=np.zeros(4), td_errors=np.zeros(4)) for _ in range(2))]
    padded = pack(batch).padded(column, fill=1)
    assert padded.shape == (3, 6)
    assert padded.dtype == getattr(batch[0], column).dtype
    for row, item in zip(padded, batch, strict=True):
        np.testing.assert_array_equal(row[: len(item)], getattr(item, column))
        np.testing.assert_array_equal(row[len(item) :], np.ones(6 - len(item)))


def test_the_padded_view_of_nothing_is_empty() -> None:
    assert pack([]).padded("tokens").shape == (0, 0)


def taken(buffer: ColumnsBuffer, name: str, rows: int) -> NDArray[Any]:
    return buffer.room(name, rows, np.int32)


def test_a_buffer_uses_its_memory_again() -> None:
    buffer = ColumnsBuffer()
    first = taken(buffer, "tokens", 100)
    second = taken(buffer, "tokens", 60)
    assert (first.shape, second.shape, first.dtype) == ((100,), (60,), np.int32)
    assert np.shares_memory(first, second)
    assert taken(buffer, "tokens", 0).shape == (0,)


def test_a_buffer_grows_and_keeps_what_it_grew_to() -> None:
    buffer = ColumnsBuffer()
    taken(buffer, "tokens", 10)
    large = taken(buffer, "tokens", 1000)
    assert large.shape == (1000,)
    assert np.shares_memory(large, taken(buffer, "tokens", 10))
    assert np.shares_memory(large, taken(buffer, "tokens", 1100))  # a quarter in reserve


def test_columns_of_a_buffer_do_not_share_memory() -> None:
    buffer = ColumnsBuffer()
    tokens, turns = taken(buffer, "tokens", 8), buffer.room("turns", 8, np.int32, (4,))
    assert turns.shape == (8, 4)
    assert not np.shares_memory(tokens, turns)


@pytest.mark.parametrize("rows", [[], [1], [2, 0, 1], [0, 1, 2], [1, 2], [2, 2, 0, 2]])
def test_a_mini_batch_is_the_trajectories_at_its_rows(rows: list[int], make_trajectory: Make) -> None:
    items = [rich(), make_trajectory(reward=2.0), make_trajectory(reward=-1.0)]
    columns = Columns.pack(items)
    for got, want in zip(columns.take(rows).trajectories(), [items[row] for row in rows], strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("rows", [[3], [-1], [0, 9]])
def test_rows_that_are_not_there_are_refused(rows: list[int]) -> None:
    with pytest.raises(IndexError, match="there are 3 trajectories"):
        pack([rich()] * 3).take(rows)


@pytest.mark.parametrize("rows", [[0.0], [[0]], [True], "0"])
def test_rows_of_another_kind_are_refused(rows: Any) -> None:
    with pytest.raises(TypeError, match="they must be \\(m,\\) integers"):
        pack([rich()]).take(rows)


def test_a_padded_column_that_does_not_exist_or_was_never_set_is_named(make_trajectory: Make) -> None:
    with pytest.raises(UnknownNameError, match="unknown column per token 'turns'"):
        pack([rich()]).padded("turns")
    with pytest.raises(TrajectoryError, match="no trajectory of these has advantages"):
        pack([make_trajectory()]).padded("advantages")
