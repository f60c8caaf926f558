"""What only real processes can show: Ctrl-C at a terminal, and output that nobody reads on."""

import json
import os
import signal
import subprocess
import sys

import pytest

NEVER = "10000"  # iterations that no test waits for


def _metrics(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture
def training(start, small_flags, tmp_path):
    """A run as it is started in a shell, in tmp_path/run."""
    words = ["-m", "freshper", "train", "frozenlake", *small_flags, "--run.iterations", NEVER, "--eval.every", NEVER]
    return start(*words, "--run.folder", str(tmp_path / "run"))


def test_ctrl_c_ends_a_run_with_everything_written(training, until, tmp_path):
    folder = tmp_path / "run"
    until(lambda: _metrics(folder) >= 3, training)
    training.send_signal(signal.SIGINT)
    out, err = training.communicate(timeout=30)
    assert training.returncode == 130
    assert err == ""
    assert "interrupted after" in out
    assert json.loads((folder / "result.json").read_text())["status"] == "interrupted"
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "model" / "last" / "model.safetensors").exists()
    assert len({_metrics(folder), json.loads((folder / "result.json").read_text())["iterations"]}) == 1


COMMAND = ("-m", "freshper")


@pytest.mark.parametrize("words", [["envs"], ["train", "--help"], ["envs", "--help"], []], ids=" ".join)
def test_a_reader_that_leaves_causes_no_traceback(start, words):
    reader, writer = os.pipe()
    os.close(reader)
    process = start(*COMMAND, *words, stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=60)
    assert err == ""
    assert process.returncode in (1, -signal.SIGPIPE)


def test_head_gets_its_line(start):
    process = start(*COMMAND, "envs")
    head = subprocess.run(["head", "-1"], stdin=process.stdout, capture_output=True, text=True, check=True)
    process.stdout.close()
    assert head.stdout.startswith("aime ")
    assert process.stderr.read() == ""


HIDDEN = """
import sys

hidden, sys.argv = sys.argv[1].split(","), ["freshper", *sys.argv[2:]]

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""
BY_MODULE = HIDDEN + "import runpy; runpy.run_module('freshper', run_name='__main__')"
BY_SCRIPT = HIDDEN + "from freshper.cli import main; raise SystemExit(main())"


@pytest.mark.parametrize(
    ("script", "missing", "words"),
    [
        (BY_MODULE, "tyro", ["--version"]),
        (BY_SCRIPT, "rich", ["train", "sokoban"]),
        (BY_SCRIPT, "torch", ["train", "sokoban"]),
        (BY_SCRIPT, "pydantic", ["eval", "."]),
        (BY_MODULE, "torch,transformers,pydantic,tyro,rich,scipy,plotly", ["report", "."]),
    ],
)
def test_without_the_extra_one_line_names_it(start, script, missing, words):
    process = start("-c", script, missing, *words)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert err.count("\n") == 1
    assert "is needed here: pip install 'freshper[train]'" in err
    assert err.split()[:2] in [["freshper:", name] for name in missing.split(",")]


def test_the_console_script_is_the_same_command(start):
    script = os.path.join(os.path.dirname(sys.executable), "freshper")
    process = start("-c", "import os, sys; os.execv(sys.argv[1], sys.argv[1:])", script, "--version")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("freshper 0.")
