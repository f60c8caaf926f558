"""Trajectories of different lengths as padded tensors within a token budget."""

import itertools

import numpy as np
import pytest
import torch

from freshper.errors import ConfigError, TrajectoryError
from freshper.learning.batching import _cheapest, _padded_tokens, _widest, micro_batches
from freshper.trajectory import StopReason, Trajectory, Turn

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
            assert batch.lengths[index] == length
        assert torch.equal(batch.response_index, batch.response_mask.view(-1).nonzero()[:, 0])
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


def split_of(lengths, budget, **how):
    """The rows of each micro-batch of trajectories of these lengths, and its width."""
    batches = micro_batches([of_length(length) for length in lengths], np.ones(len(lengths)), budget, CPU, **how)
    return [(batch.rows.tolist(), batch.tokens.shape[1]) for batch in batches]


def of_length(length):
    mask = np.arange(length) > 0
    zeros = np.zeros(length)
    parts = {"stop_reason": StopReason.TERMINATED, "success": True, "policy_version": 0, "task": "t", "group": "g"}
    turns = (Turn(0, 1, length, 0.0),)
    return Trajectory(np.ones(length, int), mask, zeros, turns, seed=0, advantages=zeros, **parts)


def test_the_order_of_rows_is_that_of_falling_length_and_then_of_arrival():
    assert split_of([3, 7, 3, 9, 7], 100) == [([3, 1, 4, 0, 2], 9)]
    assert split_of([3, 7, 3, 9, 7], 18) == [([3, 1], 9), ([4, 0], 7), ([2], 3)]


def every_split(lengths):
    """All ways to cut a falling sequence into runs."""
    for cuts in itertools.product([False, True], repeat=len(lengths) - 1):
        bounds = [0, *(k + 1 for k, cut in enumerate(cuts) if cut), len(lengths)]
        yield [lengths[a:b] for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("pass_cost", [0, 5, 40, 10_000])
def test_a_pass_cost_gives_the_cheapest_split_of_all(seed, pass_cost):
    """Against every other split that the budget allows."""
    rng = np.random.default_rng(seed)
    lengths, budget = rng.integers(2, 60, 9).tolist(), 150
    cost = sum(len(rows) * width + pass_cost for rows, width in split_of(lengths, budget, pass_cost=pass_cost))
    allowed = [s for s in every_split(sorted(lengths, reverse=True)) if all(len(run) * run[0] <= budget for run in s)]
    assert cost == min(sum(len(run) * run[0] + pass_cost for run in s) for s in allowed)


def test_padding_is_below_a_tenth_of_the_compute_on_realistic_lengths():
    """Log-normal lengths (median 400, sigma 0.8: the longest of 64 is about 6 times the median), 50 batches of 64."""
    rng = np.random.default_rng(0)
    padded = {None: 0, 64: 0}
    tokens = 0
    for _ in range(50):
        lengths = np.clip(rng.lognormal(np.log(400), 0.8, 64).astype(int), 2, 4096)
        tokens += lengths.sum()
        falling = np.sort(lengths)[::-1]
        _, cheapest = _cheapest(64, 16_384, 64, _padded_tokens(falling))
        for cost, ends in ((None, _widest(falling, 16_384)), (64, cheapest)):
            groups = np.split(falling, ends[:-1])
            padded[cost] += sum(len(group) * group[0] for group in groups)
    assert padded[64] / tokens - 1 < 0.1
    assert padded[None] / tokens - 1 > 0.15


def test_a_packed_micro_batch_holds_true_tokens_up_to_the_budget():
    assert split_of([3, 7, 3, 9, 7], 16, packed=True) == [([3, 1], 9), ([4, 0, 2], 7)]
    assert split_of([3, 7, 3, 9, 7], 29, packed=True) == [([3, 1, 4, 0, 2], 9)]
    assert [len(rows) for rows, _ in split_of([5] * 7, 5, packed=True)] == [1] * 7
    with pytest.raises(ConfigError, match="9 tokens exceeds the token budget 8"):
        split_of([3, 9], 8, packed=True)
