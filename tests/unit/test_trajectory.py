"""Trajectory: every refusal with its message; arrays copied and read-only."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from freshper import SamplingParams, StopReason, Trajectory, Turn
from freshper.errors import FreshPERError, TrajectoryError

Make = Callable[..., Trajectory]
COLUMNS = ("behavior_logprobs", "advantages", "td_errors")
ARRAYS = ("tokens", "response_mask", *COLUMNS)


def test_a_trajectory_knows_its_sums(make_trajectory: Make) -> None:
    item = make_trajectory(turns=(Turn(0, 1, 2, -0.5), Turn(2, 3, 4, 2.0)))
    assert len(item) == 4
    assert item.response_length == 2
    assert item.episode_return == 1.5
    assert item.sampling == SamplingParams()
    assert item.advantages is None
    assert item.td_errors is None


def test_a_turn_may_have_no_observation(make_trajectory: Make) -> None:
    item = make_trajectory(
        response_mask=[1, 1, 1, 1], behavior_logprobs=[-1.0] * 4, turns=(Turn(0, 0, 3, 0), Turn(3, 3, 4, 0))
    )
    assert item.response_length == 4


def test_arrays_have_their_dtypes_whatever_came_in(make_trajectory: Make) -> None:
    item = make_trajectory(tokens=np.arange(4, dtype=np.uint64), response_mask=[0, 1, 0, 1], advantages=[0, 1, 0, 2])
    assert (item.tokens.dtype, item.response_mask.dtype) == (np.int32, np.bool_)
    assert {getattr(item, name).dtype for name in ("behavior_logprobs", "advantages")} == {np.dtype(np.float32)}


def test_arrays_are_copied_and_read_only(make_trajectory: Make) -> None:
    """Also where the dtype already fits and nothing would have to be converted."""
    given = {
        "tokens": np.arange(4, dtype=np.int32),
        "response_mask": np.array([False, True, False, True]),
        **{name: np.array([0, -1, 0, -1], dtype=np.float32) for name in COLUMNS},
    }
    item = make_trajectory(**given)
    for name in ARRAYS:
        kept = getattr(item, name)
        before = kept.copy()
        given[name][:] = 1
        np.testing.assert_array_equal(kept, before)
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 1
        assert given[name].flags.writeable


def test_fields_cannot_be_set(make_trajectory: Make) -> None:
    for frozen, name in ((make_trajectory(), "tokens"), (Turn(0, 1, 2, 0.0), "reward"), (SamplingParams(), "top_p")):
        with pytest.raises(FrozenInstanceError):
            setattr(frozen, name, 1.0)


def test_numpy_scalars_become_plain_values(make_trajectory: Make) -> None:
    item = make_trajectory(
        turns=[Turn(np.int64(0), np.uint8(1), np.int32(2), np.float32(0.5)), Turn(2, 3, 4, np.int64(1))],
        policy_version=np.int64(7),
        seed=np.uint64(2**62),
        success=np.False_,
        stop_reason="turn_limit",
    )
    plain = [item.policy_version, item.seed, item.success, *[getattr(item.turns[0], n) for n in Turn.__slots__]]
    assert [type(value) for value in plain] == [int, int, bool, int, int, int, float, int]
    assert item.turns == (Turn(0, 1, 2, 0.5), Turn(2, 3, 4, 1.0))
    assert item.stop_reason is StopReason.TURN_LIMIT
    params = SamplingParams(np.float32(0.5), np.float64(0.75), np.int64(3))
    assert [type(value) for value in (params.temperature, params.top_p, params.top_k)] == [float, float, int]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tokens": []}, r"tokens has shape \(0,\): it must be \(T,\) with T >= 1"),
    ({"tokens": [[1, 2, 3, 4]]}, r"tokens has shape \(1, 4\)"),
    ({"tokens": 7}, r"tokens has shape \(\)"),
    ({"tokens": [1.0, 2.0, 3.0, 4.0]}, "tokens has dtype float64: token ids are integers"),
    ({"tokens": [True, False, True, True]}, "tokens has dtype bool"),
    ({"tokens": ["a", "b", "c", "d"]}, "tokens has dtype <U1"),
    ({"tokens": [[1], [2, 3]]}, "tokens is no array of numbers"),
    ({"tokens": [1, -2, 3, 4]}, r"token ids run from -2 to 4: they must lie in \[0, 2\^31\)"),
    ({"tokens": [1, 2, 3, 2**31]}, "token ids run from 1 to 2147483648"),
    ({"tokens": [1, 2, 3]}, r"response_mask has shape \(4,\), tokens \(3,\)"),
    ({"response_mask": [0, 1, 0, 2]}, "response_mask must hold only true and false"),
    ({"response_mask": [0, 1, 0, np.nan]}, "response_mask must hold only true and false"),
    ({"response_mask": [0, 1, 0]}, r"behavior_logprobs has shape \(4,\), response_mask \(3,\): one value per token"),
    ({"response_mask": [0, 1, 1, 1], "behavior_logprobs": [0, -1, -1, -1]}, "differs from the reply spans at token 2"),
    ({"response_mask": [0, 0, 0, 1], "behavior_logprobs": [0, 0, 0, -1]}, "differs from the reply spans at token 1"),
    ({"turns": ()}, "a trajectory has at least one turn"),
    ({"turns": (Turn(0, 1, 2, 0),)}, "the turns end at token 2 of 4: every token belongs to a turn"),
    ({"turns": (Turn(1, 1, 2, 0), Turn(2, 3, 4, 0))}, "turn 0 spans 1:1:2; it must start at 0"),
    ({"turns": (Turn(0, 1, 2, 0), Turn(3, 3, 4, 0))}, "turn 1 spans 3:3:4; it must start at 2"),
    ({"turns": (Turn(0, 1, 2, 0), Turn(1, 3, 4, 0))}, "turn 1 spans 1:3:4; it must start at 2"),
    ({"turns": (Turn(0, 2, 2, 0), Turn(2, 3, 4, 0))}, "turn 0 spans 0:2:2.*at least one reply token"),
    ({"turns": (Turn(0, 1, 2, 0), Turn(2, 3, 5, 0))}, "turn 1 spans 2:3:5.*end within 4 tokens"),
    ({"turns": (Turn(0, 1, 2, np.nan), Turn(2, 3, 4, 0))}, "turn 0 has reward nan: it must be finite"),
    ({"turns": (Turn(0, 1, 2, 0), Turn(2, 3, 4, -np.inf))}, "turn 1 has reward -inf"),
    ({"stop_reason": "finished"}, "unknown stop_reason 'finished'; known: terminated, turn_limit, token_limit, error"),
    ({"stop_reason": None}, "unknown stop_reason None"),
    ({"policy_version": -1}, r"policy_version -1 must lie in \[0, 2\^63\)"),
    ({"policy_version": 2**63}, "policy_version 9223372036854775808 must lie in"),
    ({"policy_version": 1.0}, r"policy_version \(optimizer updates applied\) 1.0 must be an int"),
    ({"policy_version": True}, "policy_version .* True must be an int"),
    ({"policy_version": None}, "policy_version .* None must be an int"),
    ({"seed": 0.5}, "seed 0.5 must be an int"),
    ({"seed": None}, "seed None must be an int"),
    ({"seed": True}, "seed True must be an int"),
    ({"seed": 2**63}, r"seed 9223372036854775808 must lie in \[-2\^63, 2\^63\): seeds are kept as int64"),
    ({"seed": -(2**63) - 1}, "seed -9223372036854775809 must lie in"),
    ({"logprobs_known": 1}, "logprobs_known 1 must be true or false"),
    ({"logprobs_known": "no"}, "logprobs_known 'no' must be true or false"),
    ({"logprobs_known": False}, "logprobs_known is False, but behavior_logprobs were given: leave one of them out"),
    ({"success": 1}, "success 1 must be true or false"),
    ({"success": None}, "success None must be true or false"),
    ({"task": None}, "task None must be a str"),
    ({"group": 3}, "group 3 must be a str"),
    (
        {"behavior_logprobs": None},
        "behavior_logprobs is missing: record the log-probs of the sampling engine.*says logprobs_known=False",
    ),
    ({"behavior_logprobs": [0, -1, 0, 0.5]}, "behavior_logprobs holds 0.5: a log-probability is at most 0"),
]
REFUSED += [
    ({name: values}, message)
    for name in COLUMNS
    for values, message in [
        ([0, -1, 0], rf"{name} has shape \(3,\), response_mask \(4,\): one value per token"),
        ([[0, -1, 0, -1]], rf"{name} has shape \(1, 4\)"),
        ([0, np.nan, 0, -1], rf"{name}\[1\] is nan: every value must be finite"),
        ([0, -1, 0, -np.inf], rf"{name}\[3\] is -inf: every value must be finite"),
        ([0, -1, np.nan, -1], rf"{name}\[2\] is nan"),
        ([0, -1e300, 0, -1], rf"{name}\[1\] is -inf"),
        ([0, -1, -0.25, -1], rf"{name}\[2\] is -0.25 on a token that was not sampled: it must be 0 there"),
        (["a", "b", "c", "d"], f"{name} is no array of numbers"),
        ([[0], [0, 1]], f"{name} is no array of numbers"),
    ]
]


@pytest.mark.parametrize(("parts", "message"), REFUSED, ids=lambda value: None)
def test_what_does_not_fit_together_is_refused(make_trajectory: Make, parts: dict[str, Any], message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        make_trajectory(**parts)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((0.0, 1, 2, 0.0), "start of a turn 0.0 must be an int"),
        ((0, "1", 2, 0.0), "reply_start of a turn '1' must be an int"),
        ((0, 1, True, 0.0), "end of a turn True must be an int"),
        ((0, 1, 2, 0.0, 1.0), "images of a turn 1.0 must be an int"),
        ((0, 1, 2, 0.0, None), "images of a turn None must be an int"),
        ((0, 1, 2, None), "reward of a turn None must be a number"),
        ((0, 1, 2, "good"), "reward of a turn 'good' must be a number"),
    ],
)
def test_a_turn_is_ints_and_a_number(parts: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        Turn(*parts)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"temperature": -0.1}, r"temperature -0.1 must be >= 0 \(0 is greedy\)"),
        ({"temperature": np.nan}, "temperature nan must be"),
        ({"temperature": np.inf}, "temperature inf must be"),
        ({"temperature": "hot"}, "temperature 'hot' must be a number"),
        ({"top_p": 0.0}, r"top_p 0.0 must be in \(0, 1\]"),
        ({"top_p": 1.01}, "top_p 1.01 must be"),
        ({"top_p": np.nan}, "top_p nan must be"),
        ({"top_k": -1}, r"top_k -1 must be >= 0 \(0 switches it off\)"),
        ({"top_k": 1.5}, "top_k 1.5 must be an int"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        SamplingParams(**parts)


def test_sampling_says_whether_it_was_truncated() -> None:
    assert not SamplingParams(0.0).truncated
    assert SamplingParams(top_p=0.99).truncated
    assert SamplingParams(top_k=1).truncated


def test_errors_are_of_the_package_and_of_the_standard_kind() -> None:
    assert issubclass(TrajectoryError, FreshPERError)
    assert issubclass(TrajectoryError, ValueError)


def test_with_columns_makes_a_checked_copy(make_trajectory: Make) -> None:
    plain = make_trajectory()
    first = plain.with_columns(advantages=np.array([0.0, 1.0, 0.0, 2.0]))
    both = first.with_columns(td_errors=np.array([0.0, 3.0, 0.0, 4.0]))
    assert plain.advantages is None
    assert first.td_errors is None
    np.testing.assert_array_equal(both.advantages, [0, 1, 0, 2])
    np.testing.assert_array_equal(both.td_errors, [0, 3, 0, 4])
    assert (both.turns, both.policy_version, both.group) == (plain.turns, plain.policy_version, plain.group)
    np.testing.assert_array_equal(both.tokens, plain.tokens)
    again = both.with_columns(advantages=np.array([0.0, 9.0, 0.0, 9.0]))
    np.testing.assert_array_equal(again.advantages, [0, 9, 0, 9])
    np.testing.assert_array_equal(again.td_errors, [0, 3, 0, 4])
    with pytest.raises(TrajectoryError, match=r"advantages\[0\] is 1.0 on a token that was not sampled"):
        plain.with_columns(advantages=np.ones(4))


def test_seeds_reach_to_the_bounds_of_int64(make_trajectory: Make) -> None:
    for seed in (2**63 - 1, -(2**63), np.uint64(2**63 - 1)):
        assert make_trajectory(seed=seed).seed == seed


def test_trajectories_are_equal_only_to_themselves_and_can_be_sent_to_a_process(make_trajectory: Make) -> None:
    item = make_trajectory()
    assert item != make_trajectory()
    assert len({item, item}) == 1
    for other in (pickle.loads(pickle.dumps(item)), copy.deepcopy(item)):  # noqa: S301 - what was pickled here
        np.testing.assert_array_equal(other.tokens, item.tokens)
        assert (other.turns, other.stop_reason, other.sampling) == (item.turns, item.stop_reason, item.sampling)
