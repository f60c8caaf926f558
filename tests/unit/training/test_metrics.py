"""The numbers of an iteration."""

import warnings

import numpy as np
import pytest

from freshper import Exponential, NoDecay, ReplayBuffer, SampledBatch
from freshper.learning.learner import LearnerUpdate
from freshper.replay.diagnostics import drift
from freshper.replay.store.columns import pack
from freshper.rollout.collect import Rollout, Transcript, TranscriptTurn
from freshper.training.metrics import Metrics
from freshper.trajectory import StopReason


def _update(*, applied=True, gap=1e-6, log_ratios=(), **metrics):
    whole = {"loss": 1.0, "abs_log_ratio": gap, "ratio_max": 1.0, "learning_rate": 0.1, "grad_norm": 2.0} | metrics
    return LearnerUpdate(applied, whole, np.array(log_ratios, dtype=np.float64), np.zeros(len(log_ratios)))


def _draw(keys, ages, weights, probabilities):
    return SampledBatch(
        keys=np.array(keys),
        probabilities=np.array(probabilities),
        base_priorities=np.ones(len(keys)),
        sampling_weights=np.array(weights),
        ages=np.array(ages),
        uses=np.zeros(len(keys), dtype=np.int64),
        index_version=0,
        columns=pack([]),
        item_offsets=np.arange(len(keys) + 1),
    )


def _buffer(freshness=None):
    return ReplayBuffer(100, freshness=freshness)


def _transcript(*rewards, success=False, valid=True, error=None):
    turns = tuple(TranscriptTurn("o", "r", reward, valid) for reward in rewards)
    reason = StopReason.ERROR if error else StopReason.TERMINATED
    return Transcript(turns, "end", success, reason, error)


def test_the_numbers_of_a_rollout(make_trajectory):
    metrics = Metrics()
    transcripts = (
        _transcript(1.0, 1.0, success=True),
        _transcript(-0.15, -0.15, 0.0, 0.0, valid=False),
        _transcript(100.0, error="boom"),
    )
    metrics.rollout(Rollout((make_trajectory(), make_trajectory()), transcripts))
    row = metrics.close(1, 1, _buffer(), 0)
    assert row["rollout/score"] == pytest.approx((2.0 - 0.3) / 2)
    assert row["rollout/success"] == 0.5
    assert row["rollout/turns"] == 3.0
    assert row["rollout/invalid"] == pytest.approx(4 / 6)
    assert row["rollout/errors"] == 1
    assert row["episodes"] == 3, "an episode that broke was played, too"
    assert row["tokens"] == row["rollout/tokens"] == 4


def test_totals_run_on_and_everything_else_begins_anew(make_trajectory):
    metrics = Metrics()
    rollout = Rollout((make_trajectory(),), (_transcript(1.0),))
    metrics.rollout(rollout)
    metrics.fresh(_update())
    metrics.add({"eval/sampled_score": 3.0})
    with metrics.timed("rollout"):
        pass
    first = metrics.close(1, 1, _buffer(), 0)
    assert first["eval/sampled_score"] == 3.0
    metrics.rollout(rollout)
    second = metrics.close(2, 1, _buffer(), 0)
    assert (second["episodes"], second["tokens"], second["rollout/tokens"]) == (2, 4, 2)
    assert second.keys() == {name for name in first if not name.startswith(("eval/", "fresh/", "time/"))}


def test_a_rollout_in_which_everything_broke_has_no_means():
    metrics = Metrics()
    metrics.rollout(Rollout((), (_transcript(error="boom"),)))
    row = metrics.close(1, 0, _buffer(), 0)
    assert row["rollout/errors"] == 1
    assert not {"rollout/score", "rollout/success", "rollout/turns", "rollout/invalid"} & row.keys()


