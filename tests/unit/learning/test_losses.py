"""Losses and their gradients against slow references in float64, written from the papers."""

import numpy as np
import pytest
import torch

from freshper.learning.losses import LOG_RATIO_LIMIT, entropy, kl_to_reference, log_ratios, ppo_clip

SHAPE = (5, 9)


def tensors(seed=0, spread=0.5):
    """Log-probs, behavior log-probs, advantages, mask and weights of a batch; junk off the mask."""
    rng = np.random.default_rng(seed)
    mask = rng.random(SHAPE) < 0.6
    behavior = -rng.exponential(2.0, SHAPE)
    return {
        "logprobs": behavior + rng.normal(scale=spread, size=SHAPE),
        "behavior_logprobs": np.where(mask, behavior, 0),
        "advantages": np.where(mask, rng.normal(size=SHAPE), 0),
        "mask": mask,
        "weights": rng.uniform(0.1, 2.0, (SHAPE[0], 1)),
    }


def as_torch(batch):
    return {
        name: torch.tensor(column, dtype=None if column.dtype == bool else torch.float64)
        for name, column in batch.items()
    }


def slow_ppo(batch, clip, dual_clip):
    """Loss, and its derivative by every log-prob, token by token."""
    loss, gradient = 0.0, np.zeros(SHAPE)
    for row, place in zip(*np.nonzero(batch["mask"]), strict=True):
        log_ratio = batch["logprobs"][row, place] - batch["behavior_logprobs"][row, place]
        ratio, advantage = np.exp(log_ratio), batch["advantages"][row, place]
        weight = batch["weights"][row, 0]
        if advantage >= 0:
            objective, moves = min(ratio, 1 + clip) * advantage, ratio < 1 + clip
        else:
            objective, moves = max(ratio, 1 - clip) * advantage, ratio > 1 - clip
            if dual_clip and ratio > dual_clip:
                objective, moves = dual_clip * advantage, False
        loss -= weight * objective
        gradient[row, place] = -weight * advantage * ratio if moves else 0.0
    return loss, gradient


@pytest.mark.parametrize("dual_clip", [0.0, 1.5, 3.0])
@pytest.mark.parametrize("clip", [0.1, 0.2, 0.8])
@pytest.mark.parametrize("spread", [0.1, 0.5, 3.0])
def test_ppo_clip_follows_the_definition(clip, dual_clip, spread):
    for seed in range(5):
        batch = tensors(seed, spread)
        inputs = as_torch(batch)
        inputs["logprobs"].requires_grad_()
        loss, _ = ppo_clip(**inputs, clip=clip, dual_clip=dual_clip)
        [gradient] = torch.autograd.grad(loss, inputs["logprobs"])
        want, slope = slow_ppo(batch, clip, dual_clip)
        assert float(loss.detach()) == pytest.approx(want, rel=1e-12)
        np.testing.assert_allclose(gradient.numpy(), slope, rtol=1e-12, atol=1e-14)


def test_on_policy_the_gradient_is_the_policy_gradient():
    """At ratio 1 nothing is clipped: the derivative by a token's log-prob is -w A."""
    batch = tensors()
    batch["logprobs"] = np.where(batch["mask"], batch["behavior_logprobs"], -7.0)
    inputs = as_torch(batch)
    inputs["logprobs"].requires_grad_()
    loss, sums = ppo_clip(**inputs, clip=0.2, dual_clip=3.0)
    [gradient] = torch.autograd.grad(loss, inputs["logprobs"])
    np.testing.assert_allclose(gradient.numpy(), -batch["weights"] * batch["advantages"], rtol=1e-12)
    assert float(sums["clip_fraction"]) == 0
    assert float(sums["ratio_max"]) == 1


def test_metrics_look_at_response_tokens_only():
    batch = tensors(spread=0.5)
    batch["logprobs"] = np.where(batch["mask"], batch["logprobs"], 50.0)
    ratios = np.exp(batch["logprobs"] - batch["behavior_logprobs"])[batch["mask"]]
    _, sums = ppo_clip(**as_torch(batch), clip=0.2, dual_clip=3.0)
    assert float(sums["clip_fraction"]) == (np.abs(ratios - 1) > 0.2).sum() > 0
    assert float(sums["abs_log_ratio"]) == pytest.approx(np.abs(np.log(ratios)).sum())
    assert float(sums["ratio_max"]) == pytest.approx(ratios.max())


