"""The learner's state, its aggregations, what may refuse an update, and reference models that are handed in."""

import contextlib
import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from freshper.errors import ConfigError, UnknownNameError
from freshper.learning.learner import Learner
from freshper.learning.losses import Clip
from freshper.learning.objective import Objective, ess_fraction


def learner_of(model, **settings):
    return Learner(model, **({"learning_rate": 1e-2, "total_updates": 20, "schedule": "cosine"} | settings))


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def copied(state):
    return copy.deepcopy(state)


def test_a_learner_goes_on_bit_for_bit_from_the_state_of_another(new_model, random_batch):
    one = learner_of(new_model(), warmup_updates=3)
    for number in range(5):
        one.update(random_batch(4, seed=number))
    other = learner_of(new_model(seed=9), warmup_updates=3)
    other.load_state_dict(copied(one.state_dict()))
    assert other.version == one.version == 5
    assert other.learning_rate == one.learning_rate
    for number in range(5, 9):
        mine, its = (learner.update(random_batch(4, seed=number)) for learner in (one, other))
        assert mine.metrics == its.metrics
        assert torch.equal(weights_of(one.model), weights_of(other.model))
    assert other.learning_rate == one.learning_rate


def test_a_state_of_other_parameters_is_refused_and_changes_nothing(new_model, random_batch):
    learner = learner_of(new_model())
    before = weights_of(learner.model)
    state = copied(learner.state_dict())
    name = next(iter(state["model"]))
    lacking = copied(state)
    del lacking["model"][name]
    with pytest.raises(ConfigError, match="trained other parameters"):
        learner.load_state_dict(lacking)
    state["model"][name] = state["model"][name][:1]
    with pytest.raises(ConfigError, match="was saved with shape"):
        learner.load_state_dict(state)
    assert torch.equal(weights_of(learner.model), before)
    learner.update(random_batch(2))


def test_only_what_is_trained_is_in_the_state(new_model, random_batch):
    model = new_model()
    model.requires_grad_(False)
    last = next(reversed(list(model.model.layers[-1].parameters())))
    last.requires_grad_(True)
    learner = learner_of(model)
    frozen = [parameter.clone() for parameter in model.parameters() if parameter is not last]
    learner.update(random_batch(3))
    assert len(learner.state_dict()["model"]) == 1
    now = [parameter for parameter in model.parameters() if parameter is not last]
    assert all(torch.equal(old, new) for old, new in zip(frozen, now, strict=True))
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        learner_of(model)


def gradient(model, batch, objective, weights=None):
    """Of one update, before the optimizer makes something else of it."""
    kept = []

    def refuse(metrics, log_ratios):
        kept.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())
        return "only looking"

    learner = learner_of(model, objective=objective, max_grad_norm=1e9)
    update = learner.update(batch, weights, accept=refuse)
    assert not update.applied
    return kept[0], update


@pytest.mark.parametrize(
    ("aggregation", "scale"),
    [
        ("token", lambda lengths: np.full(len(lengths), 1 / lengths.sum())),
        ("sequence", lambda lengths: 1 / lengths / len(lengths)),
        ("fixed", lambda lengths: np.full(len(lengths), 1 / 50 / len(lengths))),
    ],
)
def test_a_batch_is_the_weighted_sum_of_its_trajectories(new_model, random_batch, aggregation, scale):
    """Each alone with a divisor of 1, so that only the definition of the aggregation is left."""
    batch, weights = random_batch(5), np.linspace(0.5, 1.5, 5)
    objective = Objective(aggregation=aggregation, fixed_length=50, entropy_bonus=0.0)
    got, update = gradient(new_model(), batch, objective, weights)
    lengths = np.array([trajectory.response_length for trajectory in batch])
    alone = [gradient(new_model(), [one], Objective(aggregation="fixed", fixed_length=1)) for one in batch]
    want = sum(weight * part * each for weight, part, (each, _) in zip(weights, scale(lengths), alone, strict=True))
    torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-4, atol=1e-7)
    losses = [one.metrics["loss"] for _, one in alone]
    assert update.metrics["loss"] == pytest.approx(float(np.sum(weights * scale(lengths) * losses)), rel=1e-5)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed"])
