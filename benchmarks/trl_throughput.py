"""Updates and sampling beside TRL's GRPOTrainer: same weights, prompts, tokens, loss and settings, in one run.

    python benchmarks/trl_throughput.py --json trl.json

``GRPOTrainer.train()`` runs with a reward function, and its phases are timed where they are: *sampling* is its
``_generate`` (chat template, transformers' ``generate``, decoding), an *update* all between the batch being ready and
the end of the step: loss, backward pass, clipping, AdamW, scheduler. In every round freshper does the same on a copy of
the model: ``collect`` with an ``HFPolicy`` answers the same prompts (template, sampling with log-probs, decoding, a
one-turn environment, trajectories), and ``Learner.update`` learns from TRL's own completions and advantages. Who comes
first alternates.

Both: float32, one thread, temperature 1 and nothing cut off, no token ends a reply, so all have the length of the
limit: nothing to pad in completions and no row to drop, which is ``generate``'s best case. The loss is GRPO's clip
without a KL, by the mean of each sequence; AdamW with the same rates; the whole batch is one micro-batch. TRL runs with
its fast settings, not its defaults: no gradient checkpointing, no mixed precision, fused AdamW; it skips the pass for
old log-probs, as nothing has moved in between. It returns no log-probs with its samples; freshper does.

In the first round, which is not timed, both must read the same prompt tokens and find the same gradient.

Times are CPU seconds of the process: with one thread they are what a machine without other work would take, and a
busy one disturbs them little. Wall-clock ratios stand beside them. Reported are medians of the ratios of a round. Exit
status 1 when a ratio is below the required one.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import truediv
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from freshper.envs.core import Outcome
from freshper.learning.learner import Learner
from freshper.learning.losses import Clip
from freshper.learning.objective import Objective
from freshper.policies.hf import HFPolicy
from freshper.policies.loading import LoadedModel, load_model
from freshper.policies.tiny import TinyPolicy, build_model, build_tokenizer
from freshper.rollout.collect import Limits, Start, collect
from freshper.trajectory import SamplingParams, StopReason, Trajectory, Turn

LEARNING_RATE, BETAS = 1e-6, (0.9, 0.99)
LARGEST_GRADIENT_ERROR = 1e-3  # of the largest entry
WORDS = "the red box stands left of a wall and two steps above its goal push it up down right or wait".split()
PHASES = ("sampling", "update")


@dataclass(frozen=True)
class Case:
    """A model and the work: ``groups`` prompts of ``group_size`` replies of ``reply`` tokens each."""

    groups: int
    group_size: int
    prompt_words: tuple[int, int]
    reply: int
    rounds: int
    required: dict[str, float]
    load: Callable[[], LoadedModel]

    @property
    def rows(self) -> int:
        return self.groups * self.group_size


def load_tiny() -> LoadedModel:
    """The embedded policy's model with random weights, and its tokenizer with the chat template."""
    tokenizer = build_tokenizer([" ".join(WORDS)] * 2)
    model = build_model(tokenizer.get_vocab_size(), hidden_size=64, layers=3, heads=4, context=512, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        TinyPolicy(model, tokenizer).save(Path(folder))
        return replace(load_model(folder, device="cpu"), name="tiny")


CASES = {
    "tiny": Case(8, 4, (20, 40), 64, 15, {"sampling": 1.3, "update": 1.3}, load_tiny),
    "smollm2": Case(
        2, 2, (24, 40), 64, 5, {"sampling": 1.0, "update": 1.0}, lambda: load_model("smollm2", device="cpu")
    ),
}


@dataclass
class Times:
    """Seconds by side ("freshper", "TRL") and phase, one a round: CPU and wall clock."""

    cpu: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    wall: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, side: str, phase: str, start: tuple[float, float]) -> None:
        cpu, wall = now()
        self.cpu.setdefault((side, phase), []).append(cpu - start[0])
        self.wall.setdefault((side, phase), []).append(wall - start[1])

    @contextmanager
    def of(self, side: str, phase: str) -> Iterator[None]:
        start = now()
        yield
        self.add(side, phase, start)

    def ratio(self, phase: str, clock: str = "cpu") -> float:
        """How many times as long TRL takes: the median of all rounds but the first."""
        seconds = getattr(self, clock)
        return statistics.median(map(truediv, seconds["TRL", phase][1:], seconds["freshper", phase][1:]))


def now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


