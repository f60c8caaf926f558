"""GAE over conversations: the sum that defines it, credit across observations, ends and limits (cases T10, T11)."""

import numpy as np
import pytest

from freshper.errors import ConfigError, TrajectoryError
from freshper.learning.advantages import penalized_returns, returns_to_go, token_rewards
from freshper.learning.gae import Moments, gae, token_credit
from freshper.replay.priority import base_priorities
from freshper.trajectory import StopReason


def values_of(batch, seed=0):
    """Values on sampled tokens, and junk elsewhere that must not be read."""
    rng = np.random.default_rng(seed)
    return [np.where(t.response_mask, rng.normal(size=len(t)), np.nan) for t in batch]


def slow_deltas(trajectory, values, rewards, gamma, bootstrap=0.0):
    """Sampled tokens as (place, discount to the next one, delta)."""
    places = [place for place, said in enumerate(trajectory.response_mask) if said]
    ends = {turn.end - 1 for turn in trajectory.turns}
    steps = []
    for number, place in enumerate(places):
        discount = gamma if place in ends else 1.0
        following = values[places[number + 1]] if number + 1 < len(places) else bootstrap
        steps.append((place, discount, rewards[place] + discount * following - values[place]))
    return steps


def slow_advantages(steps, lam, length):
    """A of a token is the sum over later deltas, each faded by lambda and discount for every token in between."""
    result = [0.0] * length
    for start, (place, _, _) in enumerate(steps):
        fade = 1.0
        for _, discount, delta in steps[start:]:
            result[place] += fade * delta
            fade *= discount * lam
    return result


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_credit_follows_the_definition(random_batch, gamma, lam):
    batch = random_batch(6)
    for trajectory, values in zip(batch, values_of(batch), strict=True):
        got = token_credit(trajectory, values, gamma=gamma, gae_lambda=lam)
        steps = slow_deltas(trajectory, values, token_rewards(trajectory), gamma)
        want = slow_advantages(steps, lam, len(trajectory))
        np.testing.assert_allclose(got.advantages, want, rtol=1e-10, atol=1e-12)
        for place, _, delta in steps:
            assert got.td_errors[place] == pytest.approx(delta, abs=1e-12)
            assert got.targets[place] == pytest.approx(want[place] + values[place], abs=1e-12)
        off = ~trajectory.response_mask
        assert not np.concatenate([got.advantages[off], got.td_errors[off], got.targets[off]]).any()


@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
def test_lambda_one_is_the_return_minus_the_value(random_batch, gamma):
    """So credit is that of the critic-free estimators, with and without penalties."""
    batch = random_batch(6)
    penalties = [np.random.default_rng(k).normal(size=len(t)) for k, t in enumerate(batch)]
    penalized = penalized_returns(batch, penalties, 0.2, gamma)
    for k, (trajectory, values) in enumerate(zip(batch, values_of(batch), strict=True)):
        mask = trajectory.response_mask
        plain = token_credit(trajectory, values, gamma=gamma, gae_lambda=1.0)
        np.testing.assert_allclose(plain.targets, returns_to_go(trajectory, gamma), atol=1e-10)
        np.testing.assert_allclose(
            plain.advantages[mask], (returns_to_go(trajectory, gamma) - values)[mask], atol=1e-10
        )
        rewards = token_rewards(trajectory, 0.2 * penalties[k])
        paid = token_credit(trajectory, values, gamma=gamma, gae_lambda=1.0, rewards=rewards)
        np.testing.assert_allclose(paid.targets[mask], penalized[k][mask], atol=1e-10)


def test_a_terminal_reward_reaches_the_first_turn_at_its_price(paid):
    """T11: lambda per sampled token, gamma per turn, and nothing for observations, whatever their length."""
    trajectory = paid(0.0, 0.0, 8.0)
    places = np.flatnonzero(trajectory.response_mask)
    credit = token_credit(trajectory, np.zeros(len(trajectory)), gamma=0.5, gae_lambda=0.9)
    for number, place in enumerate(places):
        turns_ahead = sum(turn.reply_start > place for turn in trajectory.turns)
        tokens_ahead = len(places) - 1 - number
        assert credit.advantages[place] == pytest.approx(8 * 0.5**turns_ahead * 0.9**tokens_ahead)


def test_perfect_values_leave_no_error(paid):
    trajectory = paid(1.0, -2.0, 8.0)
    values = returns_to_go(trajectory, 0.8)
    credit = token_credit(trajectory, values, gamma=0.8, gae_lambda=0.95)
    np.testing.assert_allclose(credit.td_errors, 0, atol=1e-12)
    np.testing.assert_allclose(credit.advantages, 0, atol=1e-12)


@pytest.mark.parametrize("reason", [StopReason.TERMINATED, StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT])
def test_nothing_follows_the_last_token(random_batch, reason):
    """Limits belong to the task: after them the value is 0, as after any end."""
    [trajectory] = random_batch(1, stop_reason=reason)
    last = int(np.flatnonzero(trajectory.response_mask)[-1])
    [values] = values_of([trajectory])
    credit = token_credit(trajectory, values, gamma=0.9, gae_lambda=0.5)
    assert credit.td_errors[last] == pytest.approx(trajectory.turns[-1].reward - values[last])


