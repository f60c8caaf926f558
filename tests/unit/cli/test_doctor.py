"""What `freshper doctor` shows, and when its exit code is 1."""

import io
import json
import subprocess
import sys
from importlib import metadata

import pytest
from rich.console import Console

from freshper.cli import doctor as command
from freshper.cli.doctor import run_doctor
from freshper.errors import ConfigError, DivergedError
from freshper.training import doctor

TIMED = {
    "seconds": {"rollout": 1.25, "update": 2.5, "eval": 30.0, "checkpoint": 0.5},
    "iteration": 3.75,
    "run": 1800.0,
    "tokens_per_s": 812.3,
    "replay_updates": 2,
    "memory": {"process": 3 * 2**30},
}


@pytest.fixture
def timed(monkeypatch):
    """Puts two iterations that take no time in the place of real ones; returns the configs that were asked for."""
    configs = []
    monkeypatch.setattr(doctor, "time_iterations", lambda config, note: configs.append(config) or TIMED)
    return configs


def _run(*words):
    out = io.StringIO()
    code = run_doctor(words, Console(file=out, width=400, highlight=False, markup=False))
    return code, out.getvalue()


def test_without_a_target_the_machine_is_looked_at_and_nothing_runs(timed):
    code, out = _run()
    assert code == 0
    for part in (
        "versions",
        f"numpy {metadata.version('numpy')}",
        "machine",
        "CPUs",
        "cache",
        "extra      train: installed",
    ):
        assert part in out
    assert "iteration" not in out
    assert timed == []


def test_a_target_is_estimated_and_timed(timed):
    code, out = _run("sokoban", "--replay.ratio", "5")
    assert code == 0
    assert [config.replay.ratio for config in timed] == [5]
    assert "AdamW moments" in out
    assert "an iteration takes 3.75 s here (rollout 1.25 s, update 2.50 s; 812 sampled tokens/s)" in out
    assert "an evaluation 30.0 s, a checkpoint 0.5 s" in out
    assert "the whole run about 30 min, with a peak of 3.0 GiB (process)" in out


def test_without_running_there_is_still_an_estimate(timed):
    code, out = _run("sokoban", "--no-run")
    assert code == 0
    assert "memory on cpu, estimated" in out
    assert "iteration" not in out
    assert timed == []


def test_the_json_holds_it_all(timed):
    code, out = _run("sokoban", "--json")
    report = json.loads(out)
    assert code == 0
    assert report.keys() == {"versions", "extras", "machine", "folders", "memory", "time", "problems"}
    assert report["time"] == TIMED
    assert report["problems"] == []
    assert report["extras"]["train"] == []


def test_a_missing_library_is_exit_code_1_and_nothing_runs(timed, monkeypatch):
    real = doctor.find_spec
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "mlflow" else real(name))
    code, out = _run("sokoban", "--log.mlflow", "experiment")
    assert code == 1
    assert "problem    log.mlflow needs mlflow: pip install 'freshper[mlflow]'" in out
    assert timed == []


def test_what_does_not_fit_is_exit_code_1_with_what_to_change(timed, monkeypatch):
    monkeypatch.setattr(doctor, "_memory", lambda: (2**30, 2**20))
    code, out = _run("sokoban")
    assert code == 1
    assert "it would take less with" in out
    assert "--optimizer.token_budget 4096:" in out
    assert "are needed on cpu, and 0.0 GiB are free" in out
    assert timed == []


def test_a_folder_that_cannot_be_written_is_exit_code_1(timed, tmp_path):
    (tmp_path / "file").write_text("")
    code, out = _run("sokoban", "--run.folder", str(tmp_path / "file" / "run"))
    assert code == 1
    assert "cannot be written" in out
    assert "problem    the runs folder" in out


def test_a_run_that_fails_is_a_problem(monkeypatch):
    def fails(config, note):
        raise DivergedError("5 fresh updates in a row were not applied")

    monkeypatch.setattr(doctor, "time_iterations", fails)
    code, out = _run("sokoban")
    assert code == 1
    assert "problem    5 fresh updates in a row were not applied" in out


def test_settings_without_a_target_are_refused(timed):
    with pytest.raises(ConfigError, match=r"--replay\.ratio is a setting of a config, and no TARGET"):
        _run("--replay.ratio", "3")


def test_a_target_that_is_not_known_is_refused(timed):
    with pytest.raises(ConfigError, match="Did you mean 'sokoban'"):
        _run("sokobn")


def test_an_extra_is_told_by_what_is_missing_or_too_old(monkeypatch):
    needs = [
        "numpy>=1.26",
        'torch<3,>=2.6; extra == "train"',
        'nobody-wrote-this>=1; extra == "train"',
        "pyarrow>=999; extra == 'disk'",
        'rich>=1; extra == "disk"',
        'tyro; extra == "plain"',
    ]
    monkeypatch.setattr(command.metadata, "requires", lambda name: needs)
    assert command.extras() == {"train": ["nobody-wrote-this>=1"], "disk": ["pyarrow>=999"], "plain": []}
    _, out = _run()
    assert "extra      train: not complete, pip install 'freshper[train]' adds nobody-wrote-this>=1" in out
    assert "extra      plain: installed" in out


@pytest.mark.parametrize(("words", "code"), [([], 0), (["sokoban"], 1)])
def test_it_works_where_the_trainer_is_not_installed(words, code):
    script = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name in ('torch', 'pydantic'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from freshper.cli.doctor import run_doctor\n"
        "from freshper.cli.terminal import make_console\n"
        f"sys.exit(run_doctor({words!r}, make_console()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "versions" in done.stdout
    assert ("freshper[train]" in done.stdout.partition("problem")[2]) == (code == 1)


@pytest.mark.parametrize(("seconds", "text"), [(12.4, "12 s"), (600.0, "10 min"), (7200.0, "2.0 h")])
def test_durations_are_short(seconds, text):
    assert command._duration(seconds) == text
