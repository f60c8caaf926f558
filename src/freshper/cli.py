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

from freshper.errors import ConfigError, FreshPERError, MissingExtraError, UnknownNameError

if TYPE_CHECKING:
    from freshper.training.config import TrainConfig

_absent: ImportError | None = None
try:
    import tyro
    from rich.console import Console
except ImportError as error:  # main() says so, in one line
    _absent = error

T = TypeVar("T")
_FAILED, _WRONG_INPUT, _INTERRUPTED = 1, 2, 130


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
    """Decides the levels, held out from training; a small world has few, so some occur in a run's evaluations too."""
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
    for stream in (sys.stdin, sys.stdout):  # no sign that a terminal does not know may end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        if _absent is not None:
            raise _absent
        code = _run(list(sys.argv[1:] if argv is None else argv), Console(highlight=False, markup=False, emoji=False))
        sys.stdout.flush()  # a reader that has left is noticed here, not while the interpreter ends
        return code
    except FreshPERError as error:  # what goes wrong while running is a RuntimeError or an ArithmeticError as well
        return _complain(error, _FAILED if isinstance(error, (RuntimeError, ArithmeticError)) else _WRONG_INPUT)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("freshper"):
            raise
        return _complain(MissingExtraError(error.name or "a library", "train"), _WRONG_INPUT)
    except KeyboardInterrupt:
        return _complain("interrupted", _INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has left, e.g. `| head`
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        return _FAILED
    except OSError as error:  # the disk is full, a file cannot be written, ...
        return _complain(error, _FAILED)


def _run(words: list[str], console: Console) -> int:
    if not words or words[0] in {"-h", "--help"}:
        return _overview(console)
    if words[0] == "--version":
        from freshper import __version__

        _say(console, f"freshper {__version__}")
        return 0
    if words[0] not in _COMMANDS:
        raise UnknownNameError("command", words[0], _COMMANDS)
    _, run = _COMMANDS[words[0]]
    try:
        return run(words[1:], console)
    except SystemExit as leaving:  # tyro has shown its help
        return int(leaving.code or 0)


def _complain(error: object, code: int) -> int:
    print(f"freshper: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is: no line is broken, and no [word] in the name of a folder is taken for markup."""
    console.print(text, style=style, soft_wrap=True)


def _overview(console: Console) -> int:
    _say(console, "freshper COMMAND ...  experience replay for language-model RL\n")
    for name, (command, _) in _COMMANDS.items():
        _say(console, f"  {name:9} {(command.__doc__ or '').splitlines()[0]}")
    _say(console, "\n`freshper COMMAND --help` explains a command and all its settings.")
    return 0


def _parse(command: type[T], name: str, words: Sequence[str], hint: str = "") -> T:
    """The arguments of a command. tyro's explanations fill a box; an error here is one line."""
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


def _with_settings(words: Sequence[str], command: type[Any], name: str) -> tuple[Any, TrainConfig] | None:
    """Arguments and settings of a command that trains; None when help was asked for and given."""
    from freshper.training.arms import apply_arm, check_arm
    from freshper.training.config_file import split_flags, with_flags
    from freshper.training.presets import load_config

    if {"-h", "--help"} & set(words):
        _settings_help(command, name)
        return None
    own, flags = split_flags(words)
    arguments = _parse(command, name, own, "a setting is named with its section, as in --run.seed")
    for flag in (word.partition("=")[0] for word in flags if command is CompareCommand):
        if flag in ("--run.arm", "--run.seed", "--run.folder"):
            raise ConfigError(f"{flag} differs from run to run: a comparison takes --arms, --seeds and --folder")
    config = load_config(arguments.target)
    arm = getattr(arguments, "arm", None)
    if arm is None:
        return arguments, with_flags(config, flags)
    config = with_flags(apply_arm(config, arm), flags)
    check_arm(config, arm)
    return arguments, config


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
    _say(
        console,
        f"{result.status} after {result.facts['episodes']} episodes and {result.facts['policy_version']} updates; "
        f"held-out success {before['sampled_success']:.2f} before RL, {after['sampled_success']:.2f} now",
    )
    _say(console, f"run folder  {result.folder}\nreport      {write_report(result.folder)}")
    return 0 if result.status == "finished" else _INTERRUPTED


def _compare(words: Sequence[str], console: Console) -> int:
    given = _with_settings(words, CompareCommand, "compare")
    if given is None:
        return 0
    arguments, config = given
    from freshper import reports
    from freshper.training.compare import compare, plan_runs

    if arguments.seeds < 1:
        raise ConfigError(f"seeds {arguments.seeds} must be >= 1: it is their number")
    folder = arguments.folder or Path("runs") / f"compare-{config.run.task}"
    arms = [arm.strip() for arm in arguments.arms.split(",") if arm.strip()]
    seeds = range(arguments.seeds)
    paths = {name: Path(run.run.folder) for name, run in plan_runs(config, arms, seeds, folder).items()}
    messages = Console(stderr=True, highlight=False, markup=False, emoji=False) if arguments.json else console
    with reports.CompareProgress(paths, config.run.iterations, messages) as progress:
        result = compare(
            config,
            arms,
            seeds,
            folder=folder,
            jobs=arguments.jobs,
            command=shlex.join(["freshper", "compare", *words]),
            note=lambda text: _say(messages, text),
            poll=progress.poll,
        )
    summary = reports.summarize_compare(reports.read_compare(folder))
    numbers = reports.compare_json(summary)
    (folder / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    console.print_json(data=numbers) if arguments.json else console.print(reports.compare_table(summary))
    for name, reason in result.unfinished.items():
        _say(messages, f"not finished: {name} ({reason})")
    _say(messages, f"numbers  {folder / 'summary.json'}\nreport   {reports.write_report(folder)}")
    if result.interrupted and result.unfinished:
        return _INTERRUPTED
    return _FAILED if result.unfinished else 0


def _report(words: Sequence[str], console: Console) -> int:
    arguments = _parse(ReportCommand, "report", words)
    from freshper.reports import compare_json, is_compare, read_compare, summarize_compare, write_report

    if arguments.json and arguments.folder.is_dir() and not is_compare(arguments.folder):
        raise ConfigError(f"{arguments.folder} is a single run; --json prints the numbers of a comparison")
    path = write_report(arguments.folder)
    if arguments.json:
        console.print_json(data=compare_json(summarize_compare(read_compare(arguments.folder))))
    else:
        _say(console, str(path))
    return 0


def _eval(words: Sequence[str], console: Console) -> int:
    arguments = _parse(EvalCommand, "eval", words)
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
    _say(
        console, f"{config.run.task}, {arguments.which} policy (version {policy.version}), {arguments.episodes} levels"
    )
    for kind in ("sampled", "greedy"):
        _say(console, f"{kind:8} success {numbers[f'{kind}_success']:.3f}   score {numbers[f'{kind}_score']:+.2f}")
    return 0


def _play(words: Sequence[str], console: Console) -> int:
    arguments = _parse(PlayCommand, "play", words)
    from freshper.envs import task_names

    if arguments.seed < 0:
        raise ConfigError(f"seed {arguments.seed} must be >= 0")
    if arguments.target in task_names():
        return _play_yourself(arguments.target, arguments.seed, console)
    from freshper.training.evaluate import evaluate, load_trained

    if not Path(arguments.target).is_dir():
        raise UnknownNameError("run folder or task", arguments.target, task_names())
    config, policy = load_trained(Path(arguments.target), arguments.which)
    played = evaluate(policy, config.run.task, 1, arguments.seed, config.rollout, greedy=arguments.greedy)
    transcript = played.transcripts[0]
    for number, turn in enumerate(transcript.turns, start=1):
        _say(console, f"turn {number}", "dim")
        _say(console, turn.observation)
        _say(console, f"{turn.reply}   {turn.reward:+.2f}", "bold")
    _say(console, transcript.final_observation)
    _say(console, f"{'solved' if transcript.success else 'not solved'}, return {transcript.episode_return:+.2f}")
    return 0


def _play_yourself(task: str, seed: int, console: Console) -> int:
    from freshper.envs import make_env, write_action

    env = make_env(task, split="eval")
    observation = env.reset(seed)
    _say(console, env.instructions)
    total, outcome = 0.0, None
    while outcome is None or not outcome.done:
        _say(console, f"\n{observation}")
        try:
            typed = console.input("your reply (an action is enough): ")
        except EOFError:
            _say(console, "\nleft the game")
            return 0
        outcome = env.step(typed if "<" in typed else write_action(typed))
        observation, total = outcome.observation, total + outcome.reward
        _say(console, f"{outcome.reward:+.2f}{'' if outcome.valid else '  (not a valid reply)'}")
    _say(console, f"\n{observation}\n{'solved' if outcome.success else 'not solved'}, return {total:+.2f}")
    return 0


def _envs(words: Sequence[str], console: Console) -> int:
    arguments = _parse(EnvsCommand, "envs", words)
    from freshper.envs import describe, task_names

    if arguments.json:
        console.print_json(data={task: describe(task) for task in task_names()})
        return 0
    for task in task_names():
        _say(console, f"{task:16} {describe(task)}")
    return 0


_COMMANDS: dict[str, tuple[type[Any], Callable[[Sequence[str], Console], int]]] = {
    "train": (TrainCommand, _train),
    "compare": (CompareCommand, _compare),
    "report": (ReportCommand, _report),
    "eval": (EvalCommand, _eval),
    "play": (PlayCommand, _play),
    "envs": (EnvsCommand, _envs),
}
