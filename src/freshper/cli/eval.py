"""``freshper eval``: a trained policy on held-out levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from freshper.cli.terminal import parse, say
from freshper.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


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


def run_eval(words: Sequence[str], console: Console) -> int:
    """Run the command; returns the exit code."""
    arguments = parse(EvalCommand, "eval", words)
    from freshper.training.evaluate import evaluate_both
    from freshper.training.policy import load_trained
    from freshper.training.sections import EvalConfig

    if arguments.episodes < 1 or arguments.seed < 0:
        raise ConfigError(f"episodes {arguments.episodes} must be >= 1 and seed {arguments.seed} >= 0")
    config, policy = load_trained(arguments.folder, arguments.which)
    settings = EvalConfig(episodes=arguments.episodes, seed=arguments.seed)
    numbers, _ = evaluate_both(policy, config.model_copy(update={"eval": settings}))
    if arguments.json:
        console.print_json(data={"task": config.run.task, "policy_version": policy.version} | numbers)
        return 0
    say(console, f"{config.run.task}, {arguments.which} policy (version {policy.version}), {arguments.episodes} levels")
    for kind in ("sampled", "greedy"):
        prefix = f"{kind}_"
        measured = [
            f"{name.removeprefix(prefix)} {value:.3f}" for name, value in numbers.items() if name.startswith(prefix)
        ]
        say(console, f"{kind:8} {'   '.join(measured)}")
    return 0
