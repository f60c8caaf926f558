"""Gradients through a small recurrent policy in float64: on-policy each loss has the policy gradient (case T1 too)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from freshper import ReplayBuffer
from freshper.learning.advantages import ADVANTAGES, NEEDS_GROUPS
from freshper.learning.aggregation import row_scales
from freshper.learning.losses import LOSSES, Clip, LossInputs

VOCAB, FIXED = 40, 25
AGGREGATIONS = ["token", "sequence", "fixed"]


class Policy(nn.Module):
    """Next-token logits from an embedding and a recurrent cell."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.cell, self.out = nn.Embedding(VOCAB, 6), nn.GRU(6, 7, batch_first=True), nn.Linear(7, VOCAB)
        self.double()

    def logprobs(self, trajectory):
        """(T,) log-probs of the tokens; the first was not predicted."""
        tokens = torch.tensor(trajectory.tokens.astype(np.int64))[None]
        logits = self.out(self.cell(self.embed(tokens))[0])[0, :-1]
        chosen = torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0]
        return torch.cat([torch.zeros(1, dtype=torch.float64), chosen])

    def gradient(self, scalar):
        return torch.cat([part.flatten() for part in torch.autograd.grad(scalar, list(self.parameters()))])


def padded(rows, dtype=torch.float64):
    return nn.utils.rnn.pad_sequence([torch.as_tensor(np.array(row), dtype=dtype) for row in rows], batch_first=True)


def inputs_of(policy, batch, behavior):
    """Loss inputs (B, T); ``behavior`` (T,) each."""
    logprobs = nn.utils.rnn.pad_sequence([policy.logprobs(trajectory) for trajectory in batch], batch_first=True)
    mask = padded([trajectory.response_mask for trajectory in batch], torch.bool)
    advantages = padded([trajectory.advantages for trajectory in batch])
    return LossInputs(logprobs, torch.where(mask, padded(behavior), 0.0), advantages, mask)


def loss_of(name, policy, batch, behavior, aggregation, *, weights=None, clip=None):
    lengths = [trajectory.response_length for trajectory in batch]
    scales, divisor = row_scales(aggregation, lengths, FIXED)
    rows = torch.tensor(scales * (np.ones(len(batch)) if weights is None else weights))[:, None]
    return LOSSES[name](inputs_of(policy, batch, behavior), clip or Clip()).total(rows) / divisor


def own_logprobs(policy, batch):
    with torch.no_grad():
        return [policy.logprobs(trajectory).numpy() for trajectory in batch]


def policy_gradient(policy, batch, weights, aggregation):
    """-sum_b w_b s_b sum_t A_t grad log pi_t, one token at a time: no ratio, no padding, no loss."""
    total = 0.0
    tokens = sum(trajectory.response_length for trajectory in batch)
    for trajectory, weight in zip(batch, weights, strict=True):
        counts = {"token": tokens, "sequence": trajectory.response_length * len(batch), "fixed": FIXED * len(batch)}
        logprobs = policy.logprobs(trajectory)
        for place in np.flatnonzero(trajectory.response_mask):
            total = total - weight * float(trajectory.advantages[place]) * logprobs[place] / counts[aggregation]
    return policy.gradient(total)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_gradient_is_the_policy_gradient(random_batch, name, aggregation):
    """At ratio 1 nothing is clipped: also GSPO's, since its form per token keeps each token's own gradient."""
    policy, batch, weights = Policy(), random_batch(5), np.linspace(0.3, 1.7, 5)
    want = policy_gradient(policy, batch, weights, aggregation)
    loss = loss_of(name, policy, batch, own_logprobs(policy, batch), aggregation, weights=weights)
    torch.testing.assert_close(policy.gradient(loss), want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_off_policy_only_reinforce_keeps_it(random_batch, name):
    policy, batch, weights = Policy(), random_batch(5), np.ones(5)
    want = policy_gradient(policy, batch, weights, "token")
    got = policy.gradient(loss_of(name, policy, batch, own_logprobs(Policy(1), batch), "token"))
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-12) == (name == "reinforce")


def slope(policy, function, direction, reach=1e-6):
    """Central difference of a scalar along a direction of the parameters."""
    start = nn.utils.parameters_to_vector(policy.parameters()).detach()
    ends = []
    for sign in (1, -1):
        nn.utils.vector_to_parameters(start + sign * reach * direction, policy.parameters())
        ends.append(float(function().detach()))
    nn.utils.vector_to_parameters(start, policy.parameters())
    return (ends[0] - ends[1]) / (2 * reach)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "aggregation"), [("ppo", "token"), ("ppo", "fixed"), ("gspo", "sequence")])
def test_off_policy_the_gradient_is_the_slope_of_the_value(random_batch, name, aggregation, seed):
    """Where the loss is a function of the ratio; GSPO needs one advantage per trajectory for it."""
    policy, batch = Policy(), random_batch(5, seed)
    if name == "gspo":
        batch = [t.with_columns(advantages=np.where(t.response_mask, k - 2.5, 0)) for k, t in enumerate(batch)]
    behavior = own_logprobs(Policy(1), batch)
    clip = Clip(low=0.1, high=0.2) if name == "ppo" else Clip(low=0.03, high=0.05)  # means lie closer to 1

    def value():
        return loss_of(name, policy, batch, behavior, aggregation, clip=clip)

    gradient = policy.gradient(value())
    direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert slope(policy, value, direction) == pytest.approx(float(gradient @ direction), rel=1e-5)
    clipped = LOSSES[name](inputs_of(policy, batch, behavior), clip).outside
    assert 0 < clipped.sum() < sum(trajectory.response_length for trajectory in batch)


@pytest.mark.parametrize("name", sorted(NEEDS_GROUPS))
def test_replayed_alone_a_trajectory_teaches_what_was_stored(paid, name):
    """T1: one of each group is drawn back out of the buffer. Computed within the draw, every advantage would be 0."""
    groups = {"a": [1.0, 0.0, 0.2], "b": [0.5, -1.0], "c": [0.0, 0.0, 3.0, 1.0]}
    fresh = [
        replace(paid(reward, 0.5, seed=k), group=group)
        for group, rewards in groups.items()
        for k, reward in enumerate(rewards)
    ]
    credited = ADVANTAGES[name](fresh)
    buffer = ReplayBuffer(20, priority="advantage", seed=0)
    buffer.add(credited, policy_version=0)
    drawn = list({t.group: t for t in buffer.sample(64, policy_version=1).trajectories}.values())
    assert sorted(trajectory.group for trajectory in drawn) == ["a", "b", "c"]
    assert not any(trajectory.advantages.any() for trajectory in ADVANTAGES[name](drawn))
    policy = Policy()
    gradient = policy.gradient(loss_of("ppo", policy, drawn, own_logprobs(policy, drawn), "token"))
    stored = {(t.group, t.turns[0].reward): t.advantages for t in credited}
    again = [t.with_columns(advantages=stored[t.group, t.turns[0].reward]) for t in drawn]
    want = policy_gradient(policy, again, np.ones(3), "token")
    torch.testing.assert_close(gradient, want, rtol=1e-9, atol=1e-12)
    assert float(gradient.norm()) > 1e-2
