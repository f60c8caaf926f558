"""What `freshper inspect` shows of a buffer on disk."""

import json

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from freshper import Exponential, ReplayBuffer, cli, read_trajectories
from freshper.policies.tiny import build_tokenizer


@pytest.fixture(params=["file", "directory"])
def saved(request, tmp_path, make_trajectory):
    """A buffer of 20 items that was drawn from and observed, and where it is."""
    path = tmp_path / "buffer"
    directory = path if request.param == "directory" else None
    buffer = ReplayBuffer(30, freshness=Exponential(9.0), directory=directory)
    buffer.add([make_trajectory(reward=n, version=n) for n in range(20)], policy_version=20)
    batch = buffer.sample(8, policy_version=21)
    buffer.observe(batch, np.linspace(-0.1, 0.1, 8))
    if directory is None:
        buffer.save(path)
    else:
        buffer.checkpoint()
    summary = buffer.summary()
    buffer.close()
    return path, summary


def _run(capsys, *words):
    code = cli.main(["inspect", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_json_is_the_summary(saved, capsys):
    path, summary = saved
    code, out, _ = _run(capsys, path, "--json")
    shown = json.loads(out)
    for volatile in ("allocated", "spilled"):
        del shown["bytes"][volatile], summary["bytes"][volatile]
    assert code == 0
    assert shown == summary


def test_the_text_says_the_same(saved, capsys):
    path, summary = saved
    code, out, _ = _run(capsys, path)
    assert code == 0
    assert "20 of 30 items (unit trajectory), 20 drawable" in out
    assert "added 20, drawn 8, evicted 0" in out
    assert f"as uneven as {summary['next_draw']['effective_items']:,.0f} equally likely items" in out
    assert f"{summary['drift'][0]['ess_fraction']:.3f}" in out
    assert "Exponential(tau=9.0" in out


def test_one_item_as_ids_and_as_json(saved, capsys):
    path, _ = saved
    code, out, _ = _run(capsys, path, "--key", 19)
    assert code == 0
    assert "policy version 19" in out
    assert "return +19" in out
    code, out, _ = _run(capsys, path, "--key", 19, "--json")
    item = json.loads(out)
    assert (item["key"], item["age"], len(item["trajectories"])) == (19, 2, 1)
    assert sum(turn["reward"] for turn in item["trajectories"][0]["turns"]) == 19


def test_a_key_that_is_gone_is_one_line(saved, capsys):
    path, _ = saved
    code, out, err = _run(capsys, path, "--key", 20)
    assert (code, out) == (2, "")
    assert err == "freshper: no item has the key 20: it has left, or never was\n"


def test_nothing_there_and_no_tokenizer_are_one_line(saved, tmp_path, capsys):
    path, _ = saved
    code, _, err = _run(capsys, tmp_path / "nothing")
    assert code == 2
    assert "does not exist: name a saved buffer" in err
    code, _, err = _run(capsys, path, "--key", 3, "--tokenizer", tmp_path)
    assert code == 2
    assert "holds no tokenizer" in err
    assert err.count("\n") == 1


def test_the_text_of_an_item_needs_a_tokenizer(saved, tmp_path, capsys):
    path, _ = saved
    words = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(["up down left right"]))
    words.save_pretrained(tmp_path / "tokenizer")
    code, out, _ = _run(capsys, path, "--key", 19, "--tokenizer", tmp_path / "tokenizer", "--json")
    assert code == 0
    assert not json.loads(out)["trajectories"][0]["turns"][0]["reply"].isdigit()


def test_export_writes_all_trajectories(saved, tmp_path, capsys):
    path, _ = saved
    code, out, _ = _run(capsys, path, "--export", tmp_path / "all.jsonl")
    assert code == 0
    assert f"wrote 20 trajectories to {tmp_path / 'all.jsonl'}" in out
    assert [t.episode_return for t in read_trajectories(tmp_path / "all.jsonl")] == list(range(20))


def test_a_writer_goes_on_beside_it(tmp_path, capsys, make_trajectory):
    with ReplayBuffer(30, directory=tmp_path / "live") as buffer:
        buffer.add([make_trajectory()], policy_version=0)
        assert _run(capsys, tmp_path / "live")[0] == 0
        buffer.add([make_trajectory()], policy_version=0)
        assert "2 of 30 items" in _run(capsys, tmp_path / "live")[1]
