"""Log-probs of the sampled tokens under any transformers causal LM, without holding a vocabulary of logits per token.

The decoder runs to its hidden states, only positions that predict a sampled token are kept, and the head works through
them in chunks; the backward pass makes each chunk's logits again. Peak memory is that of one chunk, not of (b, T, V).
Where the way from a model's hidden states to its logits is not one that is known, the model's own forward is used, a
few rows at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from freshper.errors import ConfigError
from freshper.learning.batching import MicroBatch, micro_batches
from freshper.learning.heads import Chunking, Entropy, Head, find_head, head_logprobs, joined, plain_logprobs, unwrapped
from freshper.learning.packing import (
    ModelInputs,
    Packing,
    needs_padding_mask,
    packed_inputs,
    packing_of,
    padded_inputs,
)
from freshper.learning.sharing import PromptSharing, why_not_shared
from freshper.trajectory import Trajectory

SMALL_VOCABULARY = 4096  # up to here the whole (b, T, V) of logits is cheap, and the straightforward way is fastest
CHUNK_ELEMENTS = 2**24  # 64 MiB of float32 logits at a time: fewer tokens a chunk, and the gradient of W costs more
KEEP_ELEMENTS = 2**26  # up to 256 MiB of log-probs are kept for the backward pass rather than made again
CPU_PASS_COST = 64  # what one more pass costs beside its tokens, in tokens (measured: SmolLM2 on one core)
SMALL_PASS_COST = 256  # the same of a small model with a small vocabulary (measured: three layers of 64)
GPU_PASS_COST = 512  # there, kernel launches weigh more (an estimate: packing is the better way there)

Pictures = Callable[[Tensor, Sequence[Sequence[bytes]]], dict[str, Tensor]]
"""From tokens (b, T), padded on the right, and the encoded pictures of each row to what the model is given for them:
pixel values, position ids, ...; also other ``input_ids`` where a model must not read what it has sampled."""


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
        pass_cost: see :func:`freshper.learning.batching.micro_batches`; None is a measured value, but for a small
            vocabulary as few passes as the budget allows.
        pictures: what the model needs to see pictures; None for a model of text alone.
        share_prompts: run a prompt that several trajectories of a micro-batch begin with once. Raises
            :class:`ConfigError` where the model cannot be run that way.
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
        pass_cost: int | None = None,
        pictures: Pictures | None = None,
        share_prompts: bool = False,
    ) -> None:
        if chunk_elements < 1 or keep_elements < 0:
            raise ConfigError(
                f"chunk_elements {chunk_elements} must be >= 1 and keep_elements {keep_elements} >= 0: a head works "
                "through at least one token at a time"
            )
        self._pass_cost = pass_cost
        self._pictures = pictures
        config = unwrapped(model).config.get_text_config()
        self.model = model
        self.plain = int(config.vocab_size) <= small_vocabulary
        self.head: Head | None = None if self.plain else find_head(model)
        self._late_head = self.head
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
        self._sharing: PromptSharing | None = None
        if share_prompts:
            self._sharing = self._made_to_share(compiled=compiled)

    def _made_to_share(self, *, compiled: bool) -> PromptSharing:
        if self._pictures is not None:
            problem = "it reads pictures, whose positions a shared prompt does not have"
        elif compiled:
            problem = "it is compiled"
        elif not (self.plain or self.head):
            problem = "the way from its hidden states to its logits is unknown here"
        else:
            problem = why_not_shared(self.model, self._run)
        if problem:
            raise ConfigError(f"share_prompts: {type(unwrapped(self.model)).__name__} cannot share prompts: {problem}")
        self.packing = "none"
        return PromptSharing(self.model, self._run)

    @property
    def shares_prompts(self) -> bool:
        """Whether a prompt that several trajectories begin with is run once."""
        return self._sharing is not None

    def split(
        self, trajectories: Sequence[Trajectory], weights: NDArray[np.float64], token_budget: int, device: torch.device
    ) -> Iterator[MicroBatch]:
        """:func:`freshper.learning.batching.micro_batches`, in the way that suits this model; never packs pictures."""
        packed, cost = self.packing != "none" and not any(t.images for t in trajectories), self._pass_cost
        shared = self.shares_prompts
        if cost is None and (shared or not self.plain):
            on_cpu = SMALL_PASS_COST if self.plain else CPU_PASS_COST
            cost = on_cpu if device.type == "cpu" else GPU_PASS_COST
        return micro_batches(trajectories, weights, token_budget, device, pass_cost=cost, packed=packed, shared=shared)

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
        else:
            values, spread = self._through_model(batch, temperature, entropy, differentiable)
        if spread is not None and spread.dim():
            spread = spread.sum() if entropy == "sum" else _placed(spread, batch)
        return TokenScores(_placed(values, batch), spread, states if hidden else None)

    def states(self, batch: MicroBatch) -> Tensor:
        """Only the hidden states (n, d) that predicted the sampled tokens; raises as with ``hidden``."""
        everywhere, positions = self._states(batch)
        return everywhere.flatten(0, 1).index_select(0, positions)

    def _inputs(self, batch: MicroBatch) -> ModelInputs:
        if self._sharing is not None and batch.prompts is not None and batch.prompts.shared:
            return self._sharing.inputs(batch)
        if self.packing == "none" or len(batch.rows) == 1 or batch.pictured:
            return padded_inputs(batch, mask=self._masked)
        return packed_inputs(batch, self.packing, self._attention, self._dtype)

    def _shown(self, tokens: Tensor, images: Sequence[Sequence[bytes]]) -> dict[str, Tensor]:
        """What the model is given for the pictures of these rows."""
        if self._pictures is not None:
            return self._pictures(tokens, images if any(images) else [()] * len(tokens))
        if any(images):
            raise ConfigError(
                f"{sum(map(len, images))} pictures in a batch, and nothing that reads them: give the learner the "
                "picture_inputs of the policy; without them the model would see only their placeholders"
            )
        return {}

    def _states(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Hidden states everywhere (b, T, d), and the n places in (b T) where a sampled token was predicted."""
        head = self._known_head()
        run = self._run if self.head is not None else head.body
        inputs = self._inputs(batch)
        shown = self._shown(inputs.input_ids, batch.images)
        everywhere = run(**_merged(inputs.input_ids, inputs.arguments, shown)).last_hidden_state
        return everywhere, inputs.positions

    def _known_head(self) -> Head:
        if self._late_head is None:
            self._late_head = find_head(self.model)
        if self._late_head is None:
            raise ConfigError(
                f"the hidden states of {type(self.model).__name__} are out of reach: its way from them to logits is "
                "unknown here, so no value head can read them; give the critic a model of its own"
            )
        return self._late_head

    def _through_head(
        self, batch: MicroBatch, temperature: float, entropy: Entropy, differentiable: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log-probs (n,), entropies and hidden states (n, d): the body first, then the head where it is needed."""
        everywhere, positions = self._states(batch)
        states = everywhere.flatten(0, 1).index_select(0, positions)
        head, targets = self._known_head(), _targets(batch)
        if self.plain:  # the head over all positions, as in the model's own forward: the same bits
            logits = head.finish(head.module(everywhere)).flatten(0, 1).index_select(0, positions)
            values, spread = plain_logprobs(
                logits, targets, temperature, entropy=entropy, differentiable=differentiable
            )
            return values, spread, states
        asked = entropy != "none"
        values, spread = head_logprobs(head, states, targets, temperature, self._chunking, entropy=asked)
        return values, spread if spread is None or differentiable else spread.detach(), states

    def _through_model(
        self, batch: MicroBatch, temperature: float, entropy: Entropy, differentiable: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs (n,) and entropies by the model's own forward, in parts where its logits would be too large."""

        def part(
            tokens: Tensor,
            arguments: dict[str, Any],
            images: Sequence[Sequence[bytes]],
            places: Tensor,
            targets: Tensor,
        ) -> Any:
            shown = self._shown(tokens, images)
            logits = self._run(**_merged(tokens, arguments, shown)).logits
            kept = arguments.get("logits_to_keep", tokens[0])
            if logits.shape[:2] != (len(tokens), len(kept)):
                raise ConfigError(
                    f"the model gave logits {tuple(logits.shape)} for tokens {tuple(tokens.shape)}: its positions are "
                    "not those of the tokens (prompt tuning?), so no token could be scored"
                )
            logits = logits.flatten(0, 1).index_select(0, places)
            return plain_logprobs(logits, targets, temperature, entropy=entropy, differentiable=differentiable)

        inputs, targets = self._inputs(batch), _targets(batch)
        if self.plain or inputs.input_ids.numel() * self._vocabulary <= self._chunking.keep:
            values, spread = part(inputs.input_ids, inputs.arguments, batch.images, inputs.positions, targets)
            return values, spread
        entropy = "none" if entropy == "none" else "tokens"
        return joined(part, list(self._parts(batch, inputs, targets)))

    def _parts(self, batch: MicroBatch, inputs: ModelInputs, targets: Tensor) -> Iterator[tuple[Any, ...]]:
        """Arguments of model calls whose logits fit ``keep_elements``: some rows, or some sampled tokens of one row.

        Where one row's logits are too many, the model runs over the row for each part of its tokens.
        """
        rows, width = inputs.input_ids.shape
        together = self._chunking.keep // (width * self._vocabulary)
        few = max(1, self._chunking.keep // self._vocabulary) if together == 0 and self._keeps_some else width
        together = max(1, together)
        sizes = [int(count.sum()) for count in torch.split(batch.response_mask.sum(1), together)]
        spans = [slice(start, start + together) for start in range(0, rows, together)]
        for span, places, chosen in zip(
            spans, torch.split(inputs.positions, sizes), torch.split(targets, sizes), strict=True
        ):
            arguments = {name: value[span] for name, value in inputs.arguments.items()}
            tokens, columns = inputs.input_ids[span], places - span.start * width
            images = batch.images[span]
            if few >= width:
                yield tokens, arguments, images, columns, chosen
                continue
            for some, wanted in zip(torch.split(columns, few), torch.split(chosen, few), strict=True):
                counted = torch.arange(len(some), device=some.device)
                yield tokens, arguments | {"logits_to_keep": some}, images, counted, wanted


def _merged(tokens: Tensor, arguments: dict[str, Any], shown: dict[str, Tensor]) -> dict[str, Any]:
    """All that a model is called with: what the pictures need comes over the rest."""
    return {"input_ids": tokens, "use_cache": False, **arguments, **shown}


def _targets(batch: MicroBatch) -> Tensor:
    """The sampled tokens (n,) in row-major order."""
    return batch.tokens.view(-1).index_select(0, batch.response_index)


def _placed(values: Tensor, batch: MicroBatch) -> Tensor:
    """(n,) values at their places in (b, T), 0 elsewhere."""
    flat = torch.zeros_like(batch.behavior_logprobs).view(-1)
    return flat.index_copy(0, batch.response_index, values).view(batch.tokens.shape)
