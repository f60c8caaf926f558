"""Comparisons with real processes: resumed, with a killed run, with Ctrl-C, and with numbers that are right."""

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from freshper import cli
from freshper.reports.progress import CompareProgress
from freshper.training import compare, train
from freshper.training.config_file import with_flags
from freshper.training.presets import load_config

LOG = r"training; held-out success before RL: \d\.\d\d\n"  # and no traceback
ITERATIONS = 30  # long enough to be killed in the middle


@pytest.fixture
def command(small_flags, tmp_path, capsys):
    """Calls ``freshper compare`` on the test's folder; returns exit code, output, and errors."""

    def call(arms, seeds, *words):
        base = ["compare", "frozenlake", *small_flags, "--run.iterations", str(ITERATIONS)]
        where = ["--arms", arms, "--seeds", str(seeds), "--folder", str(tmp_path / "compare")]
        code = cli.main([*base, *where, *words])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def started(monkeypatch):
    """The processes that were started, by the name of their run."""
    processes = {}
    start = compare._start

    def spy(config):
        name = f"{config.run.arm}/seed{config.run.seed}"
        processes[name] = start(config)
        return processes[name]

    monkeypatch.setattr(compare, "_start", spy)
    return processes


def _times(folder):
    """When each file of a run was written last."""
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_comparison_loses_nothing_and_does_nothing_twice(command, started, rows, tmp_path, monkeypatch):
    folder = tmp_path / "compare"
    with monkeypatch.context() as patch:
        _kill_on_poll(patch, started, "freshper/seed0", folder)
        code, out, err = command("on-policy,freshper", 2)
    assert (code, err) == (1, "")
    assert f"not finished: freshper/seed0 (exit code -9, see {folder / 'freshper/seed0/log.txt'})" in out
    assert sorted(started) == ["freshper/seed0", "freshper/seed1", "on-policy/seed0", "on-policy/seed1"]
    statuses = {name: _status(folder / name) for name in started}
    assert statuses == dict.fromkeys(started, "finished") | {"freshper/seed0": None}
    incomplete = json.loads((folder / "summary.json").read_text())["incomplete"]
    assert [(run["arm"], run["seed"]) for run in incomplete] == [("freshper", 0)]

    # What is not finished is run again, with an arm more, and nothing else; JSON alone on the output.
    kept = {name: _times(folder / name) for name in ("on-policy/seed0", "on-policy/seed1", "freshper/seed1")}
    started.clear()
    code, out, err = command("on-policy,freshper,uniform", 1, "--json")
    assert code == 0
    assert f"report   {folder / 'report.html'}" in err
    assert sorted(started) == ["freshper/seed0", "uniform/seed0"]
    assert {name: _times(folder / name) for name in kept} == kept
    assert (folder / "report.html").stat().st_size > 10_000
    assert re.fullmatch(LOG, (folder / "freshper/seed0/log.txt").read_text())
    numbers = json.loads(out)
    assert numbers == json.loads((folder / "summary.json").read_text())
    assert list(numbers["arms"]) == ["on-policy", "freshper", "uniform"]
    assert numbers["seeds"] == [0, 1]
    assert [(run["arm"], run["seed"], run["status"]) for run in numbers["incomplete"]] == [("uniform", 1, "missing")]
    _check_numbers(numbers, folder)

    # A run is the same in a process of its own as in ours, and the same after another was killed.
    config = with_flags(load_config(str(folder / "freshper/seed0/config.toml")), [f"--run.folder={tmp_path / 'alone'}"])
    assert rows(train(config).folder) == rows(folder / "freshper/seed0")

    # Other settings have no place in it, and neither have they under an arm that was not there yet.
    started.clear()
    for arms in ("on-policy,freshper", "epochs"):
        code, _, err = command(arms, 2, "--optimizer.learning_rate", "0.001")
        assert code == 2
        assert re.search(r"holds a run with other settings \(optimizer.learning_rate was 0.0003, now 0.001\)", err)
        assert err.count("\n") == 1
    assert not started


def _kill_on_poll(patch, started, name, folder):
    """kill -9 for the run of that name, once it has written metrics."""
    poll, killed = CompareProgress.poll, []

    def killing(self):
        metrics = folder / name / "metrics.jsonl"
        if not killed and metrics.exists() and metrics.stat().st_size:
            killed.append(os.kill(started[name].pid, signal.SIGKILL))
        return poll(self)

    patch.setattr(CompareProgress, "poll", killing)


