"""Geometry in pictures of 64 x 64 pixels, without letters: what a very small model can learn to see."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from freshper.envs.core import Split, draw_level, with_options, write_action
from freshper.envs.geometry.question import FigureEnv, FigureProblem, check_kinds, check_pixels
from freshper.envs.maths.check import Verdict
from freshper.errors import EnvError, MissingExtraError

KNOWN = ("corner", "shape")  # the kinds of question that the demonstrator knows
RANDOM_SHARE = 0.3  # of the demonstrator's answers

_SIDE = 64  # figures are made in these coordinates, x to the right and y downward
_COLORS = {"Red": (214, 40, 40), "Green": (30, 150, 60), "Blue": (40, 80, 220)}
_PAPER = (255, 255, 255)

_Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Form:
    """A filled form: the corners of a polygon, or two opposite corners of the box around a disc."""

    points: _Points
    color: tuple[int, int, int]
    disc: bool = False


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of question: its answers, how many numbers ``draw`` draws, and what these look like."""

    question: str
    answers: tuple[str, ...]
    draw: Callable[[np.random.Generator], tuple[int, ...]]
    build: Callable[..., tuple[str, list[_Form]]]


_CORNERS = ("Top-left", "Top-right", "Bottom-left", "Bottom-right")
_SHAPES = ("Triangle", "Square", "Disc")
_ANGLES = ("Acute", "Right", "Obtuse")
_MOST = 5


def _color(number: int) -> tuple[int, int, int]:
    return tuple(_COLORS.values())[number]


def _draw_corner(rng: np.random.Generator) -> tuple[int, ...]:
    width, height = (int(side) for side in rng.integers(20, 57, size=2))
    left, top = int(rng.integers(4, 61 - width)), int(rng.integers(4, 61 - height))
    return int(rng.integers(4)), left, top, width, height, int(rng.integers(3))


def _corner(which: int, *numbers: int) -> tuple[str, list[_Form]]:
    """A right triangle with its legs along the edges of the picture."""
    left, top, width, height, color = numbers
    x, far_x = (left, left + width) if which % 2 == 0 else (left + width, left)
    y, far_y = (top, top + height) if which < 2 else (top + height, top)
    return _CORNERS[which], [_Form([(x, y), (far_x, y), (x, far_y)], _color(color))]


def _draw_shape(rng: np.random.Generator) -> tuple[int, ...]:
    side = int(rng.integers(20, 57))
    left, top = (int(at) for at in rng.integers(4, 61 - side, size=2))
    return int(rng.integers(3)), left, top, side, int(rng.integers(3))


def _shape(which: int, left: int, top: int, side: int, color: int) -> tuple[str, list[_Form]]:
    right, bottom = left + side, top + side
    points: tuple[_Points, ...] = (
        [(left, bottom), (right, bottom), (left + side / 2, top)],
        [(left, top), (right, top), (right, bottom), (left, bottom)],
        [(left, top), (right, bottom)],
    )
    return _SHAPES[which], [_Form(points[which], _color(color), disc=which == 2)]


def _draw_count(rng: np.random.Generator) -> tuple[int, ...]:
    count = int(rng.integers(1, _MOST + 1))
    cells = sorted(int(cell) for cell in rng.choice(16, size=count, replace=False))
    return (int(rng.integers(3)), *cells)


