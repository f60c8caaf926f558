"""Which updates are not applied, what is kept of them, and when a run ends."""

import json
import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper import read_trajectories
from freshper.errors import ConfigError, DivergedError, SnapshotError
from freshper.learning.learner import Learner
from freshper.policies.tiny import build_model
from freshper.training.guard import Guard

WELL = {"loss": 0.5, "grad_norm": 1.0, "entropy": 2.0, "learning_rate": 3e-4, "ratio_max": 1.5}
ILL = WELL | {"loss": math.nan}
QUIET = np.zeros(2)


@pytest.fixture
def batch(make_trajectory):
    """Two trajectories of two response tokens each."""
    return [make_trajectory(1.0), make_trajectory(-1.0)]


def _kept(folder):
    return sorted(path.name for path in (folder / "skipped").glob("*"))


@pytest.mark.parametrize("kind", ["fresh", "replay"])
@pytest.mark.parametrize("name", ["loss", "grad_norm", "critic_loss", "critic_grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_applied(kind, name, value, batch, tmp_path):
    found = Guard(tmp_path).verdict(kind, WELL | {name: value}, QUIET, batch)
    assert found is not None
    assert found.reason == f"its {name} is {value}"
    assert "optimizer.learning_rate" in found.advice


def test_a_log_ratio_that_is_not_finite_is_found_and_another_metric_may_be_nan(batch, tmp_path):
    guard = Guard(tmp_path)
    assert guard.verdict("replay", WELL, np.array([0.0, np.nan]), batch).reason == "a log-ratio is not finite"
    assert guard.verdict("fresh", WELL | {"explained_variance": math.nan}, QUIET, batch) is None


def test_without_limits_every_finite_update_is_applied(batch, tmp_path):
    for kind in ("fresh", "replay"):
        assert Guard(tmp_path).verdict(kind, WELL | {"entropy": 0.0}, np.array([-90.0, 90.0]), batch) is None


@given(ratios=st.lists(st.floats(-3, 3), min_size=2, max_size=2), limit=st.floats(0.01, 1))
@settings(max_examples=50)
def test_the_drift_of_a_fresh_update_is_that_per_token(ratios, limit, make_trajectory):
    batch = [make_trajectory(), make_trajectory()]
    drift = -(ratios[0] + ratios[1]) / 4  # over two trajectories of two sampled tokens
    guard = Guard(mock.sentinel.never_written, max_kl=limit)
    found = guard.verdict("fresh", WELL, np.array(ratios), batch)
    assert (found is not None) == (drift > limit)
    assert guard.verdict("replay", WELL, np.array(ratios), batch) is None, "replayed ones may have drifted"


def test_trajectories_mixed_into_a_fresh_batch_do_not_count_as_drift(make_trajectory, tmp_path):
    guard, mixed = Guard(tmp_path, max_kl=0.1), [make_trajectory(version=7), make_trajectory(version=3)]
    assert guard.verdict("fresh", WELL, np.array([0.0, -5.0]), mixed, since=7) is None
    found = guard.verdict("fresh", WELL, np.array([-0.4, 0.0]), mixed, since=7)
    assert found.reason == "the policy has drifted 0.2 nats per token from its sampler (limit 0.1)"
    assert guard.verdict("fresh", WELL, np.array([-5.0, -5.0]), mixed, since=8) is None, "nothing fresh is left"
    assert guard.watch("fresh", 1, mixed, since=7)(WELL, np.array([0.0, -5.0])) is None
    assert guard.watch("fresh", 2, mixed)(WELL, np.array([0.0, -5.0])).startswith("the policy has drifted 1.25")


def test_a_collapsed_entropy_is_seen_on_fresh_updates(batch, tmp_path):
    guard = Guard(tmp_path, min_entropy=0.5)
    assert guard.verdict("fresh", WELL | {"entropy": 0.5}, QUIET, batch) is None
    found = guard.verdict("fresh", WELL | {"entropy": 0.25}, QUIET, batch)
    assert found.reason == "the entropy is 0.25 nats per token (limit 0.5)"
    assert "algorithm.entropy" in found.advice
    assert guard.verdict("replay", WELL | {"entropy": 0.25}, QUIET, batch) is None


@given(spread=st.floats(0, 5), limit=st.floats(0.01, 0.99))
@settings(max_examples=50)
def test_the_ess_of_a_replay_update_decides(spread, limit, make_trajectory):
    ratios = np.array([0.0, -spread])
    weights = np.exp(ratios)
    ess_fraction = weights.sum() ** 2 / (weights**2).sum() / 2  # Kish
    guard = Guard(mock.sentinel.never_written, min_ess=limit)
    batch = [make_trajectory(), make_trajectory()]
    if abs(ess_fraction - limit) > 1e-9:
        assert (guard.verdict("replay", WELL, ratios, batch) is not None) == (ess_fraction < limit)
    assert guard.verdict("fresh", WELL, ratios, batch) is None


def test_the_batch_of_a_skipped_update_is_kept(batch, tmp_path):
    guard, weights = Guard(tmp_path), np.array([0.25, 1.0])
    accept = guard.watch("replay", 123, batch, weights)
    assert accept(ILL, np.array([0.5, np.nan])) == "its loss is nan"
    assert _kept(tmp_path) == ["000123-replay-1.json", "000123-replay-1.jsonl"]
    again = list(read_trajectories(tmp_path / "skipped" / "000123-replay-1.jsonl"))
    assert [t.episode_return for t in again] == [1.0, -1.0]
    assert np.array_equal(again[0].behavior_logprobs, batch[0].behavior_logprobs)
    facts = json.loads((tmp_path / "skipped" / "000123-replay-1.json").read_text())
    assert facts == {
        "iteration": 123,
        "kind": "replay",
        "update": 1,
        "reason": "its loss is nan",
        "in_a_row": 1,
        "metrics": WELL | {"loss": None},
        "sampling_weights": [0.25, 1.0],
        "log_ratios": [0.5, None],
    }


def test_an_applied_update_leaves_no_trace(batch, tmp_path):
    assert Guard(tmp_path).watch("fresh", 1, batch)(WELL, QUIET) is None
    assert list(tmp_path.iterdir()) == []


def test_names_tell_which_update_it_was(batch, tmp_path):
    guard = Guard(tmp_path)
    for kind, metrics in (("fresh", ILL), ("replay", WELL), ("replay", ILL), ("replay", ILL)):
        guard.watch(kind, 4, batch)(metrics, QUIET)
    guard.watch("fresh", 5, batch)(ILL, QUIET)
    names = ["000004-fresh-1", "000004-replay-2", "000004-replay-3", "000005-fresh-1"]
    assert _kept(tmp_path) == [f"{name}.{suffix}" for name in names for suffix in ("json", "jsonl")]


def test_only_the_newest_batches_stay(batch, tmp_path):
    guard = Guard(tmp_path, patience=100, keep=3)
    for iteration in range(1, 9):
        guard.watch("fresh", iteration, batch)(ILL, QUIET)
    assert _kept(tmp_path) == [f"00000{n}-fresh-1.{suffix}" for n in (6, 7, 8) for suffix in ("json", "jsonl")]


def test_patience_counts_each_kind_by_itself_and_begins_anew(batch, tmp_path):
    guard = Guard(tmp_path, patience=3)
    for iteration in range(1, 3):
        assert guard.watch("fresh", iteration, batch)(ILL, QUIET)
        assert guard.watch("replay", iteration, batch)(WELL, QUIET) is None
    assert guard.watch("fresh", 3, batch)(WELL, QUIET) is None
    for iteration in range(4, 6):
        assert guard.watch("fresh", iteration, batch)(ILL, QUIET)
        assert guard.watch("replay", iteration, batch)(WELL, QUIET) is None
    with pytest.raises(DivergedError) as stopped:
        guard.watch("fresh", 6, batch)(ILL, QUIET)
    text = str(stopped.value)
    assert "3 fresh updates in a row were not applied (guard.patience 3)" in text
    assert "its loss is nan, at learning rate 0.0003: lower optimizer.learning_rate" in text
    assert str(tmp_path / "skipped") in text
    assert f"freshper train {tmp_path} --resume" in text
    assert "000006-fresh-1.jsonl" in _kept(tmp_path), "the last batch is kept as well"


def test_a_resumed_run_has_as_much_patience_left(batch, tmp_path):
    before, after = Guard(tmp_path, patience=3), Guard(tmp_path, patience=3)
    for iteration in (1, 2):
        before.watch("replay", iteration, batch)(ILL, QUIET)
    after.restore(json.loads(json.dumps(before.state())))
    with pytest.raises(DivergedError, match="3 replay updates in a row"):
        after.watch("replay", 3, batch)(ILL, QUIET)


@pytest.mark.parametrize("state", [{}, {"in_a_row": {"fresh": 1}}, {"in_a_row": {"fresh": "x", "replay": 0}}])
def test_a_damaged_state_is_refused(state, batch, tmp_path):
    guard = Guard(tmp_path)
    guard.watch("fresh", 1, batch)(ILL, QUIET)
    before = guard.state()
    with pytest.raises(SnapshotError, match="guard is damaged"):
        guard.restore(state)
    assert guard.state() == before


def test_a_full_disk_costs_the_batch_and_not_the_run(batch, tmp_path):
    (tmp_path / "skipped").write_text("a file is in the way")
    with pytest.warns(UserWarning, match="could not be kept"):
        assert Guard(tmp_path).watch("fresh", 1, batch)(ILL, QUIET) == "its loss is nan"


@pytest.mark.parametrize(
    "wrong", [{"patience": 0}, {"max_kl": -1.0}, {"min_entropy": -1.0}, {"min_ess": 1.0}, {"keep": 0}]
)
def test_limits_out_of_range_are_refused(wrong, tmp_path):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Guard(tmp_path, **wrong)


def test_a_real_learner_that_explodes_stops_with_its_weights_unharmed(make_trajectory, tmp_path):
    model = build_model(16, hidden_size=8, layers=1, heads=2, context=16, seed=0)
    learner = Learner(model, learning_rate=1e30, total_updates=100)
    guard = Guard(tmp_path, patience=3)
    ones = np.array([0.0, 1.0, 0.0, 1.0])
    batch = [make_trajectory(advantages=ones), make_trajectory(advantages=-ones)]
    updates = []

    def run():
        for iteration in range(1, 50):
            updates.append(learner.update(batch, accept=guard.watch("fresh", iteration, batch)))

    with pytest.raises(DivergedError, match="3 fresh updates in a row"):
        run()
    applied = sum(update.applied for update in updates)
    assert applied >= 1, "the first gradient is finite"
    assert [update.applied for update in updates] == [True] * applied + [False] * 2
    assert learner.version == applied
    assert len(_kept(tmp_path)) == 2 * 3


def test_a_skipped_update_changes_neither_weights_nor_clock(make_trajectory, tmp_path):
    model = build_model(16, hidden_size=8, layers=1, heads=2, context=16, seed=0)
    learner, guard = Learner(model, learning_rate=1e-2, total_updates=100), Guard(tmp_path, min_entropy=1e3)
    batch = [make_trajectory(advantages=np.array([0.0, 1.0, 0.0, 1.0]))]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    update = learner.update(batch, accept=guard.watch("fresh", 1, batch))
    assert not update.applied
    assert learner.version == 0
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    learner.update(batch, accept=guard.watch("replay", 1, batch))
    assert learner.version == 1
    assert not all(value.equal(before[name]) for name, value in model.state_dict().items())
