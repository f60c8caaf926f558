"""The comparison as a terminal table and as JSON data."""

import io
import json

import pytest
from rich.console import Console

from freshper.reports import compare_json, compare_table, read_compare, summarize_compare
from freshper.reports.statistics import METRICS
from freshper.reports.text import number


def printed(summary, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(compare_table(summary))
    return console.file.getvalue()


@pytest.fixture
def summary(make_compare):
    return summarize_compare(read_compare(make_compare(iterations=20, seeds=(0, 1, 2), skip=[("per", 2)])))


def test_json_holds_every_number(summary):
    told = json.loads(json.dumps(compare_json(summary), allow_nan=False))
    arm = summary.arms[2]
    for metric in METRICS:
        entry, interval = told["arms"]["freshper"][metric], arm.intervals[metric]
        assert (entry["mean"], entry["low"], entry["high"]) == (interval.mean, interval.low, interval.high)
        assert entry["n"] == 3
        assert entry["values"] == {str(seed): run.values[metric] for seed, run in arm.runs.items()}
        assert told["paired"]["freshper"][metric]["mean"] == summary.difference("freshper", metric).interval.mean
    assert told["baseline"] == "on-policy"
    assert told["arms"]["freshper"]["episodes"]["mean"] == 640
    assert told["arms"]["freshper"]["policy_version"]["values"] == {"0": 60, "1": 60, "2": 60}
    assert told["arms"]["on-policy"]["policy_version"]["mean"] == 20
    assert told["paired"]["per"]["final_score"]["n"] == 2
    assert told["paired"].keys() == {"per", "freshper"}
    assert told["incomplete"] == [{"arm": "per", "seed": 2, "status": "missing", "iterations": 0}]


def test_json_has_null_where_nothing_is_known(make_compare):
    folder = make_compare(iterations=5, seeds=(0,), skip=[("per", 0)])
    told = json.loads(json.dumps(compare_json(summarize_compare(read_compare(folder))), allow_nan=False))
    assert told["arms"]["freshper"]["final_score"]["low"] is None
    assert told["arms"]["per"]["final_score"] == {"mean": None, "low": None, "high": None, "n": 0, "values": {}}
    assert told["paired"]["per"]["final_score"]["n"] == 0
    assert any("One seed only" in note for note in told["notes"])


def test_the_table_fits_a_terminal_and_tells_the_numbers(summary):
    text = printed(summary)
    score, difference = summary.arms[2].intervals["final_score"], summary.difference("freshper", "final_score")
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "on-policy" in text
    assert "episodes" in text
    assert "held-out" in text
    assert f"{number(score.low, 2)}…{number(score.high, 2)}" in text
    assert number(difference.interval.mean, 2, sign=True) in text
    assert f"{difference.in_favor}/3" in text
    assert "baseline" in text
    assert "2/3" in text
    assert "per seed 2 (missing" in text.replace("\n", " ")


def test_markup_in_names_is_text(make_compare):
    folder = make_compare(iterations=3, arms=("on-policy", "[red]x"), seeds=(0, 1))
    assert "[red]x" in printed(summarize_compare(read_compare(folder)))


@pytest.mark.parametrize(("metric", "digits"), [("final_score", 2), ("auc_score", 2), ("heldout_success", 3)])
def test_the_table_has_mean_and_interval_of_every_arm(summary, metric, digits):
    text = printed(summary)
    for arm in summary.arms:
        interval = arm.intervals[metric]
        assert number(interval.mean, digits) in text
        assert f"{number(interval.low, digits)}…{number(interval.high, digits)}" in text
