"""Advantages of fresh and replayed trajectories: stored ones stay, those of a critic follow its values."""

import numpy as np
import pytest

from freshper import StopReason, Trajectory, Turn
from freshper.errors import DivergedError
from freshper.learning.advantages import ADVANTAGES, penalized_returns
from freshper.learning.critic import CriticUpdate
from freshper.learning.gae import gae
from freshper.training.config_file import make_config
from freshper.training.estimator import Estimator


def trajectory(*rewards, group="g", logprob=-1.0):
    mask = np.tile([False, True, True], len(rewards))
    turns = tuple(Turn(3 * at, 3 * at + 1, 3 * at + 3, reward) for at, reward in enumerate(rewards))
    logprobs = np.where(mask, logprob, 0.0)
    return Trajectory(np.arange(len(mask)), mask, logprobs, turns, StopReason.TERMINATED, False, 0, "test", group, 0)


class Scorer:
    """A learner whose reference gives every token the same log-prob."""

    def __init__(self, logprob):
        self.logprob = logprob

    def score_reference(self, trajectories):
        return [np.where(one.response_mask, self.logprob, 0.0).astype(np.float32) for one in trajectories]


class Values:
    """A critic with a value for everything, that remembers what it is fitted to."""

    def __init__(self, value=0.5):
        self.value = value
        self.fitted = []
        self.applied = True

    def values(self, trajectories):
        return [np.where(one.response_mask, self.value, 0.0) for one in trajectories]

    def update(self, trajectories, targets, old_values, sampling_weights):
        self.fitted.append((trajectories, targets, old_values, sampling_weights))
        return CriticUpdate(self.applied, {"value_loss": 1.0})


def of(values=None, reference=-1.0, **sections):
    config = make_config({"rollout": {"episodes": 4, "group_size": 2}} | sections)
    return Estimator(config, Scorer(reference), values)


def advantages(trajectories):
    return np.concatenate([one.advantages for one in trajectories])


BATCH = [trajectory(0.0, 1.0, group="a"), trajectory(0.0, 0.0, group="a"), trajectory(1.0, group="b")]


def test_without_a_critic_the_named_estimator_credits_and_replay_keeps_what_was_stored():
    estimator = of(algorithm={"advantage": "reinforce++", "gamma": 0.9})
    fresh, facts = estimator.fresh(BATCH)
    np.testing.assert_array_equal(advantages(fresh), advantages(ADVANTAGES["reinforce++"](BATCH, 0.9)))
    assert facts == {}
    assert estimator.replayed(tuple(fresh)) == tuple(fresh)
    assert estimator.fit() == {}


def test_estimators_over_groups_say_how_many_teach_nothing():
    pairs = [trajectory(1.0, group="a"), trajectory(1.0, group="a"), *(trajectory(r, group="b") for r in (0.0, 1.0))]
    _, facts = of(algorithm={"advantage": "grpo"}).fresh(pairs)
    assert facts["fresh/groups_equal"] == 0.5


def test_a_kl_in_the_reward_lowers_what_tokens_have_ahead():
    kl = {"weight": 0.5, "estimator": "k1", "place": "reward"}
    estimator = of(reference=-3.0, kl=kl)
    fresh, facts = estimator.fresh(BATCH)
    penalties = [np.where(one.response_mask, 2.0, 0.0) for one in BATCH]  # log pi - log ref = -1 + 3
    want = ADVANTAGES["reinforce++"](BATCH, 1.0, penalized_returns(BATCH, penalties, 0.5))
    np.testing.assert_allclose(advantages(fresh), advantages(want))
    assert facts["fresh/reward_kl"] == pytest.approx(2.0)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_with_a_critic_fresh_and_replayed_are_credited_from_its_values(weight):
    kl = {"weight": weight, "estimator": "k1", "place": "reward"}
    critic = Values()
    estimator = of(critic, reference=-3.0, kl=kl, algorithm={"advantage": "gae"}, critic={"gae_lambda": 0.9})
    fresh, _ = estimator.fresh(BATCH)

    def rewards(batch):
        ends = [[turn.end - 1 for turn in one.turns] for one in batch]
        paid = [np.zeros(len(one)) for one in batch]
        for one, column, last in zip(batch, paid, ends, strict=True):
            column[last] = [turn.reward for turn in one.turns]
            column[one.response_mask] -= weight * 2.0
        return paid

    def slow(batch, moments=None):
        return gae(batch, critic.values(batch), gamma=1.0, gae_lambda=0.9, rewards=rewards(batch), moments=moments)

    want = slow(BATCH)
    np.testing.assert_allclose(advantages(fresh), advantages(want.trajectories), atol=1e-6)
    assert estimator.fit() == {"value_loss": 1.0, "value_skipped": 0.0}
    assert estimator.fit() == {}  # each batch once
    critic.value = 2.0
    replayed = estimator.replayed(fresh[:1])
    again = slow(BATCH[:1], want.moments)
    np.testing.assert_allclose(advantages(replayed), advantages(again.trajectories), atol=1e-6)
    np.testing.assert_allclose(replayed[0].td_errors, again.trajectories[0].td_errors, atol=1e-6)
    weights = np.array([0.3])
    estimator.fit(weights)
    _, targets, old, given = critic.fitted[-1]
    np.testing.assert_allclose(targets[0], again.targets[0], atol=1e-6)
    assert set(old[0].tolist()) == {0.0, 2.0}
    assert given is weights


def test_an_ill_batch_fits_no_critic_and_an_ill_critic_ends_the_run():
    critic = Values()
    estimator = of(critic, algorithm={"advantage": "gae"}, guard={"patience": 2})
    estimator.fresh(BATCH)
    assert estimator.fit(applied=False) == {}
    assert critic.fitted == []
    critic.applied = False
    estimator.fresh(BATCH)
    assert estimator.fit()["value_skipped"] == 1
    estimator.fresh(BATCH)
    with pytest.raises(DivergedError, match=r"2 updates of the critic in a row .*lower critic\.learning_rate"):
        estimator.fit()