class OneTurn:
    """An environment that shows a text and takes any reply."""

    task, instructions, max_turns = "one-turn", "", 1

    def __init__(self, text: str) -> None:
        self._text = text

    def reset(self, seed: int) -> str:  # noqa: ARG002
        return self._text

    def step(self, reply: str) -> Outcome:  # noqa: ARG002
        return Outcome("", 0.0, done=True, success=True, valid=True)


class Ours:
    """freshper's side: its own copy of the model, a policy to sample with, a learner."""

    def __init__(self, loaded: LoadedModel, case: Case, times: Times) -> None:
        self._case, self._times = case, times
        self.policy = HFPolicy(loaded)
        self.learner = Learner(
            loaded.model,
            objective=Objective(clip=Clip(dual=0), aggregation="sequence"),
            learning_rate=LEARNING_RATE,
            total_updates=case.rounds + 1,
            betas=BETAS,
        )
        self.gradient: list[Tensor] = []  # clipped, of the last update of which it was asked for

    def sample(self, texts: Sequence[str], seed: int) -> None:
        envs = [OneTurn(text) for text in texts]
        starts = [Start(seed=row, group=text) for row, text in enumerate(texts)]
        with self._times.of("freshper", "sampling"):
            rollout = collect(
                envs,
                self.policy,
                starts,
                limits=Limits(self._case.reply, 10_000),
                sampling=SamplingParams(),
                seed=seed,
            )
        said = sum(trajectory.response_length for trajectory in rollout.trajectories)
        if rollout.errors or said != len(texts) * self._case.reply:
            raise AssertionError(f"{said} tokens were sampled, {rollout.errors}: not the work that was asked for")

    def update(self, batch: dict[str, Tensor], *, keep_gradient: bool) -> None:
        """One update on TRL's batch; the log-probs of its tokens are known beforehand, as they would be."""
        rows = trajectories_of(batch)
        scores = self.learner.score(rows)
        rows = [replace(row, behavior_logprobs=score) for row, score in zip(rows, scores, strict=True)]

        def keep(*_: object) -> None:
            self.gradient = [p.grad.clone() for p in self.learner.model.parameters() if p.grad is not None]

        with self._times.of("freshper", "update"):
            update = self.learner.update(rows, accept=keep if keep_gradient else None)
        if not update.applied:
            raise AssertionError(f"the update was skipped: {update.skipped}")


def trajectories_of(batch: dict[str, Tensor]) -> list[Trajectory]:
    """TRL's rows as trajectories, its advantage on every completion token."""
    rows = []
    for row, advantage in enumerate(batch["advantages"].tolist()):
        prompt, reply = (batch[f"{name}_ids"][row][batch[f"{name}_mask"][row].bool()] for name in PARTS)
        mask = np.arange(len(prompt) + len(reply)) >= len(prompt)
        rows.append(
            Trajectory(
                tokens=torch.cat([prompt, reply]).numpy().astype(np.int32),
                response_mask=mask,
                behavior_logprobs=np.zeros(len(mask), np.float32),
                turns=(Turn(0, len(prompt), len(mask), 0.0),),
                stop_reason=StopReason.TERMINATED,
                success=True,
                policy_version=0,
                task=OneTurn.task,
                group=str(row),
                seed=row,
                advantages=np.where(mask, advantage, 0).astype(np.float32),
            )
        )
    return rows


PARTS = ("prompt", "completion")


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer, timed, with freshper's turn inside every round."""

    ours: Ours
    times: Times
    started: tuple[float, float]
    gradient_error: float = 0.0

    @property
    def round(self) -> int:
        return int(self.state.global_step)

    def _generate(self, prompts: list[Any]) -> Any:
        texts = [prompt[-1]["content"] for prompt in prompts]
        if self.round == 0:
            theirs = self._tokenize_prompts(prompts)[0]
            if theirs != [self.ours.policy.encode_turn(text, "") for text in texts]:
                raise AssertionError("the two sides read other prompt tokens")
        if self.round % 2:
            self.ours.sample(texts, self.round)
        with self.times.of("TRL", "sampling"):
            result = super()._generate(prompts)
        if not self.round % 2:
            self.ours.sample(texts, self.round)
        if {len(ids) for ids in result[1]} != {self.max_completion_length}:
            raise AssertionError(f"completions of {sorted(map(len, result[1]))} tokens: not what was asked for")
        return result

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        self.batch = super()._prepare_inputs(generation_batch)
        if self.round % 2:
            self.ours.update(self.batch, keep_gradient=False)
        self.started = now()
        return self.batch


