"""Credit for sampled tokens, against the definitions (cases T10 and T11)."""

import math

import numpy as np
import pytest

from freshper.errors import ConfigError
from freshper.learning.advantages import ADVANTAGES, reinforce_plus_plus, returns_to_go


def slow_returns(trajectory, gamma):
    """G of every token from the sum that defines it."""
    values = []
    for place in range(len(trajectory)):
        value = 0.0
        if trajectory.response_mask[place]:
            [now] = [k for k, turn in enumerate(trajectory.turns) if turn.reply_start <= place < turn.end]
            value = math.fsum(turn.reward * gamma ** (k - now) for k, turn in enumerate(trajectory.turns) if k >= now)
        values.append(value)
    return values


def slow_advantages(trajectories, gamma):
    returns = [slow_returns(trajectory, gamma) for trajectory in trajectories]
    sampled = [
        value
        for trajectory, values in zip(trajectories, returns, strict=True)
        for value, said in zip(values, trajectory.response_mask, strict=True)
        if said
    ]
    mean = math.fsum(sampled) / len(sampled)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in sampled) / len(sampled))
    return [
        [(value - mean) / std if said else 0.0 for value, said in zip(values, trajectory.response_mask, strict=True)]
        for trajectory, values in zip(trajectories, returns, strict=True)
    ]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
def test_returns_follow_the_definition(random_batch, gamma):
    for trajectory in random_batch(10):
        np.testing.assert_allclose(returns_to_go(trajectory, gamma), slow_returns(trajectory, gamma), atol=1e-12)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_follow_the_definition(random_batch, gamma, seed):
    batch = random_batch(8, seed, credited=False)
    for got, want in zip(reinforce_plus_plus(batch, gamma), slow_advantages(batch, gamma), strict=True):
        np.testing.assert_allclose(got.advantages, want, rtol=1e-5, atol=1e-6)


def test_a_terminal_reward_reaches_the_first_turn(paid):
    """T11."""
    won, lost = reinforce_plus_plus([paid(0.0, 0.0, 1.0), paid(0.0, 0.0, 0.0)])
    assert (won.advantages[won.response_mask] == won.advantages[won.response_mask][0]).all()
    assert won.advantages[won.turns[0].reply_start] > 0 > lost.advantages[lost.turns[0].reply_start]


def test_gamma_discounts_per_turn(paid):
    trajectory = paid(0.0, 0.0, 8.0)
    starts = [turn.reply_start for turn in trajectory.turns]
    assert returns_to_go(trajectory, 0.5)[starts].tolist() == [2.0, 4.0, 8.0]
    assert returns_to_go(trajectory, 0.0)[starts].tolist() == [0.0, 0.0, 8.0]


def test_a_turn_gets_no_credit_for_what_came_before(paid):
    trajectory = paid(5.0, 1.0)
    assert returns_to_go(trajectory)[trajectory.turns[1].reply_start] == 1.0


def test_only_advantages_are_added(random_batch):
    batch = random_batch(3, credited=False)
    for before, after in zip(batch, reinforce_plus_plus(batch), strict=True):
        assert before.advantages is None
        assert (after.advantages[~after.response_mask] == 0).all()
        assert after.tokens.tolist() == before.tokens.tolist()
        assert after.behavior_logprobs.tolist() == before.behavior_logprobs.tolist()
        assert (after.turns, after.policy_version, after.sampling) == (
            before.turns,
            before.policy_version,
            before.sampling,
        )


EQUAL = {
    "all zero": [(0.0, 0.0), (0.0,)],
    "all one": [(1.0,), (1.0,), (1.0,)],
    "one alone": [(0.0, 0.0, 0.7)],
    "0.1 + 0.2, twice": [(0.1 + 0.2,), (0.1 + 0.2,)],
    "0.1 + 0.2 and 0.3": [(0.1 + 0.2,), (0.3,), (0.3,)],
    "0.1 + 0.2 - 0.3 and 0": [(0.1 + 0.2 - 0.3,), (0.0,)],
    "thirds": [(1.0,), (sum([1 / 3] * 3),), (10 * (1 / 10) + 1e-16,)],
    "large": [(1e9 + 0.1,), (1e9 + 0.1,)],
    "negative": [(0.0, -0.15 * 3), (0.0, -0.45)],
    "tiny": [(1e-30,), (1e-30,)],
}


@pytest.mark.parametrize("case", EQUAL)
def test_equal_returns_teach_nothing(paid, case):
    """T10: exactly 0, also where sums that should be equal differ by rounding."""
    for trajectory in reinforce_plus_plus([paid(*rewards, seed=k) for k, rewards in enumerate(EQUAL[case])]):
        assert not trajectory.advantages.any()


def test_returns_made_equal_by_the_discount_teach_nothing(paid):
    """At gamma 0.9, rewards of 0.1 before a last 1 give every turn a return of 1, up to rounding."""
    for trajectory in reinforce_plus_plus([paid(0.1, 0.1, 0.1, 1.0), paid(0.1, 1.0)], gamma=0.9):
        assert not trajectory.advantages.any()


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.3, 0.3 + 1e-9), (1e-9, 2e-9), (1e6, 1e6 + 1e-3), (-1e-9, 1e-9), (-1.0, 0.0)]
)
def test_different_returns_do_teach(paid, low, high):
    worse, better = reinforce_plus_plus([paid(low), paid(high)])
    assert (worse.advantages[worse.response_mask] < -0.5).all()
    assert (better.advantages[better.response_mask] > 0.5).all()


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan")])
def test_gamma_is_checked(paid, gamma):
    with pytest.raises(ConfigError, match="gamma"):
        reinforce_plus_plus([paid(1.0)], gamma)


def test_no_trajectories_have_no_advantages():
    assert reinforce_plus_plus([]) == []


def test_the_estimator_is_known_by_name():
    assert {"reinforce++": reinforce_plus_plus} == ADVANTAGES
