"""The mathematics of learning holds for any input (cases T9, T10, T11)."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from freshper.errors import ConfigError
from freshper.learning.advantages import reinforce_plus_plus, returns_to_go
from freshper.learning.batching import micro_batches
from freshper.trajectory import StopReason, Trajectory, Turn

torch.set_num_threads(1)

MANY = settings(max_examples=150, deadline=None)


def floats(low, high):
    return st.floats(low, high, width=32)


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
