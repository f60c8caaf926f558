"""Updates and sampling beside TRL's GRPOTrainer: same weights, prompts, tokens, loss and settings, in one run.

    python benchmarks/trl_throughput.py --json trl.json       # in an environment with trl_requirements.txt

``GRPOTrainer.train()`` runs with a reward function, and its phases are timed where they are: *sampling* is its
``_generate`` (chat template, transformers' ``generate``, decoding), an *update* all between the batch being ready and
the end of the step: losses, backward passes, clipping, AdamW, scheduler. In every round freshper does the same on a
copy of the model: ``collect`` with an ``HFPolicy`` answers the same prompts (template, sampling, decoding, a one-turn
environment, trajectories), and ``Learner.update`` learns from TRL's own completions and advantages. Who comes first
alternates.

Both: float32, one thread, temperature 1 and nothing cut off; GRPO's clip without a KL, by the mean of each sequence;
AdamW with the same rates. TRL runs with its fast settings, not its defaults: no gradient checkpointing, no mixed
precision, fused AdamW; nothing moves between sampling and update, so it skips the pass for old log-probs. It returns
no log-probs of its samples; freshper does. TRL's batch is one pass (two or four were no faster); freshper's learner
splits it by its token budget, and computes a prompt that the rows of a group share once (``share_prompts``), which
TRL has no way to do.

Two kinds of work: with *full* replies no token ends a reply, so all have the same length: nothing to pad and no row to
drop, the best case of ``generate`` and of TRL's batches. *Uneven* replies end at a stop token or at the limit, as
replies do; speeds count sampled tokens (for updates: prompt and reply tokens) and nothing that pads.

In the first round, which is not timed, both must read the same prompt tokens and find the same gradient.

Times are CPU seconds of the process: with one thread they are what a machine without other work would take, and a
busy one disturbs them little. Wall-clock ratios stand beside them. Reported are medians of the ratios of a round. The
memory allocator is made to keep its memory, or one side's page faults would depend on what the other has done. Exit
status 1 when a ratio is below the required one.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
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

# glibc then keeps what it has been given. By default it hands large blocks back and faults them in again, and how often
# it does so for one side depends on what the other side has allocated before.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
LEARNING_RATE, BETAS = 1e-6, (0.9, 0.99)
LARGEST_GRADIENT_ERROR = 1e-3  # of the largest entry
WORDS = ("the", "red", "box", "stands", "left", "of", "a", "wall", "and", "two", "steps", "above", "goal", "wait")
OURS, TRL = SIDES = ("freshper", "TRL")
PHASES, PARTS = ("sampling", "update"), ("prompt", "completion")


@dataclass(frozen=True)
class Case:
    """A model and the work: ``groups`` prompts of ``group_size`` replies, each of at most ``reply`` tokens.

    ``stops`` are words whose tokens end a reply, ``token_budget`` is that of freshper's micro-batches.
    """

    load: Callable[[], LoadedModel]
    groups: int
    group_size: int
    prompt_words: tuple[int, int]
    reply: int
    stops: tuple[str, ...]
    rounds: int
    token_budget: int
    required: float

    @property
    def rows(self) -> int:
        return self.groups * self.group_size

    def ends(self, loaded: LoadedModel) -> list[int]:
        """Tokens that end a reply; one beyond the vocabulary, which is never sampled, where none shall."""
        tokens = [loaded.tokenizer.encode(word, add_special_tokens=False)[-1] for word in self.stops]
        return tokens or [int(loaded.model.config.vocab_size)]


def load_tiny() -> LoadedModel:
    """A model of the embedded policy's size with random weights, and its tokenizer with the chat template."""
    tokenizer = build_tokenizer([" ".join(WORDS)] * 2)
    model = build_model(tokenizer.get_vocab_size(), hidden_size=64, layers=3, heads=4, context=512, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        TinyPolicy(model, tokenizer).save(Path(folder))
        return load_model(folder, device="cpu")


TINY = Case(load_tiny, 8, 4, (20, 40), 64, (), 16, 4_096, 1.3)
SMOLLM2 = Case(partial(load_model, "smollm2", device="cpu"), 2, 2, (24, 40), 64, (), 4, 16_384, 1.0)
CASES = {
    "tiny-full": TINY,
    "tiny-uneven": replace(TINY, stops=("box", "goal", "left", "wait", "wall")),
    "smollm2-full": SMOLLM2,
    "smollm2-uneven": replace(SMOLLM2, stops=(".",)),
}


class Rounds:
    """What was timed, by side and phase, one entry a round."""

    def __init__(self) -> None:
        places = [(side, phase) for side in SIDES for phase in PHASES]
        self.entries: dict[tuple[str, str], list[dict[str, float]]] = {place: [] for place in places}

    @contextmanager
    def time(self, side: str, phase: str) -> Iterator[list[int]]:
        """Times a block, which appends the number of its tokens to the list it is given."""
        tokens: list[int] = []
        start = clocks()
        yield tokens
        self.add(side, phase, start, sum(tokens))

    def add(self, side: str, phase: str, start: tuple[float, float], tokens: int) -> None:
        cpu, wall = clocks()
        self.entries[side, phase].append({"tokens": tokens, "cpu": cpu - start[0], "wall": wall - start[1]})

    def speeds(self, side: str, phase: str, clock: str = "cpu") -> list[float]:
        """Tokens per second, without the first round."""
        return [entry["tokens"] / entry[clock] for entry in self.entries[side, phase][1:]]

    def ratio(self, phase: str, clock: str = "cpu") -> float:
        """How many times as fast as TRL freshper is."""
        return statistics.median(map(truediv, self.speeds(OURS, phase, clock), self.speeds(TRL, phase, clock)))


def clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


class OneTurn:
    """An environment that shows a text and takes any reply."""

    task, instructions, max_turns = "one-turn", "", 1

    def __init__(self, text: str) -> None:
        self.reset = lambda _seed: text

    def step(self, _reply: str) -> Outcome:
        return Outcome("", 0.0, done=True, success=True, valid=True)


class Ours:
    """freshper's side: its own copy of the model, a policy to sample with, a learner."""

    def __init__(self, loaded: LoadedModel, case: Case, rounds: Rounds) -> None:
        self._case, self._rounds = case, rounds
        self.policy = HFPolicy(loaded)
        self.learner = Learner(
            loaded.model,
            objective=Objective(clip=Clip(dual=0), aggregation="sequence"),
            learning_rate=LEARNING_RATE,
            total_updates=case.rounds + 1,
            betas=BETAS,
            token_budget=case.token_budget,
            share_prompts=True,
        )
        self.gradient: list[Tensor] = []  # clipped, of the first update

    def sample(self, texts: Sequence[str], seed: int) -> None:
        envs = [OneTurn(text) for text in texts]
        starts = [Start(seed=row, group=text) for row, text in enumerate(texts)]
        limits = Limits(self._case.reply, 10_000)
        with self._rounds.time(OURS, "sampling") as tokens:
            rollout = collect(envs, self.policy, starts, limits=limits, sampling=SamplingParams(), seed=seed)
            tokens.extend(trajectory.response_length for trajectory in rollout.trajectories)
        check_lengths(self._case, tokens)

    def update(self, batch: dict[str, Tensor], *, first: bool) -> None:
        """One update on TRL's batch; the log-probs of its tokens are known beforehand, as they would be."""
        rows = trajectories_of(batch)
        rows = [
            replace(row, behavior_logprobs=score) for row, score in zip(rows, self.learner.score(rows), strict=True)
        ]

        def keep(*_: object) -> None:
            self.gradient = [p.grad.clone() for p in self.learner.model.parameters() if p.grad is not None]

        with self._rounds.time(OURS, "update") as tokens:
            update = self.learner.update(rows, accept=keep if first else None)
            tokens.extend(map(len, rows))
        if not update.applied:
            raise AssertionError(f"the update was skipped: {update.skipped}")


def check_lengths(case: Case, lengths: Sequence[int]) -> None:
    """A failed episode counts as missing."""
    if len(lengths) != case.rows or (not case.stops and set(lengths) != {case.reply}):
        raise AssertionError(f"replies of {sorted(lengths)} tokens: not the work that was asked for")


def trajectories_of(batch: dict[str, Tensor]) -> list[Trajectory]:
    """TRL's rows as trajectories, its advantage on every completion token."""
    facts: dict[str, Any] = {"success": True, "policy_version": 0, "task": "one-turn", "group": "", "seed": 0}
    facts["stop_reason"] = StopReason.TERMINATED
    rows = []
    for row, advantage in enumerate(batch["advantages"].tolist()):
        prompt, reply = (batch[f"{part}_ids"][row][batch[f"{part}_mask"][row] > 0] for part in PARTS)
        mask = np.arange(len(prompt) + len(reply)) >= len(prompt)
        rows.append(
            Trajectory(
                tokens=torch.cat([prompt, reply]).numpy().astype(np.int32),
                response_mask=mask,
                behavior_logprobs=np.zeros(len(mask), np.float32),
                turns=(Turn(0, len(prompt), len(mask), 0.0),),
                advantages=np.where(mask, advantage, 0).astype(np.float32),
                **facts,
            )
        )
    return rows


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer, timed, with freshper's turn inside every round."""

    case: Case
    ours: Ours
    rounds: Rounds
    batch: dict[str, Tensor]
    started: tuple[float, float]
    gradient_error: float

    def _generate(self, prompts: list[Any]) -> Any:
        texts = [prompt[-1]["content"] for prompt in prompts]
        number = self.state.global_step
        if number == 0 and self._tokenize_prompts(prompts)[0] != [self.ours.policy.encode_turn(t, "") for t in texts]:
            raise AssertionError("the two sides read other prompt tokens")
        if number % 2:
            self.ours.sample(texts, number)
        with self.rounds.time(TRL, "sampling") as tokens:
            result = super()._generate(prompts)
            tokens.extend(map(len, result[1]))
        check_lengths(self.case, tokens)
        if not number % 2:
            self.ours.sample(texts, number)
        return result

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        self.batch = super()._prepare_inputs(generation_batch)
        if self.state.global_step % 2:
            self.ours.update(self.batch, first=False)
        self.started = clocks()
        return self.batch


class StepEnd(TrainerCallback):  # type: ignore[misc]
    """Stops the clock of TRL's update; then it may be freshper's turn."""

    def __init__(self, trainer: TimedTrainer) -> None:
        self._trainer = trainer
        self._gradient: list[Tensor] = []

    def on_pre_optimizer_step(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self._gradient = [p.grad.clone() for p in self._trainer.model.parameters() if p.grad is not None]

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        trainer = self._trainer
        read = int(trainer.batch["prompt_mask"].sum() + trainer.batch["completion_mask"].sum())
        trainer.rounds.add(TRL, "update", trainer.started, read)
        number = state.global_step - 1  # it has been counted up
        if number % 2 == 0:
            trainer.ours.update(trainer.batch, first=number == 0)
        if number == 0:
            pairs = list(zip(self._gradient, trainer.ours.gradient, strict=True))
            largest = max(float(theirs.abs().max()) for theirs, _ in pairs)
            trainer.gradient_error = max(float((one - other).abs().max()) for one, other in pairs) / largest
            self._gradient = trainer.ours.gradient = []


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Some number, so that advantages differ."""
    return [float(sum(ids) % 11) for ids in completion_ids]


def dataset_of(case: Case) -> Dataset:
    rng = np.random.default_rng(0)
    lengths = rng.integers(case.prompt_words[0], case.prompt_words[1] + 1, case.groups * (case.rounds + 1))
    texts = [" ".join(rng.choice(WORDS, length)) for length in lengths]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts]})


def make_trainer(loaded: LoadedModel, case: Case, folder: str) -> TimedTrainer:
    ends = case.ends(loaded)
    config = GRPOConfig(  # its defaults: clip 0.2, no KL, no weight decay, gradient norm 1, beta1 0.9
        output_dir=folder,
        max_steps=case.rounds + 1,
        per_device_train_batch_size=case.rows,
        num_generations=case.group_size,
        max_completion_length=case.reply,
        generation_kwargs={"eos_token_id": ends},
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta2=BETAS[1],
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = TimedTrainer(
        model=loaded.model,
        args=config,
        processing_class=loaded.tokenizer,
        reward_funcs=reward,
        train_dataset=dataset_of(case),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.eos_token_ids = ends
    trainer.case = case
    return trainer


def measure(case: Case) -> tuple[Rounds, float]:
    """Times of all rounds, and how far the two gradients of the first were apart, relative to the largest entry."""
    loaded = case.load()
    ours = replace(loaded, model=copy.deepcopy(loaded.model), end_tokens=tuple(case.ends(loaded)))
    rounds = Rounds()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(loaded, case, folder)
        trainer.ours, trainer.rounds = Ours(ours, case, rounds), rounds
        trainer.add_callback(StepEnd(trainer))
        trainer.train()
    return rounds, trainer.gradient_error


def report(name: str, case: Case) -> dict[str, Any]:
    """Measure a case, print its lines and return the result."""
    rounds, error = measure(case)
    result: dict[str, Any] = {"gradient_error": error, "required_ratio": case.required}
    holds = error < LARGEST_GRADIENT_ERROR
    print(f"{name}: largest difference of a gradient {error:.1e} of its largest entry, {case.rounds} rounds")
    for phase in PHASES:
        ratio, wall = rounds.ratio(phase), rounds.ratio(phase, "wall")
        speeds = {side: statistics.median(rounds.speeds(side, phase)) for side in SIDES}
        print(
            f"  {phase:<9}{speeds[OURS]:>8,.0f} tokens/s, TRL {speeds[TRL]:>7,.0f}: {ratio:.2f}x (required "
            f"{case.required:g}: {ratio >= case.required}), by the wall clock {wall:.2f}x"
        )
        holds = holds and ratio >= case.required
        entries = {side: rounds.entries[side, phase] for side in SIDES}
        result[phase] = {"ratio": ratio, "ratio_wall_clock": wall, "tokens_per_second": speeds, "rounds": entries}
    return result | {"holds": holds}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, help="for every case, instead of its own number")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    if not ALLOCATOR.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)  # it is read at the start
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = {}
    for name in arguments.cases:
        results[name] = report(name, replace(CASES[name], rounds=arguments.rounds or CASES[name].rounds))
    holds = all(result["holds"] for result in results.values())
    print(f"all ratios as required, and the same gradients: {holds}")
    if arguments.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
        machine = {"cores": os.cpu_count(), "python": platform.python_version()} | versions
        arguments.json.write_text(json.dumps(results | {"holds": holds, "machine": machine}, indent=2) + "\n")
    return int(not holds)


if __name__ == "__main__":
    raise SystemExit(main())
