"""Files from elsewhere: what is read although it is another tool's, and what is refused with its place."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freshper import SamplingParams, Trajectory, Turn
from freshper.errors import TrajectoryError
from freshper.replay.disk.interchange import read_trajectories, write_trajectories

Make = Callable[..., Trajectory]
Row = dict[str, Any]
SUFFIXES = (".parquet", ".jsonl")
TURN = {"start": 0, "reply_start": 1, "end": 3, "reward": 0.5}
ROW: Row = {
    "tokens": [4, 5, 6],
    "response_mask": [False, True, True],
    "behavior_logprobs": [0.0, -0.5, -1.25],
    "turns": [TURN],
    "stop_reason": "terminated",
    "success": True,
    "policy_version": 3,
    "task": "test",
    "group": "test/0",
    "seed": 7,
}


def put(path: Path, *rows: Row) -> Path:
    """The rows as a file that somebody else wrote, with the types that pyarrow sees in them."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: pa.array([row.get(name) for row in rows]) for name in names}
    pq.write_table(pa.table(columns), path)
    return path


def without(*names: str) -> Row:
    return {name: value for name, value in ROW.items() if name not in names}


def refused(path: Path, message: str, **settings: Any) -> None:
    with pytest.raises(TrajectoryError, match=message):
        list(read_trajectories(path, **settings))


