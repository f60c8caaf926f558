"""AdamW with float32 copies: small steps add up in narrow weights, and the state brings them back."""

import copy

import pytest
import torch
from torch import nn

from freshper.errors import ConfigError
from freshper.learning.optimization import Optimization


def stepped(optimization, parameter, count, gradient=1.0):
    for _ in range(count):
        parameter.grad = torch.full_like(parameter, gradient)
        optimization.clip()
        optimization.apply()
        optimization.clear()


def of(parameter, **settings):
    return Optimization([parameter], **({"learning_rate": 1e-6, "total_updates": 10_000} | settings))


def test_steps_that_a_bfloat16_weight_would_lose_add_up():
    narrow, wide = (nn.Parameter(torch.full((4,), 0.02, dtype=kind)) for kind in (torch.bfloat16, torch.float32))
    start = narrow.detach().clone()
    wide.data.copy_(start)
    for parameter in (narrow, wide):
        stepped(of(parameter, max_grad_norm=1e9), parameter, 100)
    assert (wide.detach() - start.float()).abs().max() > 9e-5
    assert torch.equal(narrow.detach(), wide.detach().bfloat16())
    assert not torch.equal(narrow.detach(), start)


def test_float32_weights_have_no_copy():
    parameter = nn.Parameter(torch.ones(3))
    state = of(parameter).state_dict()
    assert state["exact"] == {}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_the_state_brings_back_what_the_weights_do_not_show(kind):
    one, other = (nn.Parameter(torch.full((4,), 0.02, dtype=kind)) for _ in range(2))
    first = of(one, schedule="linear", total_updates=100, warmup_updates=5)
    stepped(first, one, 7)
    second = of(other, schedule="linear", total_updates=100, warmup_updates=5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    other.data.copy_(one.detach())
    assert second.learning_rate == first.learning_rate
    for optimization, parameter in ((first, one), (second, other)):
        stepped(optimization, parameter, 60, gradient=0.5)
    assert torch.equal(one.detach(), other.detach())


def test_a_scaled_step_leaves_the_schedule_alone():
    moved = []
    for scale in (1.0, 0.25):
        parameter = nn.Parameter(torch.zeros(1))
        optimization = of(parameter, learning_rate=1e-3)
        parameter.grad = torch.ones(1)
        optimization.apply(scale)
        moved.append(float(parameter.detach()))
        assert optimization.learning_rate == 1e-3
    assert moved[1] == pytest.approx(moved[0] / 4)


def test_frozen_parameters_stay_and_nothing_to_train_is_refused():
    frozen, trained = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    optimization = Optimization([frozen, trained], learning_rate=0.1, total_updates=10)
    trained.grad = torch.ones(2)
    optimization.apply()
    assert torch.equal(frozen, torch.ones(2))
    assert (trained < 1).all()
    with pytest.raises(ConfigError, match="nothing to train"):
        of(frozen)
    with pytest.raises(ConfigError, match="max_grad_norm 0"):
        of(trained, max_grad_norm=0)
