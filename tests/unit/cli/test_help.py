"""Help explains every argument and every setting."""

import inspect

import pytest

from freshper import cli
from freshper.cli.commands import COMMANDS
from freshper.training.config import TrainConfig
from freshper.training.config_file import field_paths


def _sentences(words, capsys):
    """The help of a command, its frames and line breaks taken out; also where it was asked for by SystemExit."""
    try:
        code = cli.main(words)
    except SystemExit as leaving:
        code = leaving.code
    out, err = capsys.readouterr()
    assert (code or 0, err) == (0, "")
    return " ".join("".join(sign for sign in out if sign not in "│╭╮╰╯─").split())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_explains_every_argument(command, flag, capsys):
    text = _sentences([command, flag], capsys)
    kind, _ = COMMANDS[command]
    assert text.startswith(f"usage: freshper {command}")
    assert " ".join(kind.__doc__.split()) in text
    source = inspect.getsource(kind)
    sentences = [line.strip().strip('"') for line in source.splitlines() if line.strip().startswith('"""')][1:]
    assert len(sentences) >= len(kind.__dataclass_fields__)
    assert [sentence for sentence in sentences if sentence and sentence not in text] == []


@pytest.mark.parametrize("command", ["train", "compare"])
def test_help_explains_every_setting(command, capsys):
    text = _sentences([command, "sokoban", "--replay.freshness.tau", "3", "--help"], capsys)
    assert len(field_paths()) > 50
    for path in field_paths():
        name = ".NAME" if path == "env.options" else ""  # whatever the task knows
        assert f"--{path.replace('_', '-')}{name} " in text
        assert _sentence(path) in text


def _sentence(path):
    section = TrainConfig
    *parents, name = path.split(".")
    for parent in parents:
        section = section.model_fields[parent].annotation
    return " ".join(section.model_fields[name].description.split())
