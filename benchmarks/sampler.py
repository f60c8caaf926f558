"""Sampling whole multi-turn episodes: a kept cache against transformers' ``generate``, and our engines compared.

    python benchmarks/sampler.py --json sampler.json

Three comparisons with the default embedded model, each one with the same weights, prompts, limits and settings
(temperature 1, nothing cut off, no reply ends before its limit) on both sides.

1. *generate*: ten turns of 32 episodes, 5 prompt tokens a turn (4 of an observation, the marker) and 4 sampled ones,
   in lock step. Both sides return the log-prob of every sampled token: a behavior policy needs them. ``generate``
   reads the conversation again in every turn, as its users do; inside a reply it keeps its cache. Lengths are equal,
   so it has nothing to pad, which is its best case. It is timed once more without log-probs.
2. *refilling*: 64 episodes of four turns, 32 at a time, 20 prompt tokens a turn and replies of 1 to 64 tokens,
   uniform at random. In lock step a turn lasts as long as the longest reply; with slots a row goes on at once.
3. *turns*: 32 episodes of ten turns, 20 prompt tokens and 16 sampled ones a turn. The cache that slots keep across
   turns against reading each conversation again in every turn, both with the same streams of random numbers.

All take turns in every round, and times are compared within a round, so that a busy machine disturbs all alike;
reported are medians. Log-probs are first compared with one forward pass over the finished conversations. Exit
status 1 when a ratio is below the required one or a log-prob is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

from freshper.policies.cached import CachedConversations
from freshper.policies.core import Conversations, reply_all
from freshper.policies.reencode import ReencodingConversations
from freshper.policies.slots import SlotConversations
from freshper.policies.tiny import build_model
from freshper.trajectory import SamplingParams

EPISODES, TURNS, PROMPT, REPLY = 32, 10, 5, 4
SIZES = {"hidden_size": 64, "layers": 3, "heads": 4, "context": 512}  # PolicyConfig's defaults
VOCAB = 250  # the embedded tokenizer's on Sokoban
NO_TOKEN = -1  # never sampled: no reply ends early
REQUIRED_RATIO = 2.0
REQUIRED_REFILLING, REQUIRED_TURNS = 1.5, 1.3
LARGEST_ERROR = 1e-4  # nats

Sampled = tuple[Tensor, Tensor | None]  # conversations (EPISODES, tokens), log-probs (EPISODES, TURNS x REPLY)
OURS, GENERATE, BARE = "freshper", "generate, with log-probs", "generate, without"


def prompts_of(seed: int) -> Tensor:
    """Prompt tokens (TURNS, EPISODES, PROMPT) of a round."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB, (TURNS, EPISODES, PROMPT), generator=generator)


def freshper(model: Any, prompts: Tensor, seed: int) -> Sampled:
    conversations = CachedConversations(
        model, (NO_TOKEN,), EPISODES, SamplingParams(), seed=seed, max_positions=SIZES["context"]
    )
    rows, limits = list(range(EPISODES)), [REPLY] * EPISODES
    parts: list[Tensor] = []
    logprobs: list[Tensor] = []
    for prompt in prompts:
        replies = reply_all(conversations, rows, prompt.tolist(), limits)
        parts += [prompt, torch.tensor([reply.tokens for reply in replies])]
        logprobs.append(torch.tensor([reply.logprobs for reply in replies]))
    return torch.cat(parts, 1), torch.cat(logprobs, 1)


def generate(model: Any, prompts: Tensor, seed: int, *, with_logprobs: bool = True) -> Sampled:
    torch.manual_seed(seed)
    conversation = torch.zeros(EPISODES, 0, dtype=torch.long)
    logprobs: list[Tensor] = []
    for prompt in prompts:
        conversation = torch.cat([conversation, prompt], 1)
        output = model.generate(
            conversation,
            attention_mask=torch.ones_like(conversation),
            return_dict_in_generate=True,
            output_logits=with_logprobs,
        )
        conversation = output.sequences
        if with_logprobs:
            scores = torch.log_softmax(torch.stack(output.logits, 1), -1)  # (EPISODES, REPLY, VOCAB)
            logprobs.append(scores.gather(-1, conversation[:, -REPLY:, None]).squeeze(-1))
    return conversation, torch.cat(logprobs, 1) if with_logprobs else None


