"""Comparisons without their processes: the plan, who is asked to run, and how the processes are treated."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from freshper.errors import ConfigError, RunFolderError, UnknownNameError
from freshper.training import compare as room
from freshper.training.arms import apply_arm
from freshper.training.compare import compare, plan_runs
from freshper.training.config import TrainConfig
from freshper.training.config_file import make_config, with_flags
from freshper.training.run_folder import RunFolder

CONFIG = make_config({"run": {"iterations": 2}, "replay": {"ratio": 3}})


class FakeProcess:
    """Ends when it is told to; its sentinel is the end of a pipe, as that of a real one."""

    def __init__(self):
        self.sentinel, self._writer = os.pipe()
        self.exitcode = self._ends_with = None
        self.terminated = self.killed = 0

    def end(self, code):
        """Close its files; the exit code is known a little later, to one who waits for it."""
        if self._ends_with is None:
            self._ends_with = code
            os.close(self._writer)

    @property
    def ending(self):
        return self._ends_with is not None

    def join(self):
        self.exitcode = self._ends_with

    def terminate(self):
        self.terminated += 1

    def kill(self):
        self.killed += 1
        self.end(-9)

    def close(self):
        self.end(-1)
        os.close(self.sentinel)


@pytest.fixture
def processes(monkeypatch):
    """Runs that are started become fakes, by name; no warm start is made."""
    fakes = {}

    def start(config):
        fakes[f"{config.run.arm}/seed{config.run.seed}"] = fake = FakeProcess()
        return fake

    monkeypatch.setattr(room, "_start", start)
    monkeypatch.setattr(room, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(room, "warm_started_policy", lambda config, note: None)
    yield fakes
    for fake in fakes.values():
        fake.close()


@pytest.fixture(autouse=True)
def interrupts():
    """Ctrl-C is heard, whatever the tests were started by."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _never():
    """A comparison that should not have begun has."""
    pytest.fail("it runs")


def _finish(folder, arm, seed, config=CONFIG, status="finished"):
    """The folder of a run that has ended."""
    (run,) = plan_runs(config, [arm], [seed], folder).values()
    with RunFolder(Path(run.run.folder), run) as opened:
        opened.finish({"status": status})


def _run_to_the_end(folder, processes, arms, seeds, *, jobs=2):
    """A comparison whose runs all succeed; returns its result and what was started, in order."""

    def poll():
        for name, fake in list(processes.items()):
            if not fake.ending:
                arm, _, seed = name.partition("/seed")
                _finish(folder, arm, int(seed))
                fake.end(0)

    result = compare(CONFIG, arms, seeds, folder=folder, jobs=jobs, poll=poll)
    return result, list(processes)


def test_the_plan_goes_seed_by_seed():
    runs = plan_runs(CONFIG, ["per", "epochs"], [0, 4], Path("somewhere"))
    assert list(runs) == ["per/seed0", "epochs/seed0", "per/seed4", "epochs/seed4"]
    for name, run in runs.items():
        assert run.run.folder == f"somewhere/{name}"
        expected = apply_arm(CONFIG, run.run.arm)
        same = {"seed": run.run.seed, "folder": run.run.folder}
        assert run == expected.model_copy(update={"run": expected.run.model_copy(update=same)})


