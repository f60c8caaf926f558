"""The algorithms hold for any input: losses, KL, aggregation, advantages over groups, GAE (cases T9, T10, T11)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from freshper.learning.advantages import ADVANTAGES, NEEDS_GROUPS, group_facts, penalized_returns
from freshper.learning.aggregation import row_scales
from freshper.learning.critic import value_loss
from freshper.learning.gae import token_credit
from freshper.learning.kl import KL_ESTIMATORS, token_kl
from freshper.learning.losses import LOSSES, Clip, LossInputs
from freshper.trajectory import StopReason, Trajectory, Turn

torch.set_num_threads(1)

MANY = settings(max_examples=120, deadline=None)
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 8))
NAMES = st.sampled_from(sorted(LOSSES))


def floats(low, high):
    return st.floats(low, high, width=32)


clips = st.builds(
    Clip,
    low=st.floats(1e-4, 0.99),
    high=st.sampled_from([0.0, 4e-4, 0.28, 5.0]),
    dual=st.sampled_from([0.0, 1.5, 3.0]),
    truncation=st.floats(1, 100),
)


@st.composite
def batches_of(draw, size=1000):
    """Masks and numbers of any size, and junk off the mask; some rows may have no response token at all."""
    shape = draw(SHAPES)
    mask = draw(arrays.arrays(bool, shape))
    behavior = draw(arrays.arrays(np.float32, shape, elements=floats(-100, 0)))
    ratios = draw(arrays.arrays(np.float32, shape, elements=floats(-size, size)))
    advantages = draw(arrays.arrays(np.float32, shape, elements=floats(-100, 100)))
    junk = draw(st.sampled_from([0.0, 1e30, -np.inf, np.inf, np.nan]))
    return mask, behavior, behavior + ratios, advantages, junk


def inputs_of(batch, junk):
    mask, behavior, logprobs, advantages, _ = batch
    columns = [torch.tensor(np.where(mask, c, junk), dtype=torch.float32) for c in (logprobs, behavior, advantages)]
    columns[0].requires_grad_()
    return LossInputs(*columns, torch.tensor(mask))


@MANY
@given(batches_of(), clips, NAMES)
def test_all_is_finite_and_nothing_off_the_mask_has_a_say(batch, clip, name):
    """T9: ratios up to e^1000, anything off the mask."""
    results = []
    for junk in (batch[4], 0.0):
        inputs = inputs_of(batch, junk)
        loss = LOSSES[name](inputs, clip)
        [gradient] = torch.autograd.grad(loss.values.sum(), inputs.logprobs)
        assert torch.isfinite(loss.values).all()
        assert torch.isfinite(gradient).all()
        assert not gradient[~inputs.mask].any()
        assert not loss.values.detach()[~inputs.mask].any()
        assert not loss.outside[~inputs.mask].any()
        assert all(torch.isfinite(value) for value in loss.sums().values())
        results.append((loss.values.detach(), gradient, *loss.sums().values()))
    for with_junk, without in zip(*results, strict=True):
        assert torch.equal(with_junk, without)


@MANY
@given(batches_of(3), clips)
def test_ppo_bounds_what_can_be_won_and_lost(batch, clip):
    """A token wins at most (1 + high) A and, with dual clip c, loses at most c |A|; clipped ratios have no gradient."""
    inputs = inputs_of(batch, 0.0)
    loss = LOSSES["ppo"](inputs, clip)
    [gradient] = torch.autograd.grad(loss.values.sum(), inputs.logprobs)
    values, advantages = loss.values.detach().double(), inputs.advantages.double()
    room = 1e-5 * advantages.abs() + 1e-12
    good, bad = advantages > 1e-30, advantages < -1e-30  # smaller products round to one number
    assert (values[good] >= (-(1 + clip.above) * advantages - room)[good]).all()
    assert (values[bad] >= (-(1 - clip.low) * advantages - room)[bad]).all()
    if clip.dual:
        assert (values[bad] <= (-clip.dual * advantages + room)[bad]).all()
    ratio = loss.log_ratios.exp()
    assert not gradient[good & (ratio > 1 + clip.above + 1e-5)].any()
    assert not gradient[bad & (ratio < 1 - clip.low - 1e-5)].any()


@MANY
@given(batches_of(3), clips, st.permutations(range(8)))
def test_gspo_gives_every_token_of_a_row_the_same_ratio(batch, clip, order):
    """In whatever order they stand; value over advantage is one number per row and side."""
    mask = batch[0]
    columns = [order[k] for k in range(len(order)) if order[k] < mask.shape[1]]
    order = np.array([k for k in order if k < mask.shape[1]])
    assert sorted(columns) == list(range(mask.shape[1]))
    straight = LOSSES["gspo"](inputs_of(batch, 0.0), clip)
    mixed = LOSSES["gspo"](inputs_of((*(column[:, order] for column in batch[:4]), 0.0), 0.0), clip)
    np.testing.assert_allclose(straight.values.detach()[:, order], mixed.values.detach(), rtol=1e-4, atol=1e-5)
    advantages = torch.tensor(np.where(mask, batch[3], 0))
    for row in range(mask.shape[0]):
        for side in (advantages[row] > 1e-3, advantages[row] < -1e-3):
            ratios = (-straight.values.detach()[row] / advantages[row])[side & torch.tensor(mask[row])]
            assert ratios.numel() == 0 or float(ratios.max() - ratios.min()) <= 1e-4 * max(1.0, float(ratios.max()))


@MANY
@given(batches_of(), st.sampled_from(sorted(KL_ESTIMATORS)))
def test_kl_estimates_are_finite_and_k2_and_k3_never_negative(batch, name):
    inputs = inputs_of(batch, batch[4])
    values = token_kl(name, inputs.logprobs, inputs.behavior_logprobs, inputs.mask)
    [gradient] = torch.autograd.grad(values.sum(), inputs.logprobs)
    assert torch.isfinite(values).all()
    assert torch.isfinite(gradient).all()
    assert not values.detach()[~inputs.mask].any()
    # exp(d) - d - 1 of a tiny d is what float32 leaves of it
    assert name == "k1" or float(values.detach().min()) >= -1e-6


@MANY
@given(
    st.lists(st.integers(1, 50), min_size=2, max_size=8),
    st.sampled_from(["token", "sequence", "fixed"]),
    st.integers(1, 100),
    st.integers(1, 7),
)
def test_what_one_token_counts_for(lengths, aggregation, fixed, cut):
    """Every row counts at least something, and the parts of a batch add up to it."""
    scales, divisor = row_scales(aggregation, lengths, fixed)
    counts = np.array(lengths)
    total = (scales * counts).sum() / divisor
    want = {"token": 1.0, "sequence": 1.0, "fixed": counts.mean() / fixed}[aggregation]
    assert total == pytest.approx(want)
    cut = min(cut, len(lengths) - 1)
    parts = (scales[:cut] * counts[:cut]).sum() / divisor + (scales[cut:] * counts[cut:]).sum() / divisor
    assert parts == pytest.approx(total)
    assert (scales > 0).all()


@MANY
@given(arrays.arrays(np.int64, (3, 6), elements=st.integers(-800, 800)), st.sampled_from([0.0, 0.2, 5.0]))
def test_the_value_bound_only_ever_raises_the_loss(eighths, clip):
    values, old, targets = (torch.tensor(column) for column in eighths / 8)
    loss, clipped = value_loss(values, old, targets, clip=clip)
    plain, _ = value_loss(values, old, targets, clip=0.0)
    assert (loss >= plain).all()
    assert torch.equal(loss > plain, clipped)
    assert not clipped[(values - old).abs() < clip].any()


def trajectory_of(turns, group="g"):
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
        group=group,
        seed=0,
    )


turn = st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([0.0, 1.0, -0.1, 0.3, 10.9]))
episodes = st.lists(turn, min_size=1, max_size=4)
grouped = st.lists(st.tuples(st.sampled_from("abc"), episodes), min_size=1, max_size=9).map(
    lambda parts: [trajectory_of(turns, group) for group, turns in parts]
)


def rows_of(trajectories):
    return np.array([t.advantages[t.response_mask][0] for t in trajectories], dtype=np.float64)


def raised(trajectories, amounts):
    """Every episode earns its group's amount more, in its first turn."""
    return [
        replace(t, turns=(replace(t.turns[0], reward=t.turns[0].reward + amounts[t.group]), *t.turns[1:]))
        for t in trajectories
    ]


