"""Arguments of a buffer's verbs: whatever is given, what is refused is refused by name."""

from typing import Any

import numpy as np
import pytest

from freshper.errors import ClockError, ConfigError, PriorityError, UnknownNameError
from freshper.replay.checks import (
    check_name,
    checked_count,
    checked_keys,
    checked_number,
    checked_values,
    checked_version,
    real_array,
    shown,
)

WRONG: list[Any] = [
    "ab",
    ["1", "2"],
    [b"1", b"2"],
    [True, False],
    [1j, 2.0],
    np.array([1 + 0j, 2.0]),
    np.array([1, 2], dtype="datetime64[s]"),
    np.array([1, 2], dtype="timedelta64[s]"),
    np.zeros(2, dtype=[("a", float)]),
    [None, 1.0],
    [object(), 1.0],
    [[1.0], [2.0, 3.0]],
    [1.0, 10**400],
    {1.0, 2.0},
]


@pytest.mark.parametrize("values", WRONG)
def test_values_that_are_no_numbers_are_refused_with_what_they_are(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"log_ratios must be numbers, not .*(dtype|too large|inhomogeneous)"):
        checked_values("log_ratios", values, 2)


@pytest.mark.parametrize(
    "values",
    [[1, 2], (1.0, 2.0), np.array([1, 2], np.uint8), np.array([1.0, 2.0], np.float16), np.array([1, 2], np.longdouble)],
)
def test_values_become_float64(values: Any) -> None:
    got = checked_values("x", values, 2)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, [1.0, 2.0])


def test_integers_beyond_int64_are_numbers_too() -> None:
    np.testing.assert_array_equal(checked_values("x", [10**20, 1.0], 2), [1e20, 1.0])


def test_values_are_copied() -> None:
    given = np.ones(2)
    checked_values("x", given, 2)[0] = 7.0
    np.testing.assert_array_equal(given, [1.0, 1.0])


@pytest.mark.parametrize("values", [[1.0], 1.0, [[1.0, 2.0]], []])
def test_another_number_of_values_is_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"x has shape .*but the batch has 2 trajectories"):
        checked_values("x", values, 2)


@pytest.mark.parametrize("error", [ConfigError, PriorityError])
@pytest.mark.parametrize("kind", ["gradient", "half", "list", "cells"])
def test_tensors_that_numpy_cannot_read_are_answered_with_the_way(kind: str, error: type[ConfigError]) -> None:
    torch = pytest.importorskip("torch")
    values = torch.ones(5000, requires_grad=True) if kind != "half" else torch.ones(5000, dtype=torch.bfloat16)
    if kind == "list":
        values = [values[0], values[1]]
    elif kind == "cells":
        values = [torch.ones((), dtype=torch.bfloat16)] * 5000
    with pytest.raises(error, match=r"b must be numbers.*\.detach\(\)\.float\(\)\.cpu\(\)") as told:
        real_array("b", values, error=error)
    assert len(str(told.value)) < 1000


def test_plain_tensors_are_read() -> None:
    torch = pytest.importorskip("torch")
    np.testing.assert_array_equal(checked_values("x", torch.tensor([1.0, 2.0]), 2), [1.0, 2.0])
    np.testing.assert_array_equal(checked_values("x", [torch.tensor(1.0), torch.tensor(2)], 2), [1.0, 2.0])


@pytest.mark.parametrize(
    "keys",
    [
        [1.0],
        ["1"],
        [True],
        [None],
        np.array([1], dtype="timedelta64[s]"),
        np.array([1], dtype="datetime64[s]"),
        [[1], [2, 3]],
        [[1, 2]],
        3,
        [10**30],
    ],
)
def test_keys_that_are_no_integers_are_refused(keys: Any) -> None:
    with pytest.raises(TypeError, match="keys"):
        checked_keys(keys)


@pytest.mark.parametrize("keys", [[], (), np.array([3, 4], np.uint16), [3, 4]])
def test_integer_keys_are_taken(keys: Any) -> None:
    got = checked_keys(keys)
    assert got.dtype.kind in "iu"
    np.testing.assert_array_equal(got, np.asarray(keys, dtype=np.int64))


@pytest.mark.parametrize("count", [0, -1, 1.0, True, "3", None, [3], np.array([3]), 2**31, 2**63, 10**4000])
def test_a_batch_size_that_no_draw_has_is_refused(count: Any) -> None:
    with pytest.raises(ConfigError, match=r"batch_size .* must be"):
        checked_count(count)


@pytest.mark.parametrize("count", [1, 2**31 - 1, np.int32(7)])
def test_a_batch_size_is_an_int(count: Any) -> None:
    assert (type(checked_count(count)), checked_count(count)) == (int, count)


def test_a_version_is_refused_by_what_it_is() -> None:
    assert checked_version(np.int64(3), 3) == 3  # type: ignore[arg-type]
    for wrong in ("3", 3.0, True, None, np.array([3])):
        with pytest.raises(TypeError, match=r"policy_version .* must be an int"):
            checked_version(wrong, 0)  # type: ignore[arg-type]
    for late in (2**63, 10**5000):
        with pytest.raises(ClockError, match=r"policy_version .* must be < 2\^63"):
            checked_version(late, 0)
    with pytest.raises(ClockError, match="older than 4"):
        checked_version(-(10**5000), 4)


NO_NUMBERS: list[Any] = ["1", b"1", None, True, np.bool_(True), np.ones(2), np.array(1.0), [1.0], 1j, {}, 10**400]


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_is_no_single_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"x .*(must be a number|must be finite)"):
        checked_number("x", value)


@pytest.mark.parametrize("name", [None, ["a"], {}, np.array(["a", "b"]), 3, "c"])
def test_a_name_that_nobody_knows_is_refused(name: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown kind .*Known: a, b"):
        check_name("kind", name, ("a", "b"))


def test_what_is_shown_is_short() -> None:
    assert shown("reward") == "'reward'"
    assert shown(10**5000) == "an int of 16610 bits"
    assert shown(np.zeros((300, 2), np.int16)) == "ndarray of dtype int16 and shape (300, 2)"
    assert len(shown(list(range(10**5)))) < 100
