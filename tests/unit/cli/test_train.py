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


@pytest.fixture
def settings_of(monkeypatch):
    """The settings that a command line would train with."""
    seen = []
    monkeypatch.setattr("freshper.training.loop.train", lambda config, **options: seen.append(config) or _leave())

    def read(*words):
        with pytest.raises(KeyError):
            cli.main(["train", *words])
        return seen.pop()

    return read


def test_another_model_brings_the_settings_that_suit_it_and_flags_still_win(settings_of):
    tiny = settings_of("sokoban")
    config = settings_of("sokoban", "--model", "Qwen/Qwen2.5-0.5B-Instruct", "--rollout.episodes", "16")
    assert config.policy.model == "Qwen/Qwen2.5-0.5B-Instruct"
    assert config.optimizer.learning_rate == 1e-6 < tiny.optimizer.learning_rate
    assert config.rollout.max_reply_tokens > tiny.rollout.max_reply_tokens
    assert config.rollout.episodes == 16
    assert (config.run.task, config.replay.freshness.kind) == ("sokoban", "exponential")
    assert settings_of("sokoban", "--model", "tiny") == tiny


def test_a_file_of_ones_own_keeps_its_settings_with_another_model(settings_of, tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('[run]\ntask = "sokoban"\n[optimizer]\nlearning_rate = 0.5\n')
    config = settings_of(str(path), "--model", "smollm2")
    assert (config.policy.model, config.optimizer.learning_rate) == ("smollm2", 0.5)
    assert config.rollout.max_reply_tokens == settings_of("sokoban").rollout.max_reply_tokens


def test_a_model_works_together_with_an_arm(settings_of):
    config = settings_of("sokoban", "--model", "smollm2", "--arm", "per")
    assert (config.policy.model, config.run.arm, config.replay.freshness.kind) == ("smollm2", "per", "none")