def test_updates_are_averaged_but_for_the_largest_ratio_the_last_rate_and_the_number_skipped():
    metrics = Metrics()
    metrics.fresh(_update(loss=1.0, ratio_max=3.0, learning_rate=0.3))
    metrics.fresh(_update(loss=2.0, ratio_max=5.0, learning_rate=0.2, applied=False))
    metrics.fresh(_update(loss=6.0, ratio_max=4.0, learning_rate=0.1))
    row = metrics.close(1, 2, _buffer(), 0)
    assert (row["fresh/loss"], row["fresh/ratio_max"], row["fresh/learning_rate"]) == (3.0, 5.0, 0.1)
    assert row["fresh/skipped"] == 1


def test_the_gap_is_that_of_the_first_fresh_update():
    metrics = Metrics()
    metrics.fresh(_update(gap=1e-7))
    metrics.fresh(_update(gap=0.5))  # a second epoch: the weights have moved, and rightly so
    assert metrics.close(1, 2, _buffer(), 0)["fresh/logprob_gap"] == 1e-7


def test_a_gap_above_the_limit_warns_once():
    metrics = Metrics()
    with pytest.warns(UserWarning, match=r"disagree by 0\.002 nats per token.*limit 0\.001"):
        metrics.fresh(_update(gap=2e-3))
    metrics.close(1, 1, _buffer(), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.fresh(_update(gap=2e-3))
    assert metrics.close(2, 2, _buffer(), 0)["fresh/logprob_gap"] == 2e-3


@pytest.mark.parametrize("gap", [0.0, 1e-3])
def test_a_gap_within_the_limit_is_quiet(gap):
    metrics = Metrics()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.fresh(_update(gap=gap))
    assert metrics.close(1, 1, _buffer(), 0)["fresh/logprob_gap"] == gap


def test_the_numbers_of_replay(make_trajectory):
    metrics = Metrics()
    first, second = _draw([1, 2], [4, 8], [1.0, 0.5], [0.5, 0.25]), _draw([2, 3], [8, 0], [1.0, 0.1], [0.25, 0.1])
    metrics.replay(first, _update(log_ratios=[0.1, -0.2]))
    metrics.replay(second, _update(log_ratios=[0.3, 0.0], loss=3.0))
    buffer = _buffer()
    buffer.add([make_trajectory()] * 77, policy_version=0)
    row = metrics.close(1, 3, buffer, 2)
    ess_fraction, kl, _ = drift(np.array([0.1, -0.2, 0.3, 0.0]), np.ones(4))  # of what was drawn, as it was drawn
    assert row["replay/ess_fraction"] == pytest.approx(ess_fraction)
    assert row["replay/kl"] == pytest.approx(kl)
    assert (row["replay/age_mean"], row["replay/age_max"]) == (5.0, 8.0)
    assert row["replay/weight_mean"] == pytest.approx(0.65)
    assert row["replay/weight_max"] == 1.0
    assert row["replay/repeated"] == pytest.approx(1 / 4)
    assert (row["replay/size"], row["replay/updates"], row["replay/loss"]) == (77, 2, 2.0)
    assert "fresh/loss" not in row


def test_before_replay_has_begun_its_number_is_zero_and_without_replay_it_is_absent():
    row = Metrics().close(1, 1, _buffer(), 2)
    assert (row["replay/size"], row["replay/updates"]) == (0, 0)
    assert not any(name.startswith("replay/") for name in Metrics().close(1, 1, _buffer(), 0))


def test_tau_is_logged_where_there_is_one():
    assert Metrics().close(1, 1, _buffer(Exponential(7.5)), 2)["replay/tau"] == 7.5
    assert "replay/tau" not in Metrics().close(1, 1, _buffer(NoDecay()), 2)


def test_time_is_counted_by_part_also_when_something_fails(make_trajectory):
    metrics = Metrics()
    metrics.rollout(Rollout((make_trajectory(),), (_transcript(1.0),)))
    with pytest.raises(ZeroDivisionError), metrics.timed("rollout"):
        _ = 1 / 0
    with metrics.timed("update"):
        pass
    with metrics.timed("update"):
        pass
    row = metrics.close(1, 1, _buffer(), 0)
    assert row["time/rollout_s"] > 0
    assert row["time/update_s"] > 0
    assert row["time/tokens_per_s"] == pytest.approx(2 / row["time/rollout_s"])
