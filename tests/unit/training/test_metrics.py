"""The numbers of an iteration."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest

from freshper import Exponential, NoDecay, ReplayBuffer, SampledBatch
from freshper.errors import SnapshotError
from freshper.learning.learner import LearnerUpdate
from freshper.replay.diagnostics import drift
from freshper.replay.store.columns import pack
from freshper.rollout.collect import Rollout, Transcript, TranscriptTurn
from freshper.training.metrics import Metrics
from freshper.trajectory import StopReason


def _update(*, applied=True, gap=1e-6, log_ratios=(), **metrics):
    whole = {"loss": 1.0, "abs_log_ratio": gap, "ratio_max": 1.0, "learning_rate": 0.1, "grad_norm": 2.0} | metrics
    reason = "" if applied else "its loss is nan"
    return LearnerUpdate(reason, whole, np.array(log_ratios, dtype=np.float64), np.zeros(len(log_ratios)))


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


def test_the_numbers_of_a_mixture_are_told_by_task(make_trajectory):
    played = [
        replace(_transcript(1.0, success=True), task="b", measures={"f1": 1.0}),
        replace(_transcript(0.0), task="b", measures={"f1": 0.5}),
        replace(_transcript(-1.0), task="a"),
        replace(_transcript(9.0, error="boom"), task="a"),
    ]
    metrics = Metrics()
    metrics.rollout(Rollout((make_trajectory(),) * 3, tuple(played)))
    row = metrics.close(1, 1, _buffer(), 0)
    assert (row["rollout/a/episodes"], row["rollout/a/success"], row["rollout/a/score"]) == (1, 0, -1)
    assert (row["rollout/b/episodes"], row["rollout/b/success"], row["rollout/b/score"]) == (2, 0.5, 0.5)
    assert row["rollout/f1"] == 0.75
    metrics.rollout(Rollout((make_trajectory(),), (played[0],)))
    assert not [name for name in metrics.close(2, 2, _buffer(), 0) if name.startswith("rollout/b")]


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


def test_the_gap_of_a_mixed_batch_is_that_of_its_fresh_trajectories(make_trajectory):
    metrics = Metrics()
    batch = [make_trajectory(version=4), make_trajectory(version=1), make_trajectory(version=4)]
    metrics.fresh(_update(gap=0.5, log_ratios=[4e-4, -9.0, -8e-4]), batch, 4)
    gap = metrics.close(1, 5, _buffer(), 0)["fresh/logprob_gap"]
    assert gap == pytest.approx((4e-4 + 8e-4) / 4)  # two trajectories of two sampled tokens; and nobody is warned
    metrics.fresh(_update(gap=2e-4, log_ratios=[0.0, 0.0]), batch[::2], 4)
    assert metrics.close(2, 6, _buffer(), 0)["fresh/logprob_gap"] == 2e-4
    metrics.fresh(_update(gap=0.5, log_ratios=[-9.0]), batch[1:2], 4)  # nothing fresh is left in it
    assert "fresh/logprob_gap" not in metrics.close(3, 7, _buffer(), 0)
    with pytest.warns(UserWarning, match="disagree by 0\\.5"):
        metrics.fresh(_update(gap=9.0, log_ratios=[1.0, -9.0, -1.0]), batch, 4)


def test_what_is_measured_more_than_once_is_averaged():
    metrics = Metrics()
    metrics.measure("replay", {"critic_loss": 1.0, "ratio_max": 5.0, "critic_learning_rate": 0.2})
    metrics.measure("replay", {"critic_loss": 4.0, "ratio_max": 2.0, "critic_learning_rate": 0.1})
    metrics.measure("fresh", {"critic_loss": 7.0})
    row = metrics.close(1, 1, _buffer(), 0)
    assert (row["replay/critic_loss"], row["replay/ratio_max"], row["replay/critic_learning_rate"]) == (2.5, 5.0, 0.1)
    assert row["fresh/critic_loss"] == 7.0
    assert not any("critic" in name for name in metrics.close(2, 1, _buffer(), 0))


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


def test_the_shape_of_a_rollout_is_told(make_trajectory):
    metrics = Metrics()
    cut = Transcript((TranscriptTurn("o", "r", 3.0, True),) * 2, "end", False, StopReason.TOKEN_LIMIT, None)
    metrics.rollout(Rollout((make_trajectory(),) * 2, (_transcript(0.0, 0.0), cut)))
    row = metrics.close(1, 1, _buffer(), 0)
    assert row["rollout/score_std"] == 3.0  # returns 0 and 6
    assert row["rollout/reply_tokens"] == 1.0  # four sampled tokens in four turns
    assert row["rollout/token_limit"] == 0.5


def test_the_kl_to_the_reference_and_the_drift_have_their_own_names():
    metrics = Metrics()
    metrics.fresh(_update(kl=0.25))
    metrics.replay(_draw([1, 2], [1, 1], [1.0, 1.0], [0.5, 0.5]), _update(log_ratios=[0.3, -0.3], kl=0.75))
    row = metrics.close(1, 2, _buffer(), 1)
    _, kl, _ = drift(np.array([0.3, -0.3]), np.ones(2))
    assert (row["fresh/reference_kl"], row["replay/reference_kl"], row["replay/kl"]) == (0.25, 0.75, kl)
    assert "fresh/kl" not in row


def test_a_number_that_only_some_updates_have_is_averaged_over_those():
    metrics = Metrics()
    metrics.fresh(_update())
    metrics.fresh(_update(critic_loss=4.0, critic_learning_rate=0.5, weight_max=2.0))
    metrics.fresh(_update(critic_loss=2.0, critic_learning_rate=0.25, weight_max=7.0))
    row = metrics.close(1, 3, _buffer(), 0)
    assert (row["fresh/critic_loss"], row["fresh/critic_learning_rate"], row["fresh/weight_max"]) == (3.0, 0.25, 7.0)


def test_a_ratio_that_is_not_finite_spoils_no_window():
    metrics = Metrics()
    metrics.replay(_draw([1], [1], [1.0], [0.5]), _update(applied=False, log_ratios=[np.nan], loss=np.nan))
    alone = metrics.close(1, 1, _buffer(), 1)
    assert not {"replay/kl", "replay/ess_fraction"} & alone.keys()
    assert alone["replay/skipped"] == 1
    metrics.replay(_draw([2, 3], [1, 1], [1.0, 1.0], [0.5, 0.5]), _update(log_ratios=[0.1, -0.1]))
    _, kl, _ = drift(np.array([0.1, -0.1]), np.ones(2))
    assert metrics.close(2, 2, _buffer(), 1)["replay/kl"] == kl


def test_a_largest_number_that_is_not_a_number_is_seen():
    metrics = Metrics()
    for ratio in (2.0, np.nan, 3.0):
        metrics.fresh(_update(ratio_max=ratio))
    assert np.isnan(metrics.close(1, 1, _buffer(), 0)["fresh/ratio_max"])


def _play(metrics, rng, make_trajectory, iteration):
    """One iteration of random numbers; its row without the times."""
    metrics.rollout(Rollout((make_trajectory(),), (_transcript(float(rng.normal())),)))
    metrics.fresh(_update(loss=float(rng.normal())))
    for _ in range(3):
        keys = rng.integers(0, 50, 4)
        draw = _draw(keys, rng.integers(0, 9, 4), rng.random(4), rng.random(4))
        metrics.replay(draw, _update(log_ratios=rng.normal(size=4)))
    return metrics.close(iteration, iteration, _buffer(), 3)


@pytest.mark.parametrize("at", [1, 5, 25])
def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one_bit_for_bit(at, make_trajectory):
    rng, whole = np.random.default_rng(0), Metrics()
    rows, states, draws = [], [], []
    for iteration in range(1, 31):  # 90 replay updates: the window of 64 is full and moves
        rows.append(_play(whole, rng, make_trajectory, iteration))
        states.append(json.dumps(whole.state()))
        draws.append(rng.bit_generator.state)
    resumed = Metrics()
    resumed.fresh(_update(loss=1e9))  # of an iteration that was not whole
    resumed.restore(json.loads(states[at - 1]))
    rng.bit_generator.state = draws[at - 1]
    assert [_play(resumed, rng, make_trajectory, iteration) for iteration in range(at + 1, 31)] == rows[at:]
    assert json.dumps(resumed.state()) == states[-1]


def test_a_restored_run_does_not_warn_again():
    warned, resumed = Metrics(), Metrics()
    with pytest.warns(UserWarning, match="disagree"):
        warned.fresh(_update(gap=1.0))
    resumed.restore(warned.state())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.fresh(_update(gap=1.0))
    assert resumed.close(1, 1, _buffer(), 0)["fresh/logprob_gap"] == 1.0


@pytest.mark.parametrize(
    "damage",
    [{"episodes": "many"}, {"tokens": None}, {"recent": [1.0]}, {"recent": [["a"]]}, {"recent": 3}],
    ids=str,
)
def test_damaged_metrics_are_refused_and_change_nothing(damage, make_trajectory):
    metrics = Metrics()
    _play(metrics, np.random.default_rng(0), make_trajectory, 1)
    before = metrics.state()
    with pytest.raises(SnapshotError, match="saved metrics are damaged"):
        metrics.restore(before | damage)
    with pytest.raises(SnapshotError, match="episodes"):
        metrics.restore({})
    assert metrics.state() == before


def test_every_number_is_plain(make_trajectory):
    """A checkpoint holds nothing of numpy's."""
    metrics = Metrics()
    metrics.add({"eval/score": np.float64(1.5)})
    metrics.measure("replay", {"value_loss": np.float64(2.5), "critic_learning_rate": np.float32(0.5)})
    metrics.fresh(_update(loss=np.float64(1.0), learning_rate=np.float64(0.1)))
    row = metrics.close(1, 1, _buffer(), 2)
    assert {type(value) for value in row.values()} <= {int, float}