def _status(folder):
    path = folder / "result.json"
    return json.loads(path.read_text())["status"] if path.exists() else None


def _check_numbers(numbers, folder):
    """Recompute final score, success and held-out success and their paired differences from the metrics alone."""
    final = round(0.14 * ITERATIONS)
    for arm in ("on-policy", "freshper"):
        for seed in (0, 1):
            text = (folder / arm / f"seed{seed}" / "metrics.jsonl").read_text()
            lines = [json.loads(line) for line in text.splitlines()]
            assert len(lines) == ITERATIONS
            told = numbers["arms"][arm]
            score = np.mean([line["rollout/score"] for line in lines[-final:]])
            assert told["final_score"]["values"][str(seed)] == pytest.approx(score)
            success = np.mean([line["rollout/success"] for line in lines[-final:]])
            assert told["final_success"]["values"][str(seed)] == pytest.approx(success)
            assert told["heldout_success"]["values"][str(seed)] == lines[-1]["eval/sampled_success"]
            assert told["episodes"]["values"][str(seed)] == 4 * ITERATIONS
            updates = ITERATIONS * (1 if arm == "on-policy" else 3)
            assert told["policy_version"]["values"][str(seed)] == lines[-1]["policy_version"] == updates
    for metric in ("final_score", "final_success", "heldout_success"):
        mine, theirs = (numbers["arms"][arm][metric]["values"] for arm in ("freshper", "on-policy"))
        paired = numbers["paired"]["freshper"][metric]
        differences = {seed: mine[seed] - theirs[seed] for seed in ("0", "1")}
        assert paired["values"] == pytest.approx(differences)
        assert paired["mean"] == pytest.approx(np.mean(list(differences.values())))
        assert paired["in_favor"] == sum(difference > 0 for difference in differences.values())
    assert numbers["paired"]["uniform"]["final_score"]["n"] == 1


def _processes():
    """(pid, parent, group, command line) of every process that runs."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may have ended
            state, parent, group, *_ = stat.read_text().rpartition(")")[2].split()
            if state != "Z":
                yield int(stat.parent.name), int(parent), int(group), (stat.parent / "cmdline").read_bytes()


def _children(pid):
    """The processes that run a part of the comparison ``pid``."""
    return sorted(child for child, parent, _, command in _processes() if parent == pid and b"spawn_main" in command)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the child processes in /proc")
def test_ctrl_c_ends_a_comparison_and_its_processes_cleanly(start, until, small_flags, tmp_path):
    folder = tmp_path / "compare"
    words = ["compare", "frozenlake", *small_flags, "--run.iterations", "10000", "--eval.every", "10000"]
    parent = start("-m", "freshper", *words, "--arms", "on-policy,freshper", "--seeds", "2", "--folder", str(folder))
    until(lambda: len(_children(parent.pid)) == 2, parent)
    children = _children(parent.pid)
    for child in children:
        os.kill(child, signal.SIGINT)  # at a terminal it reaches them too, and at any moment, also this early
    runs = [folder / arm / "seed0" for arm in ("on-policy", "freshper")]
    until(lambda: all((run / "metrics.jsonl").exists() for run in runs), parent)
    until(lambda: all((run / "metrics.jsonl").read_text().count("\n") > 2 for run in runs), parent)
    assert _children(parent.pid) == children

    os.killpg(parent.pid, signal.SIGINT)
    out, err = parent.communicate(timeout=60)
    assert (parent.returncode, err) == (130, "")
    assert [_status(run) for run in runs] == ["interrupted", "interrupted"]
    assert all(re.fullmatch(LOG, (run / "log.txt").read_text()) for run in runs)
    assert all((run / "model" / "last" / "model.safetensors").exists() for run in runs)
    assert all(f"not finished: {arm}/seed{n} (interrupted)" in out for arm in ("on-policy", "freshper") for n in (0, 1))
    assert len(json.loads((folder / "summary.json").read_text())["incomplete"]) == 4
    assert (folder / "report.html").exists()
    left = start("-c", "input()", stdin=subprocess.PIPE)  # a process to wait beside: the last helpers end on their own
    until(lambda: not [pid for pid, _, group, _ in _processes() if group == parent.pid], left)
