"""From logits to a token and the log-prob it was really sampled with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from freshper.errors import PolicyError
from freshper.trajectory import SamplingParams

_LARGE = 4096  # tokens: a vocabulary above is searched in two stages
_BLOCK = 512  # tokens of the first stage that are summed to one number
_NUCLEUS = 1024  # tokens among which the nucleus of top-p is looked for before the whole vocabulary is sorted


def row_stream(seed: int, row: int) -> np.random.Generator:
    """The random numbers of one conversation: decided by ``seed`` and its row, whoever runs beside it."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed % 2**64, row])))


def sample_tokens(logits: Tensor, sampling: SamplingParams, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (B,) int64 and their log-probs (B,) float32 under the distribution sampled from; logits (B, V).

    One uniform number per row decides, drawn from ``generator``, which may live on another device than the logits;
    see :func:`draw_tokens`. Raises :class:`PolicyError` when logits are NaN or infinite.
    """
    uniform = None
    if sampling.temperature > 0:
        # torch.multinomial would draw V numbers per row, five times as slow.
        uniform = torch.rand(len(logits), 1, dtype=torch.float64, generator=generator, device=generator.device)
        uniform = uniform.to(logits.device)
    tokens, logprobs = draw_tokens(logits, sampling, uniform)
    check_finite(logprobs.isfinite().all().item())
    return tokens, logprobs


def check_finite(finite: object) -> None:
    """Raise :class:`PolicyError` unless all log-probs of :func:`draw_tokens` were ``finite``."""
    if not finite:
        raise PolicyError("the logits to sample from are not finite: the weights of the model are damaged")


def draw_tokens(logits: Tensor, sampling: SamplingParams, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens (B,) int64 and log-probs (B,) float32 from logits (B, V) and ``uniform`` (B, 1) float64 in [0, 1).

    Temperature first, then top-k, then top-p, then renormalization, as the common engines do. Temperature 0 is
    greedy: all mass on one token, log-prob 0, and ``uniform`` is not needed. A row whose logits are NaN, +inf or
    all -inf gets the log-prob NaN. On an accelerator nothing here waits for the device.
    """
    logits = logits.float()
    if sampling.temperature == 0 or uniform is None:
        best, tokens = logits.max(-1)
        return tokens, torch.where(best.isfinite(), 0.0, torch.nan)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1] or sampling.top_p < 1:
        return _from_candidates(*_candidates(logits, sampling), uniform)
    if logits.shape[-1] > _LARGE:
        return _in_two_stages(logits.softmax(-1), uniform)
    logprobs = torch.log_softmax(logits, -1)
    tokens = _search(logprobs.double().exp(), uniform)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)


def _search(mass: Tensor, uniform: Tensor) -> Tensor:
    """The place (B, 1) where the cumulative mass (B, N) in float64 passes ``uniform`` of the whole.

    Something without mass adds nothing to it and is never found.
    """
    cumulative = mass.cumsum(-1)
    places = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return places.clamp_(max=mass.shape[-1] - 1)  # beyond only when the mass is NaN


def _candidates(logits: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Masses (B, N) float64 of the tokens (B, N) that truncation leaves, best first; 0 on those it takes."""
    vocabulary = logits.shape[-1]
    if 0 < sampling.top_k < vocabulary:
        best, tokens = logits.topk(sampling.top_k, -1)
        mass = best.softmax(-1).double()
    else:
        # Sorting 150,000 logits takes ten times as long as finding the best thousand, which hold the nucleus of a
        # language model nearly always. To find out an accelerator would have to be waited for; it sorts fast.
        probabilities = logits.softmax(-1)
        several = vocabulary if logits.is_cuda else min(_NUCLEUS, vocabulary)
        best, tokens = probabilities.topk(several, -1)
        mass = best.double()
        if several < vocabulary and bool((mass.sum(-1) < sampling.top_p).any()):
            best, tokens = probabilities.sort(-1, descending=True)
            mass = best.double()
    if sampling.top_p < 1:
        before = mass.cumsum(-1) - mass
        mass = mass.masked_fill(before >= sampling.top_p, 0)  # the token that crosses top_p stays in
    return mass, tokens


def _from_candidates(mass: Tensor, tokens: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    places = _search(mass, uniform)
    logprobs = (mass.gather(-1, places) / mass.sum(-1, keepdim=True)).log()
    return tokens.gather(-1, places).squeeze(-1), logprobs.float().squeeze(-1)


def _in_two_stages(probabilities: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A block of tokens by its mass, then a token of the block: float64 only for the block."""
    rows, vocabulary = probabilities.shape
    whole = vocabulary - vocabulary % _BLOCK
    blocks = probabilities[:, :whole].view(rows, -1, _BLOCK).sum(-1).double()
    if whole < vocabulary:
        blocks = torch.cat([blocks, probabilities[:, whole:].sum(-1, keepdim=True).double()], -1)
    block = _search(blocks, uniform)
    # What of the uniform number is left inside the block is uniform again.
    cumulative = blocks.cumsum(-1)
    mass = blocks.gather(-1, block)
    inside = (uniform * cumulative[:, -1:] - (cumulative.gather(-1, block) - mass)) / mass
    inside = inside.clamp(0, 1 - 2**-53)
    places = block * _BLOCK + torch.arange(_BLOCK, device=block.device)
    exists = places < vocabulary
    masses = probabilities.gather(-1, places.clamp(max=vocabulary - 1)).double().masked_fill(~exists, 0)
    place = _search(masses, inside)
    tokens = (block * _BLOCK + place).clamp(max=vocabulary - 1)
    # Divided by the sum of the blocks: softmax adds 150,000 numbers in single precision, and is off by 1e-5.
    logprobs = (probabilities.gather(-1, tokens) / cumulative[:, -1:]).log()
    return tokens.squeeze(-1), logprobs.float().squeeze(-1)
