"""The global generators: what they would have drawn, they draw."""

import random

import numpy as np
import pytest
import torch

from freshper.errors import SnapshotError
from freshper.training.rng_state import restore_rng, rng_state, settle_torch
from freshper.training.state_files import read_json, read_tensors, write_json, write_tensors


@pytest.fixture(autouse=True)
def generators():
    """Whatever is drawn and set here, the other tests find theirs."""
    before, threads = rng_state(), torch.get_num_threads()
    yield
    restore_rng(before)
    torch.set_num_threads(threads)


def _draws():
    return [random.random(), random.gauss(), np.random.rand(3).tolist(), np.random.randn(), torch.rand(3).tolist()]  # noqa: NPY002


def test_they_go_on_where_they_were_also_from_a_file(tmp_path):
    _draws()  # an odd number of normal draws: both generators keep the second one of a pair
    tree, files = write_tensors(tmp_path, rng_state())
    write_json(tmp_path / "tree.json", tree)
    expected = [_draws() for _ in range(3)]
    restore_rng(read_tensors(tmp_path, read_json(tmp_path / "tree.json"), files))
    assert [_draws() for _ in range(3)] == expected


def test_a_seed_decides_them():
    settle_torch(5, 1)
    first = _draws()
    settle_torch(6, 1)
    assert all(mine != theirs for mine, theirs in zip(_draws(), first, strict=True))
    settle_torch(5, 1)
    assert _draws() == first
    settle_torch(2**62 + 5, 1)  # as large as the seeds that are derived
    assert torch.get_num_threads() == 1


def test_generators_of_devices_that_are_gone_are_left_out():
    if torch.cuda.is_available():
        pytest.skip("there are some")
    state = rng_state()
    expected = _draws()
    restore_rng(state | {"cuda": [torch.zeros(16, dtype=torch.uint8)]})
    assert _draws() == expected


@pytest.mark.parametrize(
    "broken",
    [{"python": None}, {"python": (3, (1, 2), None)}, {"numpy": {}}, {"torch": torch.zeros(3)}, {"torch": "x"}],
    ids=str,
)
def test_damage_is_named(broken):
    with pytest.raises(SnapshotError, match="saved random generators are damaged"):
        restore_rng(rng_state() | broken)


def test_what_is_missing_is_named():
    state = rng_state()
    del state["torch"]
    with pytest.raises(SnapshotError, match=r"damaged \(KeyError: 'torch'\)"):
        restore_rng(state)