def test_the_largest_ratio_can_be_below_one():
    batch = tensors(spread=0.0)
    batch["logprobs"] = batch["behavior_logprobs"] - 0.5
    _, sums = ppo_clip(**as_torch(batch), clip=0.2, dual_clip=3.0)
    assert float(sums["ratio_max"]) == pytest.approx(np.exp(-0.5))


def test_log_ratios_are_clamped_and_nothing_off_the_mask():
    logprobs = torch.tensor([[-1.0, -500.0, -1.0, -torch.inf, torch.nan]], requires_grad=True)
    behavior = torch.tensor([[-3.0, -1.0, -900.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True, False, False]])
    result = log_ratios(logprobs, behavior, mask)
    assert result.tolist() == [[2.0, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT, 0.0, 0.0]]
    result.exp().sum().backward()
    assert torch.isfinite(logprobs.grad).all()
    assert (logprobs.grad[0, 3:] == 0).all()


def slow_entropy(logits):
    total = 0.0
    for row in np.asarray(logits, np.float64):
        mass = np.exp(row - row.max())
        mass /= mass.sum()
        total -= sum(p * np.log(p) for p in mass if p > 0)
    return total


def test_entropy_follows_the_definition():
    logits = np.random.default_rng(0).normal(scale=3.0, size=(20, 11))
    assert float(entropy(torch.log_softmax(torch.tensor(logits), -1))) == pytest.approx(slow_entropy(logits), rel=1e-12)
    assert float(entropy(torch.log_softmax(torch.zeros(3, 8), -1))) == pytest.approx(3 * np.log(8), rel=1e-6)


def test_the_entropy_of_certainty_is_zero_with_a_finite_gradient():
    logits = torch.tensor([[0.0, -1e4, -1e4], [0.0, 0.0, -1e30]], requires_grad=True)
    value = entropy(torch.log_softmax(logits, -1))
    value.backward()
    assert float(value.detach()) == pytest.approx(np.log(2))
    assert torch.isfinite(logits.grad).all()


def test_the_gradient_of_the_entropy_leads_to_the_uniform_distribution():
    logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
    entropy(torch.log_softmax(logits, -1)).backward()
    assert logits.grad[0, 0] < 0 < logits.grad[0, 2]


def test_kl_follows_the_definition():
    batch = tensors(spread=1.0)
    mask, policy, other = batch["mask"], batch["logprobs"], batch["behavior_logprobs"]
    difference = (other - policy)[mask]
    want = (np.exp(difference) - difference - 1).sum()
    inputs = [torch.tensor(policy), torch.tensor(other), torch.tensor(mask)]
    assert float(kl_to_reference(*inputs)) == pytest.approx(want, rel=1e-12)
    assert float(kl_to_reference(inputs[0], inputs[0], inputs[2])) == 0


def test_the_expected_kl_estimate_is_the_kl():
    """Under samples of the policy itself, the mean of the estimate is KL(policy || reference)."""
    policy = np.array([0.5, 0.3, 0.15, 0.05])
    other = np.array([0.25, 0.25, 0.25, 0.25])
    estimates = [
        float(kl_to_reference(*(torch.tensor([[np.log(p)]]) for p in pair), torch.tensor([[True]])))
        for pair in zip(policy, other, strict=True)
    ]
    assert np.dot(policy, estimates) == pytest.approx((policy * np.log(policy / other)).sum(), rel=1e-12)


def test_the_gradient_of_the_kl_leads_to_the_reference():
    policy = torch.tensor([[-1.0, -3.0, -2.0]], requires_grad=True)
    kl_to_reference(policy, torch.tensor([[-2.0, -2.0, -2.0]]), torch.tensor([[True, True, True]])).backward()
    assert policy.grad[0, 0] > 0 > policy.grad[0, 1]
    assert policy.grad[0, 2] == 0