def test_kl_and_entropy_are_aggregated_as_the_loss_is_and_split_in_any_way(new_model, random_batch, aggregation):
    objective = Objective(aggregation=aggregation, fixed_length=30, kl=0.5, kl_estimator="k2", entropy_bonus=0.3)
    batch = random_batch(6)
    results = []
    for budget in (10_000, 40):
        model = new_model()
        reference = new_model(seed=4)
        learner = learner_of(model, objective=objective, token_budget=budget, reference=entering(reference))
        learner.update(batch)
        results.append((weights_of(model), learner.update(batch).metrics))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=2e-4)
    assert results[0][1]["kl"] == pytest.approx(results[1][1]["kl"], rel=1e-3)
    assert results[0][1]["kl"] > 0


def entering(model):
    return lambda: contextlib.nullcontext(model)


def test_a_reference_that_is_handed_in_scores_as_itself(new_model, random_batch):
    batch, other = random_batch(4), new_model(seed=5)
    learner = learner_of(new_model(), reference=entering(other))
    for got, want in zip(learner.score_reference(batch), learner_of(other).score(batch), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ConfigError, match="no reference model"):
        learner_of(new_model()).score_reference(batch)


def test_what_is_refused_moves_nothing_and_leaves_no_gradient(new_model, random_batch):
    learner = learner_of(new_model())
    before = weights_of(learner.model)
    update = learner.update(random_batch(3), accept=lambda metrics, log_ratios: "ill")
    assert (update.skipped, update.applied, learner.version) == ("ill", False, 0)
    assert torch.equal(weights_of(learner.model), before)
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    assert learner.update(random_batch(3), accept=lambda metrics, log_ratios: None).applied


def test_the_rate_of_one_update_follows_its_ess(new_model, random_batch):
    """AdamW's first step has the size of the rate, whatever the gradient."""
    moved = []
    for scaled in (False, True):
        model = new_model()
        learner = learner_of(model, schedule="constant", max_grad_norm=1e9)
        before, batch = weights_of(model), random_batch(6)
        update = learner.update(batch, scale_by_ess=scaled)
        moved.append((weights_of(model) - before).abs().max().item())
    ratios = np.exp(update.log_ratios - update.log_ratios.max())
    fraction = ratios.sum() ** 2 / (ratios**2).sum() / len(ratios)
    assert 1 / 6 <= fraction < 0.9
    assert moved[1] == pytest.approx(moved[0] * math.sqrt(fraction), rel=1e-3)
    assert update.metrics["learning_rate"] == pytest.approx(1e-2 * math.sqrt(fraction))
    assert learner.learning_rate == 1e-2  # of the next one


def test_the_ess_fraction_has_its_bounds():
    assert ess_fraction(torch.zeros(7)) == pytest.approx(1)
    assert ess_fraction(torch.tensor([800.0, 0.0, -800.0])) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"loss": "pop"}, UnknownNameError, "ppo"),
        ({"kl": -1.0}, ConfigError, "kl -1.0"),
        ({"entropy_bonus": math.nan}, ConfigError, "entropy_bonus nan"),
        ({"kl": 0.1, "kl_estimator": "k1"}, ConfigError, "only noise"),
    ],
)
def test_an_objective_that_means_nothing_is_refused(settings, error, message):
    with pytest.raises(error, match=message):
        Objective(**settings)


@pytest.mark.parametrize("loss", ["ppo", "truncated-is", "gspo", "cispo", "reinforce", "trajectory-is"])
def test_every_loss_learns_which_tokens_were_good(new_model, random_batch, loss):
    """On-policy, with advantage 1 on one trajectory and -1 on another: the first becomes likelier, the second not."""
    model = new_model()
    learner = learner_of(model, objective=Objective(loss=loss, clip=Clip(low=0.2, high=0.3)), schedule="constant")
    good, bad = random_batch(2)
    batch = [
        trajectory.with_columns(advantages=np.where(trajectory.response_mask, advantage, 0.0))
        for trajectory, advantage in ((good, 1.0), (bad, -1.0))
    ]
    batch = [replace(t, behavior_logprobs=s) for t, s in zip(batch, learner.score(batch), strict=True)]
    before = [float(score.sum()) for score in learner.score(batch)]
    assert learner.update(batch).applied
    after = [float(score.sum()) for score in learner.score(batch)]
    assert after[0] > before[0]
    assert after[1] < before[1]
