"""The command ``freshper``: train, compare, report, eval, play, envs. Wrong input ends in one line and exit code 2."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from freshper.errors import ConfigError, DivergedError, EnvError, FreshPERError, MissingExtraError, UnknownNameError

if TYPE_CHECKING:
    from freshper.envs import Outcome
    from freshper.training.config import TrainConfig

try:
    import tyro
    from rich.console import Console
except ImportError as missing:
    raise MissingExtraError(missing.name or "tyro", "train") from missing

T = TypeVar("T")
_FAILED, _WRONG_INPUT, _INTERRUPTED = 1, 2, 130


@dataclass(frozen=True)
class TrainCommand:
    """Learn a task with a language model: live progress, a run folder, an HTML report.

    TARGET is a task (`freshper envs` lists them) or a TOML file. Every setting is a dotted flag, e.g.
    `freshper train sokoban --arm per --run.seed 1 --replay.freshness.tau 30`.
    """

    target: tyro.conf.Positional[str] = "sokoban"
    """Task or config file."""
    arm: str | None = None
    """Values of an arm: on-policy, epochs, uniform, recency, success-only, per, per-is, freshper, freshper-is."""


@dataclass(frozen=True)
class CompareCommand:
    """Run several arms on several seeds, in parallel processes, and compare them.

    Called again with the same folder it runs only what is not finished. Settings are dotted flags as in
    `freshper train`, the same for all arms.
    """

    target: tyro.conf.Positional[str] = "sokoban"
    """Task or config file."""
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


@dataclass(frozen=True)
class ReportCommand:
    """Write the HTML report of a run or of a comparison, and print where it is."""

    folder: tyro.conf.Positional[Path]
    """Run folder, or folder of a comparison."""
    json: bool = False
    """Print a comparison's numbers as JSON as well."""


@dataclass(frozen=True)
class EvalCommand:
    """Measure a trained policy on held-out levels."""

    folder: tyro.conf.Positional[Path]
    """Run folder."""
    which: Literal["best", "last"] = "best"
    """Which saved policy."""
    episodes: int = 200
    """Number of levels."""
    seed: int = 2_000
    """Decides the levels; other ones than during training by default."""
    json: bool = False
    """Print the result as JSON."""


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


@dataclass(frozen=True)
class EnvsCommand:
    """List the tasks."""

    json: bool = False
    """Print them as JSON."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (the run failed), 2 (wrong input), 130 (interrupted)."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv), Console(highlight=False))
    except (DivergedError, EnvError) as error:
        return _complain(error, _FAILED)
    except FreshPERError as error:
        return _complain(error, _WRONG_INPUT)
    except KeyboardInterrupt:
        return _complain("interrupted", _INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has left, e.g. `| head`
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        return _FAILED


def _run(words: list[str], console: Console) -> int:
    if not words or words[0] in {"-h", "--help"}:
        return _overview(console)
    if words[0] == "--version":
        from freshper import __version__

        console.print(f"freshper {__version__}")
        return 0
    if words[0] not in _COMMANDS:
        raise UnknownNameError("command", words[0], _COMMANDS)
    return _COMMANDS[words[0]](words[1:], console)


def _complain(error: object, code: int) -> int:
    print(f"freshper: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _overview(console: Console) -> int:
    console.print("[bold]freshper[/bold] COMMAND ...  experience replay for language-model RL\n")
    for name, command in _DESCRIBED.items():
        console.print(f"  [bold]{name:9}[/bold] {(command.__doc__ or '').splitlines()[0]}", soft_wrap=True)
    console.print("\n`freshper COMMAND --help` explains a command and all its settings.")
    return 0


def _parse(command: type[T], name: str, words: Sequence[str], *, dotted: bool = False) -> tuple[T, list[str]]:
    """The arguments of a command, and the dotted flags among ``words`` where the command takes them.

    tyro's explanations fill a box; an error here is one line.
    """
    own, flags = _without_dotted(words) if dotted else (list(words), [])
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(command, prog=f"freshper {name}", args=own), flags
    except SystemExit as leaving:
        if leaving.code == 0:
            raise
        text = complaint.getvalue().translate({ord(sign): " " for sign in "╭╮╰╯│─"})
        raise ConfigError(" ".join(text.split("For full helptext")[0].split())) from None


def _without_dotted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off ``--section.name value`` and ``--section.name=value``."""
    own: list[str] = []
    flags: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            own.append(word)
            continue
        flags.append(word)
        if not equals and (value := next(rest, None)) is not None:
            flags.append(value)
    return own, flags


