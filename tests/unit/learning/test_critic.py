"""The critic: values of prefixes, the clipped regression, and one update at a time."""

import copy

import numpy as np
import pytest
import torch

from freshper.errors import ConfigError, TrajectoryError
from freshper.learning.critic import Critic, ValueHead, explained_variance, value_loss
from freshper.learning.gae import gae

WIDTH = 32  # of the small model's hidden states


def states_of(model):
    """From a micro-batch to the states that its sampled tokens were predicted from."""

    def states(batch):
        output = model.base_model(input_ids=batch.tokens, attention_mask=batch.attention_mask, use_cache=False)
        return output.last_hidden_state[:, :-1][batch.response_mask[:, 1:]]

    return states


def critic_of(model, *, own=False, **settings):
    """Reading the model's states; with ``own``, training the model itself."""
    whole = {"learning_rate": 1e-2, "total_updates": 1000, "max_grad_norm": 1e9} | settings
    critic = Critic(states_of(model), WIDTH, network=model if own else None, **whole)
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-0.5, 0.5, WIDTH))
        critic.head.bias.fill_(0.25)
    return critic


def columns_of(batch, seed=0):
    rng = np.random.default_rng(seed)
    return [np.where(t.response_mask, rng.normal(size=len(t)), 0) for t in batch]


def slow_values(model, critic, trajectory):
    """One prefix at a time: the value of a sampled token is read where the prefix before it ends."""
    values = np.zeros(len(trajectory))
    for place in np.flatnonzero(trajectory.response_mask):
        prefix = torch.tensor(trajectory.tokens[:place].astype(np.int64))[None]
        with torch.no_grad():
            hidden = model.base_model(input_ids=prefix, use_cache=False).last_hidden_state[0, -1]
            values[place] = float((hidden * critic.head.weight).sum() + critic.head.bias)
    return values


def test_values_are_those_of_the_prefixes(new_model, random_batch):
    model, batch = new_model(), random_batch(4, credited=False)
    found = [critic_of(model, token_budget=max(n, *map(len, batch))).values(batch) for n in (1, 10_000)]
    for trajectory, *values in zip(batch, *found, strict=True):
        want = slow_values(model, critic_of(model), trajectory)
        for got in values:
            np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_new_head_values_everything_at_nothing(new_model, random_batch):
    batch = random_batch(3)
    critic = Critic(states_of(new_model()), WIDTH, learning_rate=1e-2, total_updates=10)
    assert not any(values.any() for values in critic.values(batch))
    assert ValueHead(4)(torch.ones(2, 3, 4, dtype=torch.bfloat16)).dtype == torch.float32


def slow_value_loss(value, old, target, clip):
    plain = (value - target) ** 2
    if clip == 0:
        return 0.5 * plain, 1.0, False
    bounded = min(max(value, old - clip), old + clip)
    other = (bounded - target) ** 2
    moves = plain >= other  # the worse of the two; a bounded value has no slope
    return 0.5 * max(plain, other), float(moves), other > plain


@pytest.mark.parametrize("clip", [0.0, 0.1, 0.5, 3.0])
def test_the_value_loss_follows_the_definition(clip):
    rng = np.random.default_rng(0)
    old, target = rng.normal(size=300), rng.normal(size=300)
    value = old + rng.normal(scale=0.7, size=300)
    values = torch.tensor(value, requires_grad=True)
    losses, clipped = value_loss(values, torch.tensor(old), torch.tensor(target), clip=clip)
    [slopes] = torch.autograd.grad(losses.sum(), values)
    for k in range(300):
        want, moves, bound = slow_value_loss(value[k], old[k], target[k], clip)
        assert float(losses[k].detach()) == pytest.approx(want, rel=1e-12)
        assert bool(clipped[k]) == bound
        assert float(slopes[k]) == pytest.approx(moves * (value[k] - target[k]), rel=1e-10, abs=1e-12)
    assert clipped.any() == (0 < clip < 3)


