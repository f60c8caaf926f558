"""The documentation is true: its code runs, its commands and settings exist, its examples work."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from freshper import cli
from freshper.cli.commands import COMMANDS
from freshper.cli.terminal import parse
from freshper.errors import FreshPERError
from freshper.learning.advantages import ADVANTAGES
from freshper.learning.losses import LOSSES
from freshper.training.config import GAE, TrainConfig
from freshper.training.config_file import field_paths, write_toml

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(rf"freshper (?:{'|'.join(COMMANDS)})\b")
PLACEHOLDER = re.compile(r"…|\b(?:TARGET|FOLDER|NAME|RUN_FOLDER|RUN|OUT|ARM|T|D)\b")  # what a reader fills in


def _text(page):
    return page.read_text(encoding="utf-8")


def _blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", _text(page), re.DOTALL)


def test_the_code_of_the_replay_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in _blocks(ROOT / "docs" / "replay.md", "python"):
        exec(block, names)  # the text of our own page
    assert len(names["buffer"]) == len(names["same"]) == len(names["seeded"]) == 24
    assert len(names["turns"]) == 2
    assert len(names["drawn"].groups[0]) == 2
    assert len(names["mixed"]) == 1
    assert {"buffer.npz", "buffer", "episodes.jsonl"} <= {path.name for path in tmp_path.iterdir()}


def test_the_task_of_ones_own_keeps_the_contract(tmp_path, monkeypatch):
    (block,) = _blocks(ROOT / "docs" / "tasks.md", "python")
    assert len(block.splitlines()) <= 30
    (tmp_path / "ourgame.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert cli.main(["envs", "check", "ourgame:Guess", "--replies", "<answer>5</answer>", "<answer>2</answer>"]) == 0


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
    return re.findall(r"\]\(([^)\s]+)\)", text)


def _anchors(page):
    """What GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for link in _links(_text(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


class _Read(Exception):
    """A command has been read, and would begin."""


@dataclass(frozen=True)
class _Desk:
    """A folder in which every command of the docs finds what it names, and where none of them does anything."""

    folder: Path

    def file(self, name, text):
        (self.folder / name).write_text(text, encoding="utf-8")

    def run_folder(self, name):
        run = self.folder / name
        if not run.exists():
            run.mkdir(parents=True)
            write_toml(TrainConfig(), run / "config.toml")

    def read(self, words):
        """Raise whatever is wrong with the words behind ``freshper``."""
        name, *rest = words
        if rest[0:1] and name == "train" and (rest[0].startswith("runs/") or "--resume" in rest):
            self.run_folder(rest[0].removesuffix("/config.toml"))
        if name not in ("train", "compare", "doctor"):
            parse(COMMANDS[name][0], name, rest)
        elif rest or name != "doctor":
            with pytest.raises(_Read):
                assert cli.main(words) == 0


@pytest.fixture
def desk(tmp_path, monkeypatch):
    def read(*_args, **_settings):
        raise _Read

    monkeypatch.chdir(tmp_path)
    for place in ("loop.train", "compare.compare", "doctor.missing_libraries"):  # where each of them begins
        monkeypatch.setattr(f"freshper.training.{place}", read)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return _Desk(tmp_path)


def _commands(page):
    """Every command line of a page, in code blocks and in the text."""
    lines = [line for block in _blocks(page, "") for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", _text(page), flags=re.DOTALL))
    lines = [line.partition("freshper ")[2] for line in lines if COMMAND.match(line.removeprefix(".venv/bin/"))]
    return [line for line in lines if not PLACEHOLDER.search(line.partition(" #")[0])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_can_be_given(page, desk, capsys):
    for block in _blocks(page, "toml"):
        if name := re.match(r"# (\S+\.toml)\n", block):
            desk.file(name[1], block)
    for line in _commands(page):
        try:
            desk.read(shlex.split(line, comments=True))
        except (pytest.fail.Exception, AssertionError, FreshPERError) as error:
            pytest.fail(f"freshper {line}: {capsys.readouterr().err or error}")


def test_wrong_commands_would_be_found(desk):
    for line in ("train sokoban --algorithm.advantge grpo", "train sokobann", "compare sokoban --seed 5", "eval"):
        with pytest.raises((pytest.fail.Exception, AssertionError, FreshPERError)):
            desk.read(line.split())


def test_commands_are_found_in_blocks_and_in_text(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("A `freshper envs` here, `freshper doctor TARGET` not.\n```\nfreshper train x  # y\npip\n```\n")
    assert _commands(page) == ["train x  # y", "envs"]
    assert len(_commands(ROOT / "docs" / "methods.md")) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_exists(page):
    sections = "|".join(TrainConfig.model_fields)
    named = re.findall(rf"`((?:{sections})\.[a-z_.]*[a-z_])\b[^`]*`", _text(page))
    named = [name for name in named if not re.search(r"\.(?:py|md|toml|jsonl)$", name)]
    known = {path[:end] for path in field_paths() for end in (*_dots(path), len(path))}
    assert [name for name in named if name not in known] == []


def _dots(path):
    return [place for place, sign in enumerate(path) if sign == "."]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_metric_exists(page):
    """By its name in the code that logs it: under a kind of update, or as a key of its own."""
    rooms = (ROOT / "src" / "freshper" / room for room in ("training", "learning", "envs"))
    code = "".join(_text(file) for room in rooms for file in room.rglob("*.py"))
    named = re.findall(r"`((?:rollout|fresh|replay|eval)/[a-z_]+)`", _text(page))
    for name in named:
        last = name.partition("/")[2]
        assert f'"{last}"' in code or f'"{name}"' in code, name


def test_every_method_is_on_its_page():
    text = _text(ROOT / "docs" / "methods.md")
    commands = " ".join(_commands(ROOT / "docs" / "methods.md"))
    assert [loss for loss in LOSSES if f"--algorithm.loss {loss}" not in commands] == []
    assert [name for name in (*ADVANTAGES, GAE) if name not in text] == []
    chosen = ("algorithm", "clip", "kl", "critic", "mix")
    settings = [path for path in field_paths() if path.partition(".")[0] in chosen]
    flags = commands.replace("-", "_")
    assert [path for path in settings if path not in text and path not in flags] == []