def _with_settings(words: Sequence[str], command: type[Any], name: str) -> tuple[Any, TrainConfig] | None:
    """Arguments and settings of a command that trains; None when help was asked for and given."""
    from freshper.training.arms import apply_arm
    from freshper.training.config_file import with_flags
    from freshper.training.presets import load_config

    if {"-h", "--help"} & set(words):
        _settings_help(command, name)
        return None
    arguments, flags = _parse(command, name, words, dotted=True)
    config = load_config(arguments.target)
    arm = getattr(arguments, "arm", None)
    return arguments, with_flags(apply_arm(config, arm) if arm else config, flags)


def _settings_help(command: type[Any], name: str) -> None:
    """The command's own arguments and every setting, as tyro shows them."""
    from dataclasses import make_dataclass

    from freshper.training.config import TrainConfig

    settings = (("settings", Annotated[TrainConfig, tyro.conf.arg(name="")], field(default=TrainConfig())),)
    whole = make_dataclass(
        command.__name__, settings, bases=(command,), frozen=True, namespace={"__doc__": command.__doc__}
    )
    with contextlib.suppress(SystemExit):
        tyro.cli(whole, prog=f"freshper {name}", args=["--help"])


def _train(words: Sequence[str], console: Console) -> int:
    given = _with_settings(words, TrainCommand, "train")
    if given is None:
        return 0
    _, config = given
    from freshper.reports import TrainProgress, write_report
    from freshper.training.loop import train

    with TrainProgress(config.run.iterations, f"{config.run.task} / {config.run.arm}", console) as progress:
        result = train(config, on_iteration=progress.update, note=progress.note)
    before, after = result.facts["warm_start"], result.facts["eval"]
    console.print(
        f"{result.status} after {result.facts['episodes']} episodes and {result.facts['policy_version']} updates; "
        f"held-out success {before['sampled_success']:.2f} before RL, {after['sampled_success']:.2f} now"
    )
    console.print(f"run folder  {result.folder}\nreport      {write_report(result.folder)}", soft_wrap=True)
    return 0 if result.status == "finished" else _INTERRUPTED


