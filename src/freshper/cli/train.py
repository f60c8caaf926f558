"""``freshper train``: one run, watched, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tyro

from freshper.cli.exit_codes import INTERRUPTED
from freshper.cli.settings import read_arguments
from freshper.cli.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

    from freshper.training.config import TrainConfig


@dataclass(frozen=True)
class TrainCommand:
    """Learn a task with a language model: live progress, a run folder, an HTML report.

    TARGET is a task (`freshper envs` lists them) or a TOML file. Every setting is a dotted flag, e.g.
    `freshper train sokoban --arm freshper --run.seed 1 --replay.freshness.tau 30`.
    """

    target: tyro.conf.Positional[str] = "sokoban"
    """Task or config file."""
    arm: str | None = None
    """Values of an arm: on-policy, epochs, uniform, recency, success-only, per, per-is, freshper, freshper-is."""


def run_train(words: Sequence[str], console: Console) -> int:
    """Run the command; returns the exit code."""
    given = read_arguments(words, TrainCommand, "train")
    if given is None:
        return 0
    config = _configured(*given)
    from freshper.reports import TrainProgress, write_report
    from freshper.training.loop import train

    with TrainProgress(config.run.iterations, f"{config.run.task} / {config.run.arm}", console) as progress:
        result = train(config, on_iteration=progress.update, note=progress.note)
    before, after = result.facts["warm_start"], result.facts["eval"]
    say(
        console,
        f"{result.status} after {result.facts['episodes']} episodes and {result.facts['policy_version']} updates; "
        f"held-out success {before['sampled_success']:.2f} before RL, {after['sampled_success']:.2f} now",
    )
    say(console, f"run folder  {result.folder}\nreport      {write_report(result.folder)}")
    return 0 if result.status == "finished" else INTERRUPTED


def _configured(arguments: TrainCommand, flags: list[str]) -> TrainConfig:
    """The target's settings, then the arm's, then those of the flags, which must leave the arm what it is."""
    from freshper.training.arms import apply_arm, check_arm
    from freshper.training.config_file import with_flags
    from freshper.training.presets import load_config

    config = load_config(arguments.target)
    if arguments.arm is None:
        return with_flags(config, flags)
    config = with_flags(apply_arm(config, arguments.arm), flags)
    check_arm(config, arguments.arm)
    return config
