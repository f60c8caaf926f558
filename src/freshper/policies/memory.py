"""How much memory training a model will take, from its config alone: before a weight is read.

With h the width, q and k the widths of all query and of all key heads, i the inner width, s the bytes of a
number, V the vocabulary, A the attention heads:

- activations keep ``8h + 3(q + k) + 4i`` numbers a token and layer (a decoder with a gated feed-forward
  network and fused attention; what autograd saves is 0.9 to 1.2 of it for Llama and Qwen, up to 1.4 for Gemma 2,
  down to 0.4 for a plain ReLU network), with eager attention A x ``longest`` attention weights on top, three
  times in half precision; gradient checkpointing keeps h a token and layer, and one layer whole;
- the vision tower of an image-text model keeps the same for every patch, as if all tokens were those of pictures:
  an upper bound (with eager attention, of pictures of 448 pixels where the model takes any);
- logits take ``V (s + 16)`` bytes a position: as they are, as float32, divided by the temperature, as log-probs,
  and their gradient;
- the cache takes ``2 k s`` bytes a token and layer, twice, as its buffers double when they are full; a draw
  takes ``V (s + 24)`` bytes a conversation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from freshper.policies.lora import Lora, adapted_layers, linear_layers
from freshper.policies.vision_readers import auto_class, reads_pictures

_GIB = 2**30
_BITS4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes per weight: 4 bits, an 8-bit scale per 64, a float32 one per 256 scales


def skeleton(config: Any, **arguments: Any) -> Any:
    """The model of a transformers config without its weights: every shape is there, on the meta device.

    ``arguments`` are those of ``from_config`` of transformers' classes.
    """
    with torch.device("meta"):
        return auto_class(config).from_config(config, **arguments)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of each part, and the number of parameters.

    ``weights`` adapters included; ``gradients``, ``optimizer`` (both moments of AdamW in float32, with a float32
    copy of narrower weights) and ``scratch`` (what one step of it needs beside them) of the trained parameters;
    ``reference`` a second copy, 0 with adapters;
    ``activations`` and ``logits`` of one forward and backward pass; ``cache`` (keys and values of all running
    conversations) and ``draws`` (the distributions that one token each is drawn from) while sampling.
    """

    parameters: int
    trainable: int
    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    logits: int
    scratch: int
    cache: int
    draws: int

    @property
    def kept(self) -> int:
        """What is there all the time: weights, moments and reference."""
        return self.weights + self.optimizer + self.reference

    @property
    def peak(self) -> int:
        """The larger of learning and sampling, which take turns; libraries and allocators add their own."""
        learning = self.gradients + max(self.activations + self.logits, self.scratch)
        return self.kept + max(learning, self.cache + self.draws)

    def table(self) -> str:
        """A few aligned lines for a terminal."""
        rows = [
            (f"weights ({_short(self.parameters)} parameters)", self.weights),
            (f"gradients ({_short(self.trainable)} trained)", self.gradients),
            ("AdamW moments", self.optimizer),
            ("reference model", self.reference),
            ("activations of one pass", self.activations),
            ("logits of one pass", self.logits),
            ("a step of AdamW", self.scratch),
            ("key-value cache while sampling", self.cache),
            ("distributions while sampling", self.draws),
            ("peak", self.peak),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {size / _GIB:9.3f} GiB" for name, size in rows)


def estimate(
    config: Any,
    *,
    dtype: torch.dtype = torch.float32,
    lora: Lora | None = None,
    attention: str = "auto",
    gradient_checkpointing: bool = False,
    reference: bool = False,
    token_budget: int = 16_384,
    logit_rows: int | None = None,
    conversations: int = 32,
    longest: int = 512,
) -> MemoryEstimate:
    """The memory of training the model of a transformers ``config``, every parameter counted exactly.

    The formulas stand at the head of this file.

    Args:
        config: of transformers; nothing is downloaded.
        dtype: of the weights and the computation. Adapters are float32.
        lora: adapters; none by default.
        attention: "eager" keeps all attention weights, any other kind none.
        gradient_checkpointing: as above.
        reference: whether a reference model is kept; with adapters it costs nothing.
        token_budget: rows x longest row of one forward pass.
        logit_rows: positions whose logits are there at once; all of the pass by default.
        conversations: conversations that run at once while sampling.
        longest: tokens of the longest one.
    """
    lora = lora or Lora()
    model = skeleton(config)
    text = config.get_text_config()
    size = dtype.itemsize
    own = sum(parameter.numel() for parameter in model.parameters())
    adapters = _adapter_parameters(model, lora)
    trainable = adapters or own
    weights = _base_bytes(model, own, size, lora) + 4 * adapters
    per_layer, kept_per_layer = _saved_numbers(text, attention, longest, size), int(text.hidden_size)
    layers = int(text.num_hidden_layers)
    numbers = kept_per_layer * layers + per_layer if gradient_checkpointing else per_layer * layers
    if reads_pictures(config):
        numbers += _seeing_numbers(config.vision_config, config, attention, size, gradient_checkpointing)
    vocabulary = int(text.vocab_size)
    return MemoryEstimate(
        parameters=own + adapters,
        trainable=trainable,
        weights=weights,
        gradients=trainable * (4 if adapters else size),
        optimizer=(8 if adapters or size == 4 else 12) * trainable,
        reference=weights if reference and not adapters else 0,
        activations=numbers * size * token_budget,
        logits=(token_budget if logit_rows is None else logit_rows) * vocabulary * (size + 16),
        scratch=4 * trainable,
        cache=4 * _key_width(text) * layers * size * conversations * longest,
        draws=conversations * vocabulary * (size + 24),
    )


def _saved_numbers(text: Any, attention: str, longest: int, size: int) -> int:
    """What one layer keeps of a token for the backward pass."""
    heads = int(text.num_attention_heads)
    queries, keys = heads * _head_size(text), _key_width(text)
    numbers = 8 * int(text.hidden_size) + 3 * (queries + keys) + 4 * _inner_width(text)
    if attention == "eager":
        numbers += heads * longest * (1 if size == 4 else 3)
    return numbers


def _seeing_numbers(vision: Any, config: Any, attention: str, size: int, gradient_checkpointing: bool) -> int:
    """What the vision tower keeps for a token of the conversation, if every token is one of a picture."""
    merged = getattr(vision, "spatial_merge_size", None) or config.scale_factor
    layers = int(getattr(vision, "depth", None) or vision.num_hidden_layers)
    heads = int(getattr(vision, "num_heads", None) or vision.num_attention_heads)
    width = int(getattr(vision, "embed_dim", None) or vision.hidden_size)
    inner = int(getattr(vision, "intermediate_size", None) or vision.mlp_ratio * width)
    per_layer = 8 * width + 3 * (2 * width) + 4 * inner
    if attention == "eager":
        patches = (int(getattr(vision, "image_size", 448)) // int(vision.patch_size)) ** 2
        per_layer += heads * patches * (1 if size == 4 else 3)
    kept = width * layers + per_layer if gradient_checkpointing else per_layer * layers
    return kept * int(merged) ** 2


def _head_size(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _key_width(text: Any) -> int:
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(heads) * _head_size(text)


def _inner_width(text: Any) -> int:
    for name in ("intermediate_size", "ffn_dim", "n_inner"):
        if width := getattr(text, name, None):
            return int(width)
    return 4 * int(text.hidden_size)


def _adapter_parameters(model: nn.Module, lora: Lora) -> int:
    """rank x (inputs + outputs) of every layer that gets one."""
    layers = adapted_layers(model, lora).values() if lora.rank else ()
    return sum(lora.rank * int(sum(layer.weight.shape)) for layer in layers)


def _base_bytes(model: nn.Module, own: int, size: int, lora: Lora) -> int:
    """Bytes of the weights without adapters. A 4-bit base keeps what is no linear layer in float32."""
    if lora.quantize == "none":
        return own * size
    packed: int = sum(layer.weight.numel() for layer in linear_layers(model).values())
    return int(packed * _BITS4) + 4 * (own - packed)


def _short(count: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return str(count)
