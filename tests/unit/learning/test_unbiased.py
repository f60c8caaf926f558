"""Both corrections together are unbiased: every buffer and every draw of a small world, enumerated.

A table policy plays two steps; the first may end the episode. A buffer holds one trajectory of each of three older
policies. The estimator: a draw by priority and freshness, the sampling weight toward uniform (beta 1, not normalized),
the importance ratio of the whole trajectory without a clip, a fixed baseline, sums of tokens over a fixed divisor. Its
expectation over all buffers and draws is the gradient of the present policy's expected return.
"""

import itertools

import numpy as np
import pytest
import torch

from freshper import Exponential, ReplayBuffer
from freshper.learning.aggregation import row_scales
from freshper.learning.losses import LOSSES, Clip, LossInputs
from freshper.trajectory import StopReason, Trajectory, Turn

ENDINGS = [(1,), (0, 0), (0, 1)]  # actions of all episodes that there are
RETURNS = {(1,): 1.0, (0, 0): -0.5, (0, 1): 4.0}
BASELINE = 0.7
VERSIONS = (0, 2, 5)  # of the policies that wrote the three stored trajectories
NOW = 6
SEEN = 9  # the token of every observation; actions are their own tokens


def table(seed):
    """Logits (2, 2): of the first step, and of the second after a 0."""
    return torch.tensor(np.random.default_rng(seed).normal(size=(2, 2)))


def logprobs_of(logits, actions):
    """log pi of every action, (n,)."""
    return torch.stack([torch.log_softmax(logits[step], 0)[action] for step, action in enumerate(actions)])


def chance(logits, actions):
    return logprobs_of(logits, actions).sum().exp()


def record(actions, version, logits):
    """The trajectory: an observation and a reply of one token per step, the reward at the end, A = R - b stored."""
    mask = np.array([False, True] * len(actions))
    logprobs = np.zeros(len(mask))
    logprobs[mask] = logprobs_of(logits, actions).numpy()
    last = len(actions) - 1
    return Trajectory(
        tokens=np.array([token for action in actions for token in (SEEN, action)]),
        response_mask=mask,
        behavior_logprobs=logprobs,
        turns=tuple(Turn(2 * k, 2 * k + 1, 2 * k + 2, RETURNS[actions] if k == last else 0.0) for k in range(last + 1)),
        stop_reason=StopReason.TERMINATED,
        success=False,
        policy_version=version,
        task="table",
        group="table/0",
        seed=0,
        advantages=np.where(mask, RETURNS[actions] - BASELINE, 0.0),
    )


def truth(present):
    """Minus the gradient of the expected return."""
    logits = present.clone().requires_grad_()
    expected = sum(chance(logits, actions) * reward for actions, reward in RETURNS.items())
    return -torch.autograd.grad(expected, logits)[0]


def update_gradient(trajectory, weight, present, name, aggregation):
    """Of the loss of one draw."""
    logits = present.clone().requires_grad_()
    actions = tuple(trajectory.tokens[trajectory.response_mask].tolist())
    mask = torch.tensor(trajectory.response_mask)[None]
    scored = torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, logprobs_of(logits, actions))
    columns = (torch.tensor(c.astype(np.float64))[None] for c in (trajectory.behavior_logprobs, trajectory.advantages))
    scales, divisor = row_scales(aggregation, [len(actions)], 1)
    loss = LOSSES[name](LossInputs(scored, *columns, mask), Clip(truncation=1e6)).total(torch.tensor(weight * scales))
    return torch.autograd.grad(loss / divisor, logits)[0]


def draws(trajectories, correction):
    """(chance, sampling weight, trajectory) of every draw there is, as the buffer itself has them."""
    buffer = ReplayBuffer(3, priority="reward", freshness=Exponential(tau=2.0), alpha=0.6, eps=0.1, seed=0)
    buffer.add(trajectories, policy_version=NOW)
    batch = buffer.sample(400, policy_version=NOW, **correction)
    weights = dict(zip(batch.keys.tolist(), batch.sampling_weights.tolist(), strict=True))
    drawn = dict(zip(batch.keys.tolist(), batch.trajectories, strict=True))
    assert len(weights) == 3, "an item was never drawn: its weight is unknown"
    chances = zip(buffer.keys().tolist(), buffer.probabilities().tolist(), strict=True)
    return [(probability, weights[key], drawn[key]) for key, probability in chances]


FULL = {"beta": 1.0, "toward": "uniform", "normalization": "none"}


def expectation(seed, name="trajectory-is", aggregation="fixed", **correction):
    """Over everything that three older policies may have written, and every draw from it."""
    present = table(seed)
    writers = [table(seed + 100 + version) for version in VERSIONS]
    total = torch.zeros(2, 2, dtype=torch.float64)
    for written in itertools.product(ENDINGS, repeat=len(VERSIONS)):
        parts = list(zip(written, VERSIONS, writers, strict=True))
        likelihood = np.prod([float(chance(logits, actions)) for actions, _, logits in parts])
        for probability, weight, trajectory in draws([record(*part) for part in parts], FULL | correction):
            total += likelihood * probability * update_gradient(trajectory, weight, present, name, aggregation)
    return total


def distance(got, seed):
    want = truth(table(seed))
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("toward", ["uniform", "freshness"])
@pytest.mark.parametrize("seed", range(3))
def test_both_corrections_together_are_unbiased(seed, toward):
    """Up to the float32 of stored log-probs. Toward freshness as well: an age says nothing of what was sampled."""
    assert distance(expectation(seed, toward=toward), seed) < 1e-6


LESS = {
    "no sampling weight": {"beta": 0.0},
    "half of it": {"beta": 0.5},
    "half of it, toward freshness": {"beta": 0.5, "toward": "freshness"},
    "weights normalized": {"normalization": "batch_max"},
    "no ratio": {"name": "reinforce"},
    "ratios of single tokens": {"name": "truncated-is"},
    "clipped ratios": {"name": "ppo"},
    "the ratio of the mean token": {"name": "gspo"},
    "divided by sampled tokens": {"aggregation": "token"},
    "the mean of each sequence": {"aggregation": "sequence"},
}


@pytest.mark.parametrize("case", LESS)
def test_less_than_both_is_biased(case):
    """Whatever is left out of the estimator shows: the test above could fail."""
    assert distance(expectation(0, **LESS[case]), 0) > 1e-2


@pytest.mark.parametrize("seed", range(2))
def test_freshness_and_priority_cancel_from_the_expectation(seed):
    """Toward uniform at beta 1 the expected gradient is that of uniform replay, for any loss."""
    present = table(seed)
    writers = [table(seed + 100 + version) for version in VERSIONS]
    stored = [record(*part) for part in zip(ENDINGS, VERSIONS, writers, strict=True)]
    for name in LOSSES:
        weighted = sum(p * update_gradient(t, w, present, name, "fixed") for p, w, t in draws(stored, FULL))
        uniform = sum(update_gradient(t, 1.0, present, name, "fixed") for t in stored) / 3
        torch.testing.assert_close(weighted, uniform, rtol=1e-9, atol=1e-12)
    assert max(p for p, _, _ in draws(stored, FULL)) > 0.5