@pytest.mark.parametrize(
    ("arms", "seeds", "error", "complaint"),
    [
        ([], [0], ConfigError, "0 arms and 1 seeds: at least one of each is needed"),
        (["per"], [], ConfigError, "1 arms and 0 seeds"),
        (["per", "uniform", "per"], [0], ConfigError, "an arm is named twice in per, uniform, per"),
        (["prr"], [0], UnknownNameError, "Did you mean 'per'"),
        (["per"], [-1], ConfigError, "run.seed = -1"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(arms, seeds, error, complaint):
    with pytest.raises(error, match=complaint):
        plan_runs(CONFIG, arms, seeds, Path("somewhere"))


def test_everything_is_run_once_and_described(tmp_path, processes):
    result, started = _run_to_the_end(tmp_path, processes, ["per", "uniform"], [0, 1])
    assert started == ["per/seed0", "uniform/seed0", "per/seed1", "uniform/seed1"]
    assert (result.folder, result.unfinished, result.interrupted) == (tmp_path, {}, False)
    told = json.loads((tmp_path / "compare.json").read_text())
    assert told == {"task": "sokoban", "arms": ["per", "uniform"], "seeds": [0, 1], "command": ""}


def test_called_again_it_runs_what_is_not_finished(tmp_path, processes):
    _finish(tmp_path, "per", 0)
    _finish(tmp_path, "per", 1, status="interrupted")
    _finish(tmp_path, "per", 2, status="failed")
    result, started = _run_to_the_end(tmp_path / ".", processes, ["per"], [0], jobs=1)
    assert (result.unfinished, started) == ({}, [])
    compare(CONFIG, ["per"], [1, 2, 3], folder=tmp_path, jobs=3, poll=lambda: [p.end(0) for p in processes.values()])
    assert list(processes) == ["per/seed1", "per/seed2", "per/seed3"]


def test_arms_and_seeds_of_earlier_calls_stay_described(tmp_path, processes):
    _run_to_the_end(tmp_path, processes, ["per"], [0, 1])
    _run_to_the_end(tmp_path, processes, ["uniform", "per"], [0, 5])
    told = json.loads((tmp_path / "compare.json").read_text())
    assert (told["arms"], told["seeds"]) == (["per", "uniform"], [0, 1, 5])


@pytest.mark.parametrize(
    ("flags", "arms", "difference"),
    [
        (["--optimizer.learning_rate", "0.1"], ["per"], "optimizer.learning_rate was 0.0003, now 0.1"),
        (["--replay.freshness.tau", "99"], ["per", "uniform"], "replay.freshness.tau was 12.0, now 99.0"),
        (["--run.iterations", "3"], ["uniform"], "run.iterations was 2, now 3"),
        (["--run.task", "frozenlake"], ["uniform"], "run.task was sokoban, now frozenlake"),
    ],
)
def test_other_settings_are_refused_whatever_arms_are_asked_for(tmp_path, processes, flags, arms, difference):
    """An arm that joins later has to be comparable with those that are there."""
    _run_to_the_end(tmp_path, processes, ["per"], [0])
    before = (tmp_path / "compare.json").read_text()
    with pytest.raises(RunFolderError, match=rf"per/seed0 holds a run with other settings \({difference}\)"):
        compare(with_flags(CONFIG, flags), arms, [0], folder=tmp_path, jobs=1, poll=_never)
    assert list(processes) == ["per/seed0"]
    assert (tmp_path / "compare.json").read_text() == before


def test_a_folder_that_was_moved_is_still_the_same_comparison(tmp_path, processes):
    _run_to_the_end(tmp_path / "here", processes, ["per"], [0])
    (tmp_path / "here").rename(tmp_path / "there")
    result, started = _run_to_the_end(tmp_path / "there", processes, ["per"], [0])
    assert (result.unfinished, started) == ({}, ["per/seed0"])


@pytest.mark.parametrize("content", ["{", "[]", "null", '{"arms": 3, "seeds": [0]}', '{"arms": ["per"]}', "\xff"])
def test_a_broken_description_is_an_error_with_its_name(tmp_path, processes, content):
    (tmp_path / "compare.json").write_text(content, encoding="latin-1")
    with pytest.raises(RunFolderError, match=r"cannot read .*compare\.json .*: delete it, or choose another"):
        compare(CONFIG, ["per"], [0], folder=tmp_path, jobs=1, poll=_never)
    assert not processes


def test_a_broken_result_is_an_error_with_its_name(tmp_path, processes):
    _finish(tmp_path, "per", 0)
    for content in ("{", "[]", "{}"):
        (tmp_path / "per" / "seed0" / "result.json").write_text(content)
        with pytest.raises(RunFolderError, match=r"cannot read .*result\.json .*: delete .*seed0 to run it again"):
            compare(CONFIG, ["per"], [0], folder=tmp_path, jobs=1, poll=_never)
    assert not processes


def test_two_comparisons_in_one_folder_are_refused(tmp_path, processes):
    def poll():
        with pytest.raises(RunFolderError, match="is in use by another comparison"):
            compare(CONFIG, ["per"], [0], folder=tmp_path, jobs=1, poll=_never)
        processes["per/seed0"].end(0)

    result = compare(CONFIG, ["per"], [0], folder=tmp_path, jobs=1, poll=poll)
    assert list(result.unfinished) == ["per/seed0"]


def test_a_run_that_somebody_still_writes_is_not_taken_away(tmp_path, processes):
    """The children of a comparison that was killed go on; their folders must not be deleted below them."""
    (run,) = plan_runs(CONFIG, ["per"], [0], tmp_path).values()
    with (
        RunFolder(Path(run.run.folder), run) as orphan,
        pytest.raises(RunFolderError, match=r"a run is being written to .*seed0, maybe one of a comparison"),
    ):
        compare(CONFIG, ["per"], [0], folder=tmp_path, jobs=1, poll=_never)
    assert (orphan.path / "config.toml").exists()
    assert not processes


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_no_more_runs_at_a_time_than_jobs(tmp_path, processes, jobs):
    together = []

    def poll():
        running = [fake for fake in processes.values() if not fake.ending]
        together.append(len(running))
        if running:
            running[0].end(0)

    compare(CONFIG, ["per"], range(4), folder=tmp_path, jobs=jobs, poll=poll)
    assert max(together) == min(jobs, 4)
    assert len(processes) == 4


@pytest.mark.parametrize("jobs", [0, -1])
def test_no_jobs_are_refused(tmp_path, jobs):
    with pytest.raises(ConfigError, match=f"jobs {jobs} must be >= 1"):
        compare(CONFIG, ["per"], [0], folder=tmp_path / "new", jobs=jobs)
    assert not (tmp_path / "new").exists()


def test_a_run_that_dies_is_named_and_the_others_go_on(tmp_path, processes):
    def poll():
        for name, fake in processes.items():
            if not fake.ending:
                if name != "per/seed0":
                    _finish(tmp_path, "per", int(name[-1]))
                fake.end(-9 if name == "per/seed0" else 0)

    result = compare(CONFIG, ["per"], range(3), folder=tmp_path, jobs=1, poll=poll)
    assert result.unfinished == {"per/seed0": f"exit code -9, see {tmp_path / 'per/seed0/log.txt'}"}
    assert not result.interrupted


def test_ctrl_c_tells_every_run_once_and_waits_for_them(tmp_path, processes):
    """A second SIGTERM would end a run in the middle of its last evaluation."""
    polls = []

    def poll():
        polls.append(1)
        assert len(polls) < 100, "it does not end"
        if len(polls) == 3:
            signal.raise_signal(signal.SIGINT)
        if len(polls) == 20:
            for fake in processes.values():
                fake.end(0)

    result = compare(CONFIG, ["per"], range(3), folder=tmp_path, jobs=2, poll=poll)
    assert [(fake.terminated, fake.killed) for fake in processes.values()] == [(1, 0), (1, 0)]
    assert result.interrupted
    assert result.unfinished == {f"per/seed{seed}": "interrupted" for seed in range(3)}


def test_a_second_ctrl_c_ends_them_at_once(tmp_path, processes):
    polls = []

    def poll():
        polls.append(1)
        assert len(polls) < 100, "it does not end"
        if len(polls) in (3, 6):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        compare(CONFIG, ["per"], range(3), folder=tmp_path, jobs=2, poll=poll)
    assert [(fake.terminated, fake.killed) for fake in processes.values()] == [(1, 1), (1, 1)]


def test_a_display_that_fails_leaves_no_run_behind(tmp_path, processes):
    with pytest.raises(ZeroDivisionError):
        compare(CONFIG, ["per"], range(3), folder=tmp_path, jobs=2, poll=lambda: 1 / 0)
    assert [fake.killed for fake in processes.values()] == [1, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_warm_start_leaves_the_folder_to_the_next(tmp_path, processes, monkeypatch, number):
    with monkeypatch.context() as patch:
        patch.setattr(room, "warm_started_policy", lambda config, note: signal.raise_signal(number))
        with pytest.raises(KeyboardInterrupt):
            compare(CONFIG, ["per"], [0], folder=tmp_path, jobs=1, poll=_never)
    assert not processes
    result, started = _run_to_the_end(tmp_path, processes, ["per"], [0])
    assert (result.unfinished, started) == ({}, ["per/seed0"])


def test_settings_that_every_run_shares_stay_those_of_the_config():
    runs = plan_runs(TrainConfig(), ["on-policy", "freshper"], [0], Path("x"))
    on_policy, freshper = (run.model_dump() for run in runs.values())
    for section in ("rollout", "tiny", "warm_start", "optimizer", "algorithm", "eval"):
        assert on_policy[section] == freshper[section] == TrainConfig().model_dump()[section]


FOUND = """
import json, os, signal
names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
deaf = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
print(json.dumps([[os.environ.get(name) for name in names], deaf]))
"""


def test_processes_have_one_thread_and_are_deaf_to_ctrl_c_from_their_first_moment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    before = dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with room._one_thread(), room._deaf_to_interrupts():
        found = subprocess.run([sys.executable, "-c", FOUND], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == [["1", "1", "1"], True]
    assert (dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, [])) == before
