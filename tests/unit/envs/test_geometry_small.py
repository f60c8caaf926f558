"""Small geometry: answers are read once more from the pixels of the pictures."""

import io
import sys
from collections import Counter
from functools import partial

import numpy as np
import pytest
from PIL import Image

from freshper.envs import Pictured, Teachable, check_env, make_env, write_action
from freshper.envs.core import level_split
from freshper.envs.geometry.small import SMALL_KINDS, SmallGeometrySpec, sample_figure, show_figure
from freshper.errors import ConfigError, EnvError, MissingExtraError, UnknownNameError

SEEDS = 60
COLORS = {"Red": 0, "Green": 1, "Blue": 2}


def pixels(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB")
        return np.asarray(picture).astype(int)


def inked(picture: np.ndarray) -> np.ndarray:
    """Where more than half of a pixel is colored."""
    return picture.min(axis=2) < 150


def box(mask: np.ndarray) -> np.ndarray:
    """The part of a mask that holds everything in it."""
    rows, columns = np.nonzero(mask)
    return mask[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


def read_corner(picture: np.ndarray) -> str:
    """The quarter of the triangle's box with the most ink."""
    inside = box(inked(picture))
    half_rows, half_columns = inside.shape[0] // 2, inside.shape[1] // 2
    quarters = {
        "Top-left": inside[:half_rows, :half_columns],
        "Top-right": inside[:half_rows, -half_columns:],
        "Bottom-left": inside[-half_rows:, :half_columns],
        "Bottom-right": inside[-half_rows:, -half_columns:],
    }
    return max(quarters, key=lambda name: quarters[name].mean())


def read_shape(picture: np.ndarray) -> str:
    """By how much of its box a shape fills: 1/2, 1 or pi/4."""
    filled = box(inked(picture)).mean()
    return "Triangle" if filled < 0.65 else "Square" if filled > 0.9 else "Disc"


def read_count(picture: np.ndarray) -> str:
    """Connected patches, by filling one after the other."""
    left = inked(picture)
    count = 0
    while left.any():
        count += 1
        patch = [tuple(np.argwhere(left)[0])]
        while patch:
            row, column = patch.pop()
            if 0 <= row < 64 and 0 <= column < 64 and left[row, column]:
                left[row, column] = False
                patch += [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
    return str(count)


def read_longest(picture: np.ndarray) -> str:
    """All bars are equally thick: the one with the most pixels, by the strongest channel."""
    strongest = np.where(inked(picture), picture.argmax(axis=2), -1)
    return max(COLORS, key=lambda name: (strongest == COLORS[name]).sum())


def read_angle(picture: np.ndarray) -> str:
    """The two strips end in directions from the middle; the gap between them is the angle."""
    rows, columns = np.nonzero(inked(picture))
    distances = np.hypot(columns - 31.5, rows - 31.5)
    far = distances > 14
    directions = np.sort(np.degrees(np.arctan2(rows[far] - 31.5, columns[far] - 31.5)) % 360)
    gaps = np.diff([*directions, directions[0] + 360])
    # Two strips leave two wide gaps. Both strips are equally thick, so their middles are as far apart as their edges.
    first, second = np.sort(gaps)[-2:]
    width = (360 - first - second) / 2
    degrees = min(first, second) + width
    return "Acute" if degrees < 76 else "Obtuse" if degrees > 104 else "Right"


READ = {
    "corner": read_corner,
    "shape": read_shape,
    "count": read_count,
    "longest": read_longest,
    "angle": read_angle,
}


class TestFigures:
    @pytest.mark.parametrize("kind", SMALL_KINDS)
    def test_the_answer_can_be_read_from_the_pixels(self, kind):
        rng = np.random.default_rng(0)
        answers = []
        for _ in range(SEEDS):
            level = sample_figure(SmallGeometrySpec(kinds=(kind,)), rng)
            problem = show_figure(level, 64)
            assert READ[kind](pixels(problem.picture)) == problem.answer, level
            answers.append(problem.answer)
        assert set(answers) == set(SMALL_KINDS[kind].answers)
        assert max(Counter(answers).values()) < 2 * SEEDS / len(set(answers))  # no answer is right by habit

    @pytest.mark.parametrize(
        ("level", "answer"),
        [
            ("corner 0 10 10 40 30 0", "Top-left"),
            ("corner 3 10 10 40 30 2", "Bottom-right"),
            ("shape 0 10 10 40 0", "Triangle"),
            ("shape 2 10 10 40 1", "Disc"),
            ("count 0 0 5 10 15", "4"),
            ("longest 2 0 1 40 20 10 0", "Blue"),
            ("longest 2 0 1 10 20 40 1", "Green"),
            ("angle 89 0 25 0", "Acute"),
            ("angle 90 45 25 1", "Right"),
            ("angle 91 0 25 2", "Obtuse"),
        ],
    )
    def test_by_hand(self, level, answer):
        problem = show_figure(level, 64)
        assert problem.answer == answer
        assert problem.answer in problem.choices
        assert problem.kind == level.split()[0]

    @pytest.mark.parametrize(
        ("level", "message"),
        [
            ("", "it must be one of corner, shape, count, longest, angle"),
            ("hexagon 1", "it must be one of"),
            ("count 0 -1", "and whole numbers"),
            ("count 7 1", "is no figure"),
            ("corner 0 1 2", "is no figure"),
            ("shape 5 10 10 40 0", "is no figure"),
            ("longest 0 1", "is no figure"),
        ],
    )
    def test_what_is_no_figure_is_refused(self, level, message):
        with pytest.raises(EnvError, match=message):
            show_figure(level, 64)

    def test_nothing_touches_the_edge(self):
        rng = np.random.default_rng(1)
        for _ in range(200):
            level = sample_figure(SmallGeometrySpec(), rng)
            mask = inked(pixels(show_figure(level, 64).picture))
            assert not mask[[0, -1]].any(), level
            assert not mask[:, [0, -1]].any(), level

    def test_larger_pictures_show_the_same(self):
        small, large = (pixels(show_figure("corner 1 10 10 40 30 0", size).picture) for size in (64, 256))
        assert large.shape == (256, 256, 3)
        assert np.abs(small - large.reshape(64, 4, 64, 4, 3).mean(axis=(1, 3))).max() < 60

    def test_figures_hardly_repeat(self):
        rng = np.random.default_rng(0)
        levels = [sample_figure(SmallGeometrySpec(), rng) for _ in range(20_000)]
        assert len(set(levels)) > 17_500
        kinds = Counter(level.split()[0] for level in levels)
        assert min(kinds.values()) > 0.18 * len(levels)
        assert np.mean([level_split(level) == "eval" for level in levels]) == pytest.approx(0.2, abs=0.01)


class TestEnv:
    @pytest.mark.parametrize("split", ["train", "eval"])
    def test_the_contract(self, split):
        check_env(partial(make_env, "geometry-small", split))

    def test_what_it_is(self):
        env = make_env("geometry-small")
        assert isinstance(env, Pictured)
        assert isinstance(env, Teachable)
        assert env.max_turns == 1
        for kind in SMALL_KINDS.values():
            assert f"{kind.question} {', '.join(kind.answers)}" in env.instructions

    def test_rewards(self):
        env = make_env("geometry-small")
        right = env.reset(0) and env.step(write_action(env.solution()[0].lower()))
        assert (right.reward, right.done, right.success, right.valid) == (1.0, True, True, True)
        wrong = env.reset(0) and env.step(write_action("Hexagon"))
        assert (wrong.reward, wrong.done, wrong.success, wrong.valid) == (0.0, True, False, True)
        unread = env.reset(0) and env.step("Disc")
        assert (unread.reward, unread.done, unread.success, unread.valid) == (-0.15, True, False, False)
        assert not right.measures
        with pytest.raises(EnvError, match=r"geometry-small: step\(\) while no episode is running"):
            env.step("")

    def test_one_picture_with_the_question_and_none_after(self):
        env = make_env("geometry-small")
        assert env.images() == ()
        env.reset(0)
        (first,) = env.images()
        env.step("")
        assert env.images() == ()
        env.reset(1)
        assert env.images() != (first,)
        env.reset(0)
        assert env.images() == (first,)

    def test_training_and_evaluation_pictures_are_disjoint(self):
        pictures = {}
        for split in ("train", "eval"):
            env = make_env("geometry-small", split)
            pictures[split] = set()
            for seed in range(300):
                env.reset(seed)
                pictures[split] |= set(env.images())
        assert min(map(len, pictures.values())) > 250
        assert not pictures["train"] & pictures["eval"]

    def test_kinds_can_be_chosen(self):
        env = make_env("geometry-small", kinds=["count"])
        assert {env.reset(seed) for seed in range(20)} == {"How many squares?"}
        assert "corner" not in env.instructions
        with pytest.raises(UnknownNameError, match=r"unknown kind of problem 'counts'\. Did you mean 'count'"):
            make_env("geometry-small", kinds=["counts"])
        with pytest.raises(ConfigError, match="kinds 'count' must be a list"):
            make_env("geometry-small", kinds="count")
        with pytest.raises(ConfigError, match="pixels 32 must be"):
            make_env("geometry-small", pixels=32)

    def test_the_demonstrator_knows_two_kinds_of_five(self):
        env, rng = make_env("geometry-small"), np.random.default_rng(0)
        solved = {kind: [] for kind in SMALL_KINDS}
        for seed in range(3000):
            env.reset(seed)
            solved[env._problem.kind].append(env.step(env.demonstrate(rng)).success)
        rates = {kind: float(np.mean(successes)) for kind, successes in solved.items()}
        expected = {"corner": 0.7 + 0.3 / 4, "shape": 0.7 + 0.3 / 3, "count": 1 / 5, "longest": 1 / 3, "angle": 1 / 3}
        assert rates == pytest.approx(expected, abs=0.08)  # 4 standard errors
        with pytest.raises(EnvError, match=r"demonstrate\(\) while no episode is running"):
            env.demonstrate(rng)

    def test_without_pillow_the_extra_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(MissingExtraError, match=r"pillow is needed here: pip install 'freshper\[vision\]'"):
            make_env("geometry-small").reset(0)
