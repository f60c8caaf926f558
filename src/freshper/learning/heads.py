"""From hidden states to log-probs: how a model's head works, found out once, and a head that works in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

Entropy = Literal["none", "sum", "tokens"]

_PROBE_REACH = 200.0  # beyond every usual soft cap (30 to 50), so that a cap cannot be taken for nothing


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """logits = cap * tanh(scale * module(hidden) / cap), ``cap`` 0 for none; hidden is what ``body`` returns.

    Soft caps are those of Gemma 2 (arXiv 2408.00118), scales those of Cohere, Granite and Falcon-H1.
    """

    body: nn.Module
    module: nn.Module
    vocabulary: int
    scale: float = 1.0
    cap: float = 0.0

    def finish(self, raw: Tensor) -> Tensor:
        """From what the head's module returns to the model's logits, in the same dtype."""
        if self.scale != 1.0:
            raw = raw * self.scale
        return torch.tanh(raw / self.cap) * self.cap if self.cap else raw

    def finish_(self, raw: Tensor) -> Tensor:
        """The same in place."""
        if self.scale != 1.0:
            raw.mul_(self.scale)
        return raw.div_(self.cap).tanh_().mul_(self.cap) if self.cap else raw

    @property
    def fusible(self) -> bool:
        """Whether it is one plain matrix and nothing else hangs on it, so that its gradient is known here."""
        module = self.module
        hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        return type(module) is nn.Linear and not hooks and not torch.is_autocast_enabled(module.weight.device.type)


def unwrapped(model: Any) -> Any:
    """The causal LM inside a peft model, or the model itself. Adapters live in its layers, so they stay."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    """Run the model without dropout, gradients or any other trace; its mode comes back, module by module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def find_head(model: nn.Module) -> Head | None:
    """How the model gets from hidden states to logits, or None where it is no way that is known here.

    Never a guess: the head's module is made to return values of a wide range while the model's own forward runs, and
    what becomes of them is compared with every scale and soft cap that the config names; the hidden states that the
    module was given are compared with those that the body returns by itself.
    """
    causal = unwrapped(model)
    body = getattr(causal, "base_model", causal)
    module = causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None
    if body is causal or not isinstance(body, nn.Module) or not isinstance(module, nn.Module):
        return None
    tokens = (
        torch.arange(12, device=next(model.parameters()).device).view(2, 6) % causal.config.get_text_config().vocab_size
    )
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}
    given: list[Tensor] = []
    probes: list[Tensor] = []

    def watch(_: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        given.append(arguments[0])
        reach = torch.linspace(-_PROBE_REACH, _PROBE_REACH, output.numel(), device=output.device)
        probes.append(reach.view(output.shape).to(output.dtype))
        return probes[-1]

    with trial(model):
        hook = module.register_forward_hook(watch)
        try:
            logits = model(**inputs).logits
        finally:
            hook.remove()
        try:
            hidden = body(**inputs).last_hidden_state
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return None
    if len(probes) != 1 or given[0].shape != hidden.shape or logits.shape != probes[0].shape:
        return None
    if not _same(given[0], hidden):
        return None
    for scale, cap in _candidates(causal.config.get_text_config()):
        head = Head(body, module, logits.shape[-1], scale, cap)
        if _same(head.finish(probes[0]), logits):
            return head
    return None


def _candidates(config: Any) -> list[tuple[float, float]]:
    """(scale, cap) of every number in the config whose name speaks of logits or of the head."""
    names = [name for name in config.to_dict() if "logit" in name or "lm_head" in name]
    values = [getattr(config, name, None) for name in names]
    numbers = [float(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0]
    scales = [(scale, 0.0) for number in numbers for scale in (number, 1 / number)]
    return [(1.0, 0.0), *scales, *((1.0, number) for number in numbers)]


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal but for the rounding of a few operations in the coarser of the two dtypes."""
    rounding = 4 * max(torch.finfo(one.dtype).eps, torch.finfo(other.dtype).eps)
    return torch.allclose(one.float(), other.float(), rtol=rounding, atol=rounding)


@dataclass(frozen=True, slots=True)
class Chunking:
    """How a head's work is cut: logits held at a time, and log-probs kept for the backward pass, in elements."""

    elements: int
    keep: int

    def rows(self, vocabulary: int) -> int:
        """Tokens of one chunk."""
        return max(1, self.elements // vocabulary)


def head_logprobs(
    head: Head, hidden: Tensor, targets: Tensor, temperature: float, chunking: Chunking, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (n,) of ``targets`` (n,) given hidden states (n, d), and entropies (n,) where asked for; float32.

    The logits of a chunk are freed before the next one's are made; the backward pass makes them again.
    """
    if head.fusible:
        module: Any = head.module
        if not torch.is_grad_enabled():
            chunking = Chunking(chunking.elements, 0)
        given = (targets, head, temperature, chunking, entropy)
        values, spread = _LinearLogprobs.apply(hidden, module.weight, module.bias, *given)  # type: ignore[no-untyped-call]
        return values, spread if entropy else None

    def part(states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
        return plain_logprobs(
            head.finish(head.module(states)), chosen, temperature, entropy="tokens" if entropy else "none"
        )

    rows = chunking.rows(head.vocabulary)
    return joined(part, list(zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)))


def joined(
    part: Callable[..., tuple[Tensor, Tensor | None]], calls: Sequence[tuple[Any, ...]]
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies of all calls of ``part`` end to end; for the gradient, each is made again."""
    again = torch.is_grad_enabled() and len(calls) > 1
    pieces = [checkpoint(part, *call, use_reentrant=False) if again else part(*call) for call in calls]
    entropies = [entropy for _, entropy in pieces if entropy is not None]
    return torch.cat([values for values, _ in pieces]), torch.cat(entropies) if entropies else None


def plain_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy: Entropy, differentiable: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (n,) of the targets from logits (n, V), and the entropy: () as one sum over everything, or (n,)."""
    everything = torch.log_softmax(logits.float() / temperature, -1)
    values = everything.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if entropy == "none":
        return values, None
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        terms = everything.exp() * everything
        return values, -(terms.sum() if entropy == "sum" else terms.sum(-1))


class _LinearLogprobs(torch.autograd.Function):
    """log softmax(f(h W' + b) / temperature) at the targets, and its entropy; f are the scale and cap of a head.

    With z = f(y) / temperature, p = softmax(z) and H = -sum p log p:
    d log p_k / dz_j = [j = k] - p_j and dH / dz_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
        targets, head, temperature, chunking, entropy = given
        count, rows = len(hidden), chunking.rows(len(weight))
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        spreads, norms = torch.zeros_like(logprobs), torch.empty_like(logprobs)
        keep = any(ctx.needs_input_grad[:3]) and count * len(weight) <= chunking.keep
        # The operating system hands out memory of this size page by page, which costs more than an exp of it: each
        # chunk writes into the same.
        logs = _memory(count if keep else min(rows, count), weight)
        mass = _memory(min(rows, count), weight)
        for start in range(0, count, rows):
            span = slice(start, start + rows)
            size = len(hidden[span])
            shifted = _logits(head, hidden[span], weight, bias, logs[span] if keep else logs[:size]).div_(temperature)
            # The largest is subtracted first: log-probs then keep their digits however large the logits are.
            top = shifted.amax(-1, keepdim=True)
            part = torch.exp(shifted.sub_(top), out=mass[:size])
            total = part.sum(-1, keepdim=True)
            log_total = total.log()
            logprobs[span] = (shifted.gather(-1, targets[span, None]) - log_total).squeeze(-1)
            norms[span] = (top + log_total).squeeze(-1)
            if entropy:
                spreads[span] = (log_total - part.mul_(shifted).sum(-1, keepdim=True) / total).squeeze(-1)
            if keep:
                shifted.sub_(log_total)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, norms, spreads)
        ctx.kept, ctx.head, ctx.temperature, ctx.rows = logs if keep else None, head, temperature, rows
        return logprobs, spreads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norms, spreads = ctx.saved_tensors
        head, temperature, size = ctx.head, ctx.temperature, min(ctx.rows, len(hidden))
        by_logprob, by_entropy = (
            torch.zeros_like(norms) if grad is None else (grad * (head.scale / temperature)) for grad in grads
        )
        into_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Sums over chunks are kept in float32: bfloat16 would lose the small ones.
        into_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        into_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        memory, other = _memory(size, weight), _memory(0 if ctx.kept is not None else size, weight)
        for start in range(0, len(hidden), ctx.rows):
            span = slice(start, start + ctx.rows)
            states, wanted = hidden[span], by_logprob[span, None]
            if ctx.kept is not None:
                logs = ctx.kept[span]
            else:
                logs = _logits(head, states, weight, bias, other[: len(states)]).div_(temperature)
                logs.sub_(norms[span, None])
            slope = torch.exp(logs, out=memory[: len(states)])
            if grads[1] is None:
                slope.mul_(-wanted)
            else:
                spread = by_entropy[span, None]
                slope.mul_((logs + spreads[span, None]).mul_(-spread).sub_(wanted))
            slope.scatter_add_(-1, targets[span, None], wanted)
            if head.cap:
                slope.mul_(1 - ((logs + norms[span, None]) * (temperature / head.cap)).square_())
            slope = slope.to(weight.dtype)
            if into_hidden is not None:
                into_hidden[span] = slope @ weight
            if into_weight is not None:
                _add_product(into_weight, slope, states)
            if into_bias is not None:
                into_bias += slope.sum(0)
        return into_hidden, _like(into_weight, weight), _like(into_bias, bias), None, None, None, None, None


def _memory(rows: int, weight: Tensor) -> Tensor:
    return torch.empty(rows, len(weight), dtype=torch.float32, device=weight.device)


def _like(total: Tensor | None, parameter: Tensor) -> Tensor | None:
    return None if total is None else total.to(parameter.dtype)


def _add_product(total: Tensor, slope: Tensor, states: Tensor) -> None:
    """total (V, d) += slope' (V, n) states (n, d)."""
    if states.dtype == total.dtype:
        total.addmm_(slope.t(), states)
    else:
        total += slope.t() @ states


def _logits(head: Head, states: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Logits of a chunk (n, V) in float32, written to ``out``."""
    if weight.dtype == out.dtype and bias is None:
        return head.finish_(torch.mm(states, weight.t(), out=out))
    return out.copy_(head.finish_(nn.functional.linear(states, weight, bias)))
