"""Log-probs of the sampled tokens under any transformers causal LM, without holding a vocabulary of logits per token.

The decoder runs to its hidden states, only positions that predict a sampled token are kept, and the head works through
them in chunks; the backward pass makes each chunk's logits again. Peak memory is that of one chunk, not of (b, T, V).
Where the way from a model's hidden states to its logits is not one that is known, the model's own forward is used, a
few rows at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from freshper.errors import ConfigError
from freshper.learning.batching import MicroBatch, micro_batches
from freshper.learning.heads import Chunking, Head, find_head, head_logprobs, unwrapped
from freshper.learning.packing import (
    ModelInputs,
    Packing,
    needs_padding_mask,
    packed_inputs,
    packing_of,
    padded_inputs,
)
from freshper.trajectory import Trajectory

SMALL_VOCABULARY = 4096  # up to here the whole (b, T, V) of logits is cheap, and the straightforward way is fastest
CHUNK_ELEMENTS = 2**24  # 64 MiB of float32 logits at a time: fewer tokens a chunk, and the gradient of W costs more
KEEP_ELEMENTS = 2**26  # up to 256 MiB of log-probs are kept for the backward pass rather than made again
PASS_COST = 128  # what one more pass costs a model with a large vocabulary, in tokens

Entropy = Literal["none", "sum", "tokens"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """What a forward pass says of the sampled tokens of a micro-batch.

    ``logprobs`` (b, T) float32, 0 off the mask, at the sampling temperature, in nats. ``entropy``: None, the sum over
    all sampled tokens (), or per token (b, T), in nats. ``hidden`` (n, d), where asked for: the states that predicted
    the n sampled tokens, in the row-major order of the response mask.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    hidden: Tensor | None = None


