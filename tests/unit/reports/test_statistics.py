"""Final values, areas, intervals and paired differences, against slow references."""

import itertools
import json
import math

import numpy as np
import pytest

from freshper.reports import read_compare, read_run, summarize_compare, summarize_run
from freshper.reports.statistics import (
    FINAL_SHARE,
    METRICS,
    area_under_curve,
    bootstrap_band,
    bootstrap_interval,
    final_mean,
    final_window,
    last_value,
)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def exact_interval(values):
    """The percentile bootstrap without drawing: every resample, each as likely as the other."""
    means = sorted(sum(part) / len(part) for part in itertools.product(values, repeat=len(values)))
    return [means[round(share * (len(means) - 1))] for share in (0.025, 0.975)]


@pytest.mark.parametrize(("iterations", "window"), [(1, 1), (3, 1), (7, 1), (10, 1), (11, 2), (100, 14), (150, 21)])
def test_the_final_window(iterations, window):
    assert final_window(iterations) == window
    assert window == max(1, round(FINAL_SHARE * iterations))


def test_a_run_against_plain_python(make_run):
    folder = make_run(iterations=50)
    lines = lines_of(folder)
    last = lines[-7:]
    area = sum(
        (b["episodes"] - a["episodes"]) * (a["rollout/score"] + b["rollout/score"]) / 2
        for a, b in itertools.pairwise(lines)
    ) / (lines[-1]["episodes"] - lines[0]["episodes"])
    summary = summarize_run(read_run(folder))
    assert summary.values["final_score"] == pytest.approx(sum(line["rollout/score"] for line in last) / 7)
    assert summary.values["final_success"] == pytest.approx(sum(line["rollout/success"] for line in last) / 7)
    assert summary.values["auc_score"] == pytest.approx(area)
    assert summary.values["heldout_success"] == lines[-1]["eval/sampled_success"]
    assert summary.values["heldout_greedy"] == lines[-1]["eval/greedy_success"]
    assert (summary.iterations, summary.episodes, summary.policy_version) == (50, 1600, 150)
    assert summary.seconds == 63.4
    assert summary.values.keys() == METRICS.keys()


def test_heldout_comes_from_the_result_when_no_iteration_has_it(make_run):
    summary = summarize_run(read_run(make_run(iterations=5)))
    assert summary.values["heldout_greedy"] != 0.9  # logged at iteration 5
    folder = make_run(name="bare", iterations=5)
    bare = [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in lines_of(folder)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in bare))
    summary = summarize_run(read_run(folder))
    assert summary.values["heldout_greedy"] == 0.9
    assert math.isnan(summary.values["heldout_success"])


def test_a_run_without_iterations_has_no_numbers(make_run):
    summary = summarize_run(read_run(make_run(iterations=0, status=None)))
    assert all(math.isnan(value) for value in summary.values.values())
    assert math.isnan(summary.episodes)
    assert math.isnan(summary.seconds)


def test_time_is_added_up_while_there_is_no_result(make_run):
    folder = make_run(iterations=4, status=None)
    expected = sum(line["time/iteration_s"] for line in lines_of(folder))
    assert summarize_run(read_run(folder)).seconds == pytest.approx(expected)


def test_missing_values_are_left_out():
    nan = math.nan
    assert math.isnan(final_mean(np.array([9.0, nan])))
    assert final_mean(np.array([0.0] * 18 + [4.0, nan, 2.0])) == 3.0
    assert area_under_curve(np.array([0.0, 1.0, 3.0]), np.array([2.0, nan, 6.0])) == 4.0
    assert area_under_curve(np.array([32.0]), np.array([5.0])) == 5.0
    assert math.isnan(area_under_curve(np.array([]), np.array([])))
    assert last_value(np.array([1.0, 2.0, nan])) == 2.0


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_against_every_possible_resample(seed):
    values = np.random.default_rng(seed).normal(2, 1, size=5).tolist()
    interval = bootstrap_interval(values)
    low, high = exact_interval(values)
    spread = high - low
    assert interval.mean == pytest.approx(sum(values) / 5)
    assert interval.low == pytest.approx(low, abs=0.04 * spread)  # 10,000 of the 3,125 equally likely resamples
    assert interval.high == pytest.approx(high, abs=0.04 * spread)
    assert interval.n == 5
    assert interval == bootstrap_interval(values)


def test_one_seed_has_no_interval():
    interval = bootstrap_interval([3.0])
    assert (interval.mean, interval.n) == (3.0, 1)
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)


