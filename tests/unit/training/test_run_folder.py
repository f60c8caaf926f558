"""A run's folder: who may write to it, and what stands in it."""

import json
from pathlib import Path

import pytest
from safetensors import SafetensorError

from freshper.errors import ConfigError, RunFolderError, SnapshotError
from freshper.replay.diagnostics import DriftBin
from freshper.rollout.collect import Transcript, TranscriptTurn
from freshper.training.config import TrainConfig
from freshper.training.config_file import make_config, with_flags
from freshper.training.presets import load_config
from freshper.training.run_folder import RunFolder, check_resumable, choose_folder, differences, is_in_use
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
    told = {"observation": "the board", "reply": "<answer> Up </answer>", "reward": -0.1, "valid": True, "images": []}
    assert sample["turns"] == [told, told]


def test_pictures_of_samples_are_files_named_by_their_content(folder):
    turn = TranscriptTurn("a board", "Up", 0.0, True, (b"first picture",))
    last = TranscriptTurn("a board", "Up", 0.0, True, (b"second", b"first picture"))
    ended = Transcript((turn, last), "the end", True, StopReason.TERMINATED, final_images=(b"third",))
    folder.log_sample(4, "eval", ended)
    folder.log_sample(5, "eval", ended)
    for sample in _lines(folder.path / "samples.jsonl"):
        shown = [*sample["turns"][0]["images"], *sample["turns"][1]["images"], *sample["final_images"]]
        pictures = [(folder.path / name).read_bytes() for name in shown]
        assert pictures == [b"first picture", b"second", b"first picture", b"third"]
    assert len(list((folder.path / "images").iterdir())) == 3


def test_models_appear_whole_and_replace_the_old_one(folder):
    for content in ("first", "second"):
        folder.save_model("best", lambda path, content=content: (path / "weights").write_text(content))
        assert (folder.path / "model" / "best" / "weights").read_text() == content

    def broken(path):
        (path / "weights").write_text("half")
        raise OSError("disk full")

    for failures in (1, 2):
        with pytest.warns(UserWarning, match=r"the best policy could not be written to .*disk full.*the run goes on"):
            assert not folder.save_model("best", broken)
        assert folder.failures == failures
    assert (folder.path / "model" / "best" / "weights").read_text() == "second"
    assert folder.save_model("best", lambda path: (path / "weights").write_text("third"))
    assert [path.name for path in (folder.path / "model").iterdir()] == ["best"]
    assert [path.name for path in (folder.path / "model" / "best").iterdir()] == ["weights"]


