"""kill -9 at any moment, resume: the finished run is the one that was never killed, bit for bit (T18)."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from freshper import ReplayBuffer, cli
from freshper.reports.progress import CompareProgress
from freshper.training import compare
from freshper.training.checkpoint import has_checkpoint
from freshper.training.state_files import read_json

SETTINGS = """
    --run.iterations 12 --run.sample_every 4 --rollout.episodes 4 --rollout.max_episode_tokens 256 --rollout.max_turns 2
    --tiny.hidden_size 16 --tiny.layers 1 --tiny.heads 2 --tiny.context 256
    --warm_start.updates 60 --warm_start.learning_rate 1e-2 --optimizer.schedule cosine --optimizer.learning_rate 1e-2
    --eval.every 5 --eval.episodes 4 --replay.batch_size 4 --replay.freshness.kind auto
    --replay.correction.beta_start 0.4 --replay.correction.beta_end 1
    --checkpoint.every 3 --log.tensorboard false
"""
FLAGS = SETTINGS.split()
# Iteration 8: checkpoints of 3 and 6 are there. Every iteration has a fresh update and two replay updates.
PHASES = ["rollout:8", "update:22", "optimizer:23", "journal:22", "row:7", "model:2"]
MORE_PHASES = [
    "optimizer:22",
    "update:24",
    "add:8",
    "draw:16",
    "priorities:15",
    "row:6",
    "evaluation:3",
    "evaluation:4",
]


class Trainers:
    """The process that forks trainers, and what they leave behind."""

    def __init__(self, base: Path) -> None:
        command = [sys.executable, str(Path(__file__).with_name("kill_trainer.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.base = base
        self.log = base / "log.txt"
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def run(self, *words: str, kill: str = "") -> int:
        """Exit code of ``freshper train WORDS``; -9 when it was killed at that point."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.log.unlink(missing_ok=True)
        told = {"words": ["train", *words], "kill": kill, "log": str(self.log)}
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def begin(self, folder: Path, kill: str = "", *flags: str) -> int:
        return self.run("sokoban", *FLAGS, *flags, "--run.folder", str(folder), kill=kill)

    def resume(self, folder: Path, kill: str = "", *flags: str) -> int:
        return self.run(str(folder), "--resume", *flags, kill=kill)

    def passages(self, point: str) -> int:
        """How often an uninterrupted run passes a point."""
        folder = self.base / f"counted-{point}"
        assert self.begin(folder, f"{point}:0") == 0
        shutil.rmtree(folder)
        return int(self.log.read_text().rpartition("passed ")[2])