class TokenLogprobs:
    """Scores micro-batches with one model. Made once per model, it finds out what can be done with that model.

    Args:
        model: a transformers causal LM, also wrapped by peft. It is run a few times on a handful of tokens.
        chunk_elements: logits held at a time, tokens x vocabulary.
        keep_elements: up to so many, log-probs over the vocabulary are kept for the backward pass.
        packing: put the trajectories of a micro-batch in one row where the model allows it exactly; None does so only
            where it is faster: where the kernels skip what is masked (flash attention).
        compiled: run the model through ``torch.compile``.
        small_vocabulary: at most so many tokens in the vocabulary: one plain forward pass with all logits.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        chunk_elements: int = CHUNK_ELEMENTS,
        keep_elements: int = KEEP_ELEMENTS,
        packing: bool | None = None,
        compiled: bool = False,
        small_vocabulary: int = SMALL_VOCABULARY,
    ) -> None:
        if chunk_elements < 1 or keep_elements < 0:
            raise ConfigError(f"chunk_elements {chunk_elements} must be >= 1 and keep_elements {keep_elements} >= 0")
        config = unwrapped(model).config.get_text_config()
        self.model = model
        self.plain = int(config.vocab_size) <= small_vocabulary
        self.head: Head | None = None if self.plain else find_head(model)
        self.packing: Packing = "none" if packing is False or (self.plain and not packing) else packing_of(model)
        if (packing is None and self.packing != "varlen") or not (self.plain or self.head):
            self.packing = "none"
        self._vocabulary = int(config.vocab_size)
        self._attention = str(getattr(config, "_attn_implementation", None) or "eager")
        self._dtype = next(model.parameters()).dtype
        self._chunking = Chunking(chunk_elements, keep_elements)
        self._masked = self.plain or needs_padding_mask(model)
        self._keeps_some = "logits_to_keep" in inspect.signature(unwrapped(model).forward).parameters
        run: Any = model if self.head is None else self.head.body
        self._run: Any = torch.compile(run, dynamic=True) if compiled else run

    def split(
        self, trajectories: Sequence[Trajectory], weights: NDArray[np.float64], token_budget: int, device: torch.device
    ) -> Iterator[MicroBatch]:
        """:func:`freshper.learning.batching.micro_batches`, in the way that suits this model."""
        packed, cost = self.packing != "none", None if self.plain else PASS_COST
        return micro_batches(trajectories, weights, token_budget, device, pass_cost=cost, packed=packed)

    def __call__(
        self,
        batch: MicroBatch,
        temperature: float,
        *,
        entropy: Entropy = "none",
        entropy_gradient: bool = False,
        hidden: bool = False,
    ) -> TokenScores:
        """Log-probs of the sampled tokens of a micro-batch at ``temperature``.

        ``entropy`` says in what form the policy's entropy is given, ``entropy_gradient`` whether it can be
        differentiated. ``hidden`` asks for the hidden states; raises :class:`ConfigError` where they are out of reach.
        """
        states: Tensor | None = None
        differentiable = torch.is_grad_enabled() and entropy_gradient
        if hidden or self.head is not None:
            values, spread, states = self._through_head(batch, temperature, entropy, differentiable)
        elif self.plain:
            inputs = self._inputs(batch)
            logits = self._logits(inputs.input_ids, inputs.arguments, inputs.positions)
            values, spread = _plain(logits, _targets(batch), temperature, entropy, differentiable)
        else:
            values, spread = self._in_parts(batch, temperature, entropy, differentiable)
        if spread is not None and spread.dim():
            spread = spread.sum() if entropy == "sum" else _placed(spread, batch)
        return TokenScores(_placed(values, batch), spread, states if hidden else None)

    def _inputs(self, batch: MicroBatch) -> ModelInputs:
        if self.packing == "none" or len(batch.rows) == 1:
            return padded_inputs(batch, mask=self._masked)
        return packed_inputs(batch, self.packing, self._attention, self._dtype)

    def _logits(self, tokens: Tensor, arguments: dict[str, Any], places: Tensor) -> Tensor:
        """The model's own logits (n, V) at places of the flattened tokens."""
        logits: Tensor = self._run(input_ids=tokens, use_cache=False, **arguments).logits
        return logits.flatten(0, 1).index_select(0, places)

    def _through_head(
        self, batch: MicroBatch, temperature: float, entropy: Entropy, differentiable: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log-probs (n,), entropies (n,) and hidden states (n, d): the body first, then the head where it is needed."""
        head = self.head or find_head(self.model)
        if head is None:
            raise ConfigError(
                f"the hidden states of {type(self.model).__name__} are out of reach: its way from them to logits is "
                "unknown here, so no value head can read them; give the critic a model of its own"
            )
        inputs, targets = self._inputs(batch), _targets(batch)
        run = head.body if self.head is None else self._run
        everywhere = run(input_ids=inputs.input_ids, use_cache=False, **inputs.arguments).last_hidden_state
        states = everywhere.flatten(0, 1).index_select(0, inputs.positions)
        if self.plain:  # the head over all positions, as in the model's own forward: the same bits
            logits = head.finish(head.module(everywhere)).flatten(0, 1).index_select(0, inputs.positions)
            values, spread = _plain(logits, targets, temperature, entropy, differentiable)
            return values, spread, states
        asked = entropy != "none"
        values, spread = head_logprobs(head, states, targets, temperature, self._chunking, entropy=asked)
        return values, spread if spread is None or differentiable else spread.detach(), states

    def _in_parts(
        self, batch: MicroBatch, temperature: float, entropy: Entropy, differentiable: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs (n,) and entropies (n,) by the model's own forward, part by part, made again for the gradient.

        A part is as many rows as ``keep_elements`` logits hold; where one row is longer than that, the model runs over
        it several times and gives the logits of some tokens each time.
        """
        inputs, targets = self._inputs(batch), _targets(batch)
        rows, width = inputs.input_ids.shape
        together = self._chunking.keep // (width * self._vocabulary)
        narrow = together == 0 and self._keeps_some
        together = max(1, together)
        counts = batch.response_mask.sum(1).split(together)
        pieces = []

        def part(tokens: Tensor, arguments: dict[str, Any], places: Tensor, chosen: Tensor) -> Any:
            if narrow:
                arguments, places = (
                    arguments | {"logits_to_keep": places},
                    torch.arange(len(places), device=places.device),
                )
            logits = self._logits(tokens, arguments, places)
            return _plain(logits, chosen, temperature, "none" if entropy == "none" else "tokens", differentiable)

        sizes = [int(count.sum()) for count in counts]
        starts = range(0, rows, together)
        for start, places, chosen in zip(starts, inputs.positions.split(sizes), targets.split(sizes), strict=True):
            span = slice(start, start + together)
            arguments = {name: value[span] for name, value in inputs.arguments.items()}
            step = max(1, self._chunking.keep // self._vocabulary) if narrow else len(places)
            for some, wanted in zip((places - start * width).split(step), chosen.split(step), strict=True):
                run = (inputs.input_ids[span], arguments, some, wanted)
                one_of_many = torch.is_grad_enabled() and (rows > together or step < len(places))
                pieces.append(checkpoint(part, *run, use_reentrant=False) if one_of_many else part(*run))
        spread = None if entropy == "none" else torch.cat([spreads for _, spreads in pieces])
        return torch.cat([values for values, _ in pieces]), spread


def _targets(batch: MicroBatch) -> Tensor:
    """The sampled tokens (n,) in row-major order."""
    return batch.tokens.view(-1).index_select(0, batch.response_index)


def _placed(values: Tensor, batch: MicroBatch) -> Tensor:
    """(n,) values at their places in (b, T), 0 elsewhere."""
    flat = torch.zeros_like(batch.behavior_logprobs).view(-1)
    return flat.index_copy(0, batch.response_index, values).view(batch.tokens.shape)


def _plain(
    logits: Tensor, targets: Tensor, temperature: float, entropy: Entropy, differentiable: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (n,) of the targets from logits (n, V), and the entropy: one sum over everything, or (n,)."""
    everything = torch.log_softmax(logits.float() / temperature, -1)
    values = everything.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if entropy == "none":
        return values, None
    with torch.set_grad_enabled(differentiable):
        terms = everything.exp() * everything
        return values, -(terms.sum() if entropy == "sum" else terms.sum(-1))
