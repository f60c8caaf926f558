"""``freshper export``: a trained policy as a plain Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from freshper.cli.terminal import make_console, parse, say

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class ExportCommand:
    """Write a trained policy as a folder that transformers and vLLM load."""

    folder: tyro.conf.Positional[Path]
    """Run folder."""
    out: tyro.conf.Positional[Path]
    """New folder to write."""
    which: Literal["best", "last"] = "best"
    """Which saved policy."""
    merge: bool = False
    """Add LoRA adapters to their base; without it, the folder holds the adapters alone."""


def run_export(words: Sequence[str], console: Console) -> int:
    """Run the command; returns the exit code."""
    arguments = parse(ExportCommand, "export", words)
    from freshper.training.export import export_run

    errors = make_console(stderr=True)
    facts = export_run(
        arguments.folder, arguments.out, arguments.which, merge=arguments.merge, note=lambda text: say(errors, text)
    )
    alone = "base" in facts and not arguments.merge
    of = f" (adapters of {facts['base']['name']})" if alone else ""
    say(console, f"{arguments.out}: {arguments.which} policy, version {facts['policy_version']}{of}")
    return 0
