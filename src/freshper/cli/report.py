"""``freshper report``: a folder's report, written again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from freshper.cli.terminal import parse, say
from freshper.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class ReportCommand:
    """Write the HTML report of a run or of a comparison, and print where it is."""

    folder: tyro.conf.Positional[Path]
    """Run folder, or folder of a comparison."""
    json: bool = False
    """Print a comparison's numbers as JSON as well."""


def run_report(words: Sequence[str], console: Console) -> int:
    """Run the command; returns the exit code."""
    arguments = parse(ReportCommand, "report", words)
    from freshper.reports import compare_json, is_compare, read_compare, summarize_compare, write_report

    if arguments.json and arguments.folder.is_dir() and not is_compare(arguments.folder):
        raise ConfigError(f"{arguments.folder} is a single run; --json prints the numbers of a comparison")
    path = write_report(arguments.folder)
    if arguments.json:
        console.print_json(data=compare_json(summarize_compare(read_compare(arguments.folder))))
    else:
        say(console, str(path))
    return 0
