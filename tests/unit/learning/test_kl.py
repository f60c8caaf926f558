"""KL estimates: values, and the expected gradients that decide where each may be used, by enumeration."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from freshper.errors import ConfigError, TrajectoryError, UnknownNameError
from freshper.learning.kl import KL_ESTIMATORS, check_kl, kl_penalties, token_kl

POLICY = np.array([0.5, 0.3, 0.15, 0.05])
OTHER = np.array([0.1, 0.2, 0.3, 0.4])
ONE = torch.tensor([[True]])

SLOW = {
    "k1": lambda policy, other: np.log(policy / other),
    "k2": lambda policy, other: 0.5 * np.log(policy / other) ** 2,
    "k3": lambda policy, other: other / policy - 1 - np.log(other / policy),
}


def estimate(name, policy, other, mask=ONE):
    return token_kl(
        name, *(torch.log(torch.as_tensor(p, dtype=torch.float64)).reshape(1, -1) for p in (policy, other)), mask
    )


def softmax_gradients(values):
    """E over the policy's tokens of values x grad log pi, for a softmax policy: by its logits."""
    scores = np.eye(len(POLICY)) - POLICY  # row a: grad of log pi(a)
    return (POLICY * values) @ scores


# Gradients by the logits of the two divergences, from d KL = sum d pi log(pi / ref) and d KL' = -sum ref d log pi.
REVERSE = POLICY * (np.log(POLICY / OTHER) - (POLICY * np.log(POLICY / OTHER)).sum())  # of KL(pi || ref)
FORWARD = POLICY - OTHER  # of KL(ref || pi)


def test_the_gradients_that_all_is_compared_with():
    logits = torch.log(torch.tensor(POLICY)).requires_grad_()
    policy, other = torch.softmax(logits, 0), torch.tensor(OTHER)
    for divergence, want in (
        ((policy * (policy / other).log()).sum(), REVERSE),
        ((other * (other / policy).log()).sum(), FORWARD),
    ):
        [got] = torch.autograd.grad(divergence, logits, retain_graph=True)
        np.testing.assert_allclose(got.numpy(), want, atol=1e-12)
    assert np.abs(REVERSE - FORWARD).max() > 0.05


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_estimates_follow_their_definition(name):
    rng = np.random.default_rng(0)
    policy, other = rng.uniform(0.01, 1, 50), rng.uniform(0.01, 1, 50)
    mask = torch.tensor(rng.random((1, 50)) < 0.7)
    got = estimate(name, policy, other, mask)[0].numpy()
    np.testing.assert_allclose(got, np.where(mask[0].numpy(), SLOW[name](policy, other), 0), rtol=1e-10, atol=1e-13)
    assert (got >= 0).all() or name == "k1"
    assert not estimate(name, policy, policy, mask).any()


@pytest.mark.parametrize(("name", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_which_estimates_have_the_kl_as_their_mean(name, unbiased):
    kl = (POLICY * np.log(POLICY / OTHER)).sum()
    values = estimate(name, POLICY, OTHER, torch.ones(1, 4, dtype=torch.bool))[0].numpy()
    assert (abs((POLICY * values).sum() - kl) < 1e-12) == unbiased


@pytest.mark.parametrize(("name", "want"), [("k1", np.zeros(4)), ("k2", REVERSE), ("k3", FORWARD)])
def test_the_expected_gradient_in_the_loss(name, want):
    """Of k1 nothing, of k2 that of KL(pi || ref), of k3 that of KL(ref || pi)."""
    logits = torch.log(torch.tensor(POLICY)).requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    values = token_kl(name, logprobs[None], torch.log(torch.tensor(OTHER))[None], torch.ones(1, 4, dtype=torch.bool))
    [got] = torch.autograd.grad((torch.tensor(POLICY) * values[0]).sum(), logits)  # tokens were sampled: no gradient
    np.testing.assert_allclose(got.numpy(), want, atol=1e-12)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_the_expected_gradient_in_the_reward(name):
    """Only k1 gives that of KL(pi || ref); k3 is off by the gradient of the other divergence."""
    values = estimate(name, POLICY, OTHER, torch.ones(1, 4, dtype=torch.bool))[0].numpy()
    got = softmax_gradients(values)
    assert np.allclose(got, REVERSE, atol=1e-12) == (name == "k1")
    if name == "k3":
        np.testing.assert_allclose(got, REVERSE - FORWARD, atol=1e-12)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_far_from_the_reference_all_stays_finite_and_junk_off_the_mask_has_no_say(name):
    logprobs = torch.tensor([[-1.0, -500.0, -1.0, torch.nan, -torch.inf]], requires_grad=True)
    reference = torch.tensor([[-900.0, -1.0, -1.0, 0.0, torch.inf]])
    values = token_kl(name, logprobs, reference, torch.tensor([[True, True, True, False, False]]))
    values.sum().backward()
    assert torch.isfinite(values).all()
    assert torch.isfinite(logprobs.grad).all()
    assert not values[0, 2:].any()
    assert not logprobs.grad[0, 3:].any()


def test_k1_in_the_loss_is_refused():
    with pytest.raises(ConfigError, match="expected gradient of zero"):
        check_kl("k1", "loss")
    for name, place in (("k1", "reward"), ("k2", "loss"), ("k3", "loss"), ("k2", "reward"), ("k3", "reward")):
        check_kl(name, place)


@pytest.mark.parametrize(
    ("arguments", "near"), [(("k4", "loss"), "KL estimator"), (("k3", "losses"), "Did you mean 'loss'")]
)
def test_unknown_names_are_refused(arguments, near):
    with pytest.raises(UnknownNameError, match=near):
        check_kl(*arguments)
    if arguments[0] == "k4":
        with pytest.raises(UnknownNameError, match="k1, k2, k3"):
            estimate("k4", POLICY, OTHER)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_penalties_compare_the_writer_with_the_reference(random_batch, name):
    batch = random_batch(4)
    rng = np.random.default_rng(1)
    scores = [np.where(t.response_mask, -rng.uniform(0.5, 6, len(t)), 0).astype(np.float32) for t in batch]
    for got, trajectory, score in zip(kl_penalties(batch, scores, name), batch, scores, strict=True):
        written, other = (np.exp(column.astype(np.float64)) for column in (trajectory.behavior_logprobs, score))
        np.testing.assert_allclose(
            got, np.where(trajectory.response_mask, SLOW[name](written, other), 0), rtol=1e-9, atol=1e-12
        )
        assert got.dtype == np.float64


def test_penalties_need_log_probs_of_both(random_batch):
    batch = random_batch(2)
    scores = [np.zeros(len(trajectory), np.float32) for trajectory in batch]
    with pytest.raises(TrajectoryError, match="trajectory 1 has logprobs_known=True and reference scores of shape"):
        kl_penalties(batch, [scores[0], scores[1][:-1]], "k1")
    unknown = replace(batch[1], behavior_logprobs=None, logprobs_known=False)
    with pytest.raises(TrajectoryError, match="trajectory 1 has logprobs_known=False"):
        kl_penalties([batch[0], unknown], scores, "k1")
