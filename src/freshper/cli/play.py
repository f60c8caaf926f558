"""``freshper play``: watch a trained policy, or play a task yourself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from freshper.cli.terminal import parse, say
from freshper.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class PlayCommand:
    """Watch a trained policy play a held-out level, or play a task yourself.

    `freshper play runs/sokoban-freshper-s0` watches; `freshper play sokoban` is for you to play.
    """

    target: tyro.conf.Positional[str]
    """Run folder, or a task."""
    which: Literal["best", "last"] = "best"
    """Which saved policy."""
    seed: int = 0
    """Decides the level."""
    greedy: bool = True
    """Take the likeliest reply instead of sampling."""


def run_play(words: Sequence[str], console: Console) -> int:
    """Run the command; returns the exit code."""
    arguments = parse(PlayCommand, "play", words)
    from freshper.envs import task_names

    if arguments.seed < 0:
        raise ConfigError(f"seed {arguments.seed} must be >= 0")
    if arguments.target in task_names():
        return _play_yourself(arguments.target, arguments.seed, console)
    from freshper.training.evaluate import evaluate
    from freshper.training.policy import load_trained

    if not Path(arguments.target).is_dir():
        raise UnknownNameError("run folder or task", arguments.target, task_names())
    config, policy = load_trained(Path(arguments.target), arguments.which)
    played = evaluate(policy, config.run.task, 1, arguments.seed, config.rollout, greedy=arguments.greedy)
    transcript = played.transcripts[0]
    for number, turn in enumerate(transcript.turns, start=1):
        say(console, f"turn {number}", "dim")
        say(console, turn.observation)
        say(console, f"{turn.reply}   {turn.reward:+.2f}", "bold")
    say(console, transcript.final_observation)
    say(console, f"{'solved' if transcript.success else 'not solved'}, return {transcript.episode_return:+.2f}")
    return 0


def _play_yourself(task: str, seed: int, console: Console) -> int:
    from freshper.envs import make_env, write_action

    env = make_env(task, split="eval")
    observation = env.reset(seed)
    say(console, env.instructions)
    total, outcome = 0.0, None
    while outcome is None or not outcome.done:
        say(console, f"\n{observation}")
        try:
            typed = console.input("your reply (an action is enough): ")
        except EOFError:
            say(console, "\nleft the game")
            return 0
        outcome = env.step(typed if "<" in typed else write_action(typed))
        observation, total = outcome.observation, total + outcome.reward
        say(console, f"{outcome.reward:+.2f}{'' if outcome.valid else '  (not a valid reply)'}")
    say(console, f"\n{observation}\n{'solved' if outcome.success else 'not solved'}, return {total:+.2f}")
    return 0
