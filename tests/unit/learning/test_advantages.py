"""Credit for sampled tokens, against the definitions (cases T10 and T11)."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from freshper.errors import ConfigError, TrajectoryError
from freshper.learning.advantages import (
    ADVANTAGES,
    NEEDS_GROUPS,
    group_facts,
    penalized_returns,
    reinforce_plus_plus,
    returns_to_go,
    token_rewards,
)

GROUP_WISE = sorted(NEEDS_GROUPS)


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


def in_groups(paid, groups):
    """Trajectories of the given rewards: one list of rewards per trajectory, one name per group; groups take turns."""
    named = [(name, number, rewards) for name, members in groups.items() for number, rewards in enumerate(members)]
    named.sort(key=lambda part: part[1])
    return [replace(paid(*rewards, seed=len(name) + k), group=name) for name, k, rewards in named]


def slow_group_advantages(name, trajectories, gamma):
    """One advantage per trajectory, from the papers, one trajectory at a time."""
    totals = [
        math.fsum(turn.reward * gamma**k for k, turn in enumerate(trajectory.turns)) for trajectory in trajectories
    ]
    results = []
    for trajectory, total in zip(trajectories, totals, strict=True):
        group = [t for other, t in zip(trajectories, totals, strict=True) if other.group == trajectory.group]
        if len(group) == 1:
            results.append(0.0)
        elif name == "rloo":
            results.append(total - (math.fsum(group) - total) / (len(group) - 1))
        elif name == "grpo":
            results.append((total - statistics.fmean(group)) / statistics.stdev(group))
        else:
            results.append(total - statistics.fmean(group))
    if name == "reinforce++-baseline":
        scale = statistics.pstdev(results, 0.0)
        return [value / scale for value in results]
    return results


def of_rows(trajectories):
    """The one advantage of each trajectory; that it is one, and 0 off the mask, is checked."""
    values = []
    for trajectory in trajectories:
        credited = trajectory.advantages[trajectory.response_mask]
        assert (credited == credited[0]).all()
        assert not trajectory.advantages[~trajectory.response_mask].any()
        values.append(credited[0])
    return values


MIXED = {
    "a": [(0.0, 1.0), (0.3,), (-2.0, 0.1, 7.0)],
    "b": [(1.0,), (0.0, 0.0), (0.5, 0.5), (2.0,)],
    "alone": [(3.0, 1.0)],
    "pair": [(10.9,), (-0.2, -0.1)],
}


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", GROUP_WISE)
def test_group_advantages_follow_the_papers(paid, name, gamma):
    groups = MIXED if gamma else {key: [(*rewards, 1.0) for rewards in MIXED[key]] for key in MIXED}
    batch = in_groups(paid, groups)
    got = of_rows(ADVANTAGES[name](batch, gamma))
    np.testing.assert_allclose(got, slow_group_advantages(name, batch, gamma), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", GROUP_WISE)
def test_order_and_neighbors_decide_nothing(paid, name):
    """A group is its members wherever they stand; only reinforce++-baseline looks at other groups."""
    batch = in_groups(paid, MIXED)
    order = np.random.default_rng(0).permutation(len(batch))
    straight, mixed = of_rows(ADVANTAGES[name](batch)), of_rows(ADVANTAGES[name]([batch[k] for k in order]))
    np.testing.assert_allclose([straight[k] for k in order], mixed, rtol=1e-6)
    own = [k for k, trajectory in enumerate(batch) if trajectory.group == "b"]
    apart = of_rows(ADVANTAGES[name]([batch[k] for k in own]))
    same = np.allclose([straight[k] for k in own], apart, rtol=1e-5)
    assert same == (name != "reinforce++-baseline")


@pytest.mark.parametrize("case", EQUAL)
@pytest.mark.parametrize("name", GROUP_WISE)
def test_a_group_of_equal_returns_teaches_nothing_beside_one_that_does(paid, name, case):
    """T10, per group: exactly 0, whatever the other groups of the batch are."""
    batch = in_groups(paid, {"equal": EQUAL[case], "a": MIXED["a"]})
    for trajectory in ADVANTAGES[name](batch):
        assert trajectory.advantages.any() == (trajectory.group == "a")
    assert not any(t.advantages.any() for t in ADVANTAGES[name]([t for t in batch if t.group == "equal"]))


@pytest.mark.parametrize("name", GROUP_WISE)
def test_a_small_difference_teaches(paid, name):
    worse, better = of_rows(ADVANTAGES[name](in_groups(paid, {"a": [(0.3,), (0.3 + 1e-9,)]})))
    assert worse < 0 < better


def test_what_groups_offer_is_counted(paid):
    batch = in_groups(paid, MIXED | {"equal": EQUAL["0.1 + 0.2 and 0.3"]})
    facts = group_facts(batch)
    assert sorted(facts.names) == ["a", "alone", "b", "equal", "pair"]
    assert facts.names == tuple(dict.fromkeys(trajectory.group for trajectory in batch))
    assert (facts.alone, facts.equal) == (("alone",), ("equal",))
    assert group_facts(in_groups(paid, {"a": [(0.0, 1.0), (0.0, 0.5)]}), gamma=0.0).equal == ("a",)
    assert group_facts([]).names == ()


def test_rewards_lie_at_the_end_of_replies(random_batch):
    for trajectory in random_batch(4):
        penalties = np.random.default_rng(0).normal(size=len(trajectory))
        want = [0.0] * len(trajectory)
        for turn in trajectory.turns:
            want[turn.end - 1] += turn.reward
        np.testing.assert_array_equal(token_rewards(trajectory), want)
        want = [w - p if said else 0.0 for w, p, said in zip(want, penalties, trajectory.response_mask, strict=True)]
        np.testing.assert_allclose(token_rewards(trajectory, penalties), want, rtol=1e-12)


def slow_penalized(trajectory, penalty, weight, gamma):
    """What is still to come at every sampled token: each later reward and penalty, discounted by turns in between."""
    turn_of = {place: k for k, turn in enumerate(trajectory.turns) for place in range(turn.reply_start, turn.end)}
    values = [0.0] * len(trajectory)
    for now, first in turn_of.items():
        for later, k in turn_of.items():
            if later >= now:
                earned = trajectory.turns[k].reward if later == trajectory.turns[k].end - 1 else 0.0
                values[now] += gamma ** (k - first) * (earned - weight * penalty[later])
    return values


@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
def test_penalties_are_taken_from_the_tokens_that_earn_them(random_batch, gamma):
    batch = random_batch(6)
    penalties = [np.random.default_rng(k).normal(size=len(trajectory)) for k, trajectory in enumerate(batch)]
    for got, trajectory, penalty in zip(penalized_returns(batch, penalties, 0.3, gamma), batch, penalties, strict=True):
        np.testing.assert_allclose(got, slow_penalized(trajectory, penalty, 0.3, gamma), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_without_weight_penalties_change_no_bit(random_batch, name, gamma):
    batch = [replace(t, group="ab"[k % 2]) for k, t in enumerate(random_batch(6, credited=False))]
    penalties = [np.ones(len(trajectory)) for trajectory in batch]
    unchanged = penalized_returns(batch, penalties, 0.0, gamma)
    for got, trajectory in zip(unchanged, batch, strict=True):
        np.testing.assert_array_equal(got, returns_to_go(trajectory, gamma))
    plain, given = ADVANTAGES[name](batch, gamma), ADVANTAGES[name](batch, gamma, unchanged)
    for one, other in zip(plain, given, strict=True):
        np.testing.assert_array_equal(one.advantages, other.advantages)
    moved = ADVANTAGES[name](batch, gamma, penalized_returns(batch, penalties, 1.0, gamma))
    assert any((one.advantages != other.advantages).any() for one, other in zip(plain, moved, strict=True))


def test_columns_that_do_not_fit_are_refused(random_batch):
    batch = random_batch(2)
    short, nan = np.zeros(len(batch[0]) - 1), np.full(len(batch[0]), np.nan)
    for penalties in (short, nan):
        with pytest.raises(TrajectoryError, match="one finite number per token"):
            token_rewards(batch[0], penalties)
    for returns in ([short, np.zeros(len(batch[1]))], [np.zeros(len(batch[0]))]):
        with pytest.raises(TrajectoryError, match="returns were given"):
            reinforce_plus_plus(batch, 1.0, returns)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_estimator_checks_gamma_and_takes_an_empty_batch(paid, name):
    assert ADVANTAGES[name]([]) == []
    with pytest.raises(ConfigError, match=r"gamma 1.1 must be in \[0, 1\]"):
        ADVANTAGES[name]([paid(1.0)], 1.1)


def test_the_estimators_are_known_by_name():
    assert ADVANTAGES["reinforce++"] is reinforce_plus_plus
    assert {"reinforce++-baseline", "grpo", "grpo-no-std", "dr-grpo", "rloo"} == NEEDS_GROUPS < set(ADVANTAGES)