def test_identical_values_have_an_interval_of_zero_width():
    interval = bootstrap_interval([0.1, 0.1, 0.1])
    assert (interval.mean, interval.low, interval.high, interval.n) == (0.1, 0.1, 0.1, 3)


def test_unknown_values_do_not_count():
    assert bootstrap_interval([1.0, math.nan, 3.0]).n == 2
    assert bootstrap_interval([1.0, math.nan, 3.0]).mean == 2.0
    assert bootstrap_interval([]).n == 0


def test_the_band_is_the_interval_at_every_point():
    curves = np.random.default_rng(0).normal(size=(4, 30))
    mean, low, high = bootstrap_band(curves)
    for place in (0, 13, 29):
        interval = bootstrap_interval(curves[:, place])
        assert (mean[place], low[place], high[place]) == pytest.approx((interval.mean, interval.low, interval.high))
    assert bootstrap_band(curves[:1])[1:] == (None, None)


def test_a_band_of_identical_curves_has_no_width():
    mean, low, high = bootstrap_band(np.ones((3, 4)))
    assert mean.tolist() == low.tolist() == high.tolist() == [1.0] * 4


def test_paired_differences_by_common_seed(make_compare):
    folder = make_compare(iterations=20, seeds=(0, 1, 2, 3), skip=[("on-policy", 0), ("freshper", 3)])
    compare = read_compare(folder)
    summary = summarize_compare(compare)
    difference = summary.difference("freshper", "final_score")
    score = {pair: summarize_run(run).values["final_score"] for pair, run in compare.runs.items()}
    expected = {seed: score["freshper", seed] - score["on-policy", seed] for seed in (1, 2)}
    assert summary.baseline == "on-policy"
    assert difference.values == pytest.approx(expected)
    assert difference.interval.mean == pytest.approx(sum(expected.values()) / 2)
    assert difference.in_favor == sum(value > 0 for value in expected.values())
    assert summary.difference("on-policy", "final_score") is None
    assert summary.arms[0].seeds == (1, 2, 3)


def test_a_tie_is_in_nobodys_favor(make_compare):
    folder = make_compare(iterations=5, arms=("on-policy", "twin"), seeds=(0, 1))
    for seed in (0, 1):
        source = folder / "on-policy" / f"seed{seed}" / "metrics.jsonl"
        (folder / "twin" / f"seed{seed}" / "metrics.jsonl").write_text(source.read_text())
    difference = summarize_compare(read_compare(folder)).difference("twin", "final_score")
    assert difference.in_favor == 0
    assert (difference.interval.mean, difference.interval.low, difference.interval.high) == (0, 0, 0)


def test_the_first_arm_is_the_baseline_without_on_policy(make_compare):
    summary = summarize_compare(read_compare(make_compare(iterations=3, arms=("per", "freshper"), seeds=(0,))))
    assert summary.baseline == "per"
    assert {difference.arm for difference in summary.differences} == {"freshper"}


@pytest.mark.parametrize("status", [None, "interrupted", "failed"])
def test_incomplete_runs_are_listed_and_never_averaged_in(make_compare, make_run, status):
    folder = make_compare(iterations=20, seeds=(0, 1, 2), skip=[("per", 1)])
    before = summarize_compare(read_compare(folder))
    result = folder / "freshper" / "seed2" / "result.json"
    told = {**json.loads(result.read_text()), "status": status}
    result.unlink() if status is None else result.write_text(json.dumps(told))
    summary = summarize_compare(read_compare(folder))
    fresh = summary.arms[2]
    scores = [before.arms[2].runs[seed].values["final_score"] for seed in (0, 1)]
    assert fresh.seeds == (0, 1)
    assert fresh.intervals["final_score"].mean == pytest.approx(sum(scores) / 2)
    assert [(r.arm, r.seed, r.status, r.iterations) for r in summary.incomplete] == [
        ("per", 1, "missing", 0),
        ("freshper", 2, status or "running", 20),
    ]
    assert "per seed 1 (missing, iteration 0)" in summary.notes[0]


def test_unequal_budgets_are_told(make_compare, make_run):
    folder = make_compare(iterations=10, arms=("on-policy", "per"), seeds=(0, 1))
    assert summarize_compare(read_compare(folder)).notes == ()
    for seed in (0, 1):
        make_run(name=f"compare/per/seed{seed}", arm="per", seed=seed, iterations=8)
    notes = summarize_compare(read_compare(folder)).notes
    assert notes == ("The arms consumed different numbers of episodes: on-policy 320, per 256.",)