@pytest.fixture(params=SUFFIXES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"data{request.param}"


def place(path: Path, number: int) -> str:
    """How an error names the row at ``number``, counted from 0."""
    return rf"{path.name}, line {number + 1}: " if path.suffix == ".jsonl" else rf"{path.name}, row {number}: "


def test_the_fields_without_a_default_are_enough(path: Path) -> None:
    (item,) = read_trajectories(put(path, ROW))
    assert item.tokens.tolist() == [4, 5, 6]
    assert item.behavior_logprobs.tolist() == [0, -0.5, -1.25]
    assert item.turns == (Turn(0, 1, 3, 0.5),)
    assert (item.sampling, item.advantages, item.td_errors) == (SamplingParams(), None, None)
    assert (item.images, item.logprobs_known, item.seed) == ((), True, 7)


def test_null_is_the_same_as_missing(path: Path) -> None:
    empty = dict.fromkeys(("sampling", "advantages", "td_errors", "images", "logprobs_known"))
    (item,) = read_trajectories(put(path, ROW | empty))
    assert (item.sampling, item.advantages, item.images, item.logprobs_known) == (SamplingParams(), None, (), True)


def test_columns_that_no_trajectory_has_are_ignored(path: Path) -> None:
    extra = {"model": "a", "tokens.length": 3, "messages": [{"role": "user", "content": "hi"}], "index": 0}
    (item,) = read_trajectories(put(path, ROW | extra))
    assert len(item) == 3


@pytest.mark.parametrize("name", ["tokens", "response_mask", "turns", "stop_reason", "success", "task"])
def test_a_required_field_that_is_missing_is_named(path: Path, name: str) -> None:
    """Also where there is no row at all, since a column can be missing without one."""
    where = "" if path.suffix == ".parquet" else place(path, 0)
    said = f"lacks the columns {name}, group: " if path.suffix == ".parquet" else f"{name}, group missing or null: "
    refused(put(path, without(name, "group")), where + said)
    both = put(path, ROW, ROW | {name: None})
    refused(both, place(path, 1) + f"{name} missing or null: a trajectory needs them")
    if path.suffix == ".parquet":
        pq.write_table(pq.read_table(put(path, without(name))).slice(0, 0), path)
        refused(path, f"lacks the columns {name}: a trajectory needs them")


def test_a_version_that_is_replaced_may_be_missing(path: Path) -> None:
    put(path, without("policy_version"))
    refused(path, "policy_version")
    (item,) = read_trajectories(path, policy_version=11)
    assert item.policy_version == 11


def test_log_probs_may_be_missing_only_where_the_row_says_so(path: Path) -> None:
    bare = without("behavior_logprobs")
    message = "behavior_logprobs is missing: .*a demonstration that has none says logprobs_known=False"
    for row in (bare, bare | {"logprobs_known": True}, bare | {"behavior_logprobs": None}):
        refused(put(path, row), place(path, 0) + message)
    (item,) = read_trajectories(put(path, bare | {"logprobs_known": False}))
    assert not item.logprobs_known
    np.testing.assert_array_equal(item.behavior_logprobs, np.array([0, np.nan, np.nan], dtype=np.float32))
    refused(put(path, ROW | {"logprobs_known": False}), "logprobs_known is False, but behavior_logprobs were given")


BAD: list[tuple[Row, str]] = [
    ({"tokens": [4, 5, 2**31]}, r"token ids run from 4 to 2147483648: they must lie in \[0, 2\^31\)"),
    ({"tokens": [4, -5, 6]}, "token ids run from -5 to 6"),
    ({"tokens": [4, 5]}, r"response_mask has shape \(3,\), tokens \(2,\)"),
    ({"tokens": []}, r"tokens has shape \(0,\)"),
    ({"tokens": "abc"}, "tokens is str: a list is needed"),
    ({"tokens": 4}, "tokens is int: a list is needed"),
    ({"tokens": ["4", "5", "6"]}, r"tokens\[0\] is '4': integers are needed"),
    ({"tokens": [[4], [5, 6], [7]]}, r"tokens\[0\] is \[4\]: integers are needed"),
    ({"tokens": [4, None, 6]}, r"tokens\[1\] is None: integers are needed"),
    ({"response_mask": [0, 1, 2]}, "response_mask must hold only true and false"),
    ({"response_mask": ["a", "b", "c"]}, r"response_mask\[0\] is 'a': true and false are needed"),
    ({"behavior_logprobs": [0.0, -0.5]}, r"behavior_logprobs has shape \(2,\), response_mask \(3,\)"),
    ({"behavior_logprobs": [0.0, None, -1.0]}, r"behavior_logprobs\[1\] is None: numbers are needed"),
    ({"behavior_logprobs": ["0", "-1", "-1"]}, r"behavior_logprobs\[0\] is '0': numbers are needed"),
    ({"behavior_logprobs": [0.0, 0.5, -1.0]}, "behavior_logprobs holds 0.5: a log-probability is at most 0"),
    ({"behavior_logprobs": [-1.0, -0.5, -1.0]}, r"behavior_logprobs\[0\] is -1.0 on a token that was not sampled"),
    ({"advantages": [0.0, 1e39, 1.0]}, r"advantages\[1\] is inf: every value must be finite"),
    ({"turns": []}, "a trajectory has at least one turn"),
    ({"turns": "none"}, "turns is str: a list is needed"),
    ({"turns": [0, 1, 3]}, "turn 0 is int: an object with its fields is needed"),
    ({"turns": [TURN | {"end": 2}]}, "the turns end at token 2 of 3"),
    ({"turns": [TURN | {"end": 3.0}]}, "end of a turn 3.0 must be an int"),
    ({"turns": [TURN | {"reward": None}]}, "turn 0 has no reward"),
    ({"turns": [TURN | {"reward": "1"}]}, "reward of turn 0 is '1': a number is needed"),
    ({"turns": [TURN | {"reward": True}]}, "reward of turn 0 is True: a number is needed"),
    ({"turns": [TURN | {"stop": 3}]}, "turn 0 has the unknown field 'stop'; known: start, reply_start, end, reward"),
    ({"turns": [TURN | {"images": 1}]}, "the turns show 1 images, but the trajectory holds 0"),
    ({"stop_reason": "done"}, "unknown stop_reason 'done'"),
    ({"stop_reason": 1}, "unknown stop_reason 1"),
    ({"success": 1}, "success 1 must be true or false"),
    ({"policy_version": 3.0}, "policy_version .* 3.0 must be an int"),
    ({"policy_version": -1}, "policy_version -1 must lie in"),
    ({"seed": 7.0}, "seed 7.0 must be an int"),
    ({"seed": "7"}, "seed '7' must be an int"),
    ({"task": 5}, "task 5 must be a str"),
    ({"logprobs_known": "false"}, "logprobs_known 'false' must be true or false"),
    ({"sampling": {"top_p": 1.5}}, r"top_p 1.5 must be in \(0, 1\]"),
    ({"sampling": {"temp": 0.5}}, "sampling has the unknown field 'temp'; known: temperature, top_p, top_k"),
    ({"sampling": {"top_k": 1.0}}, "top_k 1.0 must be an int"),
    ({"sampling": [1.0, 1.0, 0]}, "sampling is (list|ndarray): an object with its fields is needed"),
    ({"images": ["not base64"]}, "image 0 is neither bytes nor base64 text"),
    ({"images": ["é"]}, "image 0 is neither bytes nor base64 text"),
    ({"images": [5]}, "image 0 is neither bytes nor base64 text"),
    ({"images": [""]}, "image 0 is empty"),
    ({"images": "aGk="}, "images is str: a list is needed"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda value: None)
def test_a_row_that_is_no_trajectory_is_refused_with_its_place(path: Path, change: Row, message: str) -> None:
    """Among lines, the one before it is good and has been yielded; a column of Parquet has one type."""
    put(path, *([ROW] if path.suffix == ".jsonl" else []), ROW | change)
    number = 1 if path.suffix == ".jsonl" else 0
    rows = read_trajectories(path)
    for _ in range(number):
        assert len(next(rows)) == 3
    with pytest.raises(TrajectoryError, match=place(path, number) + message):
        next(rows)


def test_ids_as_floats_are_refused(path: Path) -> None:
    said = r"tokens holds double: integers are needed" if path.suffix == ".parquet" else r"tokens\[0\] is 4.0: integers"
    refused(put(path, ROW | {"tokens": [4.0, 5.0, 6.0]}), place(path, 0) + said.replace("double", "float64"))
    said = "response_mask holds float64: true" if path.suffix == ".parquet" else r"response_mask\[0\] is 0.0: true and"
    refused(put(path, ROW | {"response_mask": [0.0, 1.0, 1.0]}), place(path, 0) + said)


def test_the_row_is_counted_over_the_whole_file(path: Path) -> None:
    rows = [ROW] * 150
    refused(put(path, *rows[:140], ROW | {"success": None}, *rows[:9]), place(path, 140) + "success missing or null")


def test_what_others_write_is_taken_where_nothing_is_lost(path: Path) -> None:
    """pandas and polars write 64 bits, large lists, categories; a JSON writer drops the .0 of a whole number."""
    row = ROW | {
        "response_mask": [0, 1, 1],
        "behavior_logprobs": [0, -1, -2],
        "advantages": [0, 1, 2],
        "sampling": {"temperature": 1, "top_p": 1, "top_k": None},
        "turns": [TURN | {"reward": 2, "images": 1}],
        "images": ["aGVsbG8="],
    }
    (item,) = read_trajectories(put(path, row))  # pyarrow makes 64-bit integers of all these
    assert item.behavior_logprobs.tolist() == [0, -1, -2]
    assert item.response_mask.tolist() == [False, True, True]
    assert (item.images, item.sampling, item.episode_return) == ((b"hello",), SamplingParams(), 2.0)


def test_a_folder_and_a_missing_file_stay_errors_of_the_system(make_trajectory: Make, path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trajectories(path)
    with pytest.raises(FileNotFoundError):
        write_trajectories(path.parent / "no" / path.name, [make_trajectory()])
    path.mkdir()
    with pytest.raises(IsADirectoryError, match=path.name):
        read_trajectories(path)
    with pytest.raises(IsADirectoryError, match=path.name):
        write_trajectories(path, [make_trajectory()])
    assert list(path.parent.iterdir()) == [path]


def test_a_compressed_file_says_so(tmp_path: Path) -> None:
    plain = put(tmp_path / "plain.jsonl", ROW).read_bytes()
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(plain))
    refused(tmp_path / "a.jsonl", "a.jsonl, line 1: the file is compressed with gzip: unpack it first")
    (tmp_path / "a.parquet").write_bytes(gzip.compress(plain))
    refused(tmp_path / "a.parquet", "a.parquet is no whole Parquet file")
