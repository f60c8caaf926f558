"""Packing: the trajectories of a micro-batch end to end in one row, each alone with itself, instead of padded rows.

Only what the model is given changes: losses see (b, T) as before. Whether a model may be packed is decided by its
attention and checked by running it: what stands beside a trajectory must not change one bit of its logits.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from freshper.learning.batching import MicroBatch
from freshper.learning.heads import trial, unwrapped

Packing = Literal["none", "mask", "varlen"]

_MASKED = ("sdpa", "eager")  # attention that takes an explicit 4-dimensional mask
_RECURRENT = ("linear_attention", "recurrent", "mamba", "conv", "chunked")  # parts of layer types that leak or cut


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """What a model is called with. ``positions`` (n,): places in the flattened ``input_ids`` that predict the sampled
    tokens, in the row-major order of the response mask."""

    input_ids: Tensor
    positions: Tensor
    arguments: dict[str, Any] = field(default_factory=dict)


def padded_inputs(batch: MicroBatch, *, mask: bool = True) -> ModelInputs:
    """One row per trajectory, padded on the right; without ``mask`` only for models in which no token sees later ones.

    Causal attention never shows the padding to a token before it, so the mask only costs: the fast kernels for
    causal attention take none.
    """
    arguments = {"attention_mask": batch.attention_mask} if mask else {}
    return ModelInputs(batch.tokens, batch.response_index - 1, arguments)


def packed_inputs(batch: MicroBatch, packing: Packing, attention: str, dtype: torch.dtype) -> ModelInputs:
    """All trajectories in one row (1, N) without padding, position ids restarting at 0 with each.

    "mask": an explicit block-diagonal causal mask (1, 1, N, N), boolean for sdpa, additive for eager attention.
    "varlen": the bounds of the sequences, as the variable-length kernels of flash attention take them
    (``cu_seq_lens_q``, ``cu_seq_lens_k`` (b + 1,) int32, ``max_length_q``, ``max_length_k``), and no mask.
    """
    lengths, width, device = batch.lengths, batch.tokens.shape[1], batch.tokens.device
    starts = np.concatenate([[0], np.cumsum(lengths)])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    column = np.arange(starts[-1]) - starts[owner]
    flat = torch.from_numpy(owner * width + column).to(device)
    shift = torch.from_numpy(np.arange(len(lengths)) * width - starts[:-1]).to(device)
    places = batch.response_index
    positions = places - shift[torch.div(places, width, rounding_mode="floor")] - 1
    arguments: dict[str, Any] = {"position_ids": torch.from_numpy(column).to(device)[None]}
    if packing == "varlen":
        bounds = torch.from_numpy(starts.astype(np.int32)).to(device)
        longest = int(lengths.max())
        arguments |= {
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    else:
        arguments["attention_mask"] = block_mask(lengths, attention, dtype, device)
    return ModelInputs(batch.tokens.view(-1)[flat][None], positions, arguments)


def block_mask(lengths: NDArray[np.int64], attention: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(1, 1, N, N): each token sees itself and the earlier tokens of its own sequence; N is the sum of the lengths."""
    owner = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device)
    seen = (owner[:, None] == owner[None]).tril_()[None, None]
    if attention == "sdpa":
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)


def packing_of(model: nn.Module) -> Packing:
    """How trajectories may share a row in this model: "none" wherever the result would not be exact.

    By the attention implementation first: explicit masks for sdpa and eager, sequence bounds for flash attention. A
    model with recurrent layers, or with sliding windows where the mask is explicit (it would replace the window), is
    not packed. Then by trial: the logits of a trajectory must be those that it has alone, within rounding, and must
    not change by one bit when the tokens beside it do.
    """
    causal = unwrapped(model)
    config = causal.config.get_text_config()
    attention = str(getattr(config, "_attn_implementation", None) or "eager")
    packing: Packing = "varlen" if attention.startswith("flash_attention") else "mask"
    if packing == "mask" and attention not in _MASKED:
        return "none"
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if any(part in kind for kind in kinds for part in _RECURRENT):
        return "none"
    if packing == "mask" and has_local_attention(config):
        return "none"
    if packing == "mask" and ("sliding_attention" in kinds or (window and "full_attention" not in kinds)):
        return "none"
    if "position_ids" not in inspect.signature(causal.forward).parameters:
        return "none"
    return packing if _is_exact(model, packing, attention) else "none"


def has_local_attention(config: Any) -> bool:
    """Whether some layers count columns back, whatever the mask and the positions say (GPT-Neo)."""
    return "local" in (getattr(config, "attention_layers", None) or ())


def needs_padding_mask(model: nn.Module) -> bool:
    """Whether tokens of a row change when the padding on their right is not masked. Found by trial."""
    tokens, mask = _three(model)
    with trial(model):
        masked = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        open_ = model(input_ids=tokens, use_cache=False).logits
        other = model(input_ids=torch.where(mask.bool(), tokens, tokens.roll(1, 0)), use_cache=False).logits
    real = mask.bool()
    if masked.shape != open_.shape or masked.shape[:2] != tokens.shape:
        return True
    return not (is_close(open_[real], masked[real]) and torch.equal(open_[real], other[real]))


def _is_exact(model: nn.Module, packing: Packing, attention: str) -> bool:
    tokens, mask = _three(model)
    lengths = mask.sum(1).cpu().numpy()
    dtype = next(model.parameters()).dtype
    empty = torch.zeros_like(tokens, dtype=torch.float32)

    def packed(ids: Tensor) -> list[Tensor]:
        index = torch.arange(1, 2, device=ids.device)
        batch = MicroBatch(np.arange(3), lengths, ids, mask, mask.bool(), empty, empty, empty[:, :1], index)
        inputs = packed_inputs(batch, packing, attention, dtype)
        logits: Tensor = model(input_ids=inputs.input_ids, use_cache=False, **inputs.arguments).logits[0]
        return list(torch.split(logits, lengths.tolist()))

    with trial(model):
        alone = model(input_ids=tokens[1:2, : lengths[1]], use_cache=False).logits[0]
        try:
            together = packed(tokens)[1]
            beside = packed(torch.cat([tokens[:1] + 1, tokens[1:2], tokens[2:] + 1]))[1]
        except (TypeError, ValueError, RuntimeError, IndexError):
            return False
    return is_close(together, alone) and torch.equal(together, beside)


def _three(model: Any) -> tuple[Tensor, Tensor]:
    """Three rows of 5, 8 and 6 tokens padded to 8, and their mask."""
    device = next(model.parameters()).device
    lengths = torch.tensor([[5], [8], [6]], device=device)
    mask = (torch.arange(8, device=device)[None] < lengths).long()
    size = min(97, unwrapped(model).config.get_text_config().vocab_size - 1)
    return torch.arange(24, device=device).view(3, 8) * 5 % size, mask


def is_close(one: Tensor, other: Tensor) -> bool:
    """Equal within the rounding of a deep model, relative to the largest logit."""
    tolerance = 100 * torch.finfo(one.dtype).eps * float(other.abs().max())
    return bool((one.float() - other.float()).abs().max() <= tolerance)
