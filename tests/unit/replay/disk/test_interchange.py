"""Trajectories written to Parquet and JSON lines: exact, atomic, and as other tools see them."""

import base64
import errno
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from freshper import ReplayBuffer, SamplingParams, StopReason, Trajectory, Turn
from freshper.errors import ClockError, ConfigError, MissingExtraError, TrajectoryError, UnknownNameError
from freshper.replay.disk import interchange
from freshper.replay.disk.interchange import read_trajectories, write_trajectories

Make = Callable[..., Trajectory]
SUFFIXES = (".parquet", ".jsonl")
ARRAYS = ("tokens", "response_mask", "behavior_logprobs", "advantages", "td_errors")
# What came out of a 32-bit float and is easily lost: no short decimal, denormal, the smallest and the largest, -0.
AWKWARD = np.array([0.1, -1 / 3, 1e-45, 1.17549435e-38, 3.4028235e38, 16777217.0, -0.0, 1e-7], dtype=np.float32)


def varied(make: Make) -> list[Trajectory]:
    """Trajectories that differ in everything that a record can hold."""
    mask = np.array([False] * 2 + [True] * len(AWKWARD))
    longer: dict[str, Any] = {
        "tokens": [2**31 - 1, 0, *range(len(AWKWARD))],
        "response_mask": mask,
        "behavior_logprobs": np.concatenate([[0, 0], -np.abs(AWKWARD)]),
        "turns": (Turn(0, 2, 2 + len(AWKWARD), 0.1 + 0.2, 2),),
        "group": 'ünïcode "quoted"\n\u2028\x00',
        "images": (b"\x89PNG\r\n\x00", b"\xff" * 5),
    }
    return [
        make(0.1),
        make(-2.5, 2**63 - 1, advantages=[0, 0.25, 0, -1], stop_reason=StopReason.TURN_LIMIT, seed=-(2**63)),
        make(1.0, 1, td_errors=[0, 1, 0, 2], sampling=SamplingParams(0.99, 0.9, 100), task="", seed=2**63 - 1),
        make(**longer, advantages=np.concatenate([[0, 0], AWKWARD]), td_errors=np.concatenate([[0, -0.0], -AWKWARD])),
        make(behavior_logprobs=None, logprobs_known=False, advantages=[0, 1, 0, 1]),
    ]


def assert_same(mine: Trajectory, theirs: Trajectory) -> None:
    """Every field, arrays to the bit."""
    for field in fields(Trajectory):
        one, other = getattr(mine, field.name), getattr(theirs, field.name)
        if field.name in ARRAYS and one is not None:
            assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes()), field.name
            assert not other.flags.writeable
        else:
            assert (one, type(one)) == (other, type(other)), field.name