@MANY
@given(grouped, st.sampled_from(sorted(NEEDS_GROUPS)), st.sampled_from([0.0, 0.9, 1.0]))
def test_advantages_compare_within_groups_only(batch, name, gamma):
    """They sum to 0 over a group; what all of a group earn alike changes nothing; equal and alone are exactly 0."""
    advantages = rows_of(ADVANTAGES[name](batch, gamma))
    facts = group_facts(batch, gamma)
    for group in facts.names:
        own = np.array([t.group == group for t in batch])
        assert advantages[own].sum() == pytest.approx(0, abs=1e-4 * max(1.0, float(np.abs(advantages).max())))
        assert advantages[own].any() == (group not in facts.alone + facts.equal)
    after = rows_of(ADVANTAGES[name](raised(batch, {"a": 2.0, "b": -1.5, "c": 0.25}), gamma))
    np.testing.assert_allclose(after, advantages, rtol=1e-4, atol=1e-5)


@MANY
@given(grouped, st.sampled_from(sorted(NEEDS_GROUPS)), st.sampled_from([0.01, 3.0, 50.0]))
def test_which_advantages_know_the_unit_of_rewards(batch, name, factor):
    scaled = [replace(t, turns=tuple(replace(u, reward=factor * u.reward) for u in t.turns)) for t in batch]
    one, two = (rows_of(ADVANTAGES[name](b)) for b in (batch, scaled))
    normalized = name in ("grpo", "reinforce++-baseline")
    np.testing.assert_allclose(two, one if normalized else factor * one, rtol=1e-4, atol=1e-5)


