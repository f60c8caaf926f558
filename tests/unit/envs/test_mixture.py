"""Mixtures of tasks: drawn by weight from the seed, and otherwise the tasks themselves."""

from collections import Counter

import numpy as np
import pytest

from freshper.envs import MixtureEnv, Pictured, Teachable, check_env, make_env
from freshper.errors import ConfigError, EnvError, UnknownNameError

WEIGHTS = {"sokoban": 3.0, "frozenlake": 1.0}


def test_it_keeps_the_contract():
    check_env(lambda: make_env("mixture", weights=WEIGHTS))


def test_tasks_are_drawn_by_weight():
    env = make_env("mixture", weights=WEIGHTS)
    drawn = Counter()
    for seed in range(1000):
        env.reset(seed)
        drawn[env.task] += 1
    assert drawn["sokoban"] / 1000 == pytest.approx(0.75, abs=0.055)  # 4 standard errors


def test_chances_can_be_changed_while_it_is_in_use():
    env = make_env("mixture", weights=WEIGHTS)
    assert env.tasks == ("sokoban", "frozenlake")
    env.draw_by([0.1, 0.9])
    drawn = Counter()
    for seed in range(1000):
        env.reset(seed)
        drawn[env.task] += 1
    assert drawn["sokoban"] / 1000 == pytest.approx(0.1, abs=0.038)  # 4 standard errors
    assert env.weights == (0.75, 0.25)
    for wrong in ([1.0], [-0.5, 1.5], [float("nan"), 1.0], [0.1, 0.1], [0.0, 0.0], [float("inf"), 0.0]):
        with pytest.raises(ConfigError, match="are no chances of the 2 tasks sokoban, frozenlake"):
            env.draw_by(wrong)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_an_episode_is_that_of_its_task(split):
    mixed = make_env("mixture", split, weights=WEIGHTS)
    alone = {task: make_env(task, split) for task in WEIGHTS}
    rng, same = np.random.default_rng(0), np.random.default_rng(0)
    for seed in range(12):
        observation = mixed.reset(seed)
        own = alone[mixed.task]
        assert observation == own.reset(seed)
        assert (mixed.instructions, mixed.max_turns) == (own.instructions, own.max_turns)
        assert mixed.solution() == own.solution()
        outcome = mixed.step(mixed.demonstrate(rng))
        assert outcome == own.step(own.demonstrate(same))


def test_settings_reach_their_task():
    env = make_env("mixture", weights={"frozenlake": 1.0, "sokoban": 1.0}, options={"frozenlake": {"size": 6}})
    sizes = {}
    for seed in range(30):
        sizes[env.task if seed else ""] = env.reset(seed).count("\n") + 1
        sizes[env.task] = env.reset(seed).count("\n") + 1
    assert sizes["frozenlake"] == 6
    assert sizes["sokoban"] == 4


def test_pictures_are_shown_by_the_tasks_that_have_them():
    env = make_env("mixture", weights={"frozenlake-image": 1.0, "sokoban": 1.0})
    assert isinstance(env, Pictured)
    assert isinstance(env, Teachable)
    shown = set()
    for seed in range(20):
        env.reset(seed)
        shown.add((env.task, len(env.images())))
    assert shown == {("frozenlake-image", 1), ("sokoban", 0)}
    assert not isinstance(make_env("mixture", weights=WEIGHTS), Pictured)


def test_before_an_episode_nothing_can_be_played():
    env = make_env("mixture", weights=WEIGHTS)
    for call in (lambda: env.step("x"), env.solution):
        with pytest.raises(EnvError, match="no episode is running"):
            call()


def test_tasks_have_names_of_their_own_and_are_no_mixtures():
    one, other = make_env("sokoban"), make_env("sokoban", height=8, width=8)
    with pytest.raises(ConfigError, match="2 tasks of a mixture are called 'sokoban': rename one"):
        MixtureEnv([one, other], [1.0, 1.0])
    with pytest.raises(ConfigError, match="a mixture cannot be a task of another one"):
        MixtureEnv([one, make_env("mixture", weights={"frozenlake": 1.0})], [1.0, 1.0])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"weights": {}}, "name its tasks"),
        ({"weights": {"sokoban": 0}}, "above 0"),
        ({"weights": {"sokoban": float("nan")}}, "above 0"),
        ({"weights": {"sokoban": 1e308, "frozenlake": 1e308}}, r"at most 1e\+100"),
        ({"weights": {"pkg": {"mod:Game": 1.0}}}, "a name with a dot stands"),
        ({"weights": {"sokoban": "much"}}, "must be a number"),
        ({"weights": {"mixture": 1.0}}, "of itself"),
        ({"weights": {"sokban": 1.0}}, "Did you mean 'sokoban'"),
        ({"weights": {"sokoban": 1.0}, "options": {"frozenlake": {}}}, "unknown task of the mixture"),
        ({"weights": {"sokoban": 1.0}, "options": {"sokoban": {"hight": 5}}}, "Did you mean 'height'"),
        ({"weight": 1}, "unknown option 'weight'. Did you mean 'weights'"),
    ],
)
def test_what_cannot_be_mixed_is_refused(options, complaint):
    with pytest.raises((ConfigError, UnknownNameError), match=complaint):
        make_env("mixture", **options)
