"""The page of all settings says what the code says."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from freshper.training.config_file import field_paths

SCRIPT = Path(__file__).parents[3] / "docs" / "config_reference.py"


@pytest.fixture
def reference(monkeypatch, tmp_path):
    """The generator as a module, with a page of its own."""
    spec = importlib.util.spec_from_file_location("config_reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    return module


def test_the_page_in_the_docs_is_not_stale():
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_setting_has_one_row_with_a_sentence(reference):
    rows = [re.split(r"(?<!\\)\|", line) for line in reference.page().splitlines() if line.startswith("| `")]
    assert sorted(row[1].strip(" `") for row in rows) == sorted(field_paths())
    assert all(len(row) == 6 for row in rows)
    assert all(row[4].strip().endswith((".", ")")) for row in rows)


@pytest.mark.parametrize(
    "row",
    [
        "| `run.seed` | int in [0, 2^63) | `0` |",
        "| `rollout.temperature` | float > 0 | `1.0` |",
        "| `rollout.top_p` | float in (0, 1] | `1.0` |",
        '| `replay.freshness.kind` | `exponential` \\| `none` \\| `auto` | `"exponential"` |',
        "| `log.tensorboard` | true, false | `true` |",
    ],
)
def test_types_bounds_and_defaults_are_told(row, reference):
    assert row in reference.page()


def test_a_stale_page_is_found_and_mended(reference, capsys):
    assert reference.main(["--check"]) == 1
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    text = reference.PAGE.read_text(encoding="utf-8")
    reference.PAGE.write_text(text.replace("`replay.alpha`", "`replay.omega`"), encoding="utf-8")
    capsys.readouterr()
    assert reference.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert "-| `replay.omega`" in out
    assert "+| `replay.alpha`" in out
    assert reference.main(["--chekc"]) == 2