def test_a_full_disk_as_safetensors_tells_it_is_a_full_disk(folder):
    def broken(path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.warns(UserWarning, match="could not be written"):
        assert not folder.save_model("last", broken)
    assert not (folder.path / "model" / "last").exists()


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
    with RunFolder(tmp_path / "run", CONFIG) as folder:
        folder.log({"iteration": 1})
    with pytest.raises(RunFolderError, match="holds a run already"):
        RunFolder(tmp_path / "run", CONFIG)
    assert not is_in_use(tmp_path / "run")


def test_a_run_that_failed_before_its_first_iteration_leaves_its_folder_free(tmp_path):
    with RunFolder(tmp_path / "run", CONFIG):
        (tmp_path / "run" / "buffer").mkdir()
        (tmp_path / "run" / "buffer" / "log").touch()
    with RunFolder(tmp_path / "run", CONFIG) as folder:
        assert not (tmp_path / "run" / "buffer").exists()
        folder.log({"iteration": 1})
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1


def test_what_a_failed_start_left_is_taken_by_the_next_run(tmp_path):
    config = make_config({"run": {"task": "openenv:http://localhost:1", "arm": "x"}})
    first = choose_folder(config, tmp_path)
    assert first.parent == tmp_path  # no part of the task's name is a folder
    with RunFolder(first, config) as folder:
        assert choose_folder(config, tmp_path) != first  # it is in use
        folder.finish({"status": "failed"})
    assert choose_folder(config, tmp_path) == first
    with RunFolder(first, config) as folder:
        assert not (first / "result.json").exists()
        folder.log({"iteration": 1})
        folder.finish({"status": "finished"})
    assert choose_folder(config, tmp_path) != first


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


def _some_run(path, iterations=4, config=CONFIG):
    """Rows, samples and drift of some iterations; what stood there after the second one."""
    turn = TranscriptTurn("o", "r", 1.0, True)
    with RunFolder(path, config) as folder:
        for iteration in range(1, iterations + 1):
            folder.log({"iteration": iteration})
            folder.log_sample(iteration, "fresh", Transcript((turn,), "end", True, StopReason.TERMINATED))
            if iteration % 2 == 0:
                folder.log_drift(iteration, [DriftBin(1, 2, 3, 0.5, 0.1, 0.5, 1.0)])
            if iteration == 2:
                positions = folder.positions()
        folder.finish({"status": "interrupted"})
    return positions


GROWING = ("metrics.jsonl", "samples.jsonl", "drift.jsonl")


def _iterations(path):
    return {name: [line["iteration"] for line in _lines(path / name)] for name in GROWING}


def test_a_resumed_run_goes_back_to_where_it_stood(tmp_path):
    positions = _some_run(tmp_path)
    with RunFolder(tmp_path, CONFIG, resume=True) as folder:
        assert _iterations(tmp_path)["metrics.jsonl"] == [1, 2, 3, 4]  # nothing is touched yet
        assert (tmp_path / "result.json").exists()
        folder.go_back(positions, 2)
        assert _iterations(tmp_path) == {"metrics.jsonl": [1, 2], "samples.jsonl": [1, 2], "drift.jsonl": [2]}
        assert not (tmp_path / "result.json").exists()  # the run is going on
        folder.log({"iteration": 3})
    assert _iterations(tmp_path)["metrics.jsonl"] == [1, 2, 3]


def test_half_a_line_of_a_killed_process_is_cut_off(tmp_path):
    positions = _some_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "x')
    with RunFolder(tmp_path, CONFIG, resume=True) as folder:
        folder.go_back(positions, 2)
    assert _iterations(tmp_path)["metrics.jsonl"] == [1, 2]


def test_a_run_without_samples_yet_has_none_after_going_back(tmp_path):
    with RunFolder(tmp_path, CONFIG) as folder:
        folder.log({"iteration": 1})
        positions = folder.positions()
        folder.log_drift(2, [])
    assert positions == {"metrics.jsonl": 17, "samples.jsonl": 0, "drift.jsonl": 0}
    with RunFolder(tmp_path, CONFIG, resume=True) as folder:
        folder.go_back(positions, 1)
    assert (tmp_path / "drift.jsonl").read_text() == ""
    assert not (tmp_path / "samples.jsonl").exists()


@pytest.mark.parametrize("name", GROWING)
def test_lines_that_are_lost_are_noticed_before_anything_is_cut(tmp_path, name):
    positions = _some_run(tmp_path)
    (tmp_path / name).write_text("")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with (
        RunFolder(tmp_path, CONFIG, resume=True) as folder,
        pytest.raises(SnapshotError, match=rf"{name} has 0 bytes, {positions[name]} stood in it .* iteration 2"),
    ):
        folder.go_back(positions, 2)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_model_that_was_being_replaced_comes_back(tmp_path):
    with RunFolder(tmp_path, CONFIG) as folder:
        folder.save_model("best", lambda path: (path / "weights").write_text("old"))
        positions = folder.positions()
    (tmp_path / "model" / "best").rename(tmp_path / "model" / ".best.old")  # killed between two names
    with RunFolder(tmp_path, CONFIG, resume=True) as folder:
        folder.go_back(positions, 1)
    assert (tmp_path / "model" / "best" / "weights").read_text() == "old"


def test_nothing_is_written_before_a_resumed_run_has_gone_back(tmp_path):
    _some_run(tmp_path)
    with (
        RunFolder(tmp_path, CONFIG, resume=True) as folder,
        pytest.raises(RunFolderError, match="was opened to resume"),
    ):
        folder.log({"iteration": 9})
    assert _iterations(tmp_path)["metrics.jsonl"] == [1, 2, 3, 4]


def test_where_there_is_no_run_nothing_is_made(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(RunFolderError, match=r"holds no run that could be resumed: there is no config\.toml"):
            RunFolder(path, CONFIG, resume=True)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_going_on_cannot_be_resumed(tmp_path):
    with RunFolder(tmp_path, CONFIG), pytest.raises(RunFolderError, match="is in use by another run"):
        RunFolder(tmp_path, CONFIG, resume=True)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--optimizer.weight_decay", "1"], r"other settings \(optimizer\.weight_decay was 0\.0, now 1\.0\)"),
        (["--run.seed", "1", "--log.tensorboard", "false"], r"other settings \(run\.seed was 0, now 1\)"),
        (["--checkpoint.keep", "9"], r"other settings \(checkpoint\.keep was 2, now 9\)"),
        (["--run.iterations", "149"], "holds a run of 150 iterations: run.iterations can grow, but not become 149"),
    ],
)
def test_other_settings_are_refused(tmp_path, flags, complaint):
    _some_run(tmp_path)
    with pytest.raises(RunFolderError, match=complaint):
        RunFolder(tmp_path, with_flags(CONFIG, flags), resume=True)
    assert not is_in_use(tmp_path)


def test_some_settings_may_change_and_the_folder_says_so(tmp_path):
    positions = _some_run(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    flags = ["--run.iterations=151", "--checkpoint.every=7", "--eval.patience=3", "--log.tensorboard=false"]
    config = with_flags(CONFIG, [*flags, f"--run.folder={tmp_path / 'there'}"])
    check_resumable(tmp_path / "there", config)
    with RunFolder(tmp_path / "there", config, resume=True) as folder:
        folder.go_back(positions, 2)
    assert load_config(str(tmp_path / "there" / "config.toml")) == config


def test_a_damaged_config_is_named(tmp_path):
    _some_run(tmp_path)
    (tmp_path / "config.toml").write_text("[run")
    with pytest.raises(ConfigError, match=r"cannot read the config .*config\.toml"):
        RunFolder(tmp_path, CONFIG, resume=True)
    assert not is_in_use(tmp_path)


@pytest.mark.parametrize(
    ("content", "finished"),
    [
        ('{"status": "finished"}', True),
        ('{"status": "interrupted"}', False),
        ("[]", False),
        ("{", False),
        (None, False),
    ],
)
def test_whether_a_run_is_finished(folder, content, finished):
    if content is not None:
        (folder.path / "result.json").write_text(content)
    assert folder.is_finished == finished


def test_differences_are_told_in_words():
    there = {"a": {"b": 1, "c": [1]}, "d": "x"}
    assert list(differences(there, {"a": {"b": 1, "c": [2]}, "d": "y"})) == ["a.c was [1], now [2]", "d was x, now y"]
    assert list(differences(there, there)) == []
