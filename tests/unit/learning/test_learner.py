"""One call is one optimizer update: the right gradient, whatever the batches, and the clock."""

from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch

from freshper.errors import ConfigError, TrajectoryError, UnknownNameError
from freshper.learning.advantages import reinforce_plus_plus
from freshper.learning.learner import Learner
from freshper.learning.losses import Clip
from freshper.learning.objective import Objective
from freshper.trajectory import SamplingParams

WIDE = 1e9  # a gradient norm that nothing reaches


def learner_of(model, **settings):
    """A learner; settings of its objective are told from its own."""
    clip = {new: settings.pop(old) for old, new in (("clip", "low"), ("dual_clip", "dual")) if old in settings}
    aims = {name: settings.pop(name) for name in ("kl", "entropy_bonus") if name in settings}
    objective = Objective(clip=Clip(**clip), **aims)
    own = {"learning_rate": 1e-3, "total_updates": 1000, "max_grad_norm": WIDE}
    return Learner(model, objective=objective, **(own | settings))


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def update_gradient(model, batch, sampling_weights=None, **settings):
    """The gradient of one update; it stays in place after the update."""
    learner_of(model, **settings).update(batch, sampling_weights)
    return gradient(model)


def alone(model, trajectory, temperature=1.0):
    """Log-probs of the tokens after the first, from a forward pass of one trajectory without padding."""
    tokens = torch.tensor(trajectory.tokens.astype(np.int64))
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits / temperature, -1), tokens[1:], torch.tensor(trajectory.response_mask[1:])


def scored_on_policy(model, batch):
    """The batch with the model's own log-probs as those of the sampler."""
    scores = learner_of(model).score(batch)
    return [replace(t, behavior_logprobs=score) for t, score in zip(batch, scores, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.8])
def test_scores_are_those_of_every_trajectory_alone(new_model, random_batch, temperature):
    model, batch = new_model(), random_batch(8, temperature=temperature)
    for budget in (40, 10_000):
        scores = learner_of(model, token_budget=budget).score(batch)
        for trajectory, score in zip(batch, scores, strict=True):
            with torch.inference_mode():
                logprobs, tokens, mask = alone(model, trajectory, temperature)
            want = torch.where(mask, logprobs.gather(-1, tokens[:, None])[:, 0], 0.0)
            np.testing.assert_allclose(score[1:], want.numpy(), atol=1e-5)
            assert score.shape == (len(trajectory),)
            assert score[0] == 0


def test_scoring_needs_no_advantages_and_changes_nothing(new_model, random_batch):
    model = new_model()
    before, learner = weights_of(model), learner_of(model)
    learner.score(random_batch(3, credited=False))
    assert torch.equal(before, weights_of(model))
    assert learner.version == 0


def test_on_policy_the_gradient_is_the_policy_gradient(new_model, random_batch):
    """-sum w A grad log pi / response tokens, with one forward pass per trajectory and no ratio at all."""
    model = new_model()
    batch = scored_on_policy(model, random_batch(8))
    sampling_weights = np.linspace(0.2, 1.5, 8)
    total, count = 0.0, sum(t.response_length for t in batch)
    for trajectory, weight in zip(batch, sampling_weights, strict=True):
        logprobs, tokens, mask = alone(model, trajectory)
        advantages = torch.tensor(trajectory.advantages[1:])
        total = total - weight * (logprobs.gather(-1, tokens[:, None])[:, 0] * advantages * mask).sum()
    model.zero_grad()
    (total / count).backward()
    want = gradient(model).clone()
    got = update_gradient(model, batch, sampling_weights)
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5


@pytest.mark.parametrize("budget", [40, 60, 100, 1000])
def test_the_gradient_does_not_depend_on_the_token_budget(new_model, random_batch, budget):
    batch, sampling_weights = random_batch(10), np.linspace(0.2, 1.5, 10)
    whole = update_gradient(new_model(), batch, sampling_weights, token_budget=10_000, kl=0.1, entropy_bonus=0.1)
    parts = update_gradient(new_model(), batch, sampling_weights, token_budget=budget, kl=0.1, entropy_bonus=0.1)
    assert float((whole - parts).abs().max()) < 1e-6 < float(whole.abs().max())


