"""How a run can end, and what its folder then holds: finished, interrupted, failed, or never begun."""

import contextlib
import json
import signal
import sys
from dataclasses import replace

import pytest
import torch

from freshper import cli
from freshper.errors import ConfigError, DivergedError, EnvError, RunFolderError, SnapshotError
from freshper.learning.losses import LOSSES
from freshper.training import train, warm_start
from freshper.training.evaluate import evaluate_both
from freshper.training.policy import load_trained
from freshper.training.tasks import play

NEVER = 300  # iterations that no test waits for; few enough to end if one has to


@pytest.fixture
def config(small, tmp_path):
    def make(name="run", **changes):
        return small(**changes | {"run": {"folder": str(tmp_path / name)} | changes.get("run", {})})

    return make


@pytest.fixture(autouse=True)
def signals():
    """Ctrl-C is heard also where a shell has started the tests in the background."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert handlers == [signal.default_int_handler, signal.SIG_DFL], "a run has not given the signals back"


def _at(iteration, *numbers):
    """A listener that sends signals when an iteration is over."""

    def listen(row):
        if row["iteration"] == iteration:
            for number in numbers:
                signal.raise_signal(number)

    return listen


def test_a_finished_run_tells_everything(trained, result, rows):
    facts = result(trained)
    assert facts["status"] == "finished"
    assert (facts["iterations"], facts["episodes"], facts["policy_version"]) == (3, 12, 9)
    assert facts["seconds"] > 0
    assert facts["eval"].keys() == facts["warm_start"].keys()
    last = rows(trained)[-1]
    assert {name: last[f"eval/{name}"] for name in facts["eval"]} == facts["eval"]
    assert sorted(path.name for path in (trained / "model").iterdir()) == ["best", "last"]
    assert list((trained / "tb").iterdir())


def test_the_saved_policy_plays_as_it_did_in_the_run(trained, small, result):
    config, policy = load_trained(trained, "last")
    assert config == small(run={"folder": str(trained)})
    assert policy.version == 9
    assert evaluate_both(policy, config)[0] == result(trained)["eval"]


def test_best_is_the_one_with_the_best_evaluation(small, tmp_path, monkeypatch):
    scores = iter([9.0, 0.1, 0.5, 0.3])  # before RL, and after each iteration
    evaluate = train.__globals__["evaluate_both"]

    def scripted(*args):
        numbers, played = evaluate(*args)
        return numbers | {"sampled_score": next(scores)}, played

    monkeypatch.setitem(train.__globals__, "evaluate_both", scripted)
    folder = train(small(run={"folder": str(tmp_path / "run")}, eval={"every": 1})).folder
    versions = {which: load_trained(folder, which)[1].version for which in ("best", "last")}
    assert versions == {"best": 6, "last": 9}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_the_first_signal_ends_the_run_after_an_iteration(config, result, rows, number):
    outcome = train(config(run={"iterations": NEVER}, eval={"every": NEVER}), on_iteration=_at(2, number))
    facts = result(outcome.folder)
    assert outcome.status == facts["status"] == "interrupted"
    assert facts["iterations"] == 3
    assert [line["iteration"] for line in rows(outcome.folder)] == [1, 2, 3]
    assert "eval/sampled_score" in rows(outcome.folder)[-1]
    assert load_trained(outcome.folder, "best")[1].version == load_trained(outcome.folder, "last")[1].version == 9


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_the_second_signal_ends_it_at_once(config, result, rows, tmp_path, number):
    with pytest.raises(KeyboardInterrupt):
        train(config(run={"iterations": NEVER}), on_iteration=_at(2, number, number))
    facts = result(tmp_path / "run")
    assert (facts["status"], facts["iterations"], facts["policy_version"]) == ("interrupted", 2, 6)
    assert len(rows(tmp_path / "run")) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_during_the_warm_start_ends_in_one_line(small_flags, tmp_path, monkeypatch, capsys, number):
    monkeypatch.setenv("FRESHPER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(warm_start, "_build", lambda config, folder, note: signal.raise_signal(number))
    folder = tmp_path / "run"
    assert cli.main(["train", "frozenlake", *small_flags, "--run.folder", str(folder)]) == 130
    assert capsys.readouterr().err == "freshper: interrupted\n"
    facts = json.loads((folder / "result.json").read_text())
    assert (facts["status"], facts["iterations"], facts["episodes"]) == ("interrupted", 0, 0)
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_interrupted_run_has_a_report_and_exit_code_130(small_flags, result, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    progress = sys.modules["freshper.reports.progress"].TrainProgress
    update = progress.update

    def interrupting(self, metrics):
        update(self, metrics)
        _at(1, signal.SIGINT)(metrics)

    monkeypatch.setattr(progress, "update", interrupting)
    words = ["train", "frozenlake", *small_flags, "--run.iterations", str(NEVER), "--run.folder", str(folder)]
    assert cli.main(words) == 130
    said = capsys.readouterr()
    assert said.err == ""
    assert "interrupted after 8 episodes and 6 updates" in said.out
    assert result(folder)["status"] == "interrupted"
    assert "interrupted" in (folder / "report.html").read_text()


@pytest.fixture
def diverging(monkeypatch):
    """From the third iteration on the loss is not finite."""
    whole = LOSSES["ppo"]
    calls = []

    def broken(inputs, clip):
        calls.append(1)
        loss = whole(inputs, clip)
        return replace(loss, values=loss.values * torch.nan) if len(calls) > 6 else loss

    monkeypatch.setitem(LOSSES, "ppo", broken)


def test_a_diverging_run_fails_with_what_it_has(config, result, rows, diverging, tmp_path):
    with pytest.raises(DivergedError, match=r"5 replay updates in a row .*its loss is nan"):
        train(config(run={"iterations": NEVER}))
    facts = result(tmp_path / "run")
    assert (facts["status"], facts["iterations"], facts["policy_version"]) == ("failed", 4, 6)
    lines = rows(tmp_path / "run")
    assert [line["fresh/skipped"] + line["replay/skipped"] for line in lines] == [0, 0, 3, 3]
    assert load_trained(tmp_path / "run", "last")[1].version == 6
    assert all(torch.isfinite(p).all() for p in load_trained(tmp_path / "run", "last")[1].model.parameters())


def test_a_diverging_run_is_one_line_and_exit_code_1(small_flags, diverging, tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["train", "frozenlake", *small_flags, "--run.iterations", str(NEVER), "--run.folder", str(folder)]
    assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "lower optimizer.learning_rate" in error
    assert cli.main(["report", str(folder)]) == 0
    assert "failed" in (folder / "report.html").read_text()


def test_weights_that_overflow_are_one_line_and_exit_code_1(small_flags, tmp_path, capsys):
    words = ["train", "frozenlake", *small_flags, "--optimizer.learning_rate", "1e30"]
    assert cli.main([*words, "--run.folder", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("freshper: ")


def test_a_full_disk_is_one_line_and_exit_code_1(small_flags, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"

    def full(self, metrics):
        raise OSError(28, "No space left on device", str(folder / "metrics.jsonl"))

    monkeypatch.setattr("freshper.training.run_folder.RunFolder.log", full)
    assert cli.main(["train", "frozenlake", *small_flags, "--run.folder", str(folder)]) == 1
    error = capsys.readouterr().err
    assert error == f"freshper: [Errno 28] No space left on device: '{folder / 'metrics.jsonl'}'\n"
    assert json.loads((folder / "result.json").read_text())["status"] == "failed"


def test_broken_episodes_are_counted_and_the_others_are_learned_from(config, rows, monkeypatch):
    collected = sys.modules["freshper.training.iteration"].play

    def breaking(config, envs, *args, **options):
        monkeypatch.setattr(envs[0], "step", lambda reply: 1 / 0)
        return collected(config, envs, *args, **options)

    monkeypatch.setattr("freshper.training.iteration.play", breaking)
    lines = rows(train(config()).folder)
    assert [line["rollout/errors"] for line in lines] == [1, 1, 1]
    assert [line["episodes"] for line in lines] == [4, 8, 12]
    assert [line["replay/size"] for line in lines] == [3, 6, 9]
    assert [line["replay/updates"] for line in lines] == [0, 2, 2]  # the first three are fewer than a batch


def test_a_run_in_which_every_episode_breaks_says_why(config, result, monkeypatch, tmp_path):
    def nothing_works(config, envs, *args, **options):
        for env in envs:
            monkeypatch.setattr(env, "step", lambda reply: 1 / 0)
        return play(config, envs, *args, **options)

    monkeypatch.setattr("freshper.training.iteration.play", nothing_works)
    with pytest.raises(EnvError, match="every episode of iteration 1 broke, the first with ZeroDivisionError"):
        train(config())
    assert result(tmp_path / "run")["status"] == "failed"


def test_a_folder_that_holds_a_run_is_left_alone(config, trained, rows):
    before = (trained / "metrics.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match="holds a run already"):
        train(config(run={"folder": str(trained)}))
    assert (trained / "metrics.jsonl").read_bytes() == before


HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_by_another_process_is_refused(small_flags, start, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    holder = start("-c", HOLDER, str(folder / ".lock"), stdin=-1)
    assert holder.stdout.readline() == "held\n"
    words = ["train", "frozenlake", *small_flags, "--run.iterations", "1", "--run.folder", str(folder)]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{folder} is in use by another run" in error
    assert [path.name for path in folder.iterdir()] == [".lock"]
    holder.communicate()
    assert cli.main(words) == 0


def test_the_folder_is_free_again_after_a_failure(config, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(warm_start, "_key", lambda config: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config())
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "failed"
    assert train(config()).status == "finished"
    with pytest.raises(RunFolderError, match="holds a run already"):
        train(config())


def test_without_a_folder_the_first_free_name_is_taken(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [str(train(small(run={"iterations": 1})).folder) for _ in range(3)]
    names = ("frozenlake-freshper-s0", "frozenlake-freshper-s0-2", "frozenlake-freshper-s0-3")
    assert folders == [f"runs/{name}" for name in names]


def test_a_saved_config_runs_again(trained, rows, tmp_path, monkeypatch):
    from freshper.training.config_file import with_flags
    from freshper.training.presets import load_config

    config = with_flags(load_config(str(trained / "config.toml")), ["--run.folder", str(tmp_path / "again")])
    assert rows(train(config).folder) == rows(trained)


def test_a_policy_that_was_not_saved_yet_and_a_damaged_one_are_named(trained, tmp_path, config):
    with contextlib.suppress(KeyboardInterrupt):
        train(config(run={"iterations": NEVER}), on_iteration=_at(1, signal.SIGINT, signal.SIGINT))
    with pytest.raises(RunFolderError, match="holds no best policy yet"):
        load_trained(tmp_path / "run", "best")
    with pytest.raises(RunFolderError, match="is no run folder"):
        load_trained(tmp_path, "best")
    damaged = train(config("damaged", run={"iterations": 1})).folder
    (damaged / "model" / "best" / "tokenizer.json").write_text("{")
    with pytest.raises(SnapshotError, match="damaged"):
        load_trained(damaged, "best")


def test_a_task_without_a_demonstrator_is_refused(small, monkeypatch, tmp_path):
    make = warm_start.make_task

    class Unteachable:
        def __init__(self, env):
            self.task, self.instructions, self.max_turns = env.task, env.instructions, env.max_turns
            self.reset, self.step = env.reset, env.step

    monkeypatch.setenv("FRESHPER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(warm_start, "make_task", lambda *args: Unteachable(make(*args)))
    with pytest.raises(ConfigError, match="'frozenlake' has no demonstrator"):
        train(small(run={"folder": str(tmp_path / "run")}))
    assert not (tmp_path / "cache").exists()
