"""Parts of a trajectory: its images, demonstrations without log-probs, and a turn as a trajectory of its own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from freshper import SamplingParams, StopReason, Trajectory, Turn
from freshper.errors import TrajectoryError

Make = Callable[..., Trajectory]
COLUMNS = ("behavior_logprobs", "advantages", "td_errors")
# Observations of 2, 0 and 3 tokens, replies of 1, 2 and 2; the first shows an image, the last one two.
TURNS = (Turn(0, 2, 3, 0.5, 1), Turn(3, 3, 5, -1.0), Turn(5, 8, 10, 2.0, 2))
MASK = np.array([0, 0, 1, 1, 1, 0, 0, 0, 1, 1], dtype=bool)
IMAGES = (b"first", b"second", b"third")


def demonstration(make: Make, **parts: Any) -> Trajectory:
    return make(**({"behavior_logprobs": None, "logprobs_known": False} | parts))


def episode(make: Make, **parts: Any) -> Trajectory:
    whole = {
        "tokens": np.arange(10, 20),
        "response_mask": MASK,
        "behavior_logprobs": np.where(MASK, -np.arange(1.0, 11.0), 0),
        "advantages": np.where(MASK, np.arange(21.0, 31.0), 0),
        "td_errors": np.where(MASK, -np.arange(31.0, 41.0), 0),
        "turns": TURNS,
        "images": IMAGES,
        "stop_reason": StopReason.TURN_LIMIT,
        "success": True,
        "policy_version": 6,
        "seed": 9,
        "sampling": SamplingParams(0.7, 0.9, 5),
    }
    return make(**(whole | parts))


def test_unknown_log_probs_are_nan_on_the_mask_and_zero_elsewhere(make_trajectory: Make) -> None:
    item = demonstration(make_trajectory)
    np.testing.assert_array_equal(item.behavior_logprobs, np.array([0, np.nan, 0, np.nan], dtype=np.float32))
    assert item.behavior_logprobs.dtype == np.float32
    assert not item.logprobs_known
    assert make_trajectory().logprobs_known
    with pytest.raises(ValueError, match="read-only"):
        item.behavior_logprobs[0] = 1


@pytest.mark.parametrize("given", [[0, -1, 0, -1], [0, np.nan, 0, np.nan], []])
def test_a_demonstration_with_log_probs_is_a_contradiction(make_trajectory: Make, given: list[float]) -> None:
    with pytest.raises(TrajectoryError, match="logprobs_known is False, but behavior_logprobs were given"):
        demonstration(make_trajectory, behavior_logprobs=given)


def test_all_other_parts_of_a_demonstration_are_checked(make_trajectory: Make) -> None:
    with pytest.raises(TrajectoryError, match=r"response_mask has shape \(3,\), tokens \(4,\)"):
        demonstration(make_trajectory, response_mask=[0, 1, 0])
    with pytest.raises(TrajectoryError, match=r"advantages\[1\] is nan"):
        demonstration(make_trajectory, advantages=[0, np.nan, 0, 1])
    with pytest.raises(TrajectoryError, match="differs from the reply spans at token 0"):
        demonstration(make_trajectory, response_mask=[1, 1, 0, 1])


def test_with_columns_keeps_the_mark_of_a_demonstration(make_trajectory: Make) -> None:
    item = demonstration(make_trajectory).with_columns(advantages=np.array([0.0, 1.0, 0.0, 2.0]))
    both = item.with_columns(td_errors=np.array([0.0, 3.0, 0.0, 4.0]))
    assert (item.logprobs_known, both.logprobs_known) == (False, False)
    np.testing.assert_array_equal(both.behavior_logprobs, np.array([0, np.nan, 0, np.nan], dtype=np.float32))
    np.testing.assert_array_equal(both.advantages, [0, 1, 0, 2])
    np.testing.assert_array_equal(both.td_errors, [0, 3, 0, 4])


def test_log_probs_that_were_found_later_take_the_mark_away(make_trajectory: Make) -> None:
    scored = replace(demonstration(make_trajectory), behavior_logprobs=[0, -1, 0, -2], logprobs_known=True)
    assert scored.logprobs_known
    np.testing.assert_array_equal(scored.behavior_logprobs, [0, -1, 0, -2])


def test_images_are_kept_in_the_order_of_the_observations(make_trajectory: Make) -> None:
    item = episode(make_trajectory, images=list(IMAGES))
    assert item.images == IMAGES
    assert [turn.images for turn in item.turns] == [1, 0, 2]
    assert make_trajectory().images == ()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ((), "the turns show 3 images, but the trajectory holds 0"),
        (IMAGES[:2], "the turns show 3 images, but the trajectory holds 2"),
        ((*IMAGES, b"x"), "the turns show 3 images, but the trajectory holds 4"),
        ((b"a", "b", b"c"), "image 1 is str: pass the bytes of an encoded picture"),
        ((b"a", b"b", bytearray(b"c")), "image 2 is bytearray"),
        (([0, 0], b"b", b"c"), "image 0 is list"),
        ((b"a", b"", b"c"), "image 1 is empty: pass the bytes"),
        (b"abc", "images is bytes"),
    ],
    ids=lambda value: None,
)
def test_images_are_bytes_and_as_many_as_the_turns_show(make_trajectory: Make, images: Any, message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        episode(make_trajectory, images=images)


def test_a_turn_cannot_show_fewer_than_no_images(make_trajectory: Make) -> None:
    """Also where the sum would fit."""
    turns = (replace(TURNS[0], images=-1), TURNS[1], replace(TURNS[2], images=4))
    with pytest.raises(TrajectoryError, match="turn 0 shows -1 images: it must be >= 0"):
        episode(make_trajectory, turns=turns)


@pytest.mark.parametrize(
    ("number", "end", "reply", "told"),
    [(0, 3, [2], (0.5, 1)), (1, 5, [3, 4], (-1.0, 1)), (2, 10, [8, 9], (2.0, 3))],
)
def test_a_turn_alone_has_exactly_its_reply_under_the_mask(
    make_trajectory: Make, number: int, end: int, reply: list[int], told: tuple[float, int]
) -> None:
    whole, (reward, shown) = episode(make_trajectory), told
    for place in (number, number - 3):
        alone = whole.at_turn(place)
        assert alone.tokens.tolist() == list(range(10, 10 + end))
        assert np.flatnonzero(alone.response_mask).tolist() == reply
        assert alone.turns == (Turn(0, reply[0], end, reward, shown),)
        assert alone.episode_return == reward
        assert alone.images == IMAGES[:shown]
        for name in COLUMNS:
            want = np.zeros(end)
            want[reply] = getattr(whole, name)[reply]
            np.testing.assert_array_equal(getattr(alone, name), want)
            assert want[reply].all()


def test_a_turn_alone_keeps_the_facts_of_the_episode(make_trajectory: Make) -> None:
    whole = episode(make_trajectory)
    for name in ("stop_reason", "success", "policy_version", "task", "group", "seed", "sampling", "logprobs_known"):
        assert getattr(whole.at_turn(1), name) == getattr(whole, name)
    assert episode(make_trajectory, advantages=None, td_errors=None).at_turn(1).advantages is None
    assert whole.images == IMAGES
    np.testing.assert_array_equal(whole.response_mask, MASK)


def test_the_turns_alone_share_out_the_mask_and_the_return(make_trajectory: Make) -> None:
    whole = episode(make_trajectory)
    together = np.zeros(len(whole), dtype=int)
    for number in range(len(TURNS)):
        alone = whole.at_turn(number)
        together[: len(alone)] += alone.response_mask
    np.testing.assert_array_equal(together, whole.response_mask)
    assert sum(whole.at_turn(number).episode_return for number in range(3)) == whole.episode_return


def test_a_turn_alone_has_one_turn_and_is_its_own(make_trajectory: Make) -> None:
    alone = episode(make_trajectory).at_turn(1)
    again = alone.at_turn(0)
    assert (again.turns, again.tokens.tolist()) == (alone.turns, alone.tokens.tolist())
    assert again.images == alone.images


@pytest.mark.parametrize("number", [3, -4, 100])
def test_a_turn_out_of_range_is_an_index_error(make_trajectory: Make, number: int) -> None:
    with pytest.raises(IndexError):
        episode(make_trajectory).at_turn(number)


def test_a_turn_of_a_demonstration_keeps_the_mark(make_trajectory: Make) -> None:
    whole = episode(make_trajectory, behavior_logprobs=None, logprobs_known=False)
    alone = whole.at_turn(-1)
    assert not alone.logprobs_known
    assert np.flatnonzero(np.isnan(alone.behavior_logprobs)).tolist() == [8, 9]
    assert not alone.behavior_logprobs[:8].any()
    np.testing.assert_array_equal(alone.advantages[8:], whole.advantages[8:])  # type: ignore[index]