@pytest.mark.parametrize("reason", [StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT])
def test_whoever_goes_on_may_bootstrap(random_batch, reason):
    [trajectory] = random_batch(1, stop_reason=reason)
    [values] = values_of([trajectory])
    credit = token_credit(trajectory, values, gamma=0.9, gae_lambda=0.5, bootstrap=3.0)
    steps = slow_deltas(trajectory, values, token_rewards(trajectory), 0.9, bootstrap=3.0)
    np.testing.assert_allclose(credit.advantages, slow_advantages(steps, 0.5, len(trajectory)), atol=1e-12)
    assert steps[-1][2] == pytest.approx(trajectory.turns[-1].reward + 0.9 * 3.0 - values[steps[-1][0]])


def test_an_end_is_no_place_to_bootstrap_from(random_batch):
    [trajectory] = random_batch(1)
    with pytest.raises(ConfigError, match=r"bootstrap 3.0 .* nothing follows"):
        token_credit(trajectory, np.zeros(len(trajectory)), gamma=1.0, gae_lambda=1.0, bootstrap=3.0)


def pooled(trajectories, columns):
    return np.concatenate([c[t.response_mask] for t, c in zip(trajectories, columns, strict=True)])


def test_a_fresh_batch_is_normalized_over_its_tokens(random_batch):
    batch = random_batch(8, credited=False)
    values = values_of(batch)
    result = gae(batch, values, gamma=0.9, gae_lambda=0.8)
    raw = [token_credit(t, v, gamma=0.9, gae_lambda=0.8) for t, v in zip(batch, values, strict=True)]
    together = pooled(batch, [credit.advantages for credit in raw])
    assert result.moments == Moments(pytest.approx(together.mean()), pytest.approx(together.std()))
    got = pooled(batch, [t.advantages.astype(np.float64) for t in result.trajectories])
    np.testing.assert_allclose(got, (together - together.mean()) / together.std(), rtol=1e-5, atol=1e-6)
    for trajectory, target, credit in zip(result.trajectories, result.targets, raw, strict=True):
        np.testing.assert_array_equal(target, credit.targets)
        np.testing.assert_array_equal(trajectory.td_errors, credit.td_errors.astype(np.float32))


def test_a_replayed_batch_takes_the_scale_of_the_fresh_one(random_batch):
    """What else is drawn beside a trajectory does not change its advantage; its own statistics would."""
    batch, drawn = random_batch(8, 0), random_batch(4, 1)
    moments = gae(batch, values_of(batch), gamma=1.0, gae_lambda=0.9).moments
    values = values_of(drawn, 3)
    together = gae(drawn, values, gamma=1.0, gae_lambda=0.9, moments=moments).trajectories
    alone = gae(drawn[:1], values[:1], gamma=1.0, gae_lambda=0.9, moments=moments).trajectories
    np.testing.assert_array_equal(together[0].advantages, alone[0].advantages)
    raw = token_credit(drawn[0], values[0], gamma=1.0, gae_lambda=0.9).advantages
    want = np.where(drawn[0].response_mask, (raw - moments.mean) / moments.std, 0)
    np.testing.assert_allclose(alone[0].advantages, want, rtol=1e-5, atol=1e-6)
    own = gae(drawn, values, gamma=1.0, gae_lambda=0.9).trajectories
    assert (own[0].advantages != together[0].advantages).any()


def test_equal_advantages_teach_nothing_and_give_no_scale(paid):
    """T10: at lambda 1 and values 0 these all have a return of 0.3, up to rounding."""
    flat = [paid(0.1 + 0.2), paid(0.3, seed=1)]
    none = [np.zeros(len(trajectory)) for trajectory in flat]
    result = gae(flat, none, gamma=1.0, gae_lambda=1.0)
    assert not any(trajectory.advantages.any() for trajectory in result.trajectories)
    assert result.moments.std == 0
    drawn = [paid(0.0), paid(1.0, seed=1)]
    replayed = gae(drawn, [np.zeros(len(t)) for t in drawn], gamma=1.0, gae_lambda=1.0, moments=result.moments)
    assert all(trajectory.advantages.any() for trajectory in replayed.trajectories)


def test_td_errors_are_what_replay_measures(random_batch):
    """Mean |delta| over the trajectory's own response tokens, not normalized."""
    batch = random_batch(5, credited=False)
    values = values_of(batch)
    result = gae(batch, values, gamma=0.9, gae_lambda=0.95)
    want = []
    for trajectory, value in zip(batch, values, strict=True):
        deltas = [abs(delta) for _, _, delta in slow_deltas(trajectory, value, token_rewards(trajectory), 0.9)]
        want.append(sum(deltas) / len(deltas) + 0.01)
    np.testing.assert_allclose(base_priorities(result.trajectories, "td_error", 0.01), want, rtol=1e-6)


def test_what_does_not_fit_is_refused(random_batch):
    [trajectory] = random_batch(1)
    zeros = np.zeros(len(trajectory))
    with pytest.raises(TrajectoryError, match="values of shape"):
        token_credit(trajectory, zeros[:-1], gamma=1.0, gae_lambda=1.0)
    with pytest.raises(TrajectoryError, match="values of shape"):
        token_credit(trajectory, np.full(len(trajectory), np.inf), gamma=1.0, gae_lambda=1.0)
    with pytest.raises(TrajectoryError, match="rewards of shape"):
        token_credit(trajectory, zeros, gamma=1.0, gae_lambda=1.0, rewards=zeros[:-1])
    for gamma, lam in ((1.1, 0.9), (0.9, -0.1), (float("nan"), 0.5)):
        with pytest.raises(ConfigError, match="gamma"):
            token_credit(trajectory, zeros, gamma=gamma, gae_lambda=lam)
    with pytest.raises(ConfigError, match="at least one trajectory"):
        gae([], [], gamma=1.0, gae_lambda=1.0)
