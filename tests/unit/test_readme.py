"""The README's code runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_first_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    for block in blocks:
        exec(block, names)  # the text of our own README
    assert len(blocks) == 1
    assert len(names["batch"]) == 128
    assert (tmp_path / "buffer.npz").exists()
