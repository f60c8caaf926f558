"""Drawn geometry as an environment: questions, pictures, attempts, answers."""

import io
import re
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from PIL import Image

from freshper.envs import Pictured, Teachable, check_env, make_env, write_action
from freshper.envs.core import level_split
from freshper.envs.geometry.angles import ANGLES
from freshper.envs.geometry.drawing import Look
from freshper.envs.geometry.drawn import (
    KINDS,
    PRESETS,
    GeometryEnv,
    GeometrySpec,
    draw_problem,
    exact_number,
    sample_problem,
    show,
)
from freshper.errors import ConfigError, EnvError, UnknownNameError

SEEDS = 150


def asking(level: str, **options: object) -> GeometryEnv:
    """An environment that asks one problem, upright and with its own letters."""
    env = make_env("geometry", **options)
    env._draw = lambda seed: show(level, Look(), 160)
    env.reset(0)
    return env


class TestQuestions:
    @pytest.mark.parametrize("split", ["train", "eval"])
    def test_the_contract(self, split):
        check_env(partial(make_env, "geometry", split, pixels=96))
        check_env(partial(make_env, "geometry", split, pixels=64, attempts=3))

    def test_what_it_is(self):
        env = make_env("geometry")
        assert isinstance(env, Pictured)
        assert isinstance(env, Teachable)
        assert env.max_turns == 1
        assert "<answer> 35/2 </answer>" in env.instructions
        assert "-0.15" in env.instructions

    def test_the_letters_of_the_question_are_those_of_the_picture(self):
        problem = show("rectangle-area 4 7", Look(letters="PQRSTU"), 96)
        assert problem.question == "What is the area of the rectangle PQRS?"
        assert (problem.answer, problem.kind) == ("28", "rectangle-area")
        assert show("inscribed-angle 80 5", Look(letters="PQRSTU"), 96).question.startswith("O is the center")

    def test_questions_have_no_braces_left(self):
        env = make_env("geometry", pixels=64)
        questions = {env.reset(seed) for seed in range(SEEDS)}
        assert len(questions) > 10
        assert not any(re.search(r"[{}]", question) for question in questions)
        assert all(question.endswith("?") for question in questions)

    def test_the_seed_decides_the_problem_and_its_look(self):
        one, other = make_env("geometry"), make_env("geometry")
        seen = []
        for seed in range(10):
            seen.append((one.reset(seed), one.images(), one.solution()))
            assert (other.reset(np.int64(seed)), other.images(), other.solution()) == seen[-1]
        assert len({images for _, images, _ in seen}) == 10

    def test_training_and_evaluation_problems_are_disjoint(self):
        rng = np.random.default_rng(0)
        spec = GeometrySpec(kinds=("sector-share",))
        levels = {split: set() for split in ("train", "eval")}
        for level in filter(None, (sample_problem(spec, rng) for _ in range(2000))):
            levels[level_split(level)].add(show(level, Look(), 64).answer)
        assert levels["train"]
        assert levels["eval"]
        for split, answers in levels.items():
            shown = {
                draw_problem(GeometrySpec(kinds=("sector-share",), pixels=64), split, seed).answer for seed in range(60)
            }
            assert shown <= answers
        assert not levels["train"] & levels["eval"]

    def test_pixels(self):
        for pixels in (64, 224, 448):
            env = make_env("geometry", pixels=pixels)
            env.reset(1)
            (picture,) = env.images()
            assert Image.open(io.BytesIO(picture)).size == (pixels, pixels)


