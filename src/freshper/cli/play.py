"""``freshper play``: watch a trained policy, or play a task yourself."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from freshper.cli.pictures import PictureShow
from freshper.cli.terminal import parse, say
from freshper.cli.visible_text import visible
from freshper.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from rich.console import Console

    from freshper.envs import Env
    from freshper.training.evaluate import Evaluation


@dataclass(frozen=True)
class PlayCommand:
    """Watch a trained policy play a held-out level, or play a task yourself.

    `freshper play runs/sokoban-freshper-s0` watches; `freshper play sokoban` is for you to play. Where a task shows
    pictures they appear in the terminal, in color, and as files with `--save-images`.
    """

    target: tyro.conf.Positional[str]
    """Run folder, or a task."""
    which: Literal["best", "last"] = "best"
    """Which saved policy."""
    seed: int = 0
    """Decides the level."""
    greedy: bool = True
    """Take the likeliest reply instead of sampling."""
    options: tuple[str, ...] = ()
    """Settings of a task that you play yourself, as size=8 slippery=true."""
    save_images: Path | None = None
    """A new folder for the pictures that a task shows."""


def run_play(words: Sequence[str], console: Console) -> int:
    """Run the command; returns the exit code."""
    arguments = parse(PlayCommand, "play", words)
    from freshper.envs import faults_of, make_env, task_names
    from freshper.envs.own import is_own

    if arguments.seed < 0:
        raise ConfigError(f"seed {arguments.seed} must be >= 0")
    if arguments.target in task_names() or is_own(arguments.target):
        env = make_env(arguments.target, split="eval", **read_options(arguments.options))
        with faults_of(arguments.target):
            return _play_yourself(env, arguments.seed, console, PictureShow(console, arguments.save_images))
    from freshper.training.evaluate import evaluate
    from freshper.training.policy import load_trained

    if not Path(arguments.target).is_dir():
        raise UnknownNameError("run folder or task", arguments.target, task_names())
    if arguments.options:
        raise ConfigError(f"options {' '.join(arguments.options)}: a run keeps the settings that it was trained with")
    config, policy = load_trained(Path(arguments.target), arguments.which)
    show = PictureShow(console, arguments.save_images)
    played = evaluate(policy, config, 1, arguments.seed, greedy=arguments.greedy)
    _replay(played, console, show)
    return 0


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Settings written as ``name=value``; a value is TOML where it can be read so, otherwise the text itself.

    Raises :class:`ConfigError` for a word of another form.
    """
    options: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (name.isidentifier() and equals):
            raise ConfigError(f"option {word!r} must have the form name=value")
        try:
            options[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            options[name] = text
    return options


def _replay(played: Evaluation, console: Console, show: PictureShow) -> None:
    """Show the episode that a policy has played."""
    (transcript,) = played.transcripts
    for number, turn in enumerate(transcript.turns, start=1):
        say(console, f"turn {number}", "dim")
        show.show(turn.images, f"turn-{number:02}")
        say(console, visible(turn.observation))
        say(console, f"{visible(turn.reply)}   {turn.reward:+.2f}", "bold")
    show.show(transcript.final_images, "final")
    say(console, visible(transcript.final_observation))
    _close(console, show, transcript.success, transcript.episode_return, transcript.measures)


def _play_yourself(env: Env, seed: int, console: Console, show: PictureShow) -> int:
    from freshper.envs import Pictured

    observation = env.reset(seed)
    actions: tuple[str, ...] = tuple(getattr(env, "actions", ()))
    prompt = "your reply (an action, or how it begins, is enough): " if actions else "your reply: "
    say(console, visible(env.instructions))
    total, outcome, turn = 0.0, None, 0
    while True:
        turn += 1
        ended = outcome is not None and outcome.done
        say(console, "")
        if isinstance(env, Pictured):
            show.show(env.images(), "final" if ended else f"turn-{turn:02}")
        say(console, visible(observation))
        if outcome is not None and ended:
            break
        try:
            typed = console.input(prompt)
        except EOFError:
            say(console, "\nleft the game")
            return 0
        outcome = env.step(_reply(typed, actions))
        observation, total = outcome.observation, total + outcome.reward
        say(console, f"{outcome.reward:+.2f}{'' if outcome.valid else '  (not a valid reply)'}")
    _close(console, show, outcome.success, total, outcome.measures)
    return 0


def _reply(typed: str, actions: Sequence[str]) -> str:
    """What the environment hears: in a game an action needs no tags and may be shortened; other words go as they are.

    Tags are never put around a reply to a question: whoever answers it shows what a policy has to write.
    """
    from freshper.envs import write_action

    if not actions or "<" in typed:
        return typed
    word = typed.strip().lower()
    begins = [action for action in actions if word and action.lower().startswith(word)]
    meant = [action for action in begins if action.lower() == word] or begins
    return write_action(meant[0] if len(meant) == 1 else typed)


def _close(console: Console, show: PictureShow, success: bool, total: float, measures: Mapping[str, float]) -> None:
    if show.saved:
        say(console, f"{show.saved} pictures saved")
    also = "".join(f", {visible(name)} {value:g}" for name, value in measures.items())
    say(console, f"{'solved' if success else 'not solved'}, return {total:+.2f}{also}")
