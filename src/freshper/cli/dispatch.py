"""From the words of the command line to an exit code: which command runs, and how an error ends it."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from freshper.cli.exit_codes import FAILED, INTERRUPTED, WRONG_INPUT
from freshper.cli.visible_text import visible
from freshper.errors import FreshPERError, MissingExtraError, UnknownNameError

if TYPE_CHECKING:
    from rich.console import Console

_absent: ImportError | None = None
try:
    from freshper.cli.commands import COMMANDS
    from freshper.cli.terminal import make_console, say
except ImportError as error:  # tyro or rich is not installed: main() says so, in one line
    _absent = error


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (the run failed), 2 (wrong input), 130 (interrupted)."""
    for stream in (sys.stdin, sys.stdout):  # no sign that a terminal does not know may end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        if _absent is not None:
            raise _absent
        code = _run(list(sys.argv[1:] if argv is None else argv), make_console())
        sys.stdout.flush()  # a reader that has left is noticed here, not while the interpreter ends
        return code
    except FreshPERError as error:  # what goes wrong while running is a RuntimeError or an ArithmeticError as well
        return _complain(error, FAILED if isinstance(error, (RuntimeError, ArithmeticError)) else WRONG_INPUT)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("freshper"):
            raise
        return _complain(MissingExtraError(error.name or "a library", "train"), WRONG_INPUT)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has left, e.g. `| head`
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        return FAILED
    except OSError as error:  # the disk is full, a file cannot be written, ...
        return _complain(error, FAILED)


def _run(words: list[str], console: Console) -> int:
    if not words or words[0] in {"-h", "--help"}:
        return _overview(console)
    if words[0] == "--version":
        from freshper import __version__

        say(console, f"freshper {__version__}")
        return 0
    if words[0] not in COMMANDS:
        raise UnknownNameError("command", words[0], COMMANDS)
    _, run = COMMANDS[words[0]]
    try:
        return run(words[1:], console)
    except SystemExit as leaving:  # tyro has shown its help
        return int(leaving.code or 0)


def _complain(error: object, code: int) -> int:
    print(f"freshper: {visible(' '.join(str(error).split()))}", file=sys.stderr)
    return code


def _overview(console: Console) -> int:
    say(console, "freshper COMMAND ...  experience replay for language-model RL\n")
    for name, (command, _) in COMMANDS.items():
        say(console, f"  {name:15} {(command.__doc__ or '').splitlines()[0]}")
    say(console, "\n`freshper COMMAND --help` explains a command and all its settings.")
    return 0
