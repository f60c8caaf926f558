"""Trajectories of every shape come back from Parquet and JSON lines to the bit; no damage raises anything else."""

import json
from collections.abc import Iterator
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper import SamplingParams, StopReason, Trajectory, Turn
from freshper.errors import TrajectoryError
from freshper.replay.disk import interchange
from freshper.replay.disk.interchange import read_trajectories, write_trajectories

SUFFIXES = (".parquet", ".jsonl")
ARRAYS = ("tokens", "response_mask", "behavior_logprobs", "advantages", "td_errors")
PROPERTY = settings(deadline=None, derandomize=True, max_examples=150)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
DOUBLE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SAMPLING = st.builds(
    SamplingParams,
    st.floats(0, 1e308),
    st.floats(0, 1, exclude_min=True),
    st.integers(0, 2**63 - 1),
)


@pytest.fixture(autouse=True, scope="module")
def no_flush() -> Iterator[None]:
    """Nothing has to survive a power cut here, and a busy disk takes its time."""
    with mock.patch("os.fsync"):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interchange")


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    turns: list[Turn] = []
    images: list[bytes] = []
    mask: list[bool] = []
    for _ in range(draw(st.integers(1, 4))):
        shown, said = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        pictures = draw(st.lists(st.binary(min_size=1, max_size=6), max_size=2))
        start = len(mask)
        turns.append(Turn(start, start + shown, start + shown + said, draw(DOUBLE), len(pictures)))
        mask += [False] * shown + [True] * said
        images += pictures

    def column(values: st.SearchStrategy[float]) -> list[float]:
        return [draw(values) if sampled else draw(st.sampled_from([0.0, -0.0])) for sampled in mask]

    known = draw(st.booleans())
    return Trajectory(
        tokens=[draw(st.integers(0, 2**31 - 1)) for _ in mask],  # type: ignore[arg-type]
        response_mask=mask,  # type: ignore[arg-type]
        behavior_logprobs=column(FLOAT32.map(lambda value: -abs(value))) if known else None,  # type: ignore[arg-type]
        turns=tuple(turns),
        stop_reason=draw(st.sampled_from(StopReason)),
        success=draw(st.booleans()),
        policy_version=draw(st.integers(0, 2**63 - 1)),
        task=draw(TEXT),
        group=draw(TEXT),
        seed=draw(INT64),
        sampling=draw(SAMPLING),
        advantages=column(FLOAT32) if draw(st.booleans()) else None,  # type: ignore[arg-type]
        td_errors=column(FLOAT32) if draw(st.booleans()) else None,  # type: ignore[arg-type]
        images=tuple(images),
        logprobs_known=known,
    )


def everything(item: Trajectory) -> list[Any]:
    """All fields, arrays as bytes: NaN and -0 count too."""
    parts = []
    for field in fields(Trajectory):
        value = getattr(item, field.name)
        parts.append(value.tobytes() if isinstance(value, np.ndarray) else repr(value))
    return parts


@PROPERTY
@given(items=st.lists(trajectories(), max_size=6), rows=st.integers(1, 4))
def test_both_formats_give_back_every_bit(folder: Path, items: list[Trajectory], rows: int) -> None:
    want = [everything(item) for item in items]
    for suffix in SUFFIXES:
        path, again = folder / f"a{suffix}", folder / f"b{suffix}"
        with mock.patch.object(interchange, "_CHUNK_ROWS", rows):
            assert write_trajectories(path, iter(items)) == len(items)
            assert [everything(item) for item in read_trajectories(path)] == want
            assert write_trajectories(again, read_trajectories(path)) == len(items)
        assert again.read_bytes() == path.read_bytes()


