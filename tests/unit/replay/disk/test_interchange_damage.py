"""Damaged files: JSON that is cut, doubled or no JSON; Parquet that is truncated or has a flipped byte."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freshper import Trajectory, Turn
from freshper.errors import TrajectoryError
from freshper.replay.disk.interchange import read_trajectories, write_trajectories

Make = Callable[..., Trajectory]


@pytest.fixture
def lines(make_trajectory: Make, tmp_path: Path) -> Path:
    write_trajectories(tmp_path / "data.jsonl", [make_trajectory(float(number)) for number in range(3)])
    return tmp_path / "data.jsonl"


@pytest.fixture
def table(make_trajectory: Make, tmp_path: Path) -> Path:
    write_trajectories(tmp_path / "data.parquet", [make_trajectory(float(number)) for number in range(3)])
    return tmp_path / "data.parquet"


def refused(path: Path, message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        list(read_trajectories(path))


def changed(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> Path:
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    return path


def second(path: Path, old: str, new: str) -> Path:
    """The file with a change in its second line."""

    def change(lines: list[bytes]) -> list[bytes]:
        assert old.encode() in lines[1]
        return [lines[0], lines[1].replace(old.encode(), new.encode(), 1), *lines[2:]]

    return changed(path, change)


def test_a_file_that_ends_within_a_line_is_refused_with_that_line(lines: Path) -> None:
    whole = lines.read_bytes()
    starts = [0, *(index + 1 for index, byte in enumerate(whole) if byte == ord("\n"))]
    for length in range(0, len(whole), 11):
        lines.write_bytes(whole[:length])
        complete = sum(start <= length for start in starts) - 1
        if length in starts or length + 1 in starts:
            assert len(list(read_trajectories(lines))) == complete + (length not in starts)
        else:
            refused(lines, rf"data.jsonl, line {complete + 1}: no whole JSON object: .* at character \d+")


def test_the_last_line_may_lack_its_line_feed(lines: Path) -> None:
    lines.write_bytes(lines.read_bytes()[:-1])
    assert [item.episode_return for item in read_trajectories(lines)] == [0.0, 1.0, 2.0]


def test_an_empty_file_of_lines_holds_nothing_but_an_empty_parquet_file_is_cut(lines: Path, table: Path) -> None:
    lines.write_bytes(b"")
    assert list(read_trajectories(lines)) == []
    table.write_bytes(b"")
    refused(table, "data.parquet is no whole Parquet file")


def test_line_ends_blank_lines_and_marks_are_refused_with_their_line(lines: Path) -> None:
    whole = lines.read_bytes()
    for strange, message in [
        (b"\xef\xbb\xbf" + whole, "line 1: the file starts with a byte-order mark: save it as UTF-8 without one"),
        (whole.replace(b"\n", b"\r\n"), "line 1: the line ends with CR LF: save the file with line feeds alone"),
        (whole.replace(b"\n", b"\n\n", 1), "line 2: the line is blank: every line holds one trajectory"),
        (whole + b"\n", "line 4: the line is blank"),
        (whole + b" \r\n", "line 4: the line is blank"),
        (whole.decode().encode("utf-16"), "line 1: no UTF-8 text"),
        (whole + b"\x00" * 8, "line 4: no whole JSON object"),
        (whole.replace(b"\n", b"", 1), "line 1: no whole JSON object: Extra data"),
    ]:
        lines.write_bytes(strange)
        refused(lines, "data.jsonl, " + message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"seed":0', '"seed":0,"seed":1', "the key 'seed' stands twice in one object"),
        ('"start":0', '"start":0,"start":1', "the key 'start' stands twice in one object"),
        ("[0.0,-0.5", "[0.0,NaN", "NaN is no JSON: a value that is unknown is null"),
        ("[0.0,-0.5", "[0.0,-Infinity", "-Infinity is no JSON"),
        ("[0.0,-0.5", "[0.0,-1e999", r"behavior_logprobs\[1\] is -inf: every value must be finite"),
        ('"reward":1.0', '"reward":1e999', "turn 1 has reward inf: it must be finite"),
        ('"reward":1.0', '"reward":1' + "0" * 400, "reward of a turn is far too large"),
        ("[5,", "[1" + "0" * 30 + ",", "tokens holds an integer that is far too large"),
        ("[5,", "[1" + "0" * 5000 + ",", "no trajectory: Exceeds the limit"),
        ("[5,", "[5,true,", r"tokens\[1\] is True: integers are needed"),
        ("[5,", "[" * 100_000, "no trajectory: the JSON is nested too deeply|no whole JSON object"),
        ("[0.0,-0.5", "[-1" + "0" * 400 + ",-0.5", "behavior_logprobs holds an integer that is far too large"),
        ('"seed":0', '"seed":1' + "0" * 30, r"seed 10{30} must lie in \[-2\^63, 2\^63\)"),
        ('"task":"test"', '"task":"\\ud800"', "task is no text: surrogates not allowed"),
        ('"stop_reason":"terminated"', '"stop_reason":["terminated"]', r"unknown stop_reason \['terminated'\]"),
    ],
)
def test_json_that_is_no_trajectory_is_refused(lines: Path, old: str, new: str, message: str) -> None:
    refused(second(lines, old, new), rf"data.jsonl, line 2: ({message})")


@pytest.mark.parametrize("line", ["[]", "null", "3", '"text"', "[[1, 2]]"])
def test_a_line_that_is_no_object_is_refused(lines: Path, line: str) -> None:
    changed(lines, lambda parts: [parts[0], line.encode() + b"\n", parts[2]])
    refused(lines, "data.jsonl, line 2: a .* where a JSON object with the fields of a trajectory belongs")


def test_what_is_no_text_is_refused(lines: Path, table: Path) -> None:
    changed(lines, lambda parts: [parts[0], parts[1].replace(b'"test"', b'"\xff"'), parts[2]])
    refused(lines, "data.jsonl, line 2: no UTF-8 text: invalid start byte")
    columns = pq.read_table(table)
    broken = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(np.array([0, 1, 2, 3], dtype=np.int32)), pa.py_buffer(b"a\xffc")]
    )
    pq.write_table(columns.set_column(columns.column_names.index("task"), "task", broken), table)
    refused(table, "data.parquet, row 1: task cannot be read: 'utf-8' codec")


@pytest.mark.parametrize("kind", [pa.timestamp("ns"), pa.date64(), pa.decimal128(20, 2), pa.binary(8), pa.time64("ns")])
def test_a_column_of_quite_another_type_is_refused(table: Path, kind: pa.DataType) -> None:
    columns = pq.read_table(table)
    strange = pa.Array.from_buffers(kind, 3, [None, pa.py_buffer(b"\x7f" * 48)])  # no moment that Python has
    for name in ("seed", "task", "tokens", "turns", "sampling", "images"):
        place = columns.column_names.index(name)
        pq.write_table(columns.set_column(place, name, strange), table)
        refused(table, f"data.parquet(, row 0: .*{name[:4]}| is no whole Parquet file)")


def test_one_format_under_the_name_of_the_other_is_refused(lines: Path, table: Path) -> None:
    one, other = lines.read_bytes(), table.read_bytes()
    lines.write_bytes(other)
    table.write_bytes(one)
    refused(lines, "data.jsonl, line 1: no")
    refused(table, "data.parquet is no whole Parquet file")


def test_a_truncated_parquet_file_is_refused_at_every_length(table: Path) -> None:
    whole = table.read_bytes()
    for length in [*range(0, len(whole), 13), len(whole) - 1]:
        table.write_bytes(whole[:length])
        refused(table, "data.parquet is no whole Parquet file")


def test_a_flipped_byte_of_the_values_is_noticed(make_trajectory: Make, tmp_path: Path) -> None:
    """The page checksums do it: without them most of these files would give other numbers in silence."""
    rng = np.random.default_rng(0)
    path = tmp_path / "noise.parquet"
    mask = np.arange(2000) > 0
    item = make_trajectory(
        tokens=rng.integers(0, 2**31, 2000),
        response_mask=mask,
        behavior_logprobs=np.where(mask, -rng.exponential(size=2000), 0),
        turns=(Turn(0, 1, 2000, 1.0),),
    )
    write_trajectories(path, [item])
    whole = path.read_bytes()
    tokens = pq.ParquetFile(path).metadata.row_group(0).column(0)
    assert tokens.path_in_schema.startswith("tokens")
    end = tokens.data_page_offset + tokens.total_compressed_size
    for position in range(end - 4000, end, 97):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        refused(path, "noise.parquet is no whole Parquet file: .*(CRC|checksum)")


def test_a_column_that_stands_twice_is_refused(table: Path) -> None:
    columns = pq.read_table(table)
    pq.write_table(columns.append_column("seed", columns.column("seed")), table)
    refused(table, "data.parquet holds the column seed twice")


def as_others_write(columns: pa.Table, change: dict[str, pa.DataType]) -> pa.Table:
    for name, kind in change.items():
        place = columns.column_names.index(name)
        column = columns.column(name)
        empty = pa.types.is_null(kind)  # the type of a column in which another tool saw nothing
        columns = columns.set_column(place, name, pa.nulls(len(columns)) if empty else column.cast(kind))
    return columns


OTHERS: list[dict[str, pa.DataType]] = [
    {"tokens": pa.list_(pa.int64()), "behavior_logprobs": pa.list_(pa.float64())},
    {"tokens": pa.large_list(pa.int64()), "behavior_logprobs": pa.large_list(pa.float64())},
    {"tokens": pa.list_(pa.uint8()), "response_mask": pa.list_(pa.int8())},
    {"tokens": pa.list_(pa.int16(), 4), "seed": pa.int8(), "policy_version": pa.uint64()},
    {"task": pa.large_string(), "group": pa.dictionary(pa.int32(), pa.string()), "images": pa.list_(pa.large_binary())},
    {"advantages": pa.list_(pa.float16()), "td_errors": pa.null()},
]


@pytest.mark.parametrize("change", OTHERS, ids=lambda value: None)
def test_wider_and_narrower_types_are_taken(make_trajectory: Make, table: Path, change: dict[str, Any]) -> None:
    advantages = np.array([0, 0.1, 0, -0.25], dtype=np.float16)  # also what 16 bits can hold
    items = [make_trajectory(1.0, advantages=advantages), make_trajectory(2.0, 7, group="other")]
    write_trajectories(table, items)
    pq.write_table(as_others_write(pq.read_table(table), change), table)
    for mine, theirs in zip(items, read_trajectories(table), strict=True):
        assert theirs.tokens.tolist() == mine.tokens.tolist()
        assert theirs.behavior_logprobs.tobytes() == mine.behavior_logprobs.tobytes()
        assert (theirs.advantages is None) == (mine.advantages is None)
        if mine.advantages is not None:
            np.testing.assert_array_equal(theirs.advantages, mine.advantages)
        assert (theirs.task, theirs.group, theirs.seed) == (mine.task, mine.group, mine.seed)
        assert (theirs.policy_version, theirs.turns) == (mine.policy_version, mine.turns)


def test_a_float64_becomes_the_nearest_float32(lines: Path, table: Path) -> None:
    value = -0.1234567890123456
    second(lines, "[0.0,-0.5", f"[0.0,{value!r}")
    assert list(read_trajectories(lines))[1].behavior_logprobs[1] == np.float32(value)
    columns = pq.read_table(table)
    wide = pa.array([[0.0, value, 0.0, value]] * 3, pa.list_(pa.float64()))
    pq.write_table(columns.set_column(2, "behavior_logprobs", wide), table)
    assert next(read_trajectories(table)).behavior_logprobs[1] == np.float32(value)