@pytest.fixture(params=SUFFIXES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"data{request.param}"


def test_every_part_comes_back(make_trajectory: Make, path: Path) -> None:
    items = varied(make_trajectory)
    assert write_trajectories(str(path), iter(items)) == len(items)
    loaded = list(read_trajectories(path))
    for mine, theirs in zip(items, loaded, strict=True):
        assert_same(mine, theirs)
    assert [item.logprobs_known for item in loaded] == [True] * 4 + [False]
    assert os.listdir(path.parent) == [path.name]


def test_no_trajectories_are_a_file_too(path: Path) -> None:
    assert write_trajectories(path, []) == 0
    assert list(read_trajectories(path)) == []


def test_a_suffix_may_be_in_capitals(make_trajectory: Make, tmp_path: Path) -> None:
    for name in ("a.PARQUET", "a.JsonL"):
        write_trajectories(tmp_path / name, [make_trajectory()])
        assert len(list(read_trajectories(tmp_path / name))) == 1
    assert (tmp_path / "a.PARQUET").read_bytes()[:4] == b"PAR1"
    assert (tmp_path / "a.JsonL").read_bytes()[:1] == b"{"


def plain(item: Trajectory) -> dict[str, Any]:
    """The row of a trajectory, written out by hand."""
    return {
        "tokens": [int(token) for token in item.tokens],
        "response_mask": [bool(sampled) for sampled in item.response_mask],
        "behavior_logprobs": [float(value) for value in item.behavior_logprobs] if item.logprobs_known else None,
        "turns": [
            {"start": t.start, "reply_start": t.reply_start, "end": t.end, "reward": t.reward, "images": t.images}
            for t in item.turns
        ],
        "stop_reason": str(item.stop_reason),
        "success": item.success,
        "policy_version": item.policy_version,
        "task": item.task,
        "group": item.group,
        "seed": item.seed,
        "sampling": {
            "temperature": item.sampling.temperature,
            "top_p": item.sampling.top_p,
            "top_k": item.sampling.top_k,
        },
        "advantages": None if item.advantages is None else [float(value) for value in item.advantages],
        "td_errors": None if item.td_errors is None else [float(value) for value in item.td_errors],
        "images": list(item.images),
        "logprobs_known": item.logprobs_known,
    }


def test_other_tools_find_plain_columns(make_trajectory: Make, tmp_path: Path) -> None:
    items = varied(make_trajectory)
    rows = [plain(item) for item in items]
    write_trajectories(tmp_path / "a.parquet", items)
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert table.to_pylist() == rows
    assert table.column_names == [field.name for field in fields(Trajectory)]
    assert str(table.schema.field("tokens").type) == "list<element: int32>"
    assert str(table.schema.field("behavior_logprobs").type) == "list<element: float>"
    write_trajectories(tmp_path / "a.jsonl", items)
    text = (tmp_path / "a.jsonl").read_text(encoding="ascii")
    assert "NaN" not in text
    assert text.splitlines() == text.split("\n")[:-1]  # also a reader that ends lines at U+2028 sees the same lines
    for line, row in zip(text.splitlines(), rows, strict=True):
        images = [base64.b64encode(image).decode() for image in row["images"]]
        assert json.loads(line) == row | {"images": images}
        assert list(json.loads(line)) == table.column_names


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_order_and_number_of_rows_do_not_depend_on_chunks(
    make_trajectory: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    items = [make_trajectory(float(number), number) for number in range(150)]
    for rows, size in ((1, 2**40), (7, 2**40), (1000, 200), (150, 2**40)):
        monkeypatch.setattr(interchange, "_CHUNK_ROWS", rows)
        monkeypatch.setattr(interchange, "_CHUNK_BYTES", size)
        path = tmp_path / f"{rows}{suffix}"
        assert write_trajectories(path, items) == 150
        for mine, theirs in zip(items, read_trajectories(path), strict=True):
            assert_same(mine, theirs)
    if suffix == ".parquet":
        groups = {rows: pyarrow.parquet.ParquetFile(tmp_path / f"{rows}.parquet").num_row_groups for rows in (7, 150)}
        assert groups == {7: 22, 150: 1}


def test_chunks_reach_the_disk_before_the_last_trajectory_is_asked_for(
    make_trajectory: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interchange, "_CHUNK_ROWS", 3)
    image = np.random.default_rng(0).bytes(50_000)  # nothing that could be compressed
    sizes: list[int] = []

    def items() -> Iterator[Trajectory]:
        for number in range(9):
            (beside,) = path.parent.iterdir()
            sizes.append(beside.stat().st_size)
            yield make_trajectory(
                float(number), turns=(Turn(0, 1, 2, 0.0), Turn(2, 3, 4, 0.0, 1)), images=(bytes([number]) + image,)
            )

    assert write_trajectories(path, items()) == 9
    assert len(set(sizes[:3])) == 1
    assert sizes[0] + 40_000 < sizes[3]
    assert sizes[3] + 40_000 < sizes[6]


def test_a_file_may_be_rewritten_from_itself(make_trajectory: Make, path: Path) -> None:
    write_trajectories(path, [make_trajectory(float(number)) for number in range(5)])
    assert write_trajectories(path, (item for item in read_trajectories(path) if item.episode_return > 2)) == 2
    assert [item.episode_return for item in read_trajectories(path)] == [3.0, 4.0]


def test_what_fails_while_it_is_written_keeps_the_old_file(
    make_trajectory: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trajectories(path, [make_trajectory()])
    before = path.read_bytes()

    def broken() -> Iterator[Any]:
        yield make_trajectory()
        raise KeyError("the source failed")

    with pytest.raises(KeyError, match="the source failed"):
        write_trajectories(path, broken())
    for strange in ({"tokens": [1]}, None):
        with pytest.raises(TrajectoryError, match=r"item 1 is (dict|NoneType): only trajectories can be written"):
            write_trajectories(path, [make_trajectory(), strange])  # type: ignore[list-item]
    for place in ((os, "fsync"), (Path, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(*place, no_space)
            with pytest.raises(OSError, match="No space left"):
                write_trajectories(path, [make_trajectory()])
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_an_error_of_the_system(make_trajectory: Make, path: Path) -> None:
    """The system's own device that is always full stands where the file would be written."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    beside.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        write_trajectories(path, [make_trajectory()])
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("name", ["data.csv", "data", "data.jsonl.gz", "data.parquet.tmp", ".jsonl", "data.json"])
def test_another_suffix_is_refused_with_the_known_ones(make_trajectory: Make, tmp_path: Path, name: str) -> None:
    for call in (lambda: write_trajectories(tmp_path / name, [make_trajectory()]), lambda: read_trajectories(name)):
        with pytest.raises(UnknownNameError, match=r"unknown suffix of a file of trajectories .* Known: .jsonl, .parq"):
            call()
    assert issubclass(UnknownNameError, ConfigError)
    assert os.listdir(tmp_path) == []


def test_what_the_file_cannot_hold_is_refused(make_trajectory: Make, tmp_path: Path) -> None:
    half = make_trajectory(task="\ud800")
    for suffix in SUFFIXES:
        with pytest.raises(TrajectoryError, match="task of trajectory 1 is no text: surrogates not allowed"):
            write_trajectories(tmp_path / f"a{suffix}", [make_trajectory(), half])
    with pytest.raises(TrajectoryError, match="does not fit into Parquet"):
        write_trajectories(tmp_path / "a.parquet", [make_trajectory(sampling=SamplingParams(top_k=2**70))])
    assert os.listdir(tmp_path) == []


def test_without_pyarrow_parquet_names_the_extra_and_json_works(
    make_trajectory: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pyarrow is needed here: pip install 'freshper\[disk\]'"):
        write_trajectories(tmp_path / "a.parquet", [make_trajectory()])
    with pytest.raises(MissingExtraError, match="pyarrow"):
        read_trajectories(tmp_path / "a.parquet")
    assert os.listdir(tmp_path) == []
    write_trajectories(tmp_path / "a.jsonl", [make_trajectory()])
    assert len(list(read_trajectories(tmp_path / "a.jsonl"))) == 1


def test_a_new_run_is_seeded_with_its_own_version(make_trajectory: Make, path: Path) -> None:
    write_trajectories(path, [make_trajectory(version=5000), make_trajectory(version=7)])
    buffer = ReplayBuffer(4)
    with pytest.raises(ClockError):
        buffer.add(list(read_trajectories(path)), policy_version=0)
    assert buffer.add(list(read_trajectories(path, policy_version=0)), policy_version=0) is not None
    assert len(buffer) == 2
    assert [item.policy_version for item in read_trajectories(path, policy_version=np.int64(3))] == [3, 3]
    assert [item.policy_version for item in read_trajectories(path)] == [5000, 7]


@pytest.mark.parametrize("version", [-1, 2**63, 1.0, True, "0"])
def test_a_version_that_is_none_is_refused_at_once(make_trajectory: Make, path: Path, version: Any) -> None:
    write_trajectories(path, [])
    with pytest.raises(TrajectoryError, match=r"policy_version .* must be an int in \[0, 2\^63\)"):
        read_trajectories(path, policy_version=version)


def test_required_fields_are_those_without_a_default() -> None:
    """Of the record itself: a field that is added to it cannot be forgotten here."""
    required = {field.name for field in fields(Trajectory) if field.default is MISSING}
    assert set(interchange._REQUIRED) == required - {"behavior_logprobs"}
    assert {"success", "group", "seed", "task", "policy_version"} < required
