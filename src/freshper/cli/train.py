"""``freshper train``: one run, watched, and its report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from freshper.cli.exit_codes import INTERRUPTED
from freshper.cli.settings import read_arguments
from freshper.cli.terminal import say
from freshper.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from freshper.training.config import TrainConfig


@dataclass(frozen=True)
class TrainCommand:
    """Learn a task with a language model: live progress, a run folder, an HTML report.

    TARGET is a task (`freshper envs` lists them) or a TOML file. Every setting is a dotted flag, e.g.
    `freshper train sokoban --arm freshper --run.seed 1 --replay.freshness.tau 30`. A run that was interrupted or
    killed goes on with `freshper train RUN_FOLDER --resume`.
    """

    target: tyro.conf.Positional[str] = "sokoban"
    """Task or config file; with --resume also a run folder."""
    arm: str | None = None
    """Values of an arm: on-policy, epochs, uniform, recency, success-only, per, per-is, freshper, freshper-is,
    freshper-auto."""
    model: str | None = None
    """Train this model instead of the embedded one: smollm2, or a Hugging Face name, folder or GGUF file."""
    resume: bool = False
    """Go on from the newest checkpoint of the run folder, as if the run had never ended; run.iterations may grow."""


def run_train(words: Sequence[str], console: Console) -> int:
    """Run the command; returns the exit code."""
    given = read_arguments(words, TrainCommand, "train")
    if given is None:
        return 0
    arguments, flags = given
    config = _configured(arguments, flags)
    from freshper.reports import TrainProgress, write_report
    from freshper.training.loop import train

    with TrainProgress(config.run.iterations, f"{config.run.task} / {config.run.arm}", console) as progress:
        result = train(config, resume=arguments.resume, on_iteration=progress.update, note=progress.note)
    before, after = result.facts["warm_start"], result.facts["eval"]
    say(
        console,
        f"{result.status} after {result.facts['episodes']} episodes and {result.facts['policy_version']} updates; "
        f"held-out success {before['sampled_success']:.2f} before RL, {after['sampled_success']:.2f} now",
    )
    if lost := result.facts["failed_saves"]:
        say(console, f"{lost} times a checkpoint or a policy could not be written, see the warnings")
    if result.status == "interrupted" and config.checkpoint.every:
        say(console, f"go on with   freshper train {shlex.quote(str(result.folder))} --resume")
    say(console, f"run folder  {result.folder}\nreport      {write_report(result.folder)}")
    return 0 if result.status == "finished" else INTERRUPTED


def _configured(arguments: TrainCommand, flags: list[str]) -> TrainConfig:
    """The target's settings, then the arm's, then those of the flags, which must leave the arm what it is."""
    from freshper.training.arms import apply_arm, check_arm
    from freshper.training.config_file import with_flags
    from freshper.training.presets import load_config

    folder = Path(arguments.target)
    if arguments.resume and folder.is_dir():
        for name, value in (("arm", arguments.arm), ("model", arguments.model)):
            if value is not None:
                raise ConfigError(f"--{name} {value} with the run folder {folder}: a resumed run keeps its {name}")
        if not (folder / "config.toml").exists():
            raise ConfigError(f"{folder} is no run folder: there is no config.toml in it, so nothing to resume")
        return with_flags(with_flags(load_config(str(folder / "config.toml")), ["--run.folder", str(folder)]), flags)
    if (folder / "config.toml").exists():
        raise ConfigError(f"{folder} is a run folder: add --resume to go on with its run")
    config = load_config(arguments.target, arguments.model)
    if arguments.arm is None:
        config = with_flags(config, flags)
    else:
        config = with_flags(apply_arm(config, arguments.arm), flags)
        check_arm(config, arguments.arm)
    if arguments.resume and not config.run.folder:
        raise ConfigError("--resume needs the folder of the run: freshper train RUN_FOLDER --resume, or --run.folder")
    return config