@MANY
@given(grouped)
def test_leaving_one_out_is_the_distance_from_the_mean_made_larger(batch):
    counts = np.array([sum(other.group == t.group for other in batch) for t in batch])
    plain, left_out = (rows_of(ADVANTAGES[name](batch)) for name in ("grpo-no-std", "rloo"))
    np.testing.assert_allclose(left_out * (counts - 1), plain * counts, rtol=1e-4, atol=1e-5)


@MANY
@given(
    episodes.map(trajectory_of), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.9, 1.0]), st.integers(0, 99)
)
def test_credit_obeys_its_recursion(trajectory, gamma, lam, seed):
    """A_t = delta_t + g lambda A_{t+1} over sampled tokens, with g = gamma where a reply ends (T11)."""
    values = np.random.default_rng(seed).normal(size=len(trajectory))
    credit = token_credit(trajectory, values, gamma=gamma, gae_lambda=lam)
    places = np.flatnonzero(trajectory.response_mask)
    ends = {turn_.end - 1 for turn_ in trajectory.turns}
    for now, later in zip(places, [*places[1:], None], strict=True):
        fade = (gamma if now in ends else 1.0) * lam
        ahead = 0.0 if later is None else fade * credit.advantages[later]
        assert credit.advantages[now] == pytest.approx(credit.td_errors[now] + ahead, abs=1e-9)
    assert credit.targets[places] == pytest.approx(credit.advantages[places] + values[places], abs=1e-12)


@MANY
@given(episodes.map(trajectory_of), st.sampled_from([0.0, 0.5, 1.0]), st.floats(-2, 2), st.floats(0, 1))
def test_a_constant_penalty_costs_by_the_token(trajectory, gamma, penalty, weight):
    """Returns are linear in penalties; at gamma 1 the first token pays for every sampled one."""
    assume(abs(penalty) > 1e-3)
    [plain], [paid] = (
        penalized_returns([trajectory], [np.full(len(trajectory), amount)], weight, gamma) for amount in (0.0, penalty)
    )
    [one] = penalized_returns([trajectory], [np.ones(len(trajectory))], 1.0, gamma)
    np.testing.assert_allclose(paid - plain, weight * penalty * (one - plain), atol=1e-9)
    if gamma == 1:
        first = trajectory.turns[0].reply_start
        assert plain[first] - paid[first] == pytest.approx(weight * penalty * trajectory.response_length, abs=1e-9)
