"""Columns as names and plain arrays: everything comes back, what repeats is written once, misfits are refused."""

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freshper import SamplingParams, StopReason, Trajectory, Turn
from freshper.errors import SnapshotError
from freshper.replay.disk.column_files import columns_from, describe_columns
from freshper.replay.store.columns import Columns, pack

Make = Callable[..., Trajectory]


def varied(make: Make) -> list[Trajectory]:
    pictures = (Turn(0, 1, 2, 0.0, 2), Turn(2, 3, 4, 0.5, 1))
    return [
        make(0.1, seed=-(2**63), group="ünï\n"),
        make(-2.0, 3, advantages=[0, 0.25, 0, -1], stop_reason=StopReason.TURN_LIMIT),
        make(images=(b"one", b"twotwo", b"one"), turns=pictures, sampling=SamplingParams(0.7, 0.9, 5)),
        make(behavior_logprobs=None, logprobs_known=False, task=""),
        make(images=(b"twotwo", b"\0", b"\0"), turns=pictures, td_errors=[0, 1, 0, 2]),
    ]


def through_json(columns: Columns) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    names, arrays = describe_columns(columns)
    return json.loads(json.dumps(names)), arrays


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_everything_comes_back(make_trajectory: Make, count: int) -> None:
    columns = pack(varied(make_trajectory)[:count])
    again = columns_from(*through_json(columns))
    for field in fields(Columns):
        mine, theirs = getattr(columns, field.name), getattr(again, field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs, err_msg=field.name)
        else:
            assert mine == theirs, field.name


def test_arrays_are_plain_and_what_repeats_is_written_once(make_trajectory: Make) -> None:
    names, arrays = describe_columns(pack(varied(make_trajectory) * 3))
    assert all(array.dtype.kind in "iufb" for array in arrays.values())
    assert arrays["image_bytes"].tobytes() == b"onetwotwo\0"
    assert len(names["sampling"]) == 2
    assert "advantages" in describe_columns(pack(varied(make_trajectory)[1:2]))[1]
    assert "advantages" not in describe_columns(pack(varied(make_trajectory)[:1]))[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("seeds", "4 values of seeds for 5 rows"),
        ("stop_reasons", "4 values of stop_reasons"),
        ("successes", "4 values of successes"),
        ("logprobs_known", "4 values of logprobs_known"),
        ("has_advantages", "4 values of has_advantages"),
        ("has_td_errors", "4 values of has_td_errors"),
        ("sampling", "4 values of sampling"),
        ("image_counts", "4 values of images"),
        ("policy_versions", "5 values of seeds for 4 rows"),
        ("response_mask", "19 values of response_mask for 20 rows"),
        ("behavior_logprobs", "19 values of behavior_logprobs"),
        ("advantages", "19 values of advantages"),
        ("turn_rewards", "9 values of turn_rewards for 10 rows"),
        ("offsets", "5 values of offsets for 6 rows"),
        ("turn_offsets", "5 values of turn_offsets for 6 rows"),
    ],
)
def test_an_array_that_is_too_short_is_named(make_trajectory: Make, name: str, message: str) -> None:
    names, arrays = through_json(pack(varied(make_trajectory)))
    with pytest.raises(SnapshotError, match=f"{message}.*: they do not belong together"):
        columns_from(names, arrays | {name: arrays[name][:-1]})


@pytest.mark.parametrize("name", ["tasks", "groups"])
def test_names_that_are_too_few_are_named(make_trajectory: Make, name: str) -> None:
    names, arrays = through_json(pack(varied(make_trajectory)))
    with pytest.raises(SnapshotError, match=f"4 values of {name} for 5 rows"):
        columns_from(names | {name: names[name][1:]}, arrays)


@pytest.mark.parametrize("name", ["offsets", "turn_offsets"])
@pytest.mark.parametrize("change", [(0, 1), (-1, -1), (2, 99)])
def test_offsets_that_do_not_divide_the_rows_are_refused(
    make_trajectory: Make, name: str, change: tuple[int, int]
) -> None:
    names, arrays = through_json(pack(varied(make_trajectory)))
    offsets = arrays[name].copy()
    offsets[change[0]] += change[1]
    with pytest.raises(SnapshotError, match=f"{name} do not divide the"):
        columns_from(names, arrays | {name: offsets})
