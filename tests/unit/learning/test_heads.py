"""A head in chunks: values and gradients against float64, whatever the chunk, the dtype and what is asked of it."""

import itertools

import pytest
import torch
from torch import nn

from freshper.learning.heads import Chunking, Head, head_logprobs, joined, plain_logprobs

VOCAB, WIDTH, COUNT = 30, 8, 11
CHUNKS = {"all kept": Chunking(10**9, 10**9), "made again": Chunking(4 * VOCAB, 0), "kept in parts": Chunking(1, 10**9)}


def problem(bias=False, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    module = nn.Linear(WIDTH, VOCAB, bias=bias)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(2 * torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(COUNT, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (COUNT,), generator=generator)
    factors = torch.randn(2, COUNT, generator=generator)
    factors[0, 3] = 0  # a clipped token has no gradient
    return module.to(dtype), hidden, targets, factors


def gradients(values, entropies, factors, module, hidden):
    total = (factors[0] * values).sum() + (0.0 if entropies is None else (factors[1] * entropies).sum())
    inputs = [hidden, *module.parameters()]
    return torch.autograd.grad(total, inputs, retain_graph=True)


@pytest.mark.parametrize("chunking", CHUNKS)
@pytest.mark.parametrize("shape", [(1.0, 0.0), (0.25, 0.0), (1.0, 3.0)])
@pytest.mark.parametrize("asked", list(itertools.product([False, True], [1.0, 0.6], [False, True])))
def test_values_and_gradients_are_those_of_the_definition(chunking, shape, asked):
    (scale, cap), (bias, temperature, entropy) = shape, asked
    module, hidden, targets, factors = problem(bias)
    head = Head(module, module, VOCAB, scale, cap)
    assert head.fusible
    got = head_logprobs(head, hidden, targets, temperature, CHUNKS[chunking], entropy=entropy)
    exact, states = nn.Linear(WIDTH, VOCAB, bias=bias).double(), hidden.detach().double().requires_grad_()
    exact.load_state_dict(module.state_dict())
    logits = exact(states) * scale
    logits = (cap * torch.tanh(logits / cap) if cap else logits) / temperature
    mass = torch.softmax(logits, -1)
    values = mass[torch.arange(COUNT), targets].log()
    entropies = -(mass * mass.log()).sum(-1)
    torch.testing.assert_close(got[0].double(), values, rtol=1e-6, atol=2e-6)
    if entropy:
        torch.testing.assert_close(got[1].double(), entropies, rtol=1e-6, atol=2e-6)
    else:
        assert got[1] is None
    want = gradients(values, entropies if entropy else None, factors.double(), exact, states)
    for one, other in zip(gradients(*got, factors, module, hidden), want, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6 * float(other.abs().max()) + 2e-6)
    again = gradients(*got, factors, module, hidden)  # a second backward pass finds the same
    for one, other in zip(again, want, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6 * float(other.abs().max()) + 2e-6)


@pytest.mark.parametrize("chunking", CHUNKS)
def test_bfloat16_loses_no_more_than_the_straightforward_way(chunking):
    """Sums over chunks are kept in float32; compared with float64 from the same rounded weights."""
    module, hidden, targets, factors = problem(True, torch.bfloat16)
    head = Head(module, module, VOCAB)
    exact, states = nn.Linear(WIDTH, VOCAB).double(), hidden.detach().double().requires_grad_()
    exact.load_state_dict(module.state_dict())
    want = gradients(*plain64(exact(states), targets), factors.double(), exact, states)
    plainly = plain_logprobs(module(hidden), targets, 1.0, entropy="tokens")
    ours = head_logprobs(head, hidden, targets, 1.0, CHUNKS[chunking], entropy=True)
    errors = [
        [float((one - other).norm() / other.norm()) for one, other in zip(found, want, strict=True)]
        for found in (gradients(*plainly, factors, module, hidden), gradients(*ours, factors, module, hidden))
    ]
    assert all(
        p.dtype == torch.bfloat16
        for p in gradients(
            *head_logprobs(head, hidden, targets, 1.0, CHUNKS[chunking], entropy=True), factors, module, hidden
        )
    )
    for plain, mine in zip(*errors, strict=True):
        assert mine < 1.5 * plain + 1e-3


def plain64(logits, targets):
    logs = torch.log_softmax(logits, -1)
    return logs[torch.arange(COUNT), targets], -(logs.exp() * logs).sum(-1)


def test_large_logits_keep_their_digits():
    module, hidden, targets, _ = problem()
    with torch.no_grad():
        module.weight.mul_(1e3)
    want, _ = plain64(module.double()(hidden.double()), targets)
    module.float()
    for chunking in CHUNKS.values():
        values, _ = head_logprobs(Head(module, module, VOCAB), hidden, targets, 1.0, chunking, entropy=False)
        assert values.isfinite().all()
        torch.testing.assert_close(values.double(), want, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("frozen", ["weight", "hidden", "all"])
def test_what_is_frozen_gets_no_gradient(frozen):
    module, hidden, targets, factors = problem()
    head = Head(module, module, VOCAB)
    values, _ = head_logprobs(head, hidden, targets, 1.0, CHUNKS["made again"], entropy=False)
    want = gradients(values, None, factors, module, hidden)
    module.weight.requires_grad_(frozen == "hidden")
    hidden.requires_grad_(frozen == "weight")
    values, _ = head_logprobs(head, hidden, targets, 1.0, CHUNKS["made again"], entropy=False)
    assert values.requires_grad == (frozen != "all")
    if frozen != "all":
        (factors[0] * values).sum().backward()
        found = (hidden.grad, module.weight.grad)
        for name, one, other in zip(("hidden", "weight"), found, want, strict=True):
            assert one is None if name == frozen else torch.equal(one, other)


def test_a_head_with_something_on_it_is_not_fused():
    module, hidden, targets, factors = problem()
    head = Head(module, module, VOCAB)
    want = gradients(
        *head_logprobs(head, hidden, targets, 0.7, CHUNKS["made again"], entropy=True), factors, module, hidden
    )
    calls = []
    hook = module.register_forward_hook(lambda *_: calls.append(1))
    assert not head.fusible
    got = gradients(
        *head_logprobs(head, hidden, targets, 0.7, CHUNKS["made again"], entropy=True), factors, module, hidden
    )
    assert len(calls) == 6  # three chunks, each made again
    hook.remove()
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert not head.fusible


def test_one_call_is_not_made_again():
    calls = []

    def part(value):
        calls.append(1)
        return value.exp(), None

    value = torch.ones(3, requires_grad=True)
    joined(part, [(value,)])[0].sum().backward()
    assert len(calls) == 1
    joined(part, [(value,), (value,)])[0].sum().backward()
    assert len(calls) == 5