def test_explained_variance_by_its_definition():
    mask = np.array([True, False, True, True, False])
    target, values = np.array([1.0, 50.0, 2.0, 6.0, -9.0]), np.array([1.5, 7.0, 2.0, 4.0, 7.0])
    wanted, missed = np.array([1.0, 2.0, 6.0]), np.array([-0.5, 0.0, 2.0])
    want = 1 - np.mean((missed - missed.mean()) ** 2) / np.mean((wanted - wanted.mean()) ** 2)
    assert explained_variance([values], [target], [mask]) == pytest.approx(want)
    assert explained_variance([target], [target], [mask]) == 1
    assert explained_variance([np.full(5, 3.0)], [target], [mask]) == pytest.approx(0)
    assert explained_variance([-values], [target], [mask]) < 0
    assert explained_variance([values], [np.ones(5)], [mask]) == 0


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("budget", [60, 10_000])
def test_an_update_has_the_gradient_of_the_weighted_mean(new_model, random_batch, own, budget):
    batch = random_batch(5)
    model = new_model()
    critic = critic_of(model, own=own, token_budget=max(budget, *map(len, batch)), value_clip=0.5)
    targets, old = columns_of(batch), columns_of(batch, 1)
    weights = np.linspace(0.2, 1.5, 5)
    values = [slow_values(model, critic, trajectory) for trajectory in batch]
    total, clipped, slope = 0.0, 0, 0.0
    for row, trajectory in enumerate(batch):
        for place in np.flatnonzero(trajectory.response_mask):
            parts = slow_value_loss(values[row][place], old[row][place], targets[row][place], 0.5)
            total += weights[row] * parts[0]
            slope += weights[row] * parts[1] * (values[row][place] - targets[row][place])
            clipped += parts[2]
    count = sum(t.response_length for t in batch)
    update = critic.update(batch, targets, old, weights)
    assert update.applied
    assert update.metrics["value_loss"] == pytest.approx(total / count, rel=1e-4)
    assert update.metrics["value_clip_fraction"] == pytest.approx(clipped / count)
    assert float(critic.head.bias.grad) == pytest.approx(slope / count, rel=1e-3)
    masks = [trajectory.response_mask for trajectory in batch]
    assert update.metrics["explained_variance"] == pytest.approx(explained_variance(values, targets, masks), abs=1e-4)
    assert update.metrics["value_mean"] == pytest.approx(sum(v.sum() for v in values) / count, abs=1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_only_a_network_of_its_own_is_moved(new_model, random_batch, own):
    model, batch = new_model(), random_batch(4)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    critic = critic_of(model, own=own)
    head = critic.head.weight.detach().clone()
    critic.update(batch, columns_of(batch), columns_of(batch))
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(before, after) == (not own)
    assert not torch.equal(head, critic.head.weight)
    if not own:
        assert all(parameter.grad is None for parameter in model.parameters())


def test_values_learn_what_is_still_to_come(new_model, random_batch):
    """With gamma 1 and lambda 1 the targets are returns-to-go: the critic of its own comes to explain them."""
    batch = random_batch(6, credited=False)
    critic = critic_of(new_model(), own=True, learning_rate=3e-3, value_clip=0.0)
    explained = []
    for _ in range(60):
        old = critic.values(batch)
        targets = gae(batch, old, gamma=1.0, gae_lambda=1.0).targets
        explained.append(critic.update(batch, targets, old).metrics["explained_variance"])
    assert explained[0] < 0.3
    assert explained[-1] > 0.9


def test_values_stop_at_the_bound_that_the_same_targets_allow(new_model, random_batch):
    batch = random_batch(4)
    critic = critic_of(new_model(), value_clip=0.2, learning_rate=2e-2)
    old = critic.values(batch)
    targets = [np.where(t.response_mask, 100.0, 0.0) for t in batch]
    fractions = [critic.update(batch, targets, old).metrics["value_clip_fraction"] for _ in range(25)]
    assert fractions[0] == 0
    assert fractions[-1] > 0.9
    moved = [np.abs(now - then).max() for now, then in zip(critic.values(batch), old, strict=True)]
    assert max(moved) < 5  # AdamW's momentum carries it a little beyond the bound, nowhere near 100


def test_an_update_that_is_not_finite_never_happened(new_model, random_batch):
    model, batch = new_model(), random_batch(3)
    broken = False
    critic = critic_of(model)
    states, critic._states = critic._states, lambda part: states(part) * (float("nan") if broken else 1.0)
    critic.update(batch, columns_of(batch), columns_of(batch))
    before = copy.deepcopy(critic.state_dict())
    broken = True
    update = critic.update(batch, columns_of(batch), columns_of(batch))
    assert not update.applied
    assert not np.isfinite(update.metrics["value_loss"])
    after = critic.state_dict()
    assert all(torch.equal(before["head"][name], after["head"][name]) for name in before["head"])
    assert before["optimization"]["scheduler"] == after["optimization"]["scheduler"]
    broken = False
    assert critic.update(batch, columns_of(batch), columns_of(batch)).applied


@pytest.mark.parametrize("own", [False, True])
def test_a_restored_critic_goes_on_bit_for_bit(new_model, random_batch, own):
    batch = random_batch(5)
    settings = {"schedule": "linear", "total_updates": 10, "own": own}
    critic, other = critic_of(new_model(), **settings), critic_of(new_model(seed=0 if not own else 1), **settings)
    for seed in range(3):
        critic.update(batch, columns_of(batch, seed), columns_of(batch))
    other.load_state_dict(copy.deepcopy(critic.state_dict()))
    for seed in range(3, 6):
        one, two = (c.update(batch, columns_of(batch, seed), columns_of(batch)) for c in (critic, other))
        assert one == two
    for mine, its in zip(critic.values(batch), other.values(batch), strict=True):
        np.testing.assert_array_equal(mine, its)


def test_what_does_not_fit_is_refused_and_changes_nothing(new_model, random_batch):
    batch = random_batch(3)
    critic = critic_of(new_model())
    before, good = critic.values(batch), columns_of(batch)
    short = [*good[:1], good[1][:-1], *good[2:]]
    infinite = [*good[:2], np.full(len(batch[2]), np.inf)]
    with pytest.raises(TrajectoryError, match=r"targets\[1\]: one finite number"):
        critic.update(batch, short, good)
    with pytest.raises(TrajectoryError, match=r"old_values\[2\]: one finite number"):
        critic.update(batch, good, infinite)
    for one, other in zip(before, critic.values(batch), strict=True):
        np.testing.assert_array_equal(one, other)
    for clip in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=f"value_clip {clip} must be finite"):
            critic_of(new_model(), value_clip=clip)
