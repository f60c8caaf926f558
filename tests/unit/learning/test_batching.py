"""Trajectories of different lengths as padded tensors within a token budget."""

import numpy as np
import pytest
import torch

from freshper.errors import ConfigError, TrajectoryError
from freshper.learning.batching import micro_batches
from freshper.trajectory import Turn

CPU = torch.device("cpu")


@pytest.mark.parametrize("budget", [40, 60, 90, 100_000])
def test_every_trajectory_is_in_one_batch_as_it_is(random_batch, budget):
    trajectories = random_batch(12)
    weights = np.random.default_rng(1).uniform(size=12)
    seen = []
    longest = []
    for batch in micro_batches(trajectories, weights, budget, CPU):
        assert batch.tokens.numel() <= budget
        longest.append(batch.tokens.shape[1])
        for index, row in enumerate(batch.rows.tolist()):
            trajectory, length = trajectories[row], len(trajectories[row])
            seen.append(row)
            for got, want in (
                (batch.tokens, trajectory.tokens),
                (batch.response_mask, trajectory.response_mask),
                (batch.behavior_logprobs, trajectory.behavior_logprobs),
                (batch.advantages, trajectory.advantages),
                (batch.attention_mask, np.ones(length)),
            ):
                np.testing.assert_array_equal(got[index, :length].numpy(), want)
                assert not got[index, length:].any()
            assert float(batch.weights[index, 0]) == np.float32(weights[row])
    assert sorted(seen) == list(range(12))
    assert longest == sorted(longest, reverse=True)


def test_a_budget_of_everything_makes_one_batch(random_batch):
    trajectories = random_batch(7)
    budget = 7 * max(map(len, trajectories))
    assert len(list(micro_batches(trajectories, np.ones(7), budget, CPU))) == 1
    assert len(list(micro_batches(trajectories, np.ones(7), budget - 1, CPU))) == 2


def test_what_does_not_fit_is_refused(random_batch):
    trajectories = random_batch(7)
    longest = max(map(len, trajectories))
    assert list(micro_batches(trajectories, np.ones(7), longest, CPU))
    with pytest.raises(ConfigError, match=f"{longest} tokens exceeds the token budget {longest - 1}"):
        next(micro_batches(trajectories, np.ones(7), longest - 1, CPU))


def test_advantages_are_needed(random_batch):
    with pytest.raises(TrajectoryError, match="without advantages"):
        next(micro_batches(random_batch(2, credited=False), np.ones(2), 1000, CPU))


def test_a_token_sampled_from_nothing_cannot_be_scored(random_batch):
    mask = np.array([True, True, False, True])
    parts = {
        "tokens": [1, 2, 3, 4],
        "response_mask": mask,
        "behavior_logprobs": np.where(mask, -1.0, 0),
        "advantages": np.where(mask, 1.0, 0),
        "turns": (Turn(0, 0, 2, 0.0), Turn(2, 3, 4, 0.0)),
    }
    with pytest.raises(TrajectoryError, match="sampled from nothing"):
        next(micro_batches(random_batch(1, **parts), np.ones(1), 1000, CPU))
