"""What a problem of plane geometry is: a figure, a question and an exact answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from freshper.envs.geometry.drawing import Figure, Point


@dataclass(frozen=True, slots=True)
class Ranges:
    """How large the numbers are: lengths up to ``longest``, angles in multiples of ``angle_step`` degrees."""

    longest: int
    angle_step: int


@dataclass(frozen=True, slots=True)
class Problem:
    """``question`` has names of points in braces, ``{AB}``; they are renamed with those of the picture.

    ``asked`` and ``at`` say what of the figure the answer measures: the angle of three points in degrees, the length
    between two, the area or the perimeter of a polygon, or the share of the circle that an angle cuts out.
    """

    question: str
    answer: Fraction
    figure: Figure
    asked: Literal["angle", "length", "area", "perimeter", "share"]
    at: str


Draw = Callable[["np.random.Generator", Ranges], tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of problem: ``draw`` draws its numbers, or None for unfit ones, and ``build`` makes a problem of them."""

    draw: Draw
    build: Callable[..., Problem]


def polar(center: Point, radius: float, degrees: float) -> Point:
    """The point at a distance and in a direction, counter-clockwise from the right."""
    return (
        center[0] + radius * math.cos(math.radians(degrees)),
        center[1] + radius * math.sin(math.radians(degrees)),
    )
