"""Where metrics go beside metrics.jsonl. The real wandb, trackio and MLflow are used where they are installed."""

import json
import math
import sqlite3
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest

from freshper.errors import ConfigError, MissingExtraError, SnapshotError
from freshper.training import loggers
from freshper.training.loggers import IDENTITY_FILE, check_loggers, open_loggers
from freshper.training.sections import LogConfig

SETTINGS = {"run": {"task": "sokoban", "seed": 3}, "replay": {"freshness": {"tau": 12.0}}}


def _row(iteration, **numbers):
    return {"iteration": iteration, "fresh/loss": 1 / iteration, "rollout/score": 2.0} | numbers


def _open(folder, *, resumed_at=0, **which):
    settings = LogConfig(**({"tensorboard": False} | which))
    return open_loggers(settings, folder, name="sokoban s3", hyperparameters=SETTINGS, resumed_at=resumed_at)


def _interrupted(folder, **which):
    """A run of four iterations that is resumed after its second, and then has six."""
    first = _open(folder, **which)
    for iteration in range(1, 5):
        first.log(_row(iteration, odd=math.nan if iteration == 2 else 1.0))
    lost = first.close("interrupted")
    second = _open(folder, resumed_at=2, **which)
    for iteration in range(3, 7):
        second.log(_row(iteration, odd=math.inf if iteration == 5 else 1.0))
    return lost + second.close("finished")


