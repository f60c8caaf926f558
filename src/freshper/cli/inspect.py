"""``freshper inspect``: what is in a replay buffer on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from freshper.cli.terminal import parse, say
from freshper.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console

    from freshper import Trajectory
    from freshper.replay.buffer import ReplayBuffer

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class InspectCommand:
    """Show what is in a replay buffer: a file that `save` wrote, or a directory, also while a trainer writes there.

    `freshper inspect runs/x/buffer` shows sizes, ages, priorities, uses, tasks, drift by age and what the next draw
    would be; `--key 17 --tokenizer runs/x/models/best` shows one item as text. Nothing is changed.
    """

    path: tyro.conf.Positional[Path]
    """File or directory of the buffer."""
    key: int | None = None
    """Show this item instead; keys stand in the list of the likeliest items."""
    tokenizer: Path | None = None
    """Local tokenizer folder that turns token ids into text (needs the extra train)."""
    mark: str | None = None
    """Show the state of this checkpoint of a directory instead of the newest."""
    export: Path | None = None
    """Also write all trajectories there: .parquet or .jsonl."""
    json: bool = False
    """Print as JSON."""


def run_inspect(words: Sequence[str], console: Console) -> int:
    """Run the command; returns the exit code."""
    arguments = parse(InspectCommand, "inspect", words)
    from freshper.replay.buffer import ReplayBuffer

    if not arguments.path.exists():
        raise ConfigError(f"{arguments.path} does not exist: name a saved buffer")
    if arguments.path.suffix in (".parquet", ".jsonl") and arguments.path.is_file():
        raise ConfigError(f"{arguments.path} holds trajectories, not a buffer: freshper.read_trajectories reads them")
    buffer = ReplayBuffer.load(arguments.path, read_only=True, mark=arguments.mark)
    if arguments.export is not None:
        from freshper.replay.disk.interchange import write_trajectories

        count = write_trajectories(arguments.export, buffer.trajectories())
        say(console, f"wrote {count:,} trajectories to {arguments.export}", "dim") if not arguments.json else None
    if arguments.key is not None:
        _show_item(console, buffer, arguments)
    elif arguments.json:
        console.print_json(data=buffer.summary())
    else:
        _show_summary(console, arguments.path, buffer.summary())
    return 0


def _show_item(console: Console, buffer: ReplayBuffer, arguments: InspectCommand) -> None:
    assert arguments.key is not None
    try:
        facts, members = buffer.item(arguments.key)
    except (KeyError, TypeError) as error:
        raise ConfigError(error.args[0]) from None
    decode = _decoder(arguments.tokenizer)
    if arguments.json:
        console.print_json(data=facts | {"trajectories": [_as_data(member, decode) for member in members]})
        return
    say(console, "  ".join(f"{name} {_short(value)}" for name, value in facts.items()), "bold")
    for member in members:
        outcome = "success" if member.success else "no success"
        say(
            console,
            f"{member.task} {member.group} seed {member.seed}: {len(member)} tokens, {len(member.turns)} turns, return "
            f"{member.episode_return:+.3g}, {outcome}, {member.stop_reason}, policy version {member.policy_version}",
        )
        for number, turn in enumerate(_as_data(member, decode)["turns"], start=1):
            pictures = f", {turn['images']} images" if turn["images"] else ""
            say(console, f"turn {number}{pictures}", "dim")
            say(console, turn["observation"])
            say(console, f"{turn['reply']}   {turn['reward']:+.3g}", "bold")


def _as_data(member: Trajectory, decode: Decode) -> dict[str, Any]:
    """A trajectory for JSON, its tokens as text."""
    turns = [
        {
            "observation": decode(member.tokens[turn.start : turn.reply_start].tolist()),
            "reply": decode(member.tokens[turn.reply_start : turn.end].tolist()),
            "logprob": float(member.behavior_logprobs[turn.reply_start : turn.end].sum())
            if member.logprobs_known
            else None,
            "reward": turn.reward,
            "images": turn.images,
        }
        for turn in member.turns
    ]
    return {
        "task": member.task,
        "group": member.group,
        "seed": member.seed,
        "success": member.success,
        "stop_reason": str(member.stop_reason),
        "policy_version": member.policy_version,
        "tokens": len(member),
        "turns": turns,
    }


def _decoder(folder: Path | None) -> Decode:
    """Token ids to text, or to the ids themselves where no tokenizer is named."""
    if folder is None:
        return lambda ids: " ".join(map(str, ids))
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("transformers", "train") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} holds no tokenizer: {str(error).splitlines()[0]}") from error
    return lambda ids: str(tokenizer.decode(ids))


def _show_summary(console: Console, path: Path, summary: dict[str, Any]) -> None:
    sizes, counters = summary["bytes"], summary["counters"]
    say(console, f"{path}", "bold")
    say(
        console,
        f"{summary['items']:,} of {summary['capacity']:,} items (unit {summary['unit']}), {summary['drawable']:,} "
        f"drawable; {_megabytes(sizes['stored'])} stored, {_megabytes(sizes['images'])} of it images; policy version "
        f"{summary['policy_version']:,}; alpha {summary['alpha']:g}, priority {summary['priority']}",
    )
    say(console, ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counters.items()))
    spreads = {name: summary[name] for name in ("ages", "base_priorities", "uses") if summary[name]}
    rows = [[name.replace("_", " "), *map(_short, spread.values())] for name, spread in spreads.items()]
    _table(console, ["", "min", "p10", "median", "p90", "max", "mean"], rows)
    tasks = summary["tasks"].items()
    rows = [
        [name, f"{t['items']:,}", f"{t['part_of_draw']:.1%}", f"{'auto, now ' if t['auto'] else ''}{t['freshness']}"]
        for name, t in tasks
    ]
    _table(console, ["task", "items", "of a draw", "freshness"], rows)
    _show_next_draw(console, summary["next_draw"])
    rows = [
        [
            f"{one['age_low']}-{one['age_high']}",
            str(one["n"]),
            f"{one['ess_fraction']:.3f}",
            f"{one['kl']:.3g}",
            f"{one['kl_reverse']:.3g}",
            f"{one['clip_fraction']:.3f}" if "clip_fraction" in one else "",
            f"{one['ratio_max']:.3g}",
        ]
        for one in summary["drift"]
    ]
    _table(console, ["age", "n", "ESS", "KL(pi|mu)", "KL(mu|pi)", "clipped", "largest ratio"], rows)


def _show_next_draw(console: Console, draw: dict[str, Any] | None) -> None:
    if draw is None:
        say(console, "nothing can be drawn")
        return
    ages = draw["ages"]
    say(
        console,
        f"next draw: as uneven as {draw['effective_items']:,.0f} equally likely items, the likeliest 1 % take "
        f"{draw['top_1_percent']:.1%}; ages {ages['p10']} / {ages['median']} / {ages['p90']} (p10, median, p90)",
    )
    rows = [
        [str(one["key"]), f"{one['probability']:.3g}", str(one["age"]), _short(one["base_priority"])]
        for one in draw["largest"]
    ]
    _table(console, ["likeliest key", "P", "age", "base priority"], rows)


def _table(console: Console, head: list[str], rows: list[list[str]]) -> None:
    """Columns as wide as their widest cell; nothing where there are no rows."""
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row, style in [(head, "dim"), *((row, "") for row in rows)]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        say(console, "  ".join(cells).rstrip(), style)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
