"""Base priorities: the named measures, functions, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from freshper import Trajectory, Turn
from freshper.errors import ConfigError, PriorityError, TrajectoryError, UnknownNameError
from freshper.replay.priority import NAMED_PRIORITIES, base_priorities, check_priority, checked_priorities

Make = Callable[..., Trajectory]


@pytest.mark.parametrize(("reward", "expected"), [(10.9, 11.0), (-2.4, 2.5), (0.0, 0.1)])
def test_reward_is_the_magnitude_of_the_return_plus_eps(make_trajectory: Make, reward: float, expected: float) -> None:
    assert base_priorities([make_trajectory(reward)], "reward", 0.1) == pytest.approx([expected])


def test_reward_sums_the_turns_before_it_takes_the_magnitude(make_trajectory: Make) -> None:
    item = make_trajectory(turns=(Turn(0, 1, 2, -1.0), Turn(2, 3, 4, 1.0)))
    assert base_priorities([item], "reward", 0.25) == pytest.approx([0.25])


@pytest.mark.parametrize(("name", "column"), [("advantage", "advantages"), ("td_error", "td_errors")])
def test_magnitudes_are_means_over_response_tokens_only(make_trajectory: Make, name: str, column: str) -> None:
    item = make_trajectory(**{column: [0.0, -3.0, 0.0, 1.0]})
    assert base_priorities([item], name, 0.1) == pytest.approx([2.1])


@pytest.mark.parametrize(("name", "column"), [("advantage", "advantages"), ("td_error", "td_errors")])
def test_a_missing_column_is_named(make_trajectory: Make, name: str, column: str) -> None:
    with pytest.raises(TrajectoryError, match=f"needs {column}.*with_columns\\({column}=...\\)"):
        base_priorities([make_trajectory()], name, 0.1)


def test_magnitudes_of_large_float32_values_do_not_overflow(make_trajectory: Make) -> None:
    item = make_trajectory(advantages=[0.0, 3e38, 0.0, -3e38])
    assert base_priorities([item], "advantage", 0.0) == pytest.approx([3e38], rel=1e-6)


def test_uniform_is_one_and_success_zero_or_one(make_trajectory: Make) -> None:
    items = [make_trajectory(3.0), make_trajectory(-3.0)]
    np.testing.assert_array_equal(base_priorities(items, "uniform", 0.1), [1.0, 1.0])
    np.testing.assert_array_equal(base_priorities(items, "success", 0.1), [1.0, 0.0])


def test_the_value_of_a_function_is_final(make_trajectory: Make) -> None:
    items = [make_trajectory(number) for number in (0.0, 2.0, 5.0)]
    np.testing.assert_array_equal(base_priorities(items, lambda item: item.episode_return, 0.1), [0.0, 2.0, 5.0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1e-300, -1.0, None])
def test_a_function_that_returns_no_priority_is_refused(make_trajectory: Make, value: Any) -> None:
    values = iter([1.0, value, 1.0])
    with pytest.raises(PriorityError, match=r"base priority of trajectory 1 is .*finite and >= 0"):
        base_priorities([make_trajectory()] * 3, lambda _: next(values), 0.1)


@pytest.mark.parametrize("value", ["high", [1.0, 2.0], 10**400, 1 + 2j, {}])
def test_a_function_that_returns_no_number_is_refused(make_trajectory: Make, value: Any) -> None:
    with pytest.raises(PriorityError, match=r"must be numbers|must be a number|have shape"):
        base_priorities([make_trajectory()] * 2, lambda _: value, 0.1)


def test_an_overflowing_return_is_refused(make_trajectory: Make) -> None:
    item = make_trajectory(turns=(Turn(0, 1, 2, 1.7e308), Turn(2, 3, 4, 1.7e308)))
    with pytest.raises(PriorityError, match="trajectory 0 is inf"):
        base_priorities([item], "reward", 0.1)


def test_check_priority_knows_the_names_and_offers_the_nearest() -> None:
    for name in NAMED_PRIORITIES:
        check_priority(name, 0.1)
    check_priority(len, 0.0)
    with pytest.raises(UnknownNameError, match=r"unknown priority 'rewards'. Did you mean 'reward'\?"):
        check_priority("rewards", 0.1)


@pytest.mark.parametrize("eps", [-0.1, np.nan, np.inf])
def test_an_eps_that_would_spoil_priorities_is_refused(eps: float) -> None:
    with pytest.raises(ConfigError, match=r"eps .* must be finite and >= 0"):
        check_priority("reward", eps)


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0], [[1.0, 2.0]], 1.0, []])
def test_a_wrong_number_of_priorities_is_refused(values: Any) -> None:
    with pytest.raises(PriorityError, match="but there are 2 items"):
        checked_priorities(values, 2, str)


@pytest.mark.parametrize("values", [np.array([1 + 0j, 2.0]), ["a", "b"], [None, object()], [[1.0], [2.0, 3.0]]])
def test_values_that_are_no_real_numbers_are_refused(values: Any) -> None:
    with pytest.raises(PriorityError, match=r"must be numbers|must be a number"):
        checked_priorities(values, 2, str)


def test_good_values_come_back_as_float64() -> None:
    got = checked_priorities(np.array([0, 3], dtype=np.int32), 2, str)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, [0.0, 3.0])
    assert checked_priorities([], 0, str).shape == (0,)


@pytest.mark.parametrize(
    "values",
    [
        "ab",
        ["a", "b"],
        [b"1", b"2"],
        ["1", "2"],
        np.array([1, 2], dtype="datetime64[s]"),
        np.array([1, 2], dtype="timedelta64[s]"),
        np.array([1.0, None]),
        [10**400, 1],
        {},
    ],
)
def test_other_dtypes_are_refused_with_what_came(values: Any) -> None:
    with pytest.raises(PriorityError, match=r"dtype|is '|is b'|too large"):
        checked_priorities(values, 2, str)


def test_truth_values_and_integers_of_any_size_are_priorities() -> None:
    np.testing.assert_array_equal(checked_priorities([True, False], 2, str), [1.0, 0.0])
    np.testing.assert_array_equal(checked_priorities(np.array([True, False]), 2, str), [1.0, 0.0])
    np.testing.assert_array_equal(checked_priorities([10**30, 1], 2, str), [1e30, 1.0])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_that_cannot_be_read_are_answered_with_the_way(dtype: str, whole: bool) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(3000, dtype=getattr(torch, dtype), requires_grad=True)
    with pytest.raises(PriorityError, match=r"pass \.detach\(\)\.float\(\)") as told:
        checked_priorities(tensor if whole else [tensor[0], *[1.0] * 2999], 3000, str)
    assert len(str(told.value)) < 1000


@pytest.mark.parametrize("priority", [["reward"], {}, None, 3, np.array(["reward", "success"]), b"reward"])
def test_what_is_no_name_of_a_priority_is_refused(priority: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown priority .*Known: .*reward"):
        check_priority(priority, 0.1)


@pytest.mark.parametrize("eps", ["0.1", None, True, 10**400, 10**4000, np.ones(2), np.ones(1), [0.1], 1j])
def test_an_eps_of_another_type_is_refused(eps: Any) -> None:
    with pytest.raises(ConfigError, match="eps"):
        check_priority("reward", eps)