def _count(color: int, *cells: int) -> tuple[str, list[_Form]]:
    """A square in each of some cells of a 4 x 4 grid."""
    forms = []
    for cell in cells:
        left, top = 16 * (cell % 4) + 3, 16 * (cell // 4) + 3
        forms.append(_Form([(left, top), (left + 10, top), (left + 10, top + 10), (left, top + 10)], _color(color)))
    return str(len(cells)), forms


def _draw_longest(rng: np.random.Generator) -> tuple[int, ...]:
    """The order of the colors, and lengths that differ by more than a seventh of the picture."""
    steps = rng.choice(6, size=3, replace=False)
    lengths = [int(8 + 9 * step + rng.integers(-1, 2)) for step in steps]
    return (*(int(color) for color in rng.permutation(3)), *lengths, int(rng.integers(2)))


def _longest(*numbers: int) -> tuple[str, list[_Form]]:
    """Three bars, one below or beside the other."""
    colors, lengths, upright = numbers[:3], numbers[3:6], numbers[6]
    forms = []
    for at, (color, length) in enumerate(zip(colors, lengths, strict=True)):
        near, thick = 8 + 20 * at, 9
        points: _Points = [(4, near), (4 + length, near), (4 + length, near + thick), (4, near + thick)]
        forms.append(_Form([(y, x) for x, y in points] if upright else points, _color(color)))
    return tuple(_COLORS)[colors[lengths.index(max(lengths))]], forms


def _draw_angle(rng: np.random.Generator) -> tuple[int, ...]:
    which = int(rng.integers(3))
    low, high = ((25, 61), (90, 91), (120, 161))[which]
    return int(rng.integers(low, high)), int(rng.integers(360)), int(rng.integers(22, 30)), int(rng.integers(3))


def _angle(degrees: int, start: int, radius: int, color: int) -> tuple[str, list[_Form]]:
    """Two strips from the middle of the picture."""
    forms = []
    for direction in (start, start + degrees):
        along = (math.cos(math.radians(direction)), math.sin(math.radians(direction)))
        across = (-along[1] * 2.5, along[0] * 2.5)
        middle = _SIDE / 2
        end = (middle + radius * along[0], middle + radius * along[1])
        points: _Points = [
            (middle + across[0], middle + across[1]),
            (end[0] + across[0], end[1] + across[1]),
            (end[0] - across[0], end[1] - across[1]),
            (middle - across[0], middle - across[1]),
        ]
        forms.append(_Form(points, _color(color)))
    return _ANGLES[0 if degrees < 90 else 1 if degrees == 90 else 2], forms


SMALL_KINDS: dict[str, _Kind] = {
    "corner": _Kind("Which corner holds the right angle?", _CORNERS, _draw_corner, _corner),
    "shape": _Kind("Which shape is it?", _SHAPES, _draw_shape, _shape),
    "count": _Kind("How many squares?", tuple(str(n + 1) for n in range(_MOST)), _draw_count, _count),
    "longest": _Kind("Which bar is the longest?", tuple(_COLORS), _draw_longest, _longest),
    "angle": _Kind("What kind of angle?", _ANGLES, _draw_angle, _angle),
}


@dataclass(frozen=True, slots=True)
class SmallGeometrySpec:
    """Settings of small geometry.

    Args:
        kinds: of questions, a list of the names in ``SMALL_KINDS``; empty is all of them.
        pixels: pictures are so wide and high, 64 to 448.
    """

    kinds: tuple[str, ...] = ()
    pixels: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", check_kinds(self.kinds, SMALL_KINDS))  # lists come from files
        check_pixels(self.pixels)


PRESETS: dict[str, tuple[SmallGeometrySpec, str]] = {
    "geometry-small": (
        SmallGeometrySpec(),
        "Geometry in 64x64 pixels: shapes, corners, angles, lengths and counts, a word as answer: GeoQA at CPU scale.",
    ),
}


class SmallGeometryEnv(FigureEnv):
    """Questions about one plain figure, for a model of a few hundred thousand parameters.

    Observation: a picture (PNG, 64 x 64 unless ``pixels`` says more, without letters) and one of five questions:
    which corner holds the right angle of a triangle, which shape it is, how many squares there are, which of three
    bars is the longest, what kind of angle it is.
    Actions: one of the question's answers in ``<answer>…</answer>``; they are listed in the instructions.
    Rewards: 1 for the right answer, 0 for a wrong one, -0.15 for a reply without an answer.
    End: after one reply.
    Parameters: :class:`SmallGeometrySpec`.
    Source: own figures, more than 10^5 of them; the numbers of a figure decide its split.
    """

    def __init__(self, spec: SmallGeometrySpec, task: str, split: Split) -> None:
        kinds = [SMALL_KINDS[name] for name in spec.kinds or SMALL_KINDS]
        super().__init__(
            task,
            split,
            partial(draw_figure, spec, split),
            instructions="Look at the figure and answer the question with one of its answers.\n"
            + "\n".join(f"{kind.question} {', '.join(kind.answers)}" for kind in kinds),
            example=kinds[0].answers[0],
        )
        self.spec = spec

    def demonstrate(self, rng: np.random.Generator) -> str:
        """The reply of one who knows corners and shapes and guesses the rest, and errs in three of ten replies.

        Raises :class:`EnvError` when no episode is running.
        """
        self._require_running("demonstrate")
        if self._problem.kind in KNOWN and rng.random() >= RANDOM_SHARE:
            return write_action(self._problem.answer)
        return write_action(self._problem.choices[rng.integers(len(self._problem.choices))])

    def _check(self, answer: str) -> Verdict:
        return Verdict.RIGHT if answer.lower() == self._problem.answer.lower() else Verdict.WRONG

    def _measures(self) -> dict[str, float]:
        return {}  # every answer is decided


def make_small_geometry(spec: SmallGeometrySpec, task: str, split: Split, **options: Any) -> SmallGeometryEnv:
    """A preset with some settings changed; ``options`` are fields of :class:`SmallGeometrySpec`."""
    return SmallGeometryEnv(with_options(spec, options), task, split)


def draw_figure(spec: SmallGeometrySpec, split: Split, seed: int) -> FigureProblem:
    """The figure and question that a seed decides."""
    return show_figure(draw_level(seed, split, partial(sample_figure, spec)), spec.pixels)


def sample_figure(spec: SmallGeometrySpec, rng: np.random.Generator) -> str:
    """One draw: a kind and its numbers, such as "count 0 3 7": red squares in two cells."""
    kinds = spec.kinds or tuple(SMALL_KINDS)
    kind = kinds[rng.integers(len(kinds))]
    return " ".join([kind, *map(str, SMALL_KINDS[kind].draw(rng))])


def show_figure(level: str, pixels: int) -> FigureProblem:
    """The problem that a text of :func:`sample_figure` stands for. Raises :class:`EnvError` for any other text."""
    name, *numbers = level.split() or [""]
    if name not in SMALL_KINDS or not all(number.isdecimal() for number in numbers):
        raise EnvError(f"{level!r} is no figure: it must be one of {', '.join(SMALL_KINDS)}, and whole numbers")
    kind = SMALL_KINDS[name]
    try:
        answer, forms = kind.build(*map(int, numbers))
    except (LookupError, TypeError, ValueError) as error:
        raise EnvError(f"{level!r} is no figure: {error}") from error
    return FigureProblem(kind.question, answer, _paint(forms, pixels), name, kind.answers)


def _paint(forms: list[_Form], pixels: int) -> bytes:
    image_module, draw_module = _pillow()
    scale = 4  # painted larger and averaged: smooth edges
    picture = image_module.new("RGB", (pixels * scale, pixels * scale), _PAPER)
    brush = draw_module.Draw(picture)
    for form in forms:
        points = [(x * scale * pixels / _SIDE, y * scale * pixels / _SIDE) for x, y in form.points]
        if form.disc:
            brush.ellipse(points, fill=form.color)
        else:
            brush.polygon(points, fill=form.color)
    written = io.BytesIO()
    picture.reduce(scale).save(written, "PNG")
    return written.getvalue()


def _pillow() -> tuple[ModuleType, ModuleType]:
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise MissingExtraError("pillow", "vision") from error
    return Image, ImageDraw
