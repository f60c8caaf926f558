"""The code of the documentation runs as it stands, and so do the examples."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def _blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_code_of_the_replay_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in _blocks("replay.md"):
        exec(block, names)  # the text of our own page
    assert len(names["buffer"]) == len(names["same"]) == len(names["seeded"]) == 24
    assert len(names["turns"]) == 2
    assert len(names["drawn"].groups[0]) == 2
    assert len(names["mixed"]) == 1
    assert {"buffer.npz", "buffer", "episodes.jsonl"} <= {path.name for path in tmp_path.iterdir()}


def test_there_are_examples():
    assert [path.name[:3] for path in EXAMPLES] == [f"{number:02}_" for number in range(1, len(EXAMPLES) + 1)]
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_with_numpy_alone(path):
    hidden = "import sys; sys.modules.update(dict.fromkeys(('torch', 'pyarrow', 'numba', 'scipy', 'transformers')))\n"
    script = hidden + f"sys.argv = ['example']\nexec(compile(open({str(path)!r}).read(), {str(path)!r}, 'exec'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    success = dict(re.findall(r"^(.*): success (\d\.\d\d)", done.stdout, re.MULTILINE))
    assert float(success["replay"]) > float(success["on-policy"]) + 0.2
    assert "ESS" in done.stdout


def _links(text):
    return re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_every_link_leads_somewhere(page):
    targets = [link for link in _links(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in targets if not (page.parent / link).exists()] == []
