"""Every loss and its gradient, against a second implementation token by token in float64 (case T9)."""

import math

import numpy as np
import pytest
import torch

from freshper.errors import ConfigError
from freshper.learning.losses import LOG_RATIO_LIMIT, LOSSES, Clip, LossInputs, log_ratios, ppo

SHAPE = (5, 9)
CLIPS = [Clip(), Clip(low=0.1, high=0.3), Clip(low=0.8, high=0.2, dual=0.0), Clip(low=0.05, dual=1.5, truncation=1.0)]
CLIPS += [Clip(low=3e-4, high=4e-4, truncation=5.0), Clip(high=math.inf, truncation=1e6)]


def batch_of(seed=0, spread=0.5):
    """Log-probs, behavior log-probs, advantages, mask and weights; junk off the mask, one row with a single token."""
    rng = np.random.default_rng(seed)
    mask = rng.random(SHAPE) < 0.6
    mask[0] = np.arange(SHAPE[1]) == 4
    behavior = -rng.exponential(2.0, SHAPE)
    return {
        "logprobs": behavior + rng.normal(scale=spread, size=SHAPE),
        "behavior_logprobs": np.where(mask, behavior, 0),
        "advantages": np.where(mask, rng.normal(size=SHAPE), 0),
        "mask": mask,
    }


def as_torch(batch, dtype=torch.float64):
    columns = {name: torch.tensor(c, dtype=torch.bool if c.dtype == bool else dtype) for name, c in batch.items()}
    columns["logprobs"].requires_grad_()
    return LossInputs(**columns)


def slow_ppo(ratio, advantage, clip):
    """-objective and its derivative by the log of the ratio."""
    high = clip.high or clip.low
    if advantage >= 0:
        objective, moves = min(ratio, 1 + high) * advantage, ratio < 1 + high
    else:
        objective, moves = max(ratio, 1 - clip.low) * advantage, ratio > 1 - clip.low
    return -objective, -advantage * ratio if moves else 0.0


def slow_token(name, clip, row, place, batch):
    """Loss of one token, its derivative by the token's log-prob, and whether a bound took hold."""
    mask, logprobs, behavior = (batch[key][row] for key in ("mask", "logprobs", "behavior_logprobs"))
    logs = [logprobs[t] - behavior[t] for t in range(len(mask)) if mask[t]]
    logprob, advantage = logprobs[place], batch["advantages"][row][place]
    ratio = math.exp(logprob - behavior[place])
    outside = ratio > 1 + (clip.high or clip.low) or ratio < 1 - clip.low
    if name == "ppo":
        loss, slope = slow_ppo(ratio, advantage, clip)
        if clip.dual and advantage < 0 and ratio > clip.dual:
            loss, slope = -clip.dual * advantage, 0.0
        return loss, slope, outside
    if name == "gspo":
        ratio = math.exp(math.fsum(logs) / len(logs))
        outside = ratio > 1 + (clip.high or clip.low) or ratio < 1 - clip.low
        return *slow_ppo(ratio, advantage, clip), outside
    if name == "reinforce":
        weight, outside = 1.0, False
    elif name == "trajectory-is":
        weight, outside = math.prod(math.exp(x) for x in logs), False
    else:
        weight, outside = min(ratio, clip.truncation), ratio > clip.truncation
    return -weight * advantage * logprob, -weight * advantage, outside


@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("spread", [0.0005, 0.1, 0.5, 2.0])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_follows_its_definition(name, spread, clip):
    for seed in range(3):
        batch = batch_of(seed, spread)
        inputs = as_torch(batch)
        result = LOSSES[name](inputs, clip)
        [gradient] = torch.autograd.grad(result.values.sum(), inputs.logprobs)
        want, slope, outside = np.zeros(SHAPE), np.zeros(SHAPE), np.zeros(SHAPE, dtype=bool)
        for row, place in zip(*np.nonzero(batch["mask"]), strict=True):
            want[row, place], slope[row, place], outside[row, place] = slow_token(name, clip, row, place, batch)
        np.testing.assert_allclose(result.values.detach().numpy(), want, rtol=1e-11, atol=1e-14)
        np.testing.assert_allclose(gradient.numpy(), slope, rtol=1e-11, atol=1e-14)
        np.testing.assert_array_equal(result.outside.numpy(), outside)


def slow_gspo_objective(batch, clip):
    """GSPO as the paper has it (eq. 5): one ratio and one advantage per sequence; minus the mean over sequences."""
    objectives = []
    for row in range(SHAPE[0]):
        mask = batch.mask[row]
        ratio = ((batch.logprobs[row] - batch.behavior_logprobs[row])[mask].sum() / mask.sum()).exp()
        advantage = batch.advantages[row][mask][0]
        bounded = torch.clip(ratio, 1 - clip.low, 1 + (clip.high or clip.low))
        objectives.append(torch.min(ratio * advantage, bounded * advantage))
    return -torch.stack(objectives).mean()


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_one_advantage_per_sequence_makes_gspo_the_papers_own(clip):
    batch = batch_of(spread=0.3)
    batch["advantages"] = np.where(batch["mask"], np.array([[1.0], [-0.5], [2.0], [-3.0], [0.7]]), 0)
    inputs = as_torch(batch)
    got = (gspo := LOSSES["gspo"](inputs, clip)).total(1 / inputs.mask.double().sum(1, keepdim=True)) / SHAPE[0]
    want = slow_gspo_objective(inputs, clip)
    assert float(got.detach()) == pytest.approx(float(want.detach()), rel=1e-12)
    [one], [two] = (torch.autograd.grad(value, inputs.logprobs) for value in (got, want))
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-15)
    assert gspo.values.shape == SHAPE