class TestAnswers:
    def test_right(self):
        env = asking("triangle-angle 50 60")
        outcome = env.step("The angles of a triangle ... <answer> 70 </answer>")
        assert (outcome.reward, outcome.done, outcome.success, outcome.valid) == (1.0, True, True, True)

    def test_wrong(self):
        outcome = asking("triangle-angle 50 60").step(write_action("71"))
        assert (outcome.reward, outcome.done, outcome.success, outcome.valid) == (0.0, True, False, True)
        assert "70" in outcome.observation

    @pytest.mark.parametrize("reply", ["", "70", "<answer></answer>", "<answer> 70 </answer><answer> 71 </answer>"])
    def test_no_answer(self, reply):
        outcome = asking("triangle-angle 50 60").step(reply)
        assert (outcome.reward, outcome.done, outcome.success, outcome.valid) == (-0.15, True, False, False)

    def test_attempts(self):
        env = asking("triangle-angle 50 60", attempts=3)
        assert "3 attempts" in env.instructions
        assert len(env.images()) == 1
        first = env.step(write_action("60"))
        assert (first.reward, first.done) == (0.0, False)
        assert "70" not in first.observation  # the answer is not given away
        assert env.images() == ()  # the conversation shows it already
        second = env.step("what?")
        assert (second.reward, second.done, second.valid) == (-0.15, False, False)
        last = env.step(write_action("70"))
        assert (last.reward, last.done, last.success) == (1.0, True, True)
        with pytest.raises(EnvError, match=r"geometry: step\(\) while no episode is running"):
            env.step(write_action("70"))
        env.reset(1)
        assert len(env.images()) == 1

    @pytest.mark.parametrize(
        "reply", ["35/2", "17.5", "17.50", "35 / 2", "70/4", "17.5°", "17.5 degrees", r"17.5^\circ"]
    )
    def test_equal_numbers_are_right(self, reply):
        assert asking("inscribed-angle 35 5").step(write_action(reply)).success

    @pytest.mark.parametrize(
        "reply", ["17", "18", "17.4999999999999999", "35/3", "-35/2", "17.5 17.5", "17,5", "x", "35/0"]
    )
    def test_others_are_wrong(self, reply):
        outcome = asking("inscribed-angle 35 5").step(write_action(reply))
        assert outcome.valid
        assert not outcome.success

    def test_the_right_answer_of_every_kind_is_accepted(self):
        env = make_env("geometry", pixels=64)
        for seed in range(SEEDS):
            env.reset(seed)
            outcome = env.step(write_action(env.solution()[0]))
            assert outcome.success
            assert not outcome.measures

    @pytest.mark.parametrize(
        ("text", "number"),
        [
            ("12", 12),
            (" +3.25 ", Fraction(13, 4)),
            ("-1/3", Fraction(-1, 3)),
            (".5", Fraction(1, 2)),
            ("7.", 7),
            ("60^{\\circ}", 60),
            ("90 degree", 90),
            ("1e5", None),
            ("1/2/3", None),
            ("١٢", None),  # digits of another script
            ("9" * 41, None),
            ("1/0", None),
            ("", None),
            ("°", None),
            ("nan", None),
        ],
    )
    def test_exact_number(self, text, number):
        assert exact_number(text) == number


class TestDemonstrator:
    def test_knows_angles_only(self):
        env, rng = make_env("geometry", pixels=64), np.random.default_rng(0)
        solved = {True: [], False: []}
        for seed in range(SEEDS):
            env.reset(seed)
            known = env._problem.kind in ANGLES
            solved[known].append(env.step(env.demonstrate(rng)).success)
        assert all(solved[True])
        assert np.mean(solved[False]) < 0.1
        assert len(solved[True]) / SEEDS == pytest.approx(len(ANGLES) / len(KINDS), abs=0.15)

    @pytest.mark.parametrize("call", ["solution", "demonstrate"])
    def test_teaching_needs_a_running_episode(self, call):
        env = make_env("geometry")
        with pytest.raises(EnvError, match=rf"{call}\(\) while no episode is running"):
            env.solution() if call == "solution" else env.demonstrate(np.random.default_rng(0))


class TestSpec:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kinds": "sector-share"}, r"kinds 'sector-share' must be a list of names, such as \['sector-share'\]"),
            ({"longest": 7}, r"longest 7 must be in \[8, 99\]"),
            ({"longest": 100}, r"longest 100 must be in \[8, 99\]"),
            ({"angle_step": 2}, "angle_step 2 must be 1, 5 or 10"),
            ({"pixels": 63}, r"pixels 63 must be a whole number in \[64, 448\]"),
            ({"pixels": 449}, r"pixels 449 must be a whole number in \[64, 448\]"),
            ({"pixels": 224.0}, r"option pixels is 224.0: it must be a whole number"),
            ({"pixels": True}, r"option pixels is True: it must be a whole number"),
            ({"attempts": 0}, "attempts 0 must be at least 1"),
            ({"kinds": ["sector-shar"]}, "unknown kind of problem 'sector-shar'. Did you mean 'sector-share'"),
        ],
    )
    def test_out_of_range(self, options, message):
        with pytest.raises(ConfigError, match=message):
            make_env("geometry", **options)

    def test_t22_unknown_option_offers_the_nearest(self):
        with pytest.raises(UnknownNameError, match=r"unknown option 'pixel'.*Did you mean 'pixels'"):
            make_env("geometry", pixel=64)

    def test_a_list_out_of_a_file(self):
        env = make_env("geometry", kinds=["rectangle-area"], pixels=64)
        assert env.spec.kinds == ("rectangle-area",)
        assert hash(env.spec) == hash(GeometrySpec(kinds=("rectangle-area",), pixels=64))
        assert all("rectangle" in env.reset(seed) for seed in range(10))

    def test_the_summary_counts_the_kinds(self):
        assert f"{len(KINDS)} kinds" in PRESETS["geometry"][1]
