"""States as files: what goes in comes out, to the bit, and damage is named."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from freshper.errors import SnapshotError
from freshper.training import state_files
from freshper.training.state_files import read_json, read_tensors, write_json, write_tensors

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def _there_and_back(folder, state):
    folder.mkdir(exist_ok=True)
    tree, files = write_tensors(folder, state)
    write_json(folder / "tree.json", tree)
    return read_tensors(folder, read_json(folder / "tree.json"), files)


def _same(one, other):
    """Equal in type and to the bit, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return (
            one.contiguous().view(-1).view(torch.uint8).tolist()
            == other.contiguous().view(-1).view(torch.uint8).tolist()
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(
            type(a) is type(b) and _same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def _tensor(seed):
    chance = random.Random(seed)
    shape = [chance.randrange(4) for _ in range(chance.randrange(3))]
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(chance.choice(DTYPES))
    return tensor.T if chance.random() < 0.5 and tensor.dim() == 2 else tensor


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
keys = st.text(max_size=8) | st.integers() | st.booleans() | st.none() | st.just("$tensor")
states = st.recursive(
    plain | st.integers(0, 2**32).map(_tensor),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=12,
)


@given(state=states)
def test_everything_comes_back_as_it_was(tmp_path_factory, state):
    assert _same(_there_and_back(tmp_path_factory.mktemp("state"), state), state)


def test_the_state_of_an_optimizer_comes_back(tmp_path):
    """Keys that are numbers, tuples, None, and steps that are tensors without a dimension."""
    weights = [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(2))]
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    sum((weight**2).sum() for weight in weights).backward()
    optimizer.step()
    state = _there_and_back(tmp_path / "s", {"optimizer": optimizer.state_dict()})["optimizer"]
    assert _same(state, optimizer.state_dict())
    again = torch.optim.AdamW(weights, lr=0.2)
    again.load_state_dict(state)
    assert _same(again.state_dict(), optimizer.state_dict())


def test_tied_weights_are_written_once_and_views_without_what_they_are_cut_from(tmp_path):
    whole = torch.arange(10_000, dtype=torch.float32)
    state = {
        "embed": whole,
        "head": whole,
        "part": whole[10:20],
        "bits": whole.view(torch.int32),
        "turned": whole[:4].view(2, 2).T,
    }
    back = _there_and_back(tmp_path / "s", state)
    assert all(_same(back[name], state[name]) for name in state)
    (file,) = (tmp_path / "s").glob("*.safetensors")
    assert 80_000 < file.stat().st_size < 82_000  # the values twice, as numbers of two types


def test_a_large_state_goes_into_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(state_files, "SHARD_BYTES", 100)
    state = {str(n): torch.full((n,), float(n)) for n in (10, 10, 20, 60, 1, 5, 19)}
    back = _there_and_back(tmp_path / "s", state)
    assert _same(back, state)
    sizes = [
        sum(t.nbytes for t in safetensors.torch.load_file(path).values())
        for path in (tmp_path / "s").glob("*.safetensors")
    ]
    assert len(sizes) == 4
    assert sorted(size for size in sizes if size > 100) == [240]  # one that is too large alone


def test_gradients_do_not_come_along(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    back = _there_and_back(tmp_path / "s", {"weight": weight})["weight"]
    assert not back.requires_grad
    assert _same(back, weight.detach())


def test_a_float_of_numpy_is_a_float(tmp_path):
    (back,) = _there_and_back(tmp_path / "s", [np.float64(0.1)])
    assert (type(back), back) == (float, 0.1)


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"a": {"b": [1, {2, 3}]}}, r"a\.b\.1 is a set"),
        ({"a": object()}, "a is a object"),
        ({"a": b"bytes"}, "a is a bytes"),
        ({"a": np.ones(2)}, "a is a ndarray"),
        ({"a": np.int64(2)}, "a is a int64"),
        ({"a": {(1, 2): 3}}, "a has a tuple as a key"),
        ({"a": torch.eye(2).to_sparse()}, r"a is a torch\.sparse_coo tensor"),
    ],
)
def test_what_would_need_pickle_is_refused(tmp_path, state, what):
    with pytest.raises(SnapshotError, match=what):
        write_tensors(tmp_path, {"whole": torch.ones(3)} | state)
    assert not list(tmp_path.iterdir())


def _written(folder):
    tree, files = write_tensors(folder, {"a": torch.arange(100), "b": 1})
    return tree, files, folder / "tensors-00001.safetensors"


@pytest.mark.parametrize("place", [0, 9, 50, -1])
def test_a_changed_byte_is_noticed(tmp_path, place):
    tree, files, path = _written(tmp_path)
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=rf"{path.name} is damaged: the checksum of its {len(content)} bytes"):
        read_tensors(tmp_path, tree, files)


def test_a_file_that_is_missing_or_too_short_is_named(tmp_path):
    tree, files, path = _written(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    size = files[path.name]["bytes"]
    with pytest.raises(SnapshotError, match=f"has {size - 3} bytes, {size} were written"):
        read_tensors(tmp_path, tree, files)
    path.unlink()
    with pytest.raises(SnapshotError, match=r"cannot read .*tensors-00001.*No such file"):
        read_tensors(tmp_path, tree, files)


def test_parts_that_do_not_belong_together_are_noticed(tmp_path):
    _, files, _ = _written(tmp_path)
    with pytest.raises(SnapshotError, match="do not belong together"):
        read_tensors(tmp_path, {"$tensor": "another"}, files)


def test_json_keeps_numbers_that_are_not_finite_and_every_bit_of_the_others(tmp_path):
    body = {"a": [0.1 + 0.2, -0.0, 1e-320, math.inf, -math.inf, 2**80], "b": "ä\u2028"}
    write_json(tmp_path / "x", body)
    assert repr(read_json(tmp_path / "x")) == repr(body)
    assert json.loads((tmp_path / "x").read_text())["body"] == body


@pytest.mark.parametrize("change", [("0.25", "0.5"), ('"a"', '"b"'), ("}", ""), ('"body"', '"bodi"')])
def test_changed_json_is_noticed(tmp_path: Path, change):
    write_json(tmp_path / "x", {"a": 0.25})
    text = (tmp_path / "x").read_text()
    assert change[0] in text
    (tmp_path / "x").write_text(text.replace(*change))
    with pytest.raises(SnapshotError, match=r"is damaged: its checksum|cannot read"):
        read_json(tmp_path / "x")
    with pytest.raises(SnapshotError, match="cannot read"):
        read_json(tmp_path / "nothing")
