"""``freshper envs``: the tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freshper.cli.terminal import parse, say

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class EnvsCommand:
    """List the tasks."""

    json: bool = False
    """Print them as JSON."""


def run_envs(words: Sequence[str], console: Console) -> int:
    """Run the command; returns the exit code."""
    arguments = parse(EnvsCommand, "envs", words)
    from freshper.envs import describe, task_names

    if arguments.json:
        console.print_json(data={task: describe(task) for task in task_names()})
        return 0
    for task in task_names():
        say(console, f"{task:16} {describe(task)}")
    return 0
