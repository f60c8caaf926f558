"""Which command runs, and how an error ends it."""

from dataclasses import dataclass

import pytest

from freshper import __version__, cli
from freshper.cli.commands import COMMANDS
from freshper.cli.envs import EnvsCommand
from freshper.cli.terminal import parse, say
from freshper.errors import ConfigError, DivergedError, EnvError

NAMES = ("train", "compare", "report", "eval", "play", "export", "inspect", "envs", "serve-retriever", "doctor")


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]], ids=["nothing", "--help", "-h"])
def test_the_overview_names_every_command(words, capsys):
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert tuple(COMMANDS) == NAMES
    for name, (command, _) in COMMANDS.items():
        assert f"  {name:15} {command.__doc__.splitlines()[0]}\n" in out


def test_the_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"freshper {__version__}\n"


def test_programming_errors_keep_their_traceback(monkeypatch):
    """Only what was raised on purpose becomes a line: a bug of ours must stay visible."""

    def broken(words, console):
        raise ModuleNotFoundError("No module named 'freshper.gone'", name="freshper.gone")

    monkeypatch.setitem(COMMANDS, "envs", (EnvsCommand, broken))
    with pytest.raises(ModuleNotFoundError, match="gone"):
        cli.main(["envs"])


@dataclass(frozen=True)
class _Greet:
    """Greet somebody."""

    whom: str = "nobody"
    """Who is greeted."""


def test_a_new_command_is_one_line_in_the_table(monkeypatch, capsys):
    def greet(words, console):
        say(console, f"hello {parse(_Greet, 'greet', words).whom}")
        return 7

    monkeypatch.setitem(COMMANDS, "greet", (_Greet, greet))
    assert cli.main(["greet", "--whom", "[bold]you"]) == 7
    assert capsys.readouterr().out == "hello [bold]you\n"
    assert cli.main([]) == 0
    assert "  greet           Greet somebody.\n" in capsys.readouterr().out
    assert cli.main(["greeet"]) == 2
    assert "Did you mean 'greet'?" in capsys.readouterr().err
    assert cli.main(["greet", "--help"]) == 0
    assert "Who is greeted." in capsys.readouterr().out
    assert cli.main(["greet", "--who", "you"]) == 2
    assert capsys.readouterr().err.startswith("freshper: Unrecognized options: --who, you; Perhaps you meant: --whom")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("two\nlines"), 2, "two lines"),
        (EnvError("no such level"), 1, "no such level"),
        (DivergedError("the loss is not finite"), 1, "the loss is not finite"),
        (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device"),
        (ModuleNotFoundError("No module named 'numba'", name="numba"), 2, "numba is needed here"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_decides_the_exit_code(monkeypatch, capsys, error, code, line):
    def failing(words, console):
        raise error

    monkeypatch.setitem(COMMANDS, "envs", (EnvsCommand, failing))
    assert cli.main(["envs"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"freshper: {line}")
    assert err.count("\n") == 1
