"""Frames: what is written comes back, and nothing else is ever taken for it."""

import json
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from freshper.replay.disk import frames
from freshper.replay.disk.frames import ALIGNMENT, HEADER_BYTES, Damage, Kind

numbers = st.one_of(
    hnp.boolean_dtypes(), hnp.integer_dtypes(), hnp.unsigned_integer_dtypes(), hnp.floating_dtypes(sizes=(16, 32, 64))
)
arrays = st.dictionaries(st.text(max_size=9), hnp.arrays(numbers, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)))
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def frame(sequence: int, content: str, kind: Kind = Kind.CHANGE, count: int = 0) -> bytes:
    payload = frames.encode_payload({"content": content}, {"x": np.arange(3)})
    return b"".join(frames.encode_frame(kind, count, sequence, payload))


@given(plain, arrays)
def test_a_payload_comes_back(head: Any, given: dict[str, np.ndarray[Any, Any]]) -> None:
    payload = frames.encode_payload({"head": head}, given)
    found, again = frames.decode_payload(memoryview(payload))
    assert len(payload) % ALIGNMENT == 0
    assert found == {"head": head}
    assert list(again) == list(given)
    for name, array in given.items():
        assert again[name].dtype == array.dtype.newbyteorder("<")
        assert again[name].shape == array.shape
        assert again[name].tobytes() == np.ascontiguousarray(array).astype(again[name].dtype).tobytes()
        assert not again[name].flags.writeable


def test_arrays_that_are_no_plain_rows_of_bytes() -> None:
    table = np.arange(12).reshape(3, 4)
    given = {"turned": table.T, "every other": table[:, ::2], "one": np.array(7.5), "none": np.zeros((0, 3))}
    _, again = frames.decode_payload(frames.encode_payload({}, given))
    for name, array in given.items():
        np.testing.assert_array_equal(again[name], array, strict=True)


@pytest.mark.parametrize(
    "array",
    [np.array([None]), np.array(["text"]), np.array([1j]), np.zeros(2, "datetime64[s]"), np.longdouble([1]), [1, 2], 3],
)
def test_what_no_format_here_can_hold_is_refused(array: Any) -> None:
    with pytest.raises(TypeError, match=r"'x' is .*: only plain numbers"):
        frames.encode_payload({}, {"x": array})


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        frames.encode_payload({"x": np.int64(3)}, {})


def test_the_format_of_a_frame_does_not_change() -> None:
    """Read by hand, as version 1 of the format says."""
    data = frame(0x0102, "hello", Kind.ADD, count=5)
    word = lambda start, size: int.from_bytes(data[start : start + size], "little")  # noqa: E731
    assert data[:8] == b"freshlog"
    assert (word(8, 4), word(12, 4)) == (1, 5)  # kind, trajectories
    assert (word(16, 8), word(24, 8)) == (len(data) - 64, 0x0102)
    assert word(32, 4) == zlib.crc32(data[64:])
    assert data[36:60] == bytes(24)
    assert word(60, 4) == zlib.crc32(data[:60])
    size = word(64, 8)
    head = json.loads(data[72 : 72 + size])
    assert head == {"head": {"content": "hello"}, "arrays": [["x", "<i8", [3], 0]]}
    start = -(-(72 + size) // 64) * 64
    assert np.frombuffer(data[start : start + 24], "<i8").tolist() == [0, 1, 2]
    assert {kind.name: int(kind) for kind in Kind} == {"ADD": 1, "CHANGE": 2, "COPY": 3}


def test_every_flipped_bit_of_a_frame_is_noticed() -> None:
    data = bytearray(frame(7, "hello"))
    for place in range(len(data)):
        for bit in range(8):
            data[place] ^= 1 << bit
            with pytest.raises(Damage) as found:
                frames.read_frame(bytes(data), 0)
            assert not found.value.torn
            assert (found.value.start, found.value.stop) == (0, len(data))
            data[place] ^= 1 << bit
    assert frames.read_frame(bytes(data), 0)[0].sequence == 7


def test_a_frame_cut_short_anywhere_is_torn() -> None:
    before, data = frame(1, "before"), frame(2, "hello")
    for size in range(len(data)):
        with pytest.raises(Damage) as found:
            frames.read_frame(before + data[:size], len(before))
        assert found.value.torn
        assert (found.value.start, found.value.stop) == (len(before), len(before) + size)


def test_an_unknown_kind_is_no_frame() -> None:
    data = bytearray(frame(1, "x"))
    data[8] = 9
    data[60:64] = zlib.crc32(data[:60]).to_bytes(4, "little")
    assert frames.parse_header(bytes(data[:HEADER_BYTES])) is None


@pytest.mark.parametrize("place", [0, 20, 63, 70, -1])
def test_reading_goes_on_behind_damage(place: int) -> None:
    parts = [frame(number, "x" * number) for number in range(4)]
    damaged = bytearray(parts[1])
    damaged[place] ^= 1
    data = parts[0] + bytes(damaged) + parts[2] + parts[3]
    start, stop = len(parts[0]), len(parts[0]) + len(parts[1])
    found = list(frames.scan(data, 0, {}))
    assert [item[1].sequence for item in found if not isinstance(item, Damage)] == [0, 2, 3]
    damage = found[1]
    assert isinstance(damage, Damage)
    assert (damage.start, damage.stop) == (start, stop)
    passed = list(frames.scan(data, 0, {start: stop}))
    assert [item[1].sequence for item in passed if not isinstance(item, Damage)] == [0, 2, 3]
    assert len(passed) == 3


def test_a_frame_in_words() -> None:
    header, _ = frames.read_frame(frame(7, "x", Kind.ADD, count=64), 0)
    assert frames.describe(header) == "frame 7, add (64 trajectories),"
