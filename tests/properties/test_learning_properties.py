"""The mathematics of learning holds for any input (cases T9, T10, T11)."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from freshper.errors import ConfigError
from freshper.learning.advantages import reinforce_plus_plus, returns_to_go
from freshper.learning.batching import micro_batches
from freshper.learning.losses import entropy, kl_to_reference, log_ratios, ppo_clip
from freshper.trajectory import StopReason, Trajectory, Turn

torch.set_num_threads(1)

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 8))
MANY = settings(max_examples=150, deadline=None)


def floats(low, high):
    return st.floats(low, high, width=32)


@st.composite
def loss_inputs(draw):
    """Masks and numbers of any size; off the mask the log-probs may be anything at all."""
    shape = draw(SHAPES)
    mask = draw(arrays.arrays(bool, shape))
    ratios = draw(arrays.arrays(np.float32, shape, elements=floats(-1000, 1000)))
    behavior = draw(arrays.arrays(np.float32, shape, elements=floats(-100, 0)))
    junk = draw(st.sampled_from([0.0, 1e30, -np.inf, np.inf, np.nan]))
    return {
        "logprobs": np.where(mask, behavior + ratios, junk),
        "behavior_logprobs": np.where(mask, behavior, 0),
        "advantages": np.where(mask, draw(arrays.arrays(np.float32, shape, elements=floats(-100, 100))), 0),
        "mask": mask,
        "weights": draw(arrays.arrays(np.float32, (shape[0], 1), elements=floats(0, 10))),
    }


def as_tensors(inputs):
    tensors = {
        name: torch.tensor(c, dtype=torch.bool if c.dtype == bool else torch.float32) for name, c in inputs.items()
    }
    tensors["logprobs"].requires_grad_()
    return tensors


@MANY
@given(loss_inputs(), st.floats(0.01, 0.99), st.sampled_from([0.0, 1.5, 3.0]))
def test_loss_and_gradient_are_finite_whatever_the_ratio(inputs, clip, dual_clip):
    """T9, and nothing off the mask has any influence."""
    tensors = as_tensors(inputs)
    loss, sums = ppo_clip(**tensors, clip=clip, dual_clip=dual_clip)
    loss = loss + kl_to_reference(tensors["logprobs"], tensors["behavior_logprobs"], tensors["mask"])
    loss.backward()
    gradient = tensors["logprobs"].grad
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert (gradient[~tensors["mask"]] == 0).all()
    assert all(torch.isfinite(value) for value in sums.values())


@MANY
@given(loss_inputs(), st.floats(0.01, 0.99))
def test_the_loss_follows_the_definition(inputs, clip):
    """Against token by token in float64; beyond the clamp of the log-ratio the ratio counts as exp(20)."""
    want = size = 0.0
    for row, place in zip(*np.nonzero(inputs["mask"]), strict=True):
        log_ratio = np.float32(inputs["logprobs"][row, place]) - np.float32(inputs["behavior_logprobs"][row, place])
        ratio = np.exp(np.float64(min(max(log_ratio, -20), 20)))
        advantage = float(inputs["advantages"][row, place])
        objective = min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)
        if advantage < 0:
            objective = max(objective, 3.0 * advantage)
        want -= float(inputs["weights"][row, 0]) * objective
        size += abs(float(inputs["weights"][row, 0]) * objective)
    loss, _ = ppo_clip(**as_tensors(inputs), clip=clip, dual_clip=3.0)
    assert float(loss.detach()) == pytest.approx(want, abs=1e-5 * size + 1e-30)


@MANY
@given(loss_inputs())
def test_log_ratios_are_bounded_and_zero_off_the_mask(inputs):
    tensors = as_tensors(inputs)
    result = log_ratios(tensors["logprobs"], tensors["behavior_logprobs"], tensors["mask"]).detach()
    assert (result.abs() <= 20).all()
    assert (result[~tensors["mask"]] == 0).all()


@MANY
@given(arrays.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=floats(-1000, 1000)))
def test_entropy_lies_between_nothing_and_the_uniform_one(logits):
    tensor = torch.tensor(logits, requires_grad=True)
    value = entropy(torch.log_softmax(tensor, -1))
    value.backward()
    rows, choices = logits.shape
    assert -1e-4 <= float(value.detach()) <= rows * np.log(choices) + 1e-4
    assert torch.isfinite(tensor.grad).all()


def trajectory_of(turns):
    """``turns``: observation length, reply length and reward of each."""
    mask, spans = [], []
    for shown, said, reward in turns:
        spans.append(Turn(len(mask), len(mask) + shown, len(mask) + shown + said, reward))
        mask += [False] * shown + [True] * said
    return Trajectory(
        tokens=np.arange(len(mask)),
        response_mask=np.array(mask),
        behavior_logprobs=np.where(mask, -1.0, 0.0),
        turns=tuple(spans),
        stop_reason=StopReason.TERMINATED,
        success=False,
        policy_version=0,
        task="test",
        group="g",
        seed=0,
    )


rewards = st.one_of(st.sampled_from([0.0, 1.0, -0.1, 10.9]), st.floats(-100, 100))
turn = st.tuples(st.integers(1, 4), st.integers(1, 4), rewards)
batches = st.lists(st.lists(turn, min_size=1, max_size=5).map(trajectory_of), min_size=1, max_size=6)
gammas = st.sampled_from([0.0, 0.5, 0.97, 1.0])


def pooled(trajectories, name):
    return np.concatenate([getattr(t, name)[t.response_mask] for t in trajectories]).astype(np.float64)


def pooled_returns(trajectories, gamma):
    return np.concatenate([returns_to_go(t, gamma)[t.response_mask] for t in trajectories])


@MANY
@given(batches, gammas)
def test_advantages_are_normalized_over_the_batch(batch, gamma):
    returns = pooled_returns(batch, gamma)
    advantages = pooled(reinforce_plus_plus(batch, gamma), "advantages")
    spread = float(np.ptp(returns))
    assume(spread == 0 or spread > 1e-6)  # between the two lies rounding
    if spread == 0:
        assert not advantages.any()
        return
    assert advantages.mean() == pytest.approx(0, abs=1e-4)
    assert advantages.std() == pytest.approx(1, abs=1e-4)
    assert (np.diff(advantages[np.argsort(returns, kind="stable")]) >= 0).all()


@MANY
@given(batches, gammas, st.floats(0.01, 100))
def test_the_unit_of_rewards_does_not_matter(batch, gamma, factor):
    assume(np.ptp(pooled_returns(batch, gamma)) > 1e-6)
    scaled = [
        trajectory_of([(t.reply_start - t.start, t.end - t.reply_start, factor * t.reward) for t in trajectory.turns])
        for trajectory in batch
    ]
    one, two = (pooled(reinforce_plus_plus(b, gamma), "advantages") for b in (batch, scaled))
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


@MANY
@given(st.lists(turn, min_size=1, max_size=6).map(trajectory_of), gammas)
def test_returns_obey_their_recursion(trajectory, gamma):
    """G_k = r_k + gamma G_{k+1}: at gamma 1 the first turn's return is that of the episode (T11)."""
    values = returns_to_go(trajectory, gamma)
    firsts = [values[t.reply_start] for t in trajectory.turns] + [0.0]
    for number, now in enumerate(trajectory.turns):
        assert (values[now.reply_start : now.end] == firsts[number]).all()
        assert (values[now.start : now.reply_start] == 0).all()
        assert firsts[number] == pytest.approx(now.reward + gamma * firsts[number + 1], abs=1e-9)
    if gamma == 1:
        assert firsts[0] == pytest.approx(trajectory.episode_return, abs=1e-9)


@MANY
@given(batches, st.integers(1, 200))
def test_micro_batches_split_without_loss(batch, budget):
    batch = reinforce_plus_plus(batch)
    if max(map(len, batch)) > budget:
        with pytest.raises(ConfigError, match="token budget"):
            next(micro_batches(batch, np.ones(len(batch)), budget, torch.device("cpu")))
        return
    parts = list(micro_batches(batch, np.ones(len(batch)), budget, torch.device("cpu")))
    assert sorted(row for part in parts for row in part.rows.tolist()) == list(range(len(batch)))
    assert all(part.tokens.numel() <= budget for part in parts)
    assert sum(int(part.attention_mask.sum()) for part in parts) == sum(map(len, batch))
    assert sum(int(part.response_mask.sum()) for part in parts) == sum(t.response_length for t in batch)
