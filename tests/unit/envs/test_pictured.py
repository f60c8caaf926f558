"""FrozenLake and Sokoban as pictures: the text tasks, seen."""

import io

import numpy as np
import pytest
from PIL import Image

from freshper.envs import Pictured, make_env, write_action
from freshper.envs.pictured import FROZENLAKE_PRESETS, LAKE, ROOM, SOKOBAN_PRESETS
from freshper.errors import ConfigError, EnvError, UnknownNameError

TASKS = [*FROZENLAKE_PRESETS, *SOKOBAN_PRESETS]
SEEDS = 12


def painter(task: str):
    return LAKE if task in FROZENLAKE_PRESETS else ROOM


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("task", TASKS)
def test_the_levels_replies_and_rewards_of_the_text_task(task, split):
    seen, read = make_env(task, split), make_env(task.removesuffix("-image"), split)
    assert isinstance(seen, Pictured)
    assert not isinstance(read, Pictured)
    assert seen.max_turns == read.max_turns
    assert seen.actions == read.actions
    rng, same = np.random.default_rng(0), np.random.default_rng(0)
    for seed in range(SEEDS):
        caption, text, done = seen.reset(seed), read.reset(seed), False
        assert seen.images() == (painter(task).paint(text, seen.spec.pixels),)
        while not done:
            assert seen.solution() == read.solution()
            reply = seen.demonstrate(rng)
            assert reply == read.demonstrate(same)
            outcome, expected = seen.step(reply), read.step(reply)
            assert outcome.observation == caption
            assert seen.images() == (painter(task).paint(expected.observation, seen.spec.pixels),)
            for name in ("reward", "done", "success", "valid"):
                assert getattr(outcome, name) == getattr(expected, name)
            done = outcome.done


@pytest.mark.parametrize("task", TASKS)
def test_a_solution_leads_to_success(task):
    env = make_env(task, "eval")
    env.reset(3)
    outcomes = [env.step(write_action(action)) for action in env.solution()]
    assert outcomes[-1].success


@pytest.mark.parametrize(
    ("task", "options", "side"),
    [
        ("frozenlake-image", {}, 64),
        ("frozenlake-image", {"pixels": 448}, 448),
        ("frozenlake-image", {"size": 6, "pixels": 100}, 100),
        ("frozenlake-8x8-image", {}, 128),
        ("sokoban-image", {}, 64),
        ("sokoban-image", {"width": 5, "height": 3, "pixels": 71}, 71),
        ("sokoban-simple-image", {}, 96),
        ("sokoban-hard-image", {"pixels": 224}, 224),
    ],
)
def test_one_picture_of_the_size_that_was_asked_for(task, options, side):
    env = make_env(task, **options)
    env.reset(0)
    (image,) = env.images()
    assert Image.open(io.BytesIO(image)).size == (side, side)


def test_a_slippery_lake_seen_slips_as_one_that_is_read():
    seen, read = make_env("frozenlake-image", slippery=True), make_env("frozenlake", slippery=True)
    for seed in range(5):
        seen.reset(seed)
        read.reset(seed)
        for _ in range(10):
            outcome = read.step(write_action("Right"))
            seen.step(write_action("Right"))
            assert seen.images() == (LAKE.paint(outcome.observation, 64),)
            if outcome.done:
                break


@pytest.mark.parametrize("task", ["frozenlake-image", "sokoban-image"])
def test_the_text_gives_nothing_away(task):
    env = make_env(task)
    observations = {env.reset(seed) for seed in range(20)}
    assert len(observations) == 1
    assert len({env.reset(seed) and env.images() for seed in range(20)}) > 10
    assert "\n" not in observations.pop()


@pytest.mark.parametrize("task", ["frozenlake-image", "sokoban-image"])
def test_instructions_speak_of_colors_instead_of_symbols(task):
    text = make_env(task).instructions
    assert "figure is you" in text
    assert "_ f" not in text
    read = make_env(task.removesuffix("-image"))
    assert text.replace(type(make_env(task)).legend, read.legend) == read.instructions


@pytest.mark.parametrize("task", ["frozenlake-image", "sokoban-image"])
def test_no_picture_before_the_first_observation(task):
    with pytest.raises(EnvError, match=rf"{task}: images\(\) before any observation; call reset"):
        make_env(task).images()


@pytest.mark.parametrize(
    ("task", "options", "error", "message"),
    [
        ("frozenlake-image", {"pixels": 32}, ConfigError, r"pixels 32 must be a whole number in \[64, 448\]"),
        ("frozenlake-image", {"size": 9, "max_turns": 20}, ConfigError, "pixels 64 leave 7 for a cell of 9x9"),
        ("frozenlake-image", {"size": 1}, ConfigError, "size 1 must be >= 2"),
        ("sokoban-image", {"height": 3, "width": 10}, ConfigError, "pixels 64 leave 6 for a cell of 3x10"),
        ("sokoban-image", {"boxes": 0}, ConfigError, "boxes 0 must be >= 1"),
        ("sokoban-image", {"pixel": 64}, UnknownNameError, "unknown option 'pixel'.*Did you mean 'pixels'"),
        ("sokoban", {"pixels": 64}, UnknownNameError, "unknown option 'pixels'"),
    ],
)
def test_settings_that_contradict_each_other(task, options, error, message):
    with pytest.raises(error, match=message):
        make_env(task, **options)
