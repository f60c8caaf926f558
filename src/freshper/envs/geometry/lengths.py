"""Problems whose answer is a length, a perimeter or an area."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from freshper.envs.geometry.drawing import Figure, Mark, Point
from freshper.envs.geometry.problem import Draw, Kind, Problem, Ranges, polar

SHORTEST = 2
SLIMMEST = 4  # no side of a figure is so many times longer than another
LARGEST_DENOMINATOR = 4  # of an answer that is no integer

_TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (20, 21, 29))
_ASK = "What is the length x?"


def _sides(count: int) -> Draw:
    """Lengths, the smallest first; None for figures that would be too slim."""

    def draw(rng: np.random.Generator, ranges: Ranges) -> tuple[int, ...] | None:
        lengths = sorted(int(length) for length in rng.integers(SHORTEST, ranges.longest + 1, size=count))
        return tuple(lengths) if lengths[-1] < SLIMMEST * lengths[0] else None

    return draw


def _rectangle(height: int, width: int) -> Figure:
    points = {"A": (0.0, 0.0), "B": (float(width), 0.0), "C": (float(width), float(height)), "D": (0.0, float(height))}
    marks = (
        Mark("length", "AB", str(width)),
        Mark("length", "BC", str(height)),
        Mark("right", "DAB"),
        Mark("right", "BCD"),
    )
    return Figure(points, ("AB", "BC", "CD", "DA"), marks)


def _rectangle_area(height: int, width: int) -> Problem:
    question = "What is the area of the rectangle {ABCD}?"
    return Problem(question, Fraction(height * width), _rectangle(height, width), "area", "ABCD")


def _rectangle_perimeter(height: int, width: int) -> Problem:
    question = "What is the perimeter of the rectangle {ABCD}?"
    return Problem(question, Fraction(2 * (height + width)), _rectangle(height, width), "perimeter", "ABCD")


def _right_triangle_draw(rng: np.random.Generator, ranges: Ranges) -> tuple[int, ...] | None:
    """A multiple of a Pythagorean triple, and which of its sides is asked for."""
    triple = _TRIPLES[rng.integers(len(_TRIPLES))]
    scale = int(rng.integers(1, ranges.longest + 1))
    sides = tuple(scale * side for side in triple)
    return (*sides, int(rng.integers(3))) if sides[-1] <= 4 * ranges.longest else None


def _right_triangle(short: int, middle: int, long: int, asked: int) -> Problem:
    texts = [str(side) for side in (short, middle, long)]
    texts[asked] = "x"
    ends = ("CA", "CB", "AB")
    points = {"A": (0.0, float(short)), "B": (float(middle), 0.0), "C": (0.0, 0.0)}
    marks = (*(Mark("length", at, text) for at, text in zip(ends, texts, strict=True)), Mark("right", "ACB"))
    answer = Fraction((short, middle, long)[asked])
    return Problem(_ASK, answer, Figure(points, ("AB", "BC", "CA"), marks), "length", ends[asked])


def _triangle_area_draw(rng: np.random.Generator, ranges: Ranges) -> tuple[int, ...] | None:
    base, height = (int(length) for length in rng.integers(SHORTEST + 2, ranges.longest + 1, size=2))
    fits = base < SLIMMEST * height and height < SLIMMEST * base
    return (base, height, int(rng.integers(3, 8))) if fits else None


def _triangle_area(base: int, height: int, tenths: int) -> Problem:
    """The foot of the height cuts off so many tenths of the base."""
    foot = base * tenths / 10
    points = {"A": (0.0, 0.0), "B": (float(base), 0.0), "C": (foot, float(height)), "h": (foot, 0.0)}
    marks = (Mark("length", "AB", str(base)), Mark("length", "Ch", str(height)), Mark("right", "BhC"))
    figure = Figure(points, ("AB", "BC", "CA"), marks, dashed=("Ch",))
    return Problem("What is the area of the triangle {ABC}?", Fraction(base * height, 2), figure, "area", "ABC")


def _trapezoid_draw(rng: np.random.Generator, ranges: Ranges) -> tuple[int, ...] | None:
    lengths = _sides(3)(rng, ranges)
    if lengths is None or lengths[1] == lengths[2]:
        return None
    height, top, bottom = lengths
    return height, top, bottom, int(rng.integers(bottom - top + 1))


def _trapezoid_area(height: int, top: int, bottom: int, left: int) -> Problem:
    """The upper side begins ``left`` further to the right than the lower one."""
    foot = left + top / 2
    points = {
        "A": (0.0, 0.0),
        "B": (float(bottom), 0.0),
        "C": (float(left + top), float(height)),
        "D": (float(left), float(height)),
        "h": (foot, 0.0),
        "k": (foot, float(height)),
    }
    marks = (
        Mark("length", "AB", str(bottom)),
        Mark("length", "DC", str(top)),
        Mark("length", "hk", str(height)),
        Mark("right", "Bhk"),
        Mark("parallel", "AB"),
        Mark("parallel", "DC"),
    )
    figure = Figure(points, ("AB", "BC", "CD", "DA"), marks, dashed=("hk",))
    answer = Fraction((top + bottom) * height, 2)
    return Problem("What is the area of the trapezoid {ABCD}?", answer, figure, "area", "ABCD")


def _corner_cut_draw(rng: np.random.Generator, ranges: Ranges) -> tuple[int, ...] | None:
    sides = _sides(2)(rng, ranges)
    if sides is None or sides[0] < 4:
        return None
    height, width = sides
    return height, width, int(rng.integers(2, height - 1)), int(rng.integers(2, width - 1))


def _corner_cut(height: int, width: int, down: int, across: int) -> tuple[Figure, str]:
    """A rectangle without one of its corners, and its outline."""
    x, y = float(width), float(height)
    points = {
        "A": (0.0, 0.0),
        "B": (x, 0.0),
        "C": (x, y - down),
        "D": (x - across, y - down),
        "E": (x - across, y),
        "F": (0.0, y),
    }
    marks = (
        Mark("length", "AB", str(width)),
        Mark("length", "FA", str(height)),
        Mark("length", "CD", str(across)),
        Mark("length", "DE", str(down)),
        *(Mark("right", at) for at in ("FAB", "ABC", "BCD", "DEF", "EFA")),
    )
    return Figure(points, ("AB", "BC", "CD", "DE", "EF", "FA"), marks), "ABCDEF"


def _corner_cut_area(height: int, width: int, down: int, across: int) -> Problem:
    figure, outline = _corner_cut(height, width, down, across)
    question = "What is the area of the figure {ABCDEF}?"
    return Problem(question, Fraction(height * width - down * across), figure, "area", outline)


def _corner_cut_perimeter(height: int, width: int, down: int, across: int) -> Problem:
    figure, outline = _corner_cut(height, width, down, across)
    question = "What is the perimeter of the figure {ABCDEF}?"
    return Problem(question, Fraction(2 * (height + width)), figure, "perimeter", outline)


def _polygon_draw(rng: np.random.Generator, ranges: Ranges) -> tuple[int, ...]:
    return int(rng.integers(3, 9)), int(rng.integers(SHORTEST, ranges.longest + 1))


def _regular_polygon(corners: int, side: int) -> Problem:
    radius = side / (2 * math.sin(math.pi / corners))
    names = "abcdefgh"[:corners]  # without names: nothing is asked about them
    points = {name: polar((0.0, 0.0), radius, 360 * at / corners) for at, name in enumerate(names)}
    lines = tuple(one + other for one, other in zip(names, names[1:] + names[0], strict=True))
    marks = (Mark("length", lines[0], str(side)),)
    question = "All sides are equal. What is the perimeter of the polygon?"
    return Problem(question, Fraction(corners * side), Figure(points, lines, marks), "perimeter", names)


def _similar_draw(rng: np.random.Generator, ranges: Ranges) -> tuple[int, ...] | None:
    above, below, across = (int(length) for length in rng.integers(SHORTEST, ranges.longest + 1, size=3))
    answer = Fraction(across * (above + below), above)
    fits = 2 * min(above, below) >= max(above, below) and above < 2 * across < 4 * above
    return (above, below, across) if fits and answer.denominator <= LARGEST_DENOMINATOR else None


def _similar_triangles(above: int, below: int, across: int) -> Problem:
    """D and E on two sides of a triangle, DE parallel to BC; AD, DB and DE are known."""
    answer = Fraction(across * (above + below), above)
    apex: Point = (float(answer) / 3, math.sqrt((above + below) ** 2 - float(answer) ** 2 / 9))
    share = below / (above + below)
    base = float(answer)
    points = {
        "A": apex,
        "B": (0.0, 0.0),
        "C": (base, 0.0),
        "D": (apex[0] * share, apex[1] * share),
        "E": (base + (apex[0] - base) * share, apex[1] * share),
    }
    marks = (
        Mark("length", "AD", str(above)),
        Mark("length", "DB", str(below)),
        Mark("length", "DE", str(across)),
        Mark("length", "BC", "x"),
        Mark("parallel", "DE"),
        Mark("parallel", "BC"),
    )
    figure = Figure(points, ("AB", "BC", "CA", "DE"), marks)
    return Problem(f"{{DE}} is parallel to {{BC}}. {_ASK}", answer, figure, "length", "BC")


def _tangent_draw(rng: np.random.Generator, ranges: Ranges) -> tuple[int, ...] | None:
    sides = _right_triangle_draw(rng, ranges)
    if sides is None:
        return None
    short, middle, long, asked = sides
    return (short, middle, long) if asked else (middle, short, long)


def _tangent_length(radius: int, tangent: int, distance: int) -> Problem:
    points = {
        "O": (0.0, 0.0),
        "A": polar((0.0, 0.0), radius, math.degrees(math.acos(radius / distance))),
        "B": (float(distance), 0.0),
    }
    marks = (Mark("length", "OA", str(radius)), Mark("length", "OB", str(distance)), Mark("length", "AB", "x"))
    figure = Figure(points, ("OA", "AB", "OB"), marks, circles=(("O", float(radius)),))
    question = f"{{AB}} touches the circle around {{O}} in {{A}}. {_ASK}"
    return Problem(question, Fraction(tangent), figure, "length", "AB")


def _chords_draw(rng: np.random.Generator, ranges: Ranges) -> tuple[int, ...] | None:
    one, other, third = (int(length) for length in rng.integers(SHORTEST, ranges.longest + 1, size=3))
    answer = Fraction(one * other, third)
    parts = [answer, *map(Fraction, (one, other, third))]
    fits = max(parts) < SLIMMEST * min(parts) and answer.denominator <= LARGEST_DENOMINATOR
    return (one, other, third, int(rng.integers(60, 121))) if fits else None


def _crossing_chords(one: int, other: int, third: int, between: int) -> Problem:
    """Two chords that cross in E at an angle; three of the four parts are known."""
    answer = Fraction(one * other, third)
    points = {
        "A": (-float(one), 0.0),
        "B": (float(other), 0.0),
        "C": polar((0.0, 0.0), -third, between),
        "D": polar((0.0, 0.0), float(answer), between),
        "E": (0.0, 0.0),
    }
    x, y = points["C"]
    middle = (other - one) / 2
    center = (middle, (third**2 - 2 * middle * x - one * other) / (2 * y))
    points["o"] = center
    marks = (
        Mark("length", "AE", str(one)),
        Mark("length", "EB", str(other)),
        Mark("length", "CE", str(third)),
        Mark("length", "ED", "x"),
    )
    figure = Figure(points, ("AB", "CD"), marks, circles=(("o", math.dist(center, points["A"])),))
    return Problem(_ASK, answer, figure, "length", "ED")


LENGTHS: dict[str, Kind] = {
    "rectangle-area": Kind(_sides(2), _rectangle_area),
    "rectangle-perimeter": Kind(_sides(2), _rectangle_perimeter),
    "right-triangle": Kind(_right_triangle_draw, _right_triangle),
    "triangle-area": Kind(_triangle_area_draw, _triangle_area),
    "trapezoid-area": Kind(_trapezoid_draw, _trapezoid_area),
    "corner-cut-area": Kind(_corner_cut_draw, _corner_cut_area),
    "corner-cut-perimeter": Kind(_corner_cut_draw, _corner_cut_perimeter),
    "regular-polygon": Kind(_polygon_draw, _regular_polygon),
    "similar-triangles": Kind(_similar_draw, _similar_triangles),
    "tangent-length": Kind(_tangent_draw, _tangent_length),
    "crossing-chords": Kind(_chords_draw, _crossing_chords),
}