def plain_ppo(inputs, weights, clip, dual):
    """The symmetric clip summed at once, in the operations of the first version; its bits must stay."""
    advantages, mask = inputs.advantages, inputs.mask
    difference = torch.where(mask, inputs.logprobs - inputs.behavior_logprobs, 0.0)
    log_ratio = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    if dual > 0:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)
    return -(weights * objective * mask).sum()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.0, 3.0), (0.2, 0.2, 3.0), (0.1, 0.1, 0.0)])
def test_symmetric_ppo_keeps_every_bit(seed, low, high, dual):
    inputs = as_torch(batch_of(seed), torch.float32)
    weights = torch.tensor(np.random.default_rng(seed).uniform(0, 2, (SHAPE[0], 1)), dtype=torch.float32)
    want = plain_ppo(inputs, weights, low, dual)
    got = ppo(inputs, Clip(low=low, high=high, dual=dual)).total(weights)
    assert torch.equal(got, want)
    [one], [two] = (torch.autograd.grad(value / 37, inputs.logprobs) for value in (got, want))
    assert torch.equal(one, two)


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_look_at_response_tokens_only(name):
    batch = batch_of()
    batch["logprobs"] = np.where(batch["mask"], batch["logprobs"], 50.0)
    ratios = np.exp(batch["logprobs"] - batch["behavior_logprobs"])[batch["mask"]]
    result = LOSSES[name](as_torch(batch), Clip())
    sums = result.sums()
    assert float(sums["abs_log_ratio"]) == pytest.approx(np.abs(np.log(ratios)).sum())
    assert float(sums["ratio_max"]) == pytest.approx(ratios.max())
    assert float(sums["clip_fraction"]) == result.outside.sum()
    if name == "ppo":
        assert float(sums["clip_fraction"]) == (np.abs(ratios - 1) > 0.2).sum() > 0
    assert not any(value.requires_grad for value in sums.values())
    logs = (batch["logprobs"] - batch["behavior_logprobs"]) * batch["mask"]
    np.testing.assert_allclose(result.log_ratios.numpy(), logs, atol=1e-12)


def test_the_largest_ratio_can_be_below_one():
    batch = batch_of(spread=0.0)
    batch["logprobs"] = batch["behavior_logprobs"] - 0.5
    assert float(ppo(as_torch(batch), Clip()).sums()["ratio_max"]) == pytest.approx(np.exp(-0.5))


def test_truncation_and_cispo_are_one_and_lose_no_token():
    inputs = as_torch(batch_of(spread=3.0))
    result = LOSSES["truncated-is"](inputs, Clip(truncation=1.5))
    [gradient] = torch.autograd.grad(result.values.sum(), inputs.logprobs)
    assert result.outside.any()
    assert (gradient[inputs.mask] != 0).all()
    assert (gradient.abs() <= 1.5 * inputs.advantages.abs() + 1e-12).all()
    assert torch.equal(result.values, LOSSES["cispo"](inputs, Clip(truncation=1.5)).values)


def test_the_product_of_a_whole_trajectory_is_bounded_and_said_to_be():
    inputs = LossInputs(*(torch.full((2, 6), value) for value in (-1.0, -9.0, 1.0)), torch.ones(2, 6, dtype=torch.bool))
    inputs.behavior_logprobs[1] = -1.5
    result = LOSSES["trajectory-is"](inputs, Clip())
    assert result.outside.tolist() == [[True] * 6, [False] * 6]
    assert float(result.values[0, 0]) == pytest.approx(math.exp(LOG_RATIO_LIMIT))
    assert float(result.values[1, 0]) == pytest.approx(math.exp(3.0))


def test_log_ratios_are_clamped_and_nothing_off_the_mask():
    logprobs = torch.tensor([[-1.0, -500.0, -1.0, -torch.inf, torch.nan]], requires_grad=True)
    behavior = torch.tensor([[-3.0, -1.0, -900.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True, False, False]])
    result = log_ratios(logprobs, behavior, mask)
    assert result.tolist() == [[2.0, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT, 0.0, 0.0]]
    result.exp().sum().backward()
    assert torch.isfinite(logprobs.grad).all()
    assert (logprobs.grad[0, 3:] == 0).all()


BAD = {
    "low": [0.0, -0.1, math.nan],
    "high": [-0.1, math.nan],
    "dual": [1.0, 0.5, -3.0, math.nan],
    "truncation": [0.99, 0.0, math.inf, math.nan],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
def test_bounds_that_bound_nothing_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name}.* {value} is out of range"):
        Clip(**{name: value})
