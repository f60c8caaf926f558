"""Columns as Arrow streams and back, and rows picked from and put together again."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from freshper.errors import MissingExtraError
from freshper.replay.disk.arrow_columns import concatenate, decode_columns, encode_columns
from freshper.replay.disk.places import Places, decode_state, encode_state
from freshper.replay.store.columns import Columns, pack, take_rows
from freshper.trajectory import Trajectory

spec = importlib.util.spec_from_file_location("durable_world", Path(__file__).with_name("durable_world.py"))
assert spec is not None
assert spec.loader is not None
world = importlib.util.module_from_spec(spec)
spec.loader.exec_module(world)


def some(numbers: range | list[int]) -> list[Trajectory]:
    return [world.trajectory(number) for number in numbers]


def assert_holds(columns: Columns, expected: list[Trajectory]) -> None:
    assert len(columns) == len(expected)
    for found, item in zip(columns.trajectories(), expected, strict=True):
        world.assert_same(found, item)


@pytest.mark.parametrize("numbers", [range(40), range(1), [3, 3, 3], [2, 4], []])
def test_columns_come_back_from_a_stream(numbers: range | list[int]) -> None:
    columns = pack(some(numbers))
    again = decode_columns(memoryview(encode_columns(columns)))
    assert_holds(again, some(numbers))
    assert (again.advantages is None) == (columns.advantages is None)
    assert (again.td_errors is None) == (columns.td_errors is None)


def test_names_that_utf8_does_not_allow_come_back(make_odd: list[Trajectory]) -> None:
    assert_holds(decode_columns(encode_columns(pack(make_odd))), make_odd)


@pytest.fixture
def make_odd() -> list[Trajectory]:
    fields = {name: getattr(world.trajectory(1), name) for name in Trajectory.__slots__}
    return [Trajectory(**fields | {"task": "\ud800 half a pair", "group": ""}), world.trajectory(2)]


def test_a_shared_image_is_written_once() -> None:
    """Four hundred trajectories with one picture each, three pictures: the stream grows by three of them."""
    picture = len(world.PICTURES[0])
    plain = [number for number in range(1, 1200) if number % 3 == 1][:400]
    with_pictures = [number for number in range(1200) if number % 3 == 0][:400]
    extra = len(encode_columns(pack(some(with_pictures)))) - len(encode_columns(pack(some(plain))))
    tokens = sum(len(t) for t in some(with_pictures)) - sum(len(t) for t in some(plain))
    assert abs(extra - tokens * 17) < 3 * picture + 400 * 40  # up to 17 bytes a token, 40 a trajectory
    assert 400 * picture > 2 * (3 * picture + 400 * 40)


@pytest.mark.parametrize(
    "rows", [[], [0], [3, 4, 5], [5, 4, 3], [9, 9, 0, 9], list(range(30)), list(range(29, -1, -1))], ids=str
)
def test_rows_are_picked_in_the_order_asked(rows: list[int]) -> None:
    columns = pack(some(range(30)))
    assert_holds(take_rows(columns, np.array(rows, dtype=np.int64)), some(rows))


def test_parts_are_put_together() -> None:
    groups = [range(5), [6, 8], [], range(9, 30)]
    joined = concatenate([pack(some(numbers)) for numbers in groups])
    expected = [item for numbers in groups for item in some(numbers)]
    assert_holds(joined, expected)
    whole = pack(expected)
    for name in Columns.__slots__:
        one, other = getattr(joined, name), getattr(whole, name)
        if isinstance(other, np.ndarray):
            np.testing.assert_array_equal(one, other, strict=True)
        else:
            assert one == other
    assert_holds(concatenate([]), [])


def test_equal_images_become_one_object() -> None:
    parts = [decode_columns(encode_columns(pack(some([0, 27])))) for _ in range(3)]
    shown = [image for images in concatenate(parts).images for image in images]
    assert len(shown) == 6
    assert len({id(image) for image in shown}) == len(set(shown))


def test_optional_columns_stay_absent_where_nobody_has_them() -> None:
    joined = concatenate([pack(some([2, 4])), pack(some([6]))])
    assert joined.advantages is None
    assert joined.td_errors is None


@pytest.mark.parametrize("library", ["pyarrow", "safetensors"])
def test_a_missing_library_is_named_with_its_extra(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    use = {"pyarrow": lambda: encode_columns(pack([])), "safetensors": lambda: encode_state({}, {}, Places.joined([]))}
    with pytest.raises(MissingExtraError, match=rf"{library} is needed here.*freshper\[disk\]"):
        use[library]()


def test_a_state_comes_back() -> None:
    meta = {"rng": 2**127 + 1, "tau": None, "name": "ü"}
    arrays = {
        "keys": np.array([0.1, np.nan, -np.inf]),
        "used": np.array([True, False]),
        "none": np.zeros((0, 4), np.uint64),
        "one": np.array(3, np.int8),
        "turned": np.arange(6).reshape(2, 3).T,
    }
    places = Places.of_frame(np.array([4, 9, 2**62]), 3, 640, 1000, np.array([1, 2, 1]))
    again, found, where = decode_state(encode_state(meta, arrays, places))
    assert again == meta
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
    assert where.serials.tolist() == [4, 9, 2**62]
    assert where.nbytes.tolist() == [250, 500, 250]
    assert where.rows.tolist() == [0, 1, 2]
    assert set(where.logs.tolist()) == {3}
    assert set(where.offsets.tolist()) == {640}
