"""A run's folder: who may write to it, and what stands in it."""

import json
from pathlib import Path

import pytest

from freshper.errors import RunFolderError
from freshper.replay.diagnostics import DriftBin
from freshper.rollout.collect import Transcript, TranscriptTurn
from freshper.training.config import TrainConfig
from freshper.training.config_file import make_config
from freshper.training.presets import load_config
from freshper.training.run_folder import RunFolder, choose_folder, is_in_use
from freshper.trajectory import StopReason

CONFIG = TrainConfig()


@pytest.fixture
def folder(tmp_path):
    with RunFolder(tmp_path / "deep" / "run", CONFIG) as opened:
        yield opened


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_config_is_there_from_the_start(folder):
    assert load_config(str(folder.path / "config.toml")) == CONFIG
    assert (folder.path / "metrics.jsonl").read_text() == ""


def test_every_iteration_can_be_read_at_once(folder):
    for iteration in (1, 2):
        folder.log({"iteration": iteration, "rollout/score": iteration / 3})
        assert _lines(folder.path / "metrics.jsonl")[-1] == {"iteration": iteration, "rollout/score": iteration / 3}


def test_what_is_not_finite_is_null(folder):
    folder.log({"iteration": 1, "a": float("nan"), "b": float("inf"), "c": -1.0})
    folder.log_drift(1, [DriftBin(1, 2, 3, float("nan"), float("inf"), 0.5, 1.0)])
    strict = {"parse_constant": lambda text: pytest.fail(f"{text} is no JSON")}
    row = json.loads((folder.path / "metrics.jsonl").read_text(), **strict)
    assert row == {"iteration": 1, "a": None, "b": None, "c": -1.0}
    (bins,) = json.loads((folder.path / "drift.jsonl").read_text(), **strict)["bins"]
    assert (bins["ess_fraction"], bins["kl"], bins["kl_reverse"], bins["n"]) == (None, None, 0.5, 3)


def test_samples_are_whole_episodes_as_text(folder):
    turn = TranscriptTurn("the board", "<answer> Up </answer>", -0.1, True)
    folder.log_sample(4, "eval", Transcript((turn, turn), "the end", True, StopReason.TERMINATED))
    (sample,) = _lines(folder.path / "samples.jsonl")
    assert (sample["iteration"], sample["source"], sample["return"], sample["success"]) == (4, "eval", -0.2, True)
    assert (sample["stop_reason"], sample["final_observation"], sample["error"]) == ("terminated", "the end", None)
    told = {"observation": "the board", "reply": "<answer> Up </answer>", "reward": -0.1, "valid": True}
    assert sample["turns"] == [told, told]


def test_models_appear_whole_and_replace_the_old_one(folder):
    for content in ("first", "second"):
        folder.save_model("best", lambda path, content=content: (path / "weights").write_text(content))
        assert (folder.path / "model" / "best" / "weights").read_text() == content

    def broken(path):
        (path / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        folder.save_model("best", broken)
    assert (folder.path / "model" / "best" / "weights").read_text() == "second"
    folder.save_model("best", lambda path: (path / "weights").write_text("third"))
    assert [path.name for path in (folder.path / "model").iterdir()] == ["best"]
    assert [path.name for path in (folder.path / "model" / "best").iterdir()] == ["weights"]


def test_the_result_ends_the_run(tmp_path):
    folder = RunFolder(tmp_path / "run", CONFIG)
    assert is_in_use(folder.path)
    folder.finish({"status": "finished"})
    assert json.loads((folder.path / "result.json").read_text()) == {"status": "finished"}
    assert not is_in_use(folder.path)
    assert not [path for path in folder.path.iterdir() if path.name.endswith(".tmp")]


def test_a_folder_in_use_is_refused_and_free_afterwards(tmp_path):
    with RunFolder(tmp_path / "run", CONFIG) as folder:
        with pytest.raises(RunFolderError, match=r"is in use by another run: choose another with --run\.folder"):
            RunFolder(folder.path, CONFIG)
        assert is_in_use(folder.path)
    assert not is_in_use(folder.path)


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    with RunFolder(tmp_path / "run", CONFIG):
        pass
    with pytest.raises(RunFolderError, match="holds a run already"):
        RunFolder(tmp_path / "run", CONFIG)
    assert not is_in_use(tmp_path / "run")


def test_a_folder_that_is_there_and_empty_is_taken(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.txt").touch()
    with RunFolder(tmp_path / "run", CONFIG) as folder:
        assert (folder.path / "config.toml").exists()


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_folder_that_cannot_be_made_is_an_error_with_its_name(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=f"cannot make the run folder {tmp_path / name}: "):
        RunFolder(tmp_path / name, CONFIG)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    def denied(self, *args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(RunFolderError, match=r"cannot make the run folder .*: Permission denied"):
        RunFolder(tmp_path / "run", CONFIG)


def test_nothing_is_in_use_where_nothing_is(tmp_path):
    assert not is_in_use(tmp_path / "nowhere")
    assert not is_in_use(tmp_path)


def test_the_first_free_name_is_chosen(tmp_path):
    config = make_config({"run": {"task": "frozenlake", "arm": "per", "seed": 3}})
    assert choose_folder(config, tmp_path) == tmp_path / "frozenlake-per-s3"
    for name in ("frozenlake-per-s3", "frozenlake-per-s3-2"):
        (tmp_path / name).mkdir()
    assert choose_folder(config, tmp_path) == tmp_path / "frozenlake-per-s3-3"
    own = make_config({"run": {"folder": "anywhere/else"}})
    assert choose_folder(own, tmp_path) == Path("anywhere/else")
