"""The losses of tokens become one number: by definition, whatever the micro-batches, and never by sampling weights."""

import numpy as np
import pytest
import torch

from freshper.errors import ConfigError, UnknownNameError
from freshper.learning.aggregation import row_scales
from freshper.learning.batching import micro_batches

ALL = ["token", "sequence", "fixed"]
LENGTHS = [3, 1, 7, 2]
FIXED = 10


def losses_of(seed=0):
    """One list of token losses per row."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=length).tolist() for length in LENGTHS]


def slow_loss(aggregation, losses, weights):
    """Each written as its paper does."""
    if aggregation == "token":
        return sum(w * sum(row) for w, row in zip(weights, losses, strict=True)) / sum(map(len, losses))
    if aggregation == "sequence":
        return sum(w * (sum(row) / len(row)) for w, row in zip(weights, losses, strict=True)) / len(losses)
    return sum(w * sum(row) / FIXED for w, row in zip(weights, losses, strict=True)) / len(losses)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("aggregation", ALL)
def test_each_follows_its_definition(aggregation, seed):
    losses, weights = losses_of(seed), np.random.default_rng(seed).uniform(0, 2, len(LENGTHS))
    scales, divisor = row_scales(aggregation, LENGTHS, FIXED)
    got = sum(w * s * sum(row) for w, s, row in zip(weights, scales, losses, strict=True)) / divisor
    assert got == pytest.approx(slow_loss(aggregation, losses, weights), rel=1e-12)
    assert scales.shape == (len(LENGTHS),)


@pytest.mark.parametrize("aggregation", ALL)
def test_equal_losses_are_their_mean_times_the_mean_weight(aggregation):
    """Token and sequence give a mean; fixed gives it times the share of the length that was used."""
    scales, divisor = row_scales(aggregation, [4, 4, 4], 16)
    total = sum(scale * 4 * 2.5 for scale in scales) / divisor
    assert total == pytest.approx(2.5 if aggregation != "fixed" else 2.5 / 4)


def test_what_a_long_row_counts():
    """All tokens the same, all rows the same, or all tokens the same whatever was sampled beside them."""
    shares = {}
    for aggregation in ALL:
        scales, divisor = row_scales(aggregation, [9, 1], FIXED)
        shares[aggregation] = [9 * scales[0] / divisor, scales[1] / divisor]
    assert shares == {"token": [0.9, 0.1], "sequence": [0.5, 0.5], "fixed": [0.45, 0.05]}
    beside, divisor = row_scales("fixed", [9, 500], FIXED)
    assert 9 * beside[0] / divisor == shares["fixed"][0]


@pytest.mark.parametrize("budget", [30, 50, 1000])
@pytest.mark.parametrize("aggregation", ALL)
def test_micro_batches_add_up(random_batch, aggregation, budget):
    batch = random_batch(9)
    weights = np.linspace(0.2, 1.7, 9)
    scales, divisor = row_scales(aggregation, [trajectory.response_length for trajectory in batch], FIXED)
    total, passes = 0.0, 0
    for part in micro_batches(batch, weights * scales, max(budget, *map(len, batch)), torch.device("cpu")):
        total += float((part.weights * part.advantages).sum()) / divisor  # advantages stand in for token losses
        passes += 1
    tokens = [trajectory.advantages[trajectory.response_mask].astype(np.float64).tolist() for trajectory in batch]
    assert total == pytest.approx(slow_loss(aggregation, tokens, weights), abs=1e-6)
    assert (passes == 1) == (budget == 1000)


def test_by_token_the_scales_change_no_bit():
    weights = np.random.default_rng(0).uniform(size=4)
    scales, divisor = row_scales("token", LENGTHS)
    assert (weights * scales).tobytes() == weights.tobytes()
    assert divisor == sum(LENGTHS)


@pytest.mark.parametrize("lengths", [[], [3, 0], [[1, 2]]])
@pytest.mark.parametrize("aggregation", ALL)
def test_rows_without_tokens_are_refused(aggregation, lengths):
    with pytest.raises(ConfigError, match="at least one response token"):
        row_scales(aggregation, lengths, FIXED)


@pytest.mark.parametrize("length", [None, 0, -3])
def test_a_fixed_length_is_needed(length):
    with pytest.raises(ConfigError, match=f"fixed_length {length} must be at least 1"):
        row_scales("fixed", LENGTHS, length)


def test_an_unknown_one_is_refused():
    with pytest.raises(UnknownNameError, match="Did you mean 'token'"):
        row_scales("tokens", LENGTHS)
