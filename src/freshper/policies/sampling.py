"""From logits to a token and the log-prob it was really sampled with."""

from __future__ import annotations

import torch
from torch import Tensor

from freshper.errors import PolicyError
from freshper.trajectory import SamplingParams


def sample_tokens(logits: Tensor, sampling: SamplingParams, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (B,) int64 and their log-probs (B,) float32 under the distribution sampled from; logits (B, V).

    Temperature first, then top-k, then top-p, then renormalization, as the common engines do. Temperature 0 is
    greedy: all mass on one token, log-prob 0. Raises :class:`PolicyError` when logits are NaN or infinite.
    """
    logits = logits.float()
    if not logits.amax(-1).isfinite().all():
        raise PolicyError("the logits to sample from are not finite: the weights of the model are damaged")
    if sampling.temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits))
    logprobs = torch.log_softmax(_truncated(logits / sampling.temperature, sampling), -1)
    # One uniform number per row against the cumulative mass, in double precision: a token without mass adds
    # nothing to it and is never drawn. torch.multinomial draws V numbers per row, five times as slow.
    mass = logprobs.double().exp().cumsum(-1)
    uniform = torch.rand(len(mass), 1, dtype=torch.float64, generator=generator)
    tokens = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)


def _truncated(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """``logits`` (B, V) with -inf outside the top k and outside the smallest set that holds mass top_p."""
    if 0 < sampling.top_k < logits.shape[-1]:
        floor = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        mass = ordered.softmax(-1)
        outside = mass.cumsum(-1) - mass >= sampling.top_p  # the token that crosses top_p stays in
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return logits
