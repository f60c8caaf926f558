"""``freshper train``: which settings a run gets."""

import pytest

from freshper import cli


def test_a_task_without_a_preset_trains_with_the_defaults(monkeypatch):
    seen = []
    monkeypatch.setattr("freshper.training.loop.train", lambda config, **options: seen.append(config) or _leave())
    with pytest.raises(KeyError):
        cli.main(
            ["train", "sokoban-hard", "--replay.freshness.tau=30", "--replay.batch-size", "16", "--arm", "recency"]
        )
    (config,) = seen
    assert (config.run.task, config.run.arm, config.replay.priority) == ("sokoban-hard", "recency", "uniform")
    assert (config.replay.freshness.tau, config.replay.batch_size) == (30, 16)


def _leave():
    raise KeyError("far enough")