def _compare(words: Sequence[str], console: Console) -> int:
    given = _with_settings(words, CompareCommand, "compare")
    if given is None:
        return 0
    arguments, config = given
    from freshper.reports import (
        CompareProgress,
        compare_json,
        compare_table,
        read_compare,
        summarize_compare,
        write_report,
    )
    from freshper.training.compare import compare, plan_runs

    folder = arguments.folder or Path("runs") / f"compare-{config.run.task}"
    arms = [arm.strip() for arm in arguments.arms.split(",") if arm.strip()]
    seeds = range(arguments.seeds)
    paths = {name: Path(run.run.folder) for name, run in plan_runs(config, arms, seeds, folder).items()}
    messages = Console(stderr=True, highlight=False) if arguments.json else console
    with CompareProgress(paths, config.run.iterations, messages) as progress:
        result = compare(
            config,
            arms,
            seeds,
            folder=folder,
            jobs=arguments.jobs,
            command=shlex.join(["freshper", "compare", *words]),
            note=lambda text: messages.print(text, soft_wrap=True),
            poll=progress.poll,
        )
    summary = summarize_compare(read_compare(folder))
    numbers = compare_json(summary)
    (folder / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    console.print_json(data=numbers) if arguments.json else console.print(compare_table(summary))
    for name, reason in result.unfinished.items():
        messages.print(f"not finished: {name} ({reason})", soft_wrap=True)
    messages.print(f"numbers  {folder / 'summary.json'}\nreport   {write_report(folder)}", soft_wrap=True)
    return _FAILED if result.unfinished else 0


def _report(words: Sequence[str], console: Console) -> int:
    arguments, _ = _parse(ReportCommand, "report", words)
    from freshper.reports import compare_json, is_compare, read_compare, summarize_compare, write_report

    path = write_report(arguments.folder)
    if arguments.json:
        if not is_compare(arguments.folder):
            raise ConfigError(f"{arguments.folder} is a single run; --json prints the numbers of a comparison")
        console.print_json(data=compare_json(summarize_compare(read_compare(arguments.folder))))
    else:
        console.print(str(path), soft_wrap=True)
    return 0


def _eval(words: Sequence[str], console: Console) -> int:
    arguments, _ = _parse(EvalCommand, "eval", words)
    from freshper.training.config import EvalConfig
    from freshper.training.evaluate import evaluate_both, load_trained

    if arguments.episodes < 1 or arguments.seed < 0:
        raise ConfigError(f"episodes {arguments.episodes} must be >= 1 and seed {arguments.seed} >= 0")
    config, policy = load_trained(arguments.folder, arguments.which)
    settings = EvalConfig(episodes=arguments.episodes, seed=arguments.seed)
    numbers, _ = evaluate_both(policy, config.run.task, settings, config.rollout)
    if arguments.json:
        console.print_json(data={"task": config.run.task, "policy_version": policy.version} | numbers)
        return 0
    console.print(
        f"{config.run.task}, {arguments.which} policy (version {policy.version}), {arguments.episodes} levels"
    )
    for kind in ("sampled", "greedy"):
        console.print(f"{kind:8} success {numbers[f'{kind}_success']:.3f}   score {numbers[f'{kind}_score']:+.2f}")
    return 0


def _play(words: Sequence[str], console: Console) -> int:
    arguments, _ = _parse(PlayCommand, "play", words)
    from freshper.envs import task_names

    if arguments.target in task_names():
        return _play_yourself(arguments.target, arguments.seed, console)
    from freshper.training.evaluate import evaluate, load_trained

    if not Path(arguments.target).is_dir():
        raise UnknownNameError("run folder or task", arguments.target, task_names())
    config, policy = load_trained(Path(arguments.target), arguments.which)
    played = evaluate(policy, config.run.task, 1, arguments.seed, config.rollout, greedy=arguments.greedy)
    transcript = played.transcripts[0]
    for number, turn in enumerate(transcript.turns, start=1):
        console.print(f"[dim]turn {number}[/dim]\n{turn.observation}", markup=True)
        console.print(f"{turn.reply}   {turn.reward:+.2f}", markup=False, style="bold")
    console.print(transcript.final_observation, markup=False)
    console.print(f"{'solved' if transcript.success else 'not solved'}, return {transcript.episode_return:+.2f}")
    return 0


def _play_yourself(task: str, seed: int, console: Console) -> int:
    from freshper.envs import make_env

    env = make_env(task, split="eval")
    observation = env.reset(seed)
    console.print(env.instructions, markup=False)
    total, outcome = 0.0, None
    while outcome is None or not outcome.done:
        console.print(f"\n{observation}", markup=False)
        try:
            typed = console.input("[dim]your reply (an action is enough): [/dim]")
        except EOFError:
            console.print("\nleft the game")
            return 0
        outcome = _step(env.step, typed)
        observation, total = outcome.observation, total + outcome.reward
        console.print(f"{outcome.reward:+.2f}{'' if outcome.valid else '  (not a valid reply)'}")
    console.print(
        f"\n{observation}\n{'solved' if outcome.success else 'not solved'}, return {total:+.2f}", markup=False
    )
    return 0


def _step(step: Callable[[str], Outcome], typed: str) -> Outcome:
    """Play what was typed: a bare action gets the tags that a reply needs."""
    from freshper.envs import write_action

    return step(typed if "<" in typed else write_action(typed))


def _envs(words: Sequence[str], console: Console) -> int:
    arguments, _ = _parse(EnvsCommand, "envs", words)
    from freshper.envs import describe, task_names

    if arguments.json:
        console.print_json(data={task: describe(task) for task in task_names()})
        return 0
    for task in task_names():
        console.print(f"[bold]{task:16}[/bold] {describe(task)}", soft_wrap=True)
    return 0


_COMMANDS: dict[str, Callable[[Sequence[str], Console], int]] = {
    "train": _train,
    "compare": _compare,
    "report": _report,
    "eval": _eval,
    "play": _play,
    "envs": _envs,
}
_DESCRIBED: dict[str, type[Any]] = {
    "train": TrainCommand,
    "compare": CompareCommand,
    "report": ReportCommand,
    "eval": EvalCommand,
    "play": PlayCommand,
    "envs": EnvsCommand,
}
