"""The learning rate follows optimizer updates, and an update that is not finite never happened (cases T4, T21)."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from freshper.errors import DivergedError
from freshper.learning.learner import Learner

PEAK = 0.01

SCHEDULES = {
    "constant": lambda n: 1.0,
    "linear": lambda n: max(0.0, 1 - n / 10),
    "cosine": lambda n: (1 + math.cos(math.pi * min(n, 10) / 10)) / 2,
}
WARM = {
    "constant": (4, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    "linear": (4, [0.25, 0.5, 0.75, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0.0, 0.0]),
    "cosine": (2, [0.5, 1.0, *((1 + math.cos(math.pi * n / 8)) / 2 for n in range(9)), 0.0]),
}


def learner_of(model, **settings):
    return Learner(model, **({"learning_rate": PEAK, "total_updates": 10} | settings))


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def rates(learner, batch, count):
    """The rate of every update, as it is announced before and reported after."""
    seen = []
    for _ in range(count):
        announced = learner.learning_rate
        seen.append(learner.update(batch).metrics["learning_rate"])
        assert seen[-1] == announced
    return seen


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rate_after_every_update(new_model, random_batch, schedule):
    got = rates(learner_of(new_model(), schedule=schedule), random_batch(1), 25)
    np.testing.assert_allclose(got, [PEAK * SCHEDULES[schedule](n) for n in range(25)], atol=1e-15)
    assert all(later <= sooner for sooner, later in pairwise(got))


@pytest.mark.parametrize("schedule", WARM)
def test_the_rate_with_a_warm_up(new_model, random_batch, schedule):
    warmup, factors = WARM[schedule]
    learner = learner_of(new_model(), schedule=schedule, warmup_updates=warmup)
    np.testing.assert_allclose(rates(learner, random_batch(1), 12), PEAK * np.array(factors), atol=1e-15)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_after_the_end_nothing_moves(new_model, random_batch, schedule):
    learner = learner_of(model := new_model(), schedule=schedule, total_updates=3)
    moved = []
    for _ in range(6):
        before = weights_of(model)
        learner.update(random_batch(2))
        moved.append(not torch.equal(before, weights_of(model)))
    assert moved == [True, True, True, False, False, False]


HUGE = 1e30  # a finite weight whose gradient has no finite norm in single precision


def huge_weight(batch, model):
    return np.array([1.0, HUGE, 1.0])


def break_gradient(batch, model):
    """The loss is finite, one gradient is not."""
    parameter = next(model.parameters())
    handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
    model.broken = [handle]
    return np.ones(3)


def mend(model):
    for handle in getattr(model, "broken", []):
        handle.remove()


@pytest.mark.parametrize("fault", [huge_weight, break_gradient])
def test_an_update_that_is_not_finite_is_skipped(new_model, random_batch, fault):
    batch = random_batch(3)
    learner = learner_of(model := new_model(), schedule="linear")
    learner.update(batch)
    before, rate = weights_of(model), learner.learning_rate
    sampling_weights = fault(batch, model)
    update = learner.update(batch, sampling_weights)
    mend(model)
    assert not update.applied
    assert not (math.isfinite(update.metrics["loss"]) and math.isfinite(update.metrics["grad_norm"]))
    assert torch.equal(before, weights_of(model))
    assert (learner.version, learner.learning_rate) == (1, rate)
    assert np.isfinite(update.log_ratios).all()
    learner.update(batch)
    other = learner_of(untouched := new_model(), schedule="linear")
    other.update(batch)
    other.update(batch)
    assert torch.equal(weights_of(model), weights_of(untouched))


def test_a_skipped_first_update_leaves_the_schedule_where_it_is(new_model, random_batch):
    learner = learner_of(new_model(), schedule="cosine", warmup_updates=2)
    assert not learner.update(random_batch(1), np.array([HUGE])).applied
    np.testing.assert_allclose(rates(learner, random_batch(1), 2), [0.5 * PEAK, PEAK])


def test_too_many_in_a_row_stop_the_run(new_model, random_batch):
    learner = learner_of(model := new_model(), patience=3)
    bad, good = np.full(2, HUGE), np.ones(2)
    batch = random_batch(2)
    for _ in range(2):
        for _ in range(2):
            assert not learner.update(batch, bad).applied
        assert learner.update(batch, good).applied  # the count begins anew
    before = weights_of(model)
    learner.update(batch, bad)
    learner.update(batch, bad)
    with pytest.raises(DivergedError, match="3 updates in a row"):
        learner.update(batch, bad)
    assert torch.equal(before, weights_of(model))
    assert learner.version == 2