class StepEnd(TrainerCallback):  # type: ignore[misc]
    """Stops the clock of TRL's update; then it may be freshper's turn."""

    def __init__(self, trainer: TimedTrainer) -> None:
        self._trainer = trainer
        self._gradient: list[Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == 0:
            self._gradient = [p.grad.clone() for p in self._trainer.model.parameters() if p.grad is not None]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        trainer = self._trainer
        trainer.times.add("TRL", "update", trainer.started)
        number = state.global_step - 1  # it has been counted up
        if number % 2 == 0:
            trainer.ours.update(trainer.batch, keep_gradient=number == 0)
        if number == 0:
            pairs = list(zip(self._gradient, trainer.ours.gradient, strict=True))
            largest = max(float(theirs.abs().max()) for theirs, _ in pairs)
            trainer.gradient_error = max(float((one - other).abs().max()) for one, other in pairs) / largest


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Some number, so that advantages differ."""
    return [float(sum(ids) % 11) for ids in completion_ids]


def dataset_of(case: Case) -> Dataset:
    rng = np.random.default_rng(0)
    low, high = case.prompt_words
    texts = [
        " ".join(rng.choice(WORDS, rng.integers(low, high + 1))) for _ in range(case.groups * (case.rounds + 1))
    ]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts]})


def make_trainer(loaded: LoadedModel, case: Case, folder: str, no_token: int) -> TimedTrainer:
    config = GRPOConfig(
        output_dir=folder,
        max_steps=case.rounds + 1,
        per_device_train_batch_size=case.rows,
        gradient_accumulation_steps=1,
        num_generations=case.group_size,
        max_completion_length=case.reply,
        generation_kwargs={"eos_token_id": no_token},
        loss_type="grpo",
        beta=0.0,
        epsilon=0.2,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=10_000,
    )
    trainer = TimedTrainer(
        model=loaded.model,
        args=config,
        processing_class=loaded.tokenizer,
        reward_funcs=reward,
        train_dataset=dataset_of(case),
    )
    trainer.eos_token_ids = [no_token]
    return trainer


def measure(case: Case) -> tuple[Times, TimedTrainer, dict[str, int]]:
    loaded = case.load()
    no_token = int(loaded.model.config.vocab_size)  # never sampled: no reply ends early
    ours = replace(loaded, model=copy.deepcopy(loaded.model), end_tokens=(no_token,))
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(loaded, case, folder, no_token)
        trainer.ours, trainer.times = Ours(ours, case, times), times
        trainer.add_callback(StepEnd(trainer))
        trainer.train()
    read = int(trainer.batch["prompt_mask"].sum() + trainer.batch["completion_mask"].sum())
    return times, trainer, {"sampling": case.rows * case.reply, "update": read}


def report(name: str, case: Case) -> dict[str, Any]:
    """Measure a case, print its lines and return the result."""
    times, trainer, tokens = measure(case)
    exact = trainer.gradient_error < LARGEST_GRADIENT_ERROR
    print(f"{name}: gradients differ by {trainer.gradient_error:.1e} of the largest entry: {exact}")
    result: dict[str, Any] = {"gradient_error": trainer.gradient_error, "tokens": tokens, "holds": exact}
    for phase in PHASES:
        ratio, wall, required = times.ratio(phase), times.ratio(phase, "wall"), case.required[phase]
        speeds = {
            side: tokens[phase] / statistics.median(times.cpu[side, phase][1:]) for side in ("freshper", "TRL")
        }
        holds = ratio >= required
        print(
            f"{name:<9}{phase:<10}{speeds['freshper']:>10,.0f} tokens/s, TRL {speeds['TRL']:>8,.0f}: {ratio:.2f}x "
            f"(required {required:g}: {holds}), wall clock {wall:.2f}x"
        )
        result["holds"] = result["holds"] and holds
        result[phase] = {
            "ratio": ratio,
            "ratio_wall_clock": wall,
            "required_ratio": required,
            "tokens_per_second": speeds,
            "seconds": {side: times.cpu[side, phase] for side in speeds},
        }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, help="for every case, instead of its own number")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    results = {}
    for name in arguments.cases:
        case = CASES[name]
        results[name] = report(name, replace(case, rounds=arguments.rounds or case.rounds))
    holds = all(result["holds"] for result in results.values())
    print(f"all ratios as required, and the same gradients: {holds}")
    if arguments.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
        machine = {"cores": os.cpu_count(), "python": platform.python_version()} | versions
        arguments.json.write_text(json.dumps(results | {"holds": holds, "machine": machine}, indent=2) + "\n")
    return int(not holds)


if __name__ == "__main__":
    raise SystemExit(main())
