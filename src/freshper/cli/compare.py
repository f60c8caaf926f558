"""``freshper compare``: arms × seeds in parallel processes, and their table."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from freshper.cli.exit_codes import FAILED, INTERRUPTED
from freshper.cli.settings import read_arguments
from freshper.cli.terminal import make_console, say
from freshper.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from freshper.training.config import TrainConfig


@dataclass(frozen=True)
class CompareCommand:
    """Run several arms on several seeds, in parallel processes, and compare them.

    Called again with the same folder it runs only what is not finished. Settings are dotted flags as in
    `freshper train`, the same for all arms.
    """

    target: tyro.conf.Positional[str] = "sokoban"
    """Task or config file."""
    model: str | None = None
    """Another model than the embedded one: smollm2, or a Hugging Face name, folder or GGUF file."""
    arms: str = "on-policy,epochs,per,freshper"
    """Arms, separated by commas."""
    seeds: int = 3
    """Number of seeds: 0, 1, ..."""
    jobs: int = 2
    """Processes at a time, one thread each."""
    folder: Path | None = None
    """Where the runs go; by default runs/compare-TASK."""
    json: bool = False
    """Print the result as JSON."""


def run_compare(words: Sequence[str], console: Console) -> int:
    """Run the command; returns the exit code."""
    given = read_arguments(words, CompareCommand, "compare")
    if given is None:
        return 0
    arguments, flags = given
    config = _configured(arguments, flags)
    from freshper import reports
    from freshper.training.compare import compare, plan_runs

    if arguments.seeds < 1:
        raise ConfigError(f"seeds {arguments.seeds} must be >= 1: it is their number")
    folder = arguments.folder or Path("runs") / f"compare-{config.run.task}"
    arms = [arm.strip() for arm in arguments.arms.split(",") if arm.strip()]
    seeds = range(arguments.seeds)
    paths = {name: Path(run.run.folder) for name, run in plan_runs(config, arms, seeds, folder).items()}
    messages = make_console(stderr=True) if arguments.json else console
    with reports.CompareProgress(paths, config.run.iterations, messages) as progress:
        result = compare(
            config,
            arms,
            seeds,
            folder=folder,
            jobs=arguments.jobs,
            command=shlex.join(["freshper", "compare", *words]),
            note=lambda text: say(messages, text),
            poll=progress.poll,
        )
    summary = reports.summarize_compare(reports.read_compare(folder))
    numbers = reports.compare_json(summary)
    (folder / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    console.print_json(data=numbers) if arguments.json else console.print(reports.compare_table(summary))
    for name, reason in result.unfinished.items():
        say(messages, f"not finished: {name} ({reason})")
    say(messages, f"numbers  {folder / 'summary.json'}\nreport   {reports.write_report(folder)}")
    if result.interrupted and result.unfinished:
        return INTERRUPTED
    return FAILED if result.unfinished else 0


def _configured(arguments: CompareCommand, flags: list[str]) -> TrainConfig:
    """The settings that all runs share."""
    from freshper.training.config_file import with_flags
    from freshper.training.presets import load_config

    for flag in (word.partition("=")[0] for word in flags):
        if flag in ("--run.arm", "--run.seed", "--run.folder"):
            raise ConfigError(f"{flag} differs from run to run: a comparison takes --arms, --seeds and --folder")
    return with_flags(load_config(arguments.target, arguments.model), flags)
