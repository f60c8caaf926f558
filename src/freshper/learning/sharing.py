"""Shared prompts: what several trajectories of a micro-batch begin with is run once, and serves them all.

The prompts run first, each once; their keys and values, of which autograd knows where they come from, are then given to
every row that begins with them, and the rows go on from there. Losses and gradients are those of padded rows within
rounding. Whether a model can be run that way is decided by its layers and checked by running it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from freshper.errors import ConfigError
from freshper.learning.batching import MicroBatch, Prompts
from freshper.learning.heads import trial, unwrapped
from freshper.learning.packing import ModelInputs, has_local_attention, is_close, padded_inputs


class PromptSharing:
    """Runs the prompts of micro-batches through ``run``, a model or the part of it that ends with hidden states."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        self._config = unwrapped(model).config
        accepted = inspect.signature(unwrapped(model).forward).parameters
        # transformers 5.24 renamed the argument; releases before know only the old name.
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        own = inspect.signature(run.forward if isinstance(run, nn.Module) else run).parameters
        self._few = {"logits_to_keep": 1} if "logits_to_keep" in own else {}
        self._run = run

    def inputs(self, batch: MicroBatch) -> ModelInputs:
        """Runs the prompts of a batch that was split with them.

        Returns what the model is called with next: the rests of the rows (b, S), padded on the right, and the cache.
        """
        prompts = batch.prompts
        assert prompts is not None
        device, width = batch.tokens.device, batch.tokens.shape[1]
        longest = int(prompts.lengths.max())
        rests = prompts.reach - prompts.lengths[prompts.of_row]
        of_row, rows, lengths = (
            torch.from_numpy(part).to(device) for part in (prompts.of_row, prompts.rows, prompts.lengths)
        )
        columns = torch.arange(longest, device=device)
        known = columns < lengths[:, None]
        cache = DynamicCache(config=self._config)
        first = {"input_ids": batch.tokens[rows, :longest], "attention_mask": known.long(), self._cache_name: cache}
        self._run(**first, **self._few, use_cache=True)
        if cache.get_seq_length() != longest:
            raise ConfigError(
                f"the model kept the keys and values of {cache.get_seq_length()} of {longest} prompt tokens: prompts "
                "cannot be shared when gradient checkpointing has been switched on"
            )
        cache.batch_select_indices(of_row)
        starts = lengths[of_row]
        places = starts[:, None] + torch.arange(int(rests.max()), device=device)
        inside = places.clamp(max=width - 1)
        real = torch.cat([known[of_row], places < torch.from_numpy(batch.lengths).to(device)[:, None]], 1)
        row = torch.div(batch.response_index, width, rounding_mode="floor")
        positions = row * places.shape[1] + batch.response_index - row * width - 1 - starts[row]
        arguments = {"attention_mask": real.long(), "position_ids": inside, self._cache_name: cache, "use_cache": True}
        return ModelInputs(batch.tokens.gather(1, inside), positions, arguments)


def why_not_shared(model: nn.Module, run: Callable[..., Any]) -> str:
    """Why prompts cannot be shared in this model, or an empty text. Found by its kind of layers, and by trial.

    The trial: what is said of a row must be what the model says of it alone, within rounding, whatever the tokens
    beside it. In half precision, where rounding hides much, it must also be ten times closer to that than what the
    model says of a row that does not see its prompt.
    """
    causal = unwrapped(model)
    if problem := _special(causal):
        return problem
    device = next(model.parameters()).device
    size = min(97, causal.config.get_text_config().vocab_size - 1)
    tokens = torch.arange(27, device=device).view(3, 9) * 5 % size
    tokens[1, :5] = tokens[0, :5]
    beside = tokens.clone()
    beside[0, 5:] = (tokens[0, 5:] + 1) % size
    beside[2] = (tokens[2] + 1) % size
    sharing = PromptSharing(model, run)
    try:
        with trial(model):
            want = _said(run, padded_inputs(_trial_batch(tokens)))
            shared = sharing.inputs(_trial_batch(tokens))
            alone = {"position_ids": shared.arguments["position_ids"]}
            blind = _said(run, ModelInputs(shared.input_ids, shared.positions, alone))
            got, other = _said(run, shared), _said(run, sharing.inputs(_trial_batch(beside)))
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, ConfigError) as error:
        return f"it fails when it is run that way ({type(error).__name__}: {error})"
    middle = slice(4, 8)  # of the row in the middle, whose tokens stayed
    off = max(_distance(got, want), _distance(other[middle], want[middle]))
    if not (is_close(got, want) and is_close(other[middle], want[middle]) and off <= 0.1 * _distance(blind, want)):
        return "it gives other log-probs when it is run that way, or its rounding is too coarse to tell"
    return ""


def _special(causal: Any) -> str:
    """What in a model cannot go on from a prompt that others share, as far as its config tells."""
    config = causal.config
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers} - {DynamicLayer.__name__}
    if kinds or has_local_attention(config):
        return f"its layers of {sorted(kinds) or 'local attention'} cannot go on from a prompt that others share"
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return f"its positions ({rope['rope_type']}) depend on how long a pass is"
    if "position_ids" not in inspect.signature(causal.forward).parameters:
        return "it takes no position ids"
    if getattr(config, "layerdrop", 0) > 0:
        return f"its layerdrop {config.layerdrop} leaves out other layers for the prompts than for what follows them"
    if any(getattr(module, "gradient_checkpointing", False) for module in causal.modules()):
        return "gradient checkpointing computes the keys and values of a prompt anew, for every row"
    return ""


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


def _trial_batch(tokens: Tensor) -> MicroBatch:
    """Three rows of 9 tokens; the first two begin with the same prompt of 4, the third with one of 3."""
    of_row, lengths = np.array([0, 0, 1]), np.array([4, 3])
    prompts = Prompts(of_row, np.array([0, 2]), lengths, np.full(3, 8))
    mask = torch.from_numpy(np.arange(9) > lengths[of_row, None]).to(tokens.device)
    empty = torch.zeros_like(tokens, dtype=torch.float32)
    index = mask.flatten().nonzero().squeeze(1)
    ones = torch.ones_like(tokens)
    return MicroBatch(
        np.arange(3), np.full(3, 9), tokens, ones, mask, empty, empty, empty[:, :1], index, prompts=prompts
    )


def _said(run: Callable[..., Any], inputs: ModelInputs) -> Tensor:
    """What is given for the sampled tokens, hidden states or logits (n, d)."""
    output: Tensor = run(input_ids=inputs.input_ids, **({"use_cache": False} | inputs.arguments))[0]
    return output.flatten(0, 1)[inputs.positions]
