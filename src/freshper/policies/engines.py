"""Which engine samples from a model: chosen by what it is made of, and only after a trial has come out right."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from freshper.errors import PolicyError
from freshper.policies.core import Conversations, reply_all
from freshper.policies.growing import accepted_arguments, special_layers
from freshper.policies.reencode import ReencodingConversations
from freshper.policies.slots import SlotConversations
from freshper.trajectory import SamplingParams

logger = logging.getLogger("freshper.policies")

Build = Callable[..., Conversations]


@dataclass(frozen=True, slots=True)
class Engine:
    """``build`` makes conversations; ``reason`` says in a sentence why it is this kind."""

    build: Build
    reason: str


def conversations_for(
    model: nn.Module,
    end_tokens: Sequence[int],
    count: int,
    sampling: SamplingParams,
    *,
    seed: int,
    max_positions: int | None,
    slots: int,
) -> Conversations:
    """``count`` conversations of a transformers causal LM, at most ``slots`` of them at once.

    ``end_tokens`` end a reply; ``max_positions`` bounds the tokens of a conversation (None: no bound). The model is
    set to evaluation: dropout would sample from another policy. See :func:`engine_of` for the choice and its errors.
    """
    engine = engine_of(model)
    model.eval()
    return engine.build(model, end_tokens, count, sampling, seed=seed, max_positions=max_positions, slots=slots)


_engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


def engine_of(model: nn.Module) -> Engine:
    """The engine for ``model``, chosen once and logged: slots with a kept cache, or reading again in every turn.

    Two short conversations are played with a candidate, and its log-probs compared with one forward pass over each
    finished conversation; a candidate that is off is not used. Raises :class:`PolicyError` when all are.
    """
    known = _engines.get(model)
    if known is not None:
        return known
    was_training = model.training
    model.eval()
    try:
        engine = _engines[model] = _first_right(model)
    finally:
        model.train(was_training)
    logger.info("%s samples %s", type(model).__name__, engine.reason)
    return engine


def _first_right(model: nn.Module) -> Engine:
    problems: list[str] = []
    if special := special_layers(model.config):
        problems.append(f"layers of {special} cannot be appended to row by row")
    elif not accepted_arguments(model).position_ids:
        problems.append("it takes no position ids")
    elif not (wrong := trial(model, SlotConversations)):
        return Engine(SlotConversations, "with a cache that is kept across turns: all its layers are plain attention")
    else:
        problems.append(f"a kept cache gives {wrong}")
    for padded, how in ((True, "together"), (False, "by equal length")):
        build: Build = partial(ReencodingConversations, padded=padded)
        if not (wrong := trial(model, build)):
            again = f"by reading each conversation again in every turn, rows {how}: {'; '.join(problems)}"
            return Engine(build, again)
        problems.append(f"rows {how} give {wrong}")
    raise PolicyError(f"no engine samples from {type(model).__name__} with right log-probs: {'; '.join(problems)}")


def trial(model: Any, build: Build) -> str:
    """What is wrong with the log-probs of an engine, or an empty text: two rows of unequal length, two turns."""
    size = int(model.get_input_embeddings().weight.shape[0])
    turns = [[[5, 3, 9, 4, 7], [6, 8]], [[4], [9, 5, 3]]]
    prompts = [[[token % size for token in prompt] for prompt in turn] for turn in turns]
    return played(model, build, prompts, lambda _, tokens: {"input_ids": tokens})


def played(
    model: Any,
    build: Build,
    turns: Sequence[Sequence[Sequence[int]]],
    given: Callable[[int, Tensor], dict[str, Tensor]],
) -> str:
    """What is wrong with the log-probs of an engine that plays the prompts of two rows in some ``turns``, or "".

    ``given`` makes the arguments of the model's forward from a row's number and all its tokens (1, T).
    """
    conversations = build(model, (), 2, SamplingParams(), seed=0, max_positions=None, slots=2)
    lines: list[list[int]] = [[], []]
    said: list[list[tuple[int, float]]] = [[], []]  # (position, log-prob)
    try:
        for prompts in turns:
            replies = reply_all(conversations, [0, 1], prompts, [3, 2])
            for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
                lines[row] += prompt
                said[row] += [(len(lines[row]) + k, value) for k, value in enumerate(reply.logprobs)]
                lines[row] += reply.tokens
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:  # how a model answers arguments unlike its own
        return f"{type(error).__name__} ({error})"
    off = max(_error(model, lines[row], said[row], partial(given, row)) for row in (0, 1))
    allowed = 1e-3 if model.dtype == torch.float32 else 0.2  # nats; half precision rounds by some hundredths
    return "" if off <= allowed else f"log-probs that are off by {off:.2g} nats"


@torch.inference_mode()
def _error(
    model: Any, line: Sequence[int], said: Sequence[tuple[int, float]], given: Callable[[Tensor], dict[str, Tensor]]
) -> float:
    """Largest difference to one forward pass over the finished conversation, in nats."""
    device = model.get_input_embeddings().weight.device
    logits = model(use_cache=False, **given(torch.tensor([line], device=device))).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)
    differences = [abs(float(logprobs[place - 1, line[place]]) - value) for place, value in said]
    return max(difference if math.isfinite(difference) else math.inf for difference in differences)
