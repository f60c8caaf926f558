"""Held-out scores: of episodes that came to an end, with those that broke counted."""

import pytest

from freshper.envs import make_env
from freshper.errors import EnvError
from freshper.policies.scripted import ScriptedPolicy
from freshper.training import evaluate as room
from freshper.training.config_file import make_config

CONFIG = make_config({"eval": {"episodes": 4}, "rollout": {"max_turns": 2}})


@pytest.fixture
def breaking(monkeypatch):
    """So many evaluation environments break in their second turn."""

    def set_up(count):
        made = []

        def make(config, split):
            env = make_env(config.run.task, split)
            made.append(env)
            if len(made) % 4 < count:
                monkeypatch.setattr(env, "step", lambda reply: 1 / 0)
            return env

        monkeypatch.setattr(room, "make_task", make)

    return set_up


def played(policy):
    return room.evaluate_both(policy, CONFIG)


def test_broken_episodes_raise_no_score(breaking):
    policy = ScriptedPolicy(lambda turn: "nothing")
    whole, _ = played(policy)
    assert whole["errors"] == 0
    breaking(2)
    some, _ = played(policy)
    assert some["errors"] == 2 * 2  # sampled and greedy
    assert some["sampled_score"] == pytest.approx(whole["sampled_score"])  # every episode costs the same


def test_where_all_break_there_is_no_score(breaking):
    breaking(4)
    with pytest.raises(EnvError, match="every one of 4 evaluation episodes broke"):
        played(ScriptedPolicy(lambda turn: "nothing"))