def test_the_metrics_do_not_depend_on_the_token_budget(new_model, random_batch):
    batch = random_batch(10)
    whole, parts = (learner_of(new_model(), token_budget=budget, kl=0.1).update(batch) for budget in (10_000, 40))
    assert whole.metrics == pytest.approx(parts.metrics, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(whole.log_ratios, parts.log_ratios, atol=1e-5)


def test_order_does_not_matter(new_model, random_batch):
    batch, sampling_weights = random_batch(9), np.linspace(0.2, 1.5, 9)
    order = np.random.default_rng(0).permutation(9)
    straight = learner_of(one := new_model(), token_budget=50).update(batch, sampling_weights)
    mixed = learner_of(two := new_model(), token_budget=50).update([batch[k] for k in order], sampling_weights[order])
    assert float((gradient(one) - gradient(two)).abs().max()) < 1e-6
    np.testing.assert_allclose(straight.log_ratios[order], mixed.log_ratios, atol=1e-5)


def test_the_loss_is_divided_by_tokens_and_never_by_weights(new_model, random_batch):
    batch = random_batch(6)
    once = update_gradient(new_model(), batch, np.full(6, 0.4))
    twice = update_gradient(new_model(), batch, np.full(6, 0.8))
    assert float((2 * once - twice).abs().max()) < 1e-6
    double = update_gradient(new_model(), batch * 2, np.full(12, 0.4))
    assert float((once - double).abs().max()) < 1e-6


def test_a_weight_counts_for_its_own_trajectory(new_model, random_batch):
    batch = random_batch(4)
    got = update_gradient(new_model(), batch, np.array([0.0, 1.0, 0.0, 0.0]))
    own = update_gradient(new_model(), [batch[1]]) * batch[1].response_length
    assert float((got - own / sum(t.response_length for t in batch)).abs().max()) < 1e-6


def test_gradients_are_scaled_down_to_the_norm(new_model, random_batch):
    model = new_model()
    update = learner_of(model, max_grad_norm=0.01).update(random_batch(4))
    assert float(gradient(model).norm()) == pytest.approx(0.01, rel=1e-3)
    assert update.metrics["grad_norm"] > 0.01


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_ratios_are_those_before_the_update(new_model, random_batch, temperature):
    batch = random_batch(5, temperature=temperature)
    learner = learner_of(new_model(), learning_rate=0.05, token_budget=60)
    before = learner.score(batch)
    update = learner.update(batch)
    want = [float((s.astype(np.float64) - t.behavior_logprobs).sum()) for s, t in zip(before, batch, strict=True)]
    np.testing.assert_allclose(update.log_ratios, want, atol=1e-4)
    after = learner.score(batch)
    assert max(np.abs(a - b).max() for a, b in zip(after, before, strict=True)) > 0.1


def test_replay_uses_the_stored_advantages(new_model, paid):
    """T1: of each group only one trajectory is drawn; normalized within the draw, all advantages would be 0."""
    rewards = [1.0, 0.0, 0.5, 0.1]
    collected = scored_on_policy(new_model(), [paid(reward, seed=k) for k, reward in enumerate(rewards)])
    for drawn in reinforce_plus_plus(collected):
        assert not reinforce_plus_plus([drawn])[0].advantages[drawn.turns[0].reply_start]
        stored = update_gradient(new_model(), [drawn])
        negated = update_gradient(new_model(), [drawn.with_columns(advantages=-drawn.advantages)])
        assert float(stored.abs().max()) > 1e-3
        assert float((stored + negated).abs().max()) < 1e-6


def test_the_version_counts_updates(new_model, random_batch):
    learner, versions = learner_of(new_model()), []
    for _ in range(3):
        versions.append(learner.version)
        assert learner.update(random_batch(2)).applied
    assert versions == [0, 1, 2]
    assert learner.version == 3


def test_an_update_raises_what_earned_and_lowers_what_cost(new_model, random_batch):
    model = new_model()
    batch = scored_on_policy(model, random_batch(4))
    credited = [
        t.with_columns(advantages=np.where(t.response_mask, sign, 0))
        for t, sign in zip(batch, (1, 1, -1, -1), strict=True)
    ]
    learner = learner_of(model)
    before = [score.sum() for score in learner.score(credited)]
    for _ in range(5):
        learner.update(credited)
    after = [score.sum() for score in learner.score(credited)]
    assert [now > then for now, then in zip(after, before, strict=True)] == [True, True, False, False]


def without_credit(batch):
    return [t.with_columns(advantages=np.zeros(len(t))) for t in batch]


def test_the_entropy_is_measured_and_rewarded(new_model, random_batch):
    model, batch = new_model(), without_credit(random_batch(5))
    total = 0.0
    for trajectory in batch:
        with torch.inference_mode():
            logprobs, _, mask = alone(model, trajectory)
        mass = logprobs.double().numpy()[mask.numpy()]
        total -= float((np.exp(mass) * mass).sum())
    learner = learner_of(model, entropy_bonus=0.5)
    updates = [learner.update(batch) for _ in range(6)]
    first = updates[0].metrics
    assert first["entropy"] == pytest.approx(total / sum(t.response_length for t in batch), rel=1e-5)
    assert first["loss"] == pytest.approx(-0.5 * first["entropy"], rel=1e-6)
    assert all(one.metrics["entropy"] < two.metrics["entropy"] for one, two in pairwise(updates))


def test_the_kl_is_measured_and_pulls_back(new_model, random_batch):
    """To the model as it was when the learner was made."""
    model, batch = new_model(), without_credit(random_batch(5))
    learner = learner_of(model, kl=0.5)
    reference = learner.score(batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    away = learner.score(batch)
    total = 0.0
    for now, then, trajectory in zip(away, reference, batch, strict=True):
        difference = (then.astype(np.float64) - now)[trajectory.response_mask]
        total += (np.exp(difference) - difference - 1).sum()
    updates = [learner.update(batch) for _ in range(6)]
    first = updates[0].metrics
    assert first["kl"] == pytest.approx(total / sum(t.response_length for t in batch), rel=1e-3)
    assert first["loss"] == pytest.approx(0.5 * first["kl"], rel=1e-6)
    assert all(one.metrics["kl"] > two.metrics["kl"] for one, two in pairwise(updates))


def test_without_kl_no_copy_is_kept(new_model, random_batch):
    model = new_model()
    with mock.patch("copy.deepcopy", side_effect=AssertionError("copied")):
        assert "kl" not in learner_of(model).update(random_batch(2)).metrics
        with pytest.raises(AssertionError, match="copied"):
            learner_of(model, kl=0.1)


def test_truncated_sampling_warns_once(new_model, random_batch):
    """T19: further warnings would be errors here. It points at the caller."""
    learner = learner_of(new_model())
    learner.update(random_batch(2))
    truncated = random_batch(2, sampling=SamplingParams(top_p=0.9))
    with pytest.warns(UserWarning, match="top-p or top-k") as caught:
        learner.update(truncated)
    assert [warning.filename for warning in caught] == [__file__]
    assert learner.update(random_batch(2, sampling=SamplingParams(top_k=5))).applied


REFUSED = {
    "no trajectories": (lambda batch: [], None, ConfigError, "at least one"),
    "mixed temperatures": (lambda batch: batch(2) + batch(1, temperature=0.5), None, ConfigError, r"\[0.5, 1.0\]"),
    "greedy": (lambda batch: batch(2, temperature=0.0), None, ConfigError, "above 0"),
    "no advantages": (lambda batch: batch(1) + batch(1, credited=False), None, TrajectoryError, "without advantages"),
    "too long": (lambda batch: batch(1) + batch(9, longest=20), None, ConfigError, "exceeds the token budget"),
    "too few weights": (lambda batch: batch(3), np.ones(2), ConfigError, "sampling_weights"),
    "weights per token": (lambda batch: batch(3), np.ones((3, 1)), ConfigError, "sampling_weights"),
    "a negative weight": (lambda batch: batch(3), np.array([1.0, -0.5, 1.0]), ConfigError, "weight -0.5 must be"),
    "a weight that is no number": (
        lambda batch: batch(3),
        np.array([1.0, np.nan, 1.0]),
        ConfigError,
        "weight nan must",
    ),
    "an infinite weight": (lambda batch: batch(3), np.array([1.0, np.inf, 1.0]), ConfigError, "weight inf must"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_learned_from_is_refused_and_changes_nothing(new_model, random_batch, case):
    make, sampling_weights, error, message = REFUSED[case]
    learner = learner_of(model := new_model(), token_budget=40)
    before = weights_of(model)
    with pytest.raises(error, match=message):
        learner.update(make(random_batch), sampling_weights)
    assert torch.equal(before, weights_of(model))
    assert learner.version == 0
    learner.update(random_batch(1, seed=2))
    fresh = learner_of(other := new_model(), token_budget=40)
    fresh.update(random_batch(1, seed=2))
    assert torch.equal(weights_of(model), weights_of(other))


BAD_SETTINGS = {
    "clip": [0.0, -0.1],
    "dual_clip": [1.0, 0.5, -3.0],
    "kl": [-0.1, float("nan")],
    "entropy_bonus": [-0.1],
    "max_grad_norm": [0.0],
    "total_updates": [0],
    "warmup_updates": [-1, 1000],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD_SETTINGS for value in BAD_SETTINGS[name]])
def test_settings_out_of_range_are_refused(new_model, name, value):
    with pytest.raises(ConfigError, match=f"{value}|warm-up"):
        learner_of(new_model(), **{name: value})


def test_an_unknown_schedule_is_refused(new_model):
    with pytest.raises(UnknownNameError, match=r"'cosin'.*Did you mean 'cosine'"):
        learner_of(new_model(), schedule="cosin")