@PROPERTY
@given(items=st.lists(trajectories(), min_size=1, max_size=3))
def test_one_format_becomes_the_other(folder: Path, items: list[Trajectory]) -> None:
    want = [everything(item) for item in items]
    for first, second in (SUFFIXES, SUFFIXES[::-1]):
        write_trajectories(folder / f"one{first}", items)
        write_trajectories(folder / f"two{second}", read_trajectories(folder / f"one{first}"))
        assert [everything(item) for item in read_trajectories(folder / f"two{second}")] == want


@PROPERTY
@given(item=trajectories())
def test_a_float_in_json_is_the_shortest_text_for_its_value(folder: Path, item: Trajectory) -> None:
    """Nearest double of the text = the float32; with one digit less it would be another double."""
    write_trajectories(folder / "f.jsonl", [item])
    texts = json.loads((folder / "f.jsonl").read_text(), parse_float=str)
    for name in ("behavior_logprobs", "advantages", "td_errors"):
        for text, value in zip(texts[name] or [], getattr(item, name) if texts[name] else [], strict=True):
            assert Fraction(float(text)) == Fraction(float(value))
            digits = text.lstrip("-").partition("e")[0].replace(".", "").strip("0")
            if len(digits) > 1:
                assert float(f"{float(value):.{len(digits) - 2}e}") != float(value)


def only_trajectory_errors(path: Path) -> tuple[int, bool]:
    """How many trajectories a file gives, each a valid record, and whether it is then refused."""
    count, told = 0, ""
    try:
        for item in read_trajectories(path):
            assert everything(item)
            count += 1
    except TrajectoryError as error:
        told = str(error)
    assert told.startswith(str(path) if told else "")
    return count, bool(told)


@PROPERTY
@given(
    item=trajectories(),
    place=st.floats(0, 1, exclude_max=True),
    cut=st.integers(0, 4),
    put=st.one_of(st.binary(max_size=3), st.sampled_from([b"null", b"1e999", b"[[", b'"', b"9" * 30, b"{}", b"NaN"])),
)
def test_no_change_of_json_lines_raises_anything_else(
    folder: Path, item: Trajectory, place: float, cut: int, put: bytes
) -> None:
    path = folder / "fuzz.jsonl"
    write_trajectories(path, [item, item])
    whole = path.read_bytes()
    at = int(place * len(whole))
    path.write_bytes(whole[:at] + put + whole[at + cut :])
    count, _ = only_trajectory_errors(path)
    assert count >= (at >= whole.index(b"\n") + 1)  # a good first line is yielded whatever comes after it


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), DOUBLE, TEXT, st.sampled_from([[], {}, 10**400, 2**31])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=2)),
    max_leaves=5,
)


@settings(PROPERTY, max_examples=400)
@given(item=trajectories(), name=st.sampled_from([field.name for field in fields(Trajectory)]), value=VALUES)
def test_no_value_of_a_field_raises_anything_else(folder: Path, item: Trajectory, name: str, value: Any) -> None:
    path = folder / "value.jsonl"
    write_trajectories(path, [item])
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}) + "\n")
    only_trajectory_errors(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_changed_byte_raises_nothing_else(folder: Path, suffix: str) -> None:
    rng = np.random.default_rng(1)
    path = folder / f"byte{suffix}"
    mask = np.array([False, True, True])
    items = [
        Trajectory(
            tokens=np.arange(3),
            response_mask=mask,
            behavior_logprobs=np.where(mask, np.float32(-0.1), np.float32(0)),
            turns=(Turn(0, 1, 3, float(number), 1),),
            stop_reason=StopReason.TERMINATED,
            success=True,
            policy_version=number,
            task="test",
            group="test/0",
            seed=number,
            images=(b"image",),
        )
        for number in range(3)
    ]
    write_trajectories(path, items)
    whole = path.read_bytes()
    noticed = 0
    for position in rng.choice(len(whole), 1500):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        count, refused = only_trajectory_errors(path)
        assert refused or count == 3  # never fewer in silence
        noticed += refused
    assert noticed > 600  # the others are in numbers of JSON, or in what nobody reads of Parquet