def bare(model: Any, prompts: Tensor, seed: int) -> Sampled:
    return generate(model, prompts, seed, with_logprobs=False)


SYSTEMS: dict[str, Callable[[Any, Tensor, int], Sampled]] = {OURS: freshper, GENERATE: generate, BARE: bare}


def make_model() -> Any:
    model: Any = build_model(VOCAB, **SIZES, seed=0).eval()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=REPLY, eos_token_id=None, pad_token_id=0
    )
    return model


@torch.inference_mode()
def largest_error(model: Any, sampled: Sampled) -> float:
    """Between the log-probs of a system and those of one forward pass over its finished conversations, in nats."""
    tokens, logprobs = sampled
    if tokens.shape != (EPISODES, TURNS * (PROMPT + REPLY)):
        raise AssertionError(f"conversations of shape {tuple(tokens.shape)}: not the work that was asked for")
    if logprobs is None:
        return 0.0
    scores = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits[:, :-1].double(), -1)
    chosen = scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    said = torch.arange(1, tokens.shape[1]) % (PROMPT + REPLY) >= PROMPT
    return float((chosen[:, said] - logprobs).abs().max())


def measure(model: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds per system and round."""
    seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for number in range(rounds):
        prompts = prompts_of(number)
        for name, system in SYSTEMS.items():
            start = time.perf_counter()
            system(model, prompts, number)
            seconds[name].append(time.perf_counter() - start)
    return seconds


@dataclass(frozen=True)
class Episodes:
    """Prompts and limits of replies, by episode and turn; ``parallel`` episodes run at once."""

    prompts: list[list[list[int]]]
    limits: list[list[int]]
    parallel: int

    @classmethod
    def make(cls, seed: int, shape: tuple[int, int], prompt: int, replies: tuple[int, int], parallel: int) -> Episodes:
        """``shape`` (episodes, turns); replies between two lengths, uniform."""
        rng = np.random.default_rng(seed)
        return cls(
            rng.integers(4, VOCAB, (*shape, prompt)).tolist(),
            rng.integers(replies[0], replies[1] + 1, shape).tolist(),
            parallel,
        )

    @property
    def sampled(self) -> int:
        return sum(map(sum, self.limits))


def refilling(seed: int) -> Episodes:
    return Episodes.make(seed, (64, 4), 20, (1, 64), 32)


def turns(seed: int) -> Episodes:
    return Episodes.make(seed, (32, 10), 20, (16, 16), 32)


def lock_step(model: Any, count: int, slots: int, seed: int) -> Conversations:  # noqa: ARG001 - it has no slots
    return CachedConversations(model, (NO_TOKEN,), count, SamplingParams(), seed=seed, max_positions=SIZES["context"])


def with_slots(model: Any, count: int, slots: int, seed: int) -> Conversations:
    return SlotConversations(
        model, (NO_TOKEN,), count, SamplingParams(), seed=seed, max_positions=SIZES["context"], slots=slots
    )


def reading_again(model: Any, count: int, slots: int, seed: int) -> Conversations:
    return ReencodingConversations(
        model, (NO_TOKEN,), count, SamplingParams(), seed=seed, max_positions=SIZES["context"], slots=slots
    )


def play(conversations: Conversations, work: Episodes) -> list[list[tuple[int, float]]]:
    """What each episode read and said: tokens with their log-probs, NaN where read."""
    waiting, running = deque(range(len(work.prompts))), 0
    lines: list[list[tuple[int, float]]] = [[] for _ in work.prompts]
    turn = [0] * len(lines)

    def ask(row: int) -> None:
        prompt = work.prompts[row][turn[row]]
        lines[row] += [(token, math.nan) for token in prompt]
        conversations.submit(row, prompt, work.limits[row][turn[row]])
        turn[row] += 1

    while waiting or running:
        while waiting and running < work.parallel:
            ask(waiting.popleft())
            running += 1
        for row, reply in conversations.finished():
            lines[row] += zip(reply.tokens, reply.logprobs, strict=True)
            if turn[row] < len(work.prompts[row]):
                ask(row)
            else:
                conversations.close_row(row)
                running -= 1
    return lines


@torch.inference_mode()
def worst_logprob(model: Any, lines: list[list[tuple[int, float]]]) -> float:
    """As :func:`largest_error`, for conversations of different lengths."""
    worst = 0.0
    for line in lines:
        tokens = torch.tensor([[token for token, _ in line]])
        said = torch.tensor([value for _, value in line], dtype=torch.float64)[1:]
        scores = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits[0, :-1].double(), -1)
        errors = (scores.gather(-1, tokens[0, 1:, None]).squeeze(-1) - said).abs()
        worst = max(worst, float(errors[~said.isnan()].max()))
    return worst


Opening = Callable[[Any, int, int, int], Conversations]
COMPARISONS: dict[str, tuple[Callable[[int], Episodes], Opening, Opening, float]] = {
    "refilling against lock step": (refilling, with_slots, lock_step, REQUIRED_REFILLING),
    "kept cache against reading again": (turns, with_slots, reading_again, REQUIRED_TURNS),
}


def compare(model: Any, name: str, rounds: int) -> dict[str, Any]:
    """One comparison of engines: seconds, ratio, largest error of a log-prob."""
    make, ours, theirs, required = COMPARISONS[name]
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    worst = 0.0
    for number in range(rounds):
        work = make(number)
        for side, opening in (("ours", ours), ("theirs", theirs)):
            start = time.perf_counter()
            lines = play(opening(model, len(work.prompts), work.parallel, number), work)
            seconds[side].append(time.perf_counter() - start)
            if number == 0:
                worst = max(worst, worst_logprob(model, lines))
    ratio = statistics.median(map(truediv, seconds["theirs"], seconds["ours"]))
    speed = make(0).sampled / statistics.median(seconds["ours"])
    holds = ratio >= required and worst < LARGEST_ERROR
    print(f"{name}: {ratio:.2f}x (required {required:g}), {speed:,.0f} tokens/s, largest error {worst:.1e}: {holds}")
    return {"ratio": ratio, "required_ratio": required, "seconds": seconds, "largest_error": worst, "holds": holds}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model()
    errors = {name: largest_error(model, system(model, prompts_of(0), 0)) for name, system in SYSTEMS.items()}
    seconds = measure(model, arguments.rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    sampled = EPISODES * TURNS * REPLY
    print(
        f"{TURNS} turns of {EPISODES} episodes, {PROMPT} + {REPLY} tokens a turn, median of {arguments.rounds} rounds"
    )
    print(f"{'system':<28}{'tokens/s':>10}{'ms per turn':>14}{'x freshper':>12}{'largest error':>16}")
    ratios = {name: statistics.median(map(truediv, times, seconds[OURS])) for name, times in seconds.items()}
    for name, median in medians.items():
        print(
            f"{name:<28}{sampled / median:>10,.0f}{median / TURNS * 1e3:>14.1f}{ratios[name]:>12.2f}"
            f"{errors[name]:>16.1e}"
        )
    holds = ratios[GENERATE] >= REQUIRED_RATIO and max(errors.values()) < LARGEST_ERROR
    print(f"at least {REQUIRED_RATIO:g}x generate with log-probs, and exact: {holds}")
    compared = {name: compare(model, name, max(3, arguments.rounds // 3)) for name in COMPARISONS}
    holds = holds and all(result["holds"] for result in compared.values())
    if arguments.json:
        result = {
            "tokens_per_second": {name: sampled / median for name, median in medians.items()},
            "seconds": seconds,
            "largest_logprob_error": errors,
            "ratios": ratios,
            "required_ratio": REQUIRED_RATIO,
            "engines": compared,
            "holds": holds,
            "episodes": EPISODES,
            "turns": TURNS,
            "tokens_per_turn": [PROMPT, REPLY],
            "model": SIZES | {"vocabulary": VOCAB},
            "machine": {
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(not holds)


if __name__ == "__main__":
    raise SystemExit(main())