@pytest.fixture(scope="module")
def trainers(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    trainers = Trainers(tmp_path_factory.mktemp("trainers"))
    yield trainers
    assert trainers.process.stdin is not None
    trainers.process.stdin.close()
    trainers.process.wait(timeout=60)
    trainers.process.stdout.close()


@pytest.fixture(scope="module")
def whole(trainers: Trainers) -> Path:
    """A run that nobody has killed."""
    folder = trainers.base / "whole"
    assert trainers.begin(folder) == 0, trainers.log.read_text()
    return folder


def _lines(path: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def _next_draws(folder: Path, mark: str) -> list[object]:
    """What the buffer of a finished run would give out next."""
    drawn: list[object] = []
    with ReplayBuffer.load(folder / "buffer", mark=mark, read_only=True) as buffer:
        for method in ("stratified", "without_replacement"):
            batch = buffer.sample(16, policy_version=buffer.policy_version, method=method)
            drawn += [batch.keys.tolist(), batch.probabilities.tolist(), batch.ages.tolist(), batch.uses.tolist()]
            drawn += [t.tokens.tobytes() + t.behavior_logprobs.tobytes() for t in batch.trajectories]
        drawn += [buffer.freshness.tau, len(buffer)]
    return drawn


def assert_the_same(folder: Path, whole: Path) -> None:
    """Everything that a run leaves behind, but for the time that it took and the names of its buffer's marks."""
    for name in ("metrics.jsonl", "drift.jsonl", "samples.jsonl"):
        assert _lines(folder / name) == _lines(whole / name)
    results = [json.loads((run / "result.json").read_text()) for run in (folder, whole)]
    assert results[0] | {"seconds": 0} == results[1] | {"seconds": 0}
    for name in ("best", "last"):
        mine, theirs = (load_file(run / "model" / name / "model.safetensors") for run in (folder, whole))
        assert all(np.array_equal(mine[key], theirs[key]) for key in theirs)
        assert len({(run / "model" / name / "freshper.json").read_text() for run in (folder, whole)}) == 1
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["000009", "000012"]
    manifests = [read_json(run / "checkpoints" / "000012" / "manifest.json") for run in (folder, whole)]
    mine, theirs = (manifest["state"] for manifest in manifests)
    assert {name for name in theirs if mine[name] != theirs[name]} <= {"standing", "row", "positions"}  # seconds
    assert manifests[0]["files"] == manifests[1]["files"]  # by checksum: weights, optimizer, generators
    draws = [_next_draws(run, m["buffer_mark"]) for run, m in zip((folder, whole), manifests, strict=True)]
    assert draws[0] == draws[1]
    assert not [path for path in folder.rglob(".*") if path.name.endswith((".tmp", ".old"))]


@pytest.mark.parametrize("kill", [*PHASES, *(pytest.param(kill, marks=pytest.mark.slow) for kill in MORE_PHASES)])
def test_killed_in_each_phase(trainers: Trainers, whole: Path, tmp_path: Path, kill: str) -> None:
    folder = tmp_path / "run"
    assert trainers.begin(folder, kill) == -9
    assert trainers.resume(folder) == 0, trainers.log.read_text()
    assert_the_same(folder, whole)


def _sweep(trainers: Trainers, whole: Path, folder: Path, point: str, kills: int) -> None:
    """Kill a run at evenly spaced passages of a point, every time in the folder of a new run."""
    resumed = 0
    for number in np.linspace(1, trainers.passages(point), kills).astype(int):
        shutil.rmtree(folder, ignore_errors=True)
        assert trainers.begin(folder, f"{point}:{number}") == -9
        if not list((folder / "checkpoints").glob("[0-9]*")):
            assert trainers.resume(folder) == 2
            assert re.search(r"no checkpoint to resume from|is no run folder", trainers.log.read_text())
            continue
        result = folder / "result.json"  # once it says finished, only the buffer is still to be closed
        finished = result.exists() and json.loads(result.read_text())["status"] == "finished"
        assert trainers.resume(folder) == (2 if finished else 0), trainers.log.read_text()
        assert_the_same(folder, whole)
        resumed += 1
    assert resumed >= kills / 2


@pytest.mark.parametrize(
    "point", [pytest.param("fsync", marks=pytest.mark.slow), pytest.param("rename", marks=pytest.mark.slow), "renamed"]
)
def test_killed_while_something_is_saved(trainers: Trainers, whole: Path, tmp_path: Path, point: str) -> None:
    """A model, a checkpoint, the buffer's part of it, the result: all of them are made durable, then renamed."""
    _sweep(trainers, whole, tmp_path / "run", point, kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["fsync", "rename", "renamed", "journal", "optimizer"])
def test_killed_at_every_moment(trainers: Trainers, whole: Path, tmp_path: Path, point: str) -> None:
    _sweep(trainers, whole, tmp_path / "run", point, kills=trainers.passages(point))


def test_killed_again_and_again(trainers: Trainers, whole: Path, tmp_path: Path) -> None:
    """Every process is killed soon after its first checkpoint, or before it has one."""
    folder = tmp_path / "run"
    assert trainers.begin(folder, "rollout:4") == -9
    for kill in ("rename:1", "optimizer:5", "fsync:12", "row:5", "renamed:9"):
        assert trainers.resume(folder, kill) == -9
    assert trainers.resume(folder) == 0, trainers.log.read_text()
    assert_the_same(folder, whole)


def test_ctrl_c_loses_nothing(trainers: Trainers, whole: Path, tmp_path: Path) -> None:
    """An interrupted run evaluates once more at its end; resumed, it is the one that was never interrupted."""
    folder = tmp_path / "run"
    assert trainers.begin(folder, "interrupt:7") == 130
    assert "go on with" in trainers.log.read_text()
    assert json.loads((folder / "result.json").read_text())["status"] == "interrupted"
    assert _lines(folder / "metrics.jsonl")[-1].keys() > _lines(whole / "metrics.jsonl")[6].keys()
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["000006", "000007"]
    assert trainers.resume(folder) == 0, trainers.log.read_text()
    assert_the_same(folder, whole)


def test_killed_from_outside(trainers: Trainers, whole: Path, tmp_path: Path, start, until) -> None:
    """An ordinary process of the command, and no other's help."""
    folder = tmp_path / "run"
    process = start("-m", "freshper", "train", "sokoban", *FLAGS, "--run.folder", str(folder))
    metrics = folder / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, process)
    process.kill()
    process.wait(timeout=60)
    refused = trainers.run("sokoban", *FLAGS, "--run.folder", str(folder))
    assert (refused, "go on with --resume" in trainers.log.read_text()) == (2, True)
    # The settings may be given again instead of being read from the folder.
    assert trainers.run("sokoban", *FLAGS, "--run.folder", str(folder), "--resume") == 0, trainers.log.read_text()
    assert_the_same(folder, whole)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(trainers, whole, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert trainers.begin(folder, "rollout:8") == -9
    tensors = folder / "checkpoints" / "000006" / "tensors-00001.safetensors"
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    assert trainers.resume(folder) == 0, trainers.log.read_text()
    said = " ".join(trainers.log.read_text().split())
    assert f"{tensors} is damaged" in said
    assert "going back to the checkpoint of iteration 3" in said
    assert_the_same(folder, whole)


def test_two_processes_never_share_a_run(trainers, tmp_path: Path, start, until) -> None:
    folder = tmp_path / "run"
    process = start(
        "-m", "freshper", "train", "sokoban", *FLAGS, "--run.iterations", "900", "--run.folder", str(folder)
    )
    until((folder / "checkpoints" / "000003").exists, process)
    assert trainers.resume(folder) == 2
    assert f"{folder} is in use by another run" in trainers.log.read_text()
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130


def test_more_iterations_go_on_from_the_end(trainers: Trainers, whole: Path, tmp_path: Path) -> None:
    """The learning rate of the whole run falls along a cosine, so here the same is only the part that was there."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    assert trainers.resume(folder) == 2
    assert "is finished after 12 iterations" in trainers.log.read_text()
    assert trainers.resume(folder, "", "--run.iterations", "14") == 0, trainers.log.read_text()
    rows = _lines(folder / "metrics.jsonl")
    assert rows[:12] == _lines(whole / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, 15))
    assert json.loads((folder / "result.json").read_text())["episodes"] == 56


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--optimizer.weight_decay", "0.5"], "optimizer.weight_decay was 0.0, now 0.5"),
        (["--replay.freshness.tau=3", "--run.seed=4"], "run.seed was 0, now 4"),
        (["--run.iterations", "11"], "run.iterations can grow, but not become 11"),
    ],
)
def test_other_settings_are_refused(trainers: Trainers, whole: Path, flags: list[str], complaint: str) -> None:
    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}

    before = content()
    assert trainers.resume(whole, "", *flags) == 2
    assert complaint in trainers.log.read_text()
    assert content() == before


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["sokoban", "--resume"], "--resume needs the folder of the run"),
        (["{whole}"], "is a run folder: add --resume to go on with its run"),
        (["{whole}", "--resume", "--arm", "per"], "a resumed run keeps its arm"),
        (["{whole}/model", "--resume"], "is no run folder: there is no config.toml in it"),
        (["sokoban", "--resume", "--run.folder", "{whole}/new"], "holds no run that could be resumed"),
    ],
)
def test_what_cannot_be_resumed_is_one_line(trainers: Trainers, whole: Path, words: list[str], complaint: str) -> None:
    assert trainers.run(*(word.format(whole=whole) for word in words)) == 2
    assert complaint in trainers.log.read_text()
    assert trainers.log.read_text().count("\n") == 1
    assert not (whole / "new").exists()


CRITIC = """
    --algorithm.advantage gae --replay.priority td_error --kl.weight 0.1 --kl.place reward --critic.kind model
"""
GROUPS = "--algorithm.advantage grpo --rollout.group_size 2 --storage.unit group --storage.max_uses 3 --mix.share 0.3"


@pytest.mark.parametrize(
    ("flags", "buffer"), [("--arm epochs", False), (CRITIC, True), (GROUPS + " --replay.batch_size 2", True)]
)
def test_whatever_is_trained(trainers: Trainers, tmp_path: Path, flags: str, buffer: bool) -> None:
    """Without replay, where no buffer is kept; with a critic and a reference model; with groups, also mixed in."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert trainers.begin(whole, "", *flags.split()) == 0, trainers.log.read_text()
    assert trainers.begin(folder, "rollout:8", *flags.split()) == -9, trainers.log.read_text()
    assert trainers.resume(folder) == 0, trainers.log.read_text()
    assert (folder / "buffer").exists() == buffer
    assert _lines(folder / "metrics.jsonl") == _lines(whole / "metrics.jsonl")
    files = [read_json(run / "checkpoints" / "000012" / "manifest.json")["files"] for run in (folder, whole)]
    assert files[0] == files[1]


def test_a_full_disk_does_not_end_a_run(cache: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def full(path: Path, body: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("freshper.training.checkpoint.write_json", full)
    folder = tmp_path / "run"
    with pytest.warns(UserWarning, match="the run goes on") as said:
        assert cli.main(["train", "sokoban", *FLAGS, "--run.folder", str(folder)]) == 0
    assert [re.search(r"checkpoint of iteration (\d+)", str(one.message))[1] for one in said] == ["3", "6", "9", "12"]
    assert "4 times a checkpoint or a policy could not be written" in capsys.readouterr().out
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["failed_saves"]) == ("finished", 4)


def test_a_comparison_goes_on_with_a_run_that_was_killed(cache: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    poll, started = CompareProgress.poll, []
    start = compare._start
    monkeypatch.setattr(compare, "_start", lambda run: started.append(start(run)) or started[-1])

    def killing(self: CompareProgress) -> bool:
        if has_checkpoint(tmp_path / "freshper" / "seed0"):
            started[0].kill()
        return poll(self)

    words = ["compare", "sokoban", *FLAGS, "--run.iterations", "60", "--arms", "freshper", "--seeds", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(CompareProgress, "poll", killing)
        patch.setattr(compare, "_POLL_SECONDS", 0.02)
        assert cli.main([*words, "--folder", str(tmp_path)]) == 1
    assert cli.main([*words, "--folder", str(tmp_path)]) == 0, capsys.readouterr()
    log = (tmp_path / "freshper" / "seed0" / "log.txt").read_text()
    assert re.fullmatch(r"training; held-out .*\ntraining from iteration \d+ on; held-out .*\n", log)
    assert [row["iteration"] for row in _lines(tmp_path / "freshper" / "seed0" / "metrics.jsonl")] == list(range(1, 61))