class Recorder:
    """A logger that keeps what it is told, and breaks where it should."""

    where = "in memory"

    def __init__(self, broken=(), *, gate=None, cannot_close=False):
        self.rows, self.status = [], None
        self._broken, self._gate, self._cannot_close = broken, gate, cannot_close

    def log(self, row):
        if self._gate is not None:
            self._gate.wait()
        if row["iteration"] in self._broken:
            raise ConnectionError(f"no network at {row['iteration']}")
        self.rows.append(row["iteration"])

    def close(self, status):
        if self._cannot_close:
            raise TimeoutError("nobody answers")
        self.status = status


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Opens loggers with a recorder in the place of TensorBoard."""

    def start(recorder):
        monkeypatch.setattr(loggers, "_TensorBoard", lambda folder, resumed_at: recorder)
        return _open(tmp_path, tensorboard=True)

    return start


def test_rows_arrive_in_order_and_the_end_is_told(recorded):
    recorder = Recorder()
    opened = recorded(recorder)
    assert opened.places == ["tensorboard: in memory"]
    for iteration in range(1, 200):
        opened.log(_row(iteration))
    assert opened.close("finished") == []
    assert recorder.rows == list(range(1, 200))
    assert recorder.status == "finished"


def test_a_row_may_change_after_it_was_handed_over(recorded):
    gate = threading.Event()
    recorder = Recorder(gate=gate)
    opened, row = recorded(recorder), _row(1)
    opened.log(row)
    row["iteration"] = 99
    gate.set()
    opened.close("finished")
    assert recorder.rows == [1]


def test_a_logger_that_fails_warns_once_goes_on_and_tells_at_the_end(recorded):
    recorder = Recorder(broken=(2, 3, 5))
    opened = recorded(recorder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for iteration in range(1, 7):
            opened.log(_row(iteration))
        told = opened.close("finished")
    assert recorder.rows == [1, 4, 6]
    text = "no network at 2"
    assert [text in str(one.message) and "the run goes on" in str(one.message) for one in caught] == [True]
    assert len(told) == 1
    assert told[0].startswith("tensorboard lost 3 of 6 rows of metrics")
    assert f"the first because: ConnectionError: {text}" in told[0]


def test_a_logger_that_hangs_delays_nothing_and_is_left_behind(recorded, monkeypatch):
    monkeypatch.setattr(loggers, "_PATIENCE_SECONDS", 0.05)
    gate = threading.Event()
    recorder = Recorder(gate=gate)
    opened = recorded(recorder)
    for iteration in range(1, 5):
        opened.log(_row(iteration))
    told = opened.close("finished")
    gate.set()
    assert recorder.status is None
    assert told == ["tensorboard lost 4 of 4 rows of metrics (4 of them too late); metrics.jsonl holds everything"]


def test_the_backlog_is_bounded(recorded, monkeypatch):
    monkeypatch.setattr(loggers, "_BACKLOG", 3)
    gate = threading.Event()
    opened = recorded(Recorder(gate=gate))
    for iteration in range(1, 4):
        opened.log(_row(iteration))
    with pytest.warns(UserWarning, match="3 rows wait for it already"):
        opened.log(_row(4))
    opened.log(_row(5))
    gate.set()
    assert opened.close("finished")[0].startswith("tensorboard lost 2 of 5 rows")


def test_a_logger_that_cannot_close_is_told(recorded):
    told = recorded(Recorder(cannot_close=True)).close("failed")
    assert told == ["tensorboard was not closed properly (TimeoutError: nobody answers): its last rows may be missing"]


def test_a_logger_that_cannot_start_is_an_error_and_closes_the_others(monkeypatch, tmp_path):
    recorder = Recorder()

    def wandb(*arguments):
        raise RuntimeError("nobody is\nlogged in")

    monkeypatch.setattr(loggers, "_TensorBoard", lambda folder, resumed_at: recorder)
    monkeypatch.setattr(loggers, "_Wandb", wandb)
    monkeypatch.setattr(loggers, "find_spec", lambda name: True)
    with pytest.raises(ConfigError, match=r"log\.wandb cannot start \(RuntimeError: nobody is logged in\)"):
        _open(tmp_path, tensorboard=True, wandb="project")
    assert recorder.status == "failed"
    assert not (tmp_path / IDENTITY_FILE).exists()


@pytest.mark.parametrize("library", ["wandb", "trackio", "mlflow", "tensorboard"])
def test_a_missing_library_is_named_with_its_extra(library, monkeypatch, tmp_path):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None if name == library else True)
    extra = "train" if library == "tensorboard" else library
    which = {library: True if library == "tensorboard" else "project"}
    with pytest.raises(MissingExtraError, match=rf"{library} is needed here: pip install 'freshper\[{extra}\]'"):
        _open(tmp_path, **which)
    assert list(tmp_path.iterdir()) == []
    check_loggers(LogConfig(tensorboard=False, wandb="" if library == "wandb" else "p"))  # the others are there


def test_what_is_not_asked_for_is_not_imported(tmp_path):
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from freshper.training.loggers import open_loggers\n"
        "from freshper.training.sections import LogConfig\n"
        f"folder, settings = Path({str(tmp_path)!r}), LogConfig(tensorboard=False)\n"
        "open_loggers(settings, folder, name='', hyperparameters={}).log({})\n"
        "print([name for name in ('wandb', 'trackio', 'mlflow', 'tensorboard') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_resumed_run_keeps_its_name_and_a_new_one_in_the_same_folder_gets_another(tmp_path):
    def name(resumed_at):
        _open(tmp_path, resumed_at=resumed_at).close("finished")
        return json.loads((tmp_path / IDENTITY_FILE).read_text())["id"]

    first = name(0)
    assert first.startswith(f"{tmp_path.name}-")
    assert name(10) == first
    assert name(0) != first


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"id": 3}', '"id"'])
def test_a_damaged_identity_is_refused(text, tmp_path):
    (tmp_path / IDENTITY_FILE).write_text(text)
    with pytest.raises(SnapshotError, match=r"loggers\.json is damaged"):
        _open(tmp_path, resumed_at=1)
    _open(tmp_path).close("finished")  # a new run needs none


def test_tensorboard_goes_on_where_the_checkpoint_was(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert _interrupted(tmp_path, tensorboard=True) == []
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("fresh/loss")] == [
        (iteration, pytest.approx(1 / iteration)) for iteration in range(1, 7)
    ]
    assert events.Tags()["scalars"] == ["fresh/loss", "rollout/score", "odd"]


def _fake_wandb(starting_step):
    """A stand-in that keeps the calls, for where the real one is not installed."""
    calls = {"rows": []}
    run = SimpleNamespace(offline=False, url="https://wandb.test/run", dir="", starting_step=starting_step)
    run.log = lambda row, step: calls["rows"].append((step, row["fresh/loss"]))
    run.finish = lambda exit_code: calls.update(exit_code=exit_code)
    module = SimpleNamespace(init=lambda **given: calls.update(init=given) or run, Settings=lambda **given: given)
    return module, calls


def test_wandb_is_told_who_the_run_is_and_gets_no_row_twice(monkeypatch, tmp_path):
    module, calls = _fake_wandb(starting_step=5)  # the server has seen four
    monkeypatch.setattr(loggers, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "wandb", module)
    opened = _open(tmp_path, wandb="freshness", resumed_at=2)
    assert opened.places == ["wandb: https://wandb.test/run"]
    for iteration in range(3, 8):
        opened.log(_row(iteration))
    assert opened.close("interrupted") == []
    given = calls["init"]
    assert (given["project"], given["name"], given["resume"]) == ("freshness", "sokoban s3", "allow")
    assert given["id"] == json.loads((tmp_path / IDENTITY_FILE).read_text())["id"]
    assert given["config"] == SETTINGS
    assert calls["rows"] == [(iteration, 1 / iteration) for iteration in (5, 6, 7)]
    assert calls["exit_code"] == 1


def test_the_real_wandb_offline(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert _interrupted(tmp_path, wandb="freshness") == []
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    name = json.loads((tmp_path / IDENTITY_FILE).read_text())["id"]
    assert all(name.encode() in file.read_bytes() and b"fresh/loss" in file.read_bytes() for file in files)


def test_the_real_trackio(monkeypatch, tmp_path):
    pytest.importorskip("trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "db")
    assert _interrupted(tmp_path, trackio="freshness") == []
    name = json.loads((tmp_path / IDENTITY_FILE).read_text())["id"]
    with sqlite3.connect(tmp_path / "db" / "freshness.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
        (settings,) = database.execute("select config from configs").fetchone()
    assert {run for run, _, _ in rows} == {name}, "a resumed run is the same run"
    assert {step: json.loads(metrics)["fresh/loss"] for _, step, metrics in rows} == {n: 1 / n for n in range(1, 7)}
    assert json.loads(settings)["replay"]["freshness"]["tau"] == 12.0


def test_the_real_mlflow(monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    assert _interrupted(tmp_path, mlflow="freshness") == []
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("freshness").experiment_id])
    assert run.info.run_name == "sokoban s3"
    assert run.info.status == "FINISHED"
    assert run.data.params["replay.freshness.tau"] == "12.0"
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "fresh/loss")] == [
        (iteration, 1 / iteration) for iteration in range(1, 7)
    ]
    assert [m.step for m in client.get_metric_history(run.info.run_id, "odd")] == [1, 3, 4, 6], "no NaN, no infinity"
