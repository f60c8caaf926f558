"""The learner scores a fresh batch as the sampler did when it sampled (cases T2 and T3)."""

import numpy as np
import pytest

from freshper.envs import make_env
from freshper.learning.advantages import reinforce_plus_plus
from freshper.learning.learner import Learner
from freshper.policies.tiny import TinyPolicy, build_model, build_tokenizer
from freshper.rollout.collect import Limits, Start, collect
from freshper.trajectory import SamplingParams

EPISODES = 6


def fresh_batch(temperature):
    """Episodes of a random policy on a real task: replies of all lengths, cut and ended."""
    envs = [make_env("sokoban") for _ in range(EPISODES)]
    tokenizer = build_tokenizer([env.reset(seed) for seed, env in enumerate(envs)] + ["<answer> Left </answer>"])
    model = build_model(tokenizer.get_vocab_size(), hidden_size=32, layers=2, heads=2, context=256, seed=0)
    policy = TinyPolicy(model, tokenizer)
    rollout = collect(
        envs,
        policy,
        [Start(seed, "g") for seed in range(EPISODES)],
        limits=Limits(max_reply_tokens=6, max_episode_tokens=200),
        sampling=SamplingParams(temperature=temperature),
        seed=1,
    )
    return policy, rollout.trajectories


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
def test_sampler_and_learner_agree(temperature):
    policy, trajectories = fresh_batch(temperature)
    learner = Learner(policy.model, learning_rate=0.01, total_updates=10, token_budget=400)
    for trajectory, score in zip(trajectories, learner.score(trajectories), strict=True):
        assert trajectory.response_length > 20
        assert np.abs(score - trajectory.behavior_logprobs).max() < 1e-4
    batch = reinforce_plus_plus(trajectories)
    update = learner.update(batch)
    assert update.metrics["abs_log_ratio"] < 1e-4
    assert np.abs(update.log_ratios).max() < 1e-3
    policy.publish(learner.model, learner.version)
    again = learner.update(batch)
    assert (
        again.metrics["abs_log_ratio"] > 1e-3
    )  # against the log-probs of the policy that sampled, not the present one
    assert policy.version == 1
