"""Where a run stands."""

import json

import pytest

from freshper.errors import SnapshotError
from freshper.training.config_file import make_config
from freshper.training.standing import Standing


def _standing(iterations=10, every=3, patience=0, sample_every=4):
    run = {"iterations": iterations, "sample_every": sample_every}
    return Standing(make_config({"run": run, "eval": {"every": every, "patience": patience}}))


def _row(iteration):
    return {"iteration": iteration, "episodes": 8 * iteration, "policy_version": 3 * iteration, "x": 1.0}


def _play(standing, scores):
    """Iterate to the end; returns the iterations that were evaluated, the best ones, and those with a sample."""
    evaluated, best, samples = [], [], []
    scores = iter(scores)
    while not standing.over:
        standing.iteration += 1
        if standing.evaluates:
            evaluated.append(standing.iteration)
            if standing.evaluated({"sampled_score": next(scores)}):
                best.append(standing.iteration)
        if standing.samples:
            samples.append(standing.iteration)
        standing.iterated(_row(standing.iteration))
    return evaluated, best, samples


def test_evaluations_and_samples_come_in_their_turn_and_at_the_end():
    standing = _standing()
    assert _play(standing, [1.0, 3.0, 2.0, 3.0]) == ([3, 6, 9, 10], [3, 6], [4, 8, 10])
    facts = {"iterations": 10, "episodes": 80, "policy_version": 30, "eval": {"sampled_score": 3.0}}
    assert standing.facts == facts


@pytest.mark.parametrize(
    ("scores", "ended_after"),
    [([5, 4, 3], 9), ([1, 2, 3, 4], 10), ([5, 4, 6, 5], 10), ([float("nan"), float("nan")], 6), ([-1, 0, 0, 0], 10)],
)
def test_patience_ends_it(scores, ended_after):
    standing = _standing(patience=2)
    evaluated, _, samples = _play(standing, scores)
    assert evaluated[-1] == samples[-1] == standing.iteration == ended_after
    standing.status = "finished"
    early = "2 evaluations in a row were no better (eval.patience)"
    assert standing.result().get("stopped_early") == (early if ended_after < 10 else None)


def test_a_result_can_be_had_at_any_moment():
    standing = _standing()
    assert standing.result()["status"] == "failed"
    standing.status = "interrupted"
    result = standing.result()
    assert result["seconds"] >= 0
    assert result | {"seconds": 0} == {
        "status": "interrupted", "iterations": 0, "episodes": 0, "policy_version": 0, "seconds": 0
    }  # fmt: skip


@pytest.mark.parametrize("at", range(1, 10))
def test_one_that_goes_on_from_a_state_ends_as_the_other(at):
    scores = {3: 1.0, 6: 3.0, 9: 2.0, 10: 2.5}
    whole, first = _standing(), _standing()
    ends = _play(whole, scores.values())
    best = []
    for iteration in range(1, at + 1):
        first.iteration = iteration
        if first.evaluates and first.evaluated({"sampled_score": scores[iteration]}):
            best.append(iteration)
        first.iterated(_row(iteration))
    second = _standing()
    second.restore(json.loads(json.dumps(first.state())))
    evaluated, more, _ = _play(second, [score for iteration, score in scores.items() if iteration > at])
    assert best + more == ends[1]
    assert evaluated == [iteration for iteration in ends[0] if iteration > at]
    assert second.facts == whole.facts


def test_seconds_are_those_of_all_processes():
    first, second = _standing(), _standing()
    second.restore(first.state() | {"seconds": 1000.0})
    assert 1000 <= second.result()["seconds"] < 1010
    assert second.state()["seconds"] >= 1000


def test_facts_of_a_state_are_its_own():
    standing = _standing()
    state = standing.state()
    standing.facts["eval"] = {}
    assert "eval" not in state["facts"]


def test_the_announcement_says_where_it_begins():
    standing = _standing()
    standing.facts["warm_start"] = {"sampled_success": 0.256}
    assert standing.announcement() == "training; held-out success before RL: 0.26"
    standing.iteration = 4
    assert standing.announcement() == "training from iteration 4 on; held-out success before RL: 0.26"


@pytest.mark.parametrize("broken", [{"iteration": "x"}, {"facts": 3}, {"seconds": None}, {"scores": {}}])
def test_damage_is_named_and_changes_nothing(broken):
    standing = _standing()
    with pytest.raises(SnapshotError, match=r"(is|are) damaged"):
        standing.restore(standing.state() | {"iteration": 7} | broken)
    assert standing.iteration == 0
