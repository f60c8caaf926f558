"""Drawing levels, reading replies, the registry."""

import random
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
import pytest

from freshper.envs import core, registry
from freshper.envs.core import (
    EVAL_SHARE,
    Env,
    Teachable,
    draw_level,
    level_split,
    read_action,
    with_options,
    write_action,
)
from freshper.envs.registry import describe, make_env, register, task_names
from freshper.errors import ConfigError, EnvError, UnknownNameError

ACTIONS = ("Up", "Down", "Left", "Right")


def sample_number(rng: np.random.Generator) -> str:
    return f"level {rng.integers(1_000_000)}"


class TestSplit:
    def test_known_levels_keep_their_split(self):
        """The split is part of what a published number means: it must never move."""
        evaluation = [number for number in range(30) if level_split(f"level {number}") == "eval"]
        assert evaluation == [13, 17, 19, 20, 25]

    def test_share_of_evaluation_levels(self):
        drawn = sum(level_split(f"level {number}") == "eval" for number in range(10_000)) / 10_000
        assert drawn == pytest.approx(EVAL_SHARE, abs=0.016)  # 4 standard errors

    @pytest.mark.parametrize("split", ["train", "eval"])
    def test_t8_drawn_levels_lie_in_their_split(self, split):
        assert {level_split(draw_level(seed, split, sample_number)) for seed in range(200)} == {split}


class TestDrawLevel:
    def test_t8_depends_on_seed_and_split_alone(self):
        first = [draw_level(seed, "train", sample_number) for seed in range(50)]
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - the global generator must not matter
        assert [draw_level(seed, "train", sample_number) for seed in range(50)] == first
        assert len(set(first)) == 50

    def test_rejected_draws_are_passed_over(self):
        draws = []

        def sample(rng):
            draws.append(sample_number(rng))
            return None if len(draws) < 5 else draws[-1]

        level = draw_level(3, "train", sample)
        assert level == draws[-1]
        assert len(draws) >= 5
        assert not any(level_split(passed) == "train" for passed in draws[4:-1])

    def test_nothing_to_draw_is_an_error_after_a_bounded_number_of_tries(self):
        tries = []
        with pytest.raises(EnvError, match=r"seed 7: none of 10000 draws is a level of the eval split"):
            draw_level(7, "eval", lambda rng: tries.append(0))
        assert len(tries) == core.MAX_TRIES

    def test_negative_seed_is_refused(self):
        with pytest.raises(ConfigError, match="seed -1 must be >= 0"):
            draw_level(-1, "train", sample_number)

    def test_unknown_split_is_refused(self):
        with pytest.raises(UnknownNameError, match=r"unknown split 'evil'.*Did you mean 'eval'"):
            draw_level(0, "evil", sample_number)


class TestReadAction:
    @pytest.mark.parametrize(
        ("reply", "action"),
        [
            ("<answer> Left </answer>", "Left"),
            ("<answer>LEFT</answer>", "Left"),
            ("<answer>\n right\t</answer>", "Right"),
            ("I think left. <answer> Up </answer> Done.", "Up"),
            ("<answer> Up </answer> <answer>up</answer>", "Up"),
            ("</answer> <answer> Up </answer>", "Up"),
            ("<answer> Up </answer> <answer>", "Up"),
        ],
    )
    def test_readable(self, reply, action):
        assert read_action(reply, ACTIONS) == action

    @pytest.mark.parametrize(
        "reply",
        [
            "",
            "Left",
            "<answer> Left",
            "Left </answer>",
            "<answer></answer>",
            "<answer> Jump </answer>",
            "<answer> Left Left </answer>",
            "<answer> Left </answer> <answer> Right </answer>",
            "<answer> Left </answer> <answer> Jump </answer>",
            "<answer><answer> Left </answer></answer>",
            "<answer> Left <answer> Left </answer>",
            "<ANSWER> Left </ANSWER>",
            "<answer> Left </ answer>",
            "<answer> Lef\u0442 </answer>",  # a Cyrillic letter
        ],
    )
    def test_unreadable(self, reply):
        assert read_action(reply, ACTIONS) is None

    @pytest.mark.parametrize("action", ACTIONS)
    def test_write_action_is_the_inverse(self, action):
        assert read_action(write_action(action), ACTIONS) == action
        assert write_action("Left") == "<answer> Left </answer>"

    def test_babble_is_read_in_linear_time(self):
        """A regular expression that looks for the closing tag from every opening one takes minutes here."""
        began = time.perf_counter()
        assert read_action("<answer>" * 200_000, ACTIONS) is None
        assert read_action("</answer>" * 200_000, ACTIONS) is None
        assert time.perf_counter() - began < 5


@pytest.fixture
def tasks(monkeypatch):
    """An empty registry."""
    monkeypatch.setattr(registry, "_TASKS", {})


@pytest.mark.usefixtures("tasks")
class TestRegistry:
    def test_make_env_hands_task_split_and_options_to_the_factory(self):
        register("maze", lambda *args, **options: (args, options), "A maze.")
        assert make_env("maze") == (("maze", "train"), {})
        assert make_env("maze", "eval", size=3) == (("maze", "eval"), {"size": 3})

    def test_names_are_sorted_and_described(self):
        register("maze", dict, "A maze.")
        register("lake", dict, "A lake.")
        assert task_names() == ["lake", "maze"]
        assert describe("lake") == "A lake."

    def test_a_name_is_registered_once(self):
        register("maze", dict, "A maze.")
        with pytest.raises(ConfigError, match=r"task 'maze' is registered already \(A maze\.\)"):
            register("maze", list, "Another maze.")
        assert describe("maze") == "A maze."

    @pytest.mark.parametrize("call", [make_env, describe])
    def test_t22_unknown_task_offers_the_nearest(self, call):
        register("maze", dict, "A maze.")
        with pytest.raises(UnknownNameError, match=r"unknown task 'mase'.*Did you mean 'maze'"):
            call("mase")

    def test_unknown_split_is_refused_before_anything_is_built(self):
        register("maze", lambda *args: pytest.fail("built"), "A maze.")
        with pytest.raises(UnknownNameError, match="unknown split 'test'"):
            make_env("maze", "test")


@dataclass(frozen=True)
class Spec:
    size: int = 4
    depth: int = 1


def test_with_options_changes_fields_of_a_spec():
    assert with_options(Spec(), {"size": 5}) == Spec(size=5, depth=1)


def test_t22_unknown_option_offers_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown option 'sice'.*Did you mean 'size'.*depth, size"):
        with_options(Spec(), {"sice": 5})


NEED_DATA = {"aime", "geoqa", "gsm8k", "nq-search", "questions"}
"""Tasks whose questions come from a data set on the hub, or from files of one's own."""
OUT_OF_THE_BOX = sorted(set(task_names()) - NEED_DATA - {"mixture"})


@pytest.mark.parametrize("task", OUT_OF_THE_BOX)
def test_the_real_registry(task):
    env = make_env(task)
    assert isinstance(env, Env)
    assert isinstance(env, Teachable) or task in ("maths", "geometry")
    assert env.task == task
    assert "<answer>" in env.instructions
    assert describe(task).endswith(".")


def test_importing_envs_loads_nothing_heavy():
    code = "import sys, freshper.envs; print([name for name in ('gymnasium', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_t8_levels_are_the_same_in_another_process():
    code = (
        "from freshper.envs import make_env\n"
        f"print([make_env(task, split).reset(11) for task in {OUT_OF_THE_BOX} for split in ('train', 'eval')])"
    )
    here = [make_env(task, split).reset(11) for task in OUT_OF_THE_BOX for split in ("train", "eval")]
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == str(here)
