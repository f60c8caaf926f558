"""What every command needs: its words read into arguments, and lines printed as they are."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import TypeVar

import tyro
from rich.console import Console

from freshper.errors import ConfigError

T = TypeVar("T")


def make_console(*, stderr: bool = False) -> Console:
    """A console on standard output, or on standard error, that gives no word a meaning of its own."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is: no line is broken, and no [word] in the name of a folder is taken for markup."""
    console.print(text, style=style, soft_wrap=True)


def parse(command: type[T], name: str, words: Sequence[str], hint: str = "") -> T:
    """The arguments of a command. tyro's explanations fill a box; an error here is one line.

    Args:
        command: A frozen dataclass, one field an argument; the sentence under each field is its help.
        name: What the command is called.
        words: What stands behind its name.
        hint: Added to the complaint about an argument that does not exist.

    Raises:
        ConfigError: The words do not fit the command.
        SystemExit: Help was asked for, and has been printed.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(command, prog=f"freshper {name}", args=list(words))
    except SystemExit as leaving:
        if leaving.code == 0:
            raise
        gist = _gist(complaint.getvalue())
        raise ConfigError(f"{gist}; {hint}" if hint and "Unrecognized" in gist else gist) from None


def _gist(box: str) -> str:
    """What a box of tyro's says, without its frame and its pointers to the help."""
    parts: list[list[str]] = [[]]
    for line in box.splitlines()[1:]:  # the first one holds a title
        text = line.strip(" │|")
        if set(text) <= set("─-╰╯+"):
            parts.append([])
        else:
            parts[-1].append(text)
    pointers = ("For full helptext", "Argument helptext")
    return "; ".join(" ".join(part).rstrip(".") for part in parts if part and not part[0].startswith(pointers))
