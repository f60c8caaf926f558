"""When a run ends early."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshper.errors import ConfigError, SnapshotError
from freshper.training.early_stop import EarlyStop


def test_the_best_is_found_and_patience_counts_from_there():
    watch = EarlyStop(2)
    assert [watch.update(score) for score in (-5.0, -3.0, -3.0)] == [True, True, False]
    assert (watch.best, watch.without_gain, watch.due) == (-3.0, 1, False)
    assert not watch.update(-4.0)
    assert watch.due
    assert watch.update(0.0)
    assert not watch.due


def test_without_patience_nothing_ends():
    watch = EarlyStop(0)
    for _ in range(100):
        watch.update(1.0)
    assert not watch.due


def test_a_score_that_is_not_a_number_is_no_gain():
    watch = EarlyStop(1)
    assert not watch.update(math.nan)
    assert watch.due
    assert watch.update(-1e9)
    assert not watch.update(math.nan)
    assert watch.best == -1e9


def test_negative_patience_is_refused():
    with pytest.raises(ConfigError, match="patience -1"):
        EarlyStop(-1)


@given(st.lists(st.floats(-10, 10), max_size=20), st.integers(0, 20), st.integers(1, 4))
def test_an_interruption_changes_nothing(scores, at, patience):
    whole, before, after = EarlyStop(patience), EarlyStop(patience), EarlyStop(patience)
    expected = [(whole.update(score), whole.due) for score in scores]
    seen = [(before.update(score), before.due) for score in scores[:at]]
    after.restore(json.loads(json.dumps(before.state())))
    seen += [(after.update(score), after.due) for score in scores[at:]]
    assert seen == expected
    assert after.state() == whole.state()
    gains = [place for place, (gained, _) in enumerate(expected) if gained]
    assert whole.best == (max(scores) if scores else None)
    assert [scores[place] for place in gains] == sorted({scores[place] for place in gains})


@pytest.mark.parametrize("state", [{}, {"best": "high", "without_gain": 0}, {"best": 1.0, "without_gain": None}])
def test_a_damaged_state_is_refused_and_changes_nothing(state):
    watch = EarlyStop(3)
    watch.update(2.0)
    with pytest.raises(SnapshotError, match="early stop is damaged"):
        watch.restore(state)
    assert watch.state() == {"best": 2.0, "without_gain": 0}
