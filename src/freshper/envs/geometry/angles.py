"""Problems whose answer is an angle, in degrees, or the share of a circle."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from freshper.envs.geometry.drawing import Figure, Mark, Point
from freshper.envs.geometry.problem import Draw, Kind, Problem, Ranges, polar

NARROWEST, WIDEST = 25, 150  # angles outside are hard to draw
BLUNTEST = 120  # in a triangle: beyond, it is too flat for its labels

_ASK = "What is the angle x, in degrees?"


def _angle(rng: np.random.Generator, ranges: Ranges, low: int = NARROWEST, high: int = WIDEST) -> int:
    """A multiple of the angle step."""
    step = ranges.angle_step
    return step * int(rng.integers(-(-low // step), high // step + 1))


def _two_angles(rng: np.random.Generator, ranges: Ranges) -> tuple[int, ...] | None:
    """Two that leave room for a third in 180 degrees, the smaller first."""
    one, other = sorted((_angle(rng, ranges), _angle(rng, ranges)))
    return (one, other) if one + other <= 180 - NARROWEST else None


def _triangle_draw(rng: np.random.Generator, ranges: Ranges) -> tuple[int, ...] | None:
    angles = _two_angles(rng, ranges)
    return angles if angles and max(*angles, 180 - sum(angles)) <= BLUNTEST else None


def _one_angle(low: int, high: int) -> Draw:
    return lambda rng, ranges: (_angle(rng, ranges, low, high),)


def _triangle(at_a: int, at_b: int) -> dict[str, Point]:
    """A triangle by the angles at the ends of a side of length 1."""
    side = math.sin(math.radians(at_b)) / math.sin(math.radians(at_a + at_b))
    return {"A": (0.0, 0.0), "B": (1.0, 0.0), "C": polar((0.0, 0.0), side, at_a)}


def _triangle_angle(one: int, other: int) -> Problem:
    marks = (Mark("angle", "BAC", f"{one}°"), Mark("angle", "CBA", f"{other}°"), Mark("angle", "ACB", "x"))
    figure = Figure(_triangle(one, other), ("AB", "BC", "CA"), marks)
    return Problem(_ASK, Fraction(180 - one - other), figure, "angle", "ACB")


def _exterior_angle(one: int, other: int) -> Problem:
    """The angle outside B, from those at A and C."""
    points = _triangle(one, 180 - one - other) | {"D": (1.45, 0.0)}
    marks = (Mark("angle", "BAC", f"{one}°"), Mark("angle", "ACB", f"{other}°"), Mark("angle", "DBC", "x"))
    return Problem(_ASK, Fraction(one + other), Figure(points, ("AD", "BC", "CA"), marks), "angle", "DBC")


def _isosceles_base(apex: int) -> Problem:
    base = Fraction(180 - apex, 2)
    half = math.tan(math.radians(apex / 2))
    points = {"A": (-half, 0.0), "B": (half, 0.0), "C": (0.0, 1.0)}
    equal = (Mark("equal", "CA"), Mark("equal", "CB"))
    marks = (Mark("angle", "ACB", f"{apex}°"), Mark("angle", "BAC", "x"), *equal)
    return Problem(_ASK, base, Figure(points, ("AB", "BC", "CA"), marks), "angle", "BAC")


def _isosceles_apex(base: int) -> Problem:
    points = {"A": (-1.0, 0.0), "B": (1.0, 0.0), "C": (0.0, math.tan(math.radians(base)))}
    equal = (Mark("equal", "CA"), Mark("equal", "CB"))
    marks = (Mark("angle", "BAC", f"{base}°"), Mark("angle", "ACB", "x"), *equal)
    return Problem(_ASK, Fraction(180 - 2 * base), Figure(points, ("AB", "BC", "CA"), marks), "angle", "ACB")


def _angles_on_a_line(one: int, other: int) -> Problem:
    center = (0.0, 0.0)
    points = {
        "O": center,
        "A": (1.0, 0.0),
        "B": polar(center, 1.0, one),
        "C": polar(center, 1.0, one + other),
        "D": (-1.0, 0.0),
    }
    marks = (Mark("angle", "AOB", f"{one}°"), Mark("angle", "BOC", f"{other}°"), Mark("angle", "COD", "x"))
    figure = Figure(points, ("AD", "OB", "OC"), marks)
    return Problem(_ASK, Fraction(180 - one - other), figure, "angle", "COD")


_PARALLEL = ("DQP", "CQF", "CQP")  # corresponding, alternate and adjacent to the first


def _parallel_lines_draw(rng: np.random.Generator, ranges: Ranges) -> tuple[int, ...]:
    return _angle(rng, ranges, 35, 145), int(rng.integers(len(_PARALLEL)))


def _parallel_lines(known: int, which: int) -> Problem:
    """Two parallels and a line across; the lower parallel's angle from the upper one's."""
    lean = 0.5 / math.tan(math.radians(known))
    points = {
        "A": (-1.0 + lean, 0.5),
        "B": (1.0 + lean, 0.5),
        "C": (-1.0 - lean, -0.5),
        "D": (1.0 - lean, -0.5),
        "p": (lean, 0.5),
        "q": (-lean, -0.5),
        "E": (2.1 * lean, 1.05),
        "F": (-2.1 * lean, -1.05),
    }
    asked = _PARALLEL[which].replace("P", "p").replace("Q", "q")
    marks = (
        Mark("angle", "BpE", f"{known}°"),
        Mark("angle", asked, "x"),
        Mark("parallel", "AB"),
        Mark("parallel", "CD"),
    )
    answer = known if which < 2 else 180 - known
    return Problem(_ASK, Fraction(answer), Figure(points, ("AB", "CD", "EF"), marks), "angle", asked)


def _on_circle(*directions: float) -> dict[str, Point]:
    """Points A, B, ... of a circle around O with radius 1, by their directions in degrees."""
    center = (0.0, 0.0)
    return {"O": center} | {name: polar(center, 1.0, at) for name, at in zip("ABCDEF", directions, strict=False)}


def _central_draw(rng: np.random.Generator, ranges: Ranges) -> tuple[int, ...]:
    return _angle(rng, ranges, 50, 150), int(rng.integers(3, 8))


def _inscribed_angle(central: int, tenths: int) -> Problem:
    """The angle at A over an arc, A at so many tenths of the rest of the circle."""
    points = _on_circle(central + (360 - central) * tenths / 10, 0, central)
    marks = (Mark("angle", "BOC", f"{central}°"), Mark("angle", "BAC", "x"))
    figure = Figure(points, ("OB", "OC", "AB", "AC"), marks, circles=(("O", 1.0),))
    return Problem(f"{{O}} is the center of the circle. {_ASK}", Fraction(central, 2), figure, "angle", "BAC")


def _central_angle(inscribed: int, tenths: int) -> Problem:
    central = 2 * inscribed
    points = _on_circle(central + (360 - central) * tenths / 10, 0, central)
    marks = (Mark("angle", "BAC", f"{inscribed}°"), Mark("angle", "BOC", "x"))
    figure = Figure(points, ("OB", "OC", "AB", "AC"), marks, circles=(("O", 1.0),))
    return Problem(f"{{O}} is the center of the circle. {_ASK}", Fraction(central), figure, "angle", "BOC")


def _cyclic_draw(rng: np.random.Generator, ranges: Ranges) -> tuple[int, ...]:
    return _angle(rng, ranges, 50, 130), int(rng.integers(3, 8)), int(rng.integers(3, 8))


def _cyclic_quadrilateral(known: int, first: int, second: int) -> Problem:
    """B and D cut the circle in two arcs; A and C stand at so many tenths of theirs."""
    arc = 2 * known  # the one that A looks at, with C on it
    directions = (arc + (360 - arc) * first / 10, 0, arc * second / 10, arc)
    points = {name.replace("O", "o"): point for name, point in _on_circle(*directions).items()}
    marks = (Mark("angle", "BAD", f"{known}°"), Mark("angle", "BCD", "x"))
    figure = Figure(points, ("AB", "BC", "CD", "DA"), marks, circles=(("o", 1.0),))
    return Problem(_ASK, Fraction(180 - known), figure, "angle", "BCD")


def _semicircle_angle(known: int) -> Problem:
    """A triangle on a diameter."""
    points = _on_circle(180, 0, 2 * known)
    marks = (Mark("angle", "BAC", f"{known}°"), Mark("angle", "CBA", "x"))
    figure = Figure(points, ("AB", "BC", "CA"), marks, circles=(("O", 1.0),))
    return Problem(f"{{AB}} is a diameter of the circle. {_ASK}", Fraction(90 - known), figure, "angle", "CBA")


def _tangent_angle(central: int) -> Problem:
    """The angle between the tangents from C at two points of the circle."""
    points = _on_circle(0, central)
    points["C"] = polar(points["O"], 1 / math.cos(math.radians(central / 2)), central / 2)
    marks = (Mark("angle", "AOB", f"{central}°"), Mark("angle", "ACB", "x"))
    figure = Figure(points, ("OA", "OB", "AC", "BC"), marks, circles=(("O", 1.0),))
    question = f"{{AC}} and {{BC}} touch the circle around {{O}}. {_ASK}"
    return Problem(question, Fraction(180 - central), figure, "angle", "ACB")


def _sector_draw(rng: np.random.Generator, ranges: Ranges) -> tuple[int, ...] | None:
    angle = _angle(rng, ranges, 30, 150)
    return (angle,) if Fraction(angle, 360).denominator <= 24 else None


def _sector_share(angle: int) -> Problem:
    figure = Figure(
        _on_circle(0, angle), ("OA", "OB"), (Mark("angle", "AOB", f"{angle}°"),), (("O", 1.0),), sector="AOB"
    )
    question = "What fraction of the disc is shaded?"
    return Problem(question, Fraction(angle, 360), figure, "share", "AOB")


ANGLES: dict[str, Kind] = {
    "triangle-angle": Kind(_triangle_draw, _triangle_angle),
    "exterior-angle": Kind(_triangle_draw, _exterior_angle),
    "isosceles-base": Kind(_one_angle(NARROWEST, BLUNTEST), _isosceles_base),
    "isosceles-apex": Kind(_one_angle(30, 77), _isosceles_apex),
    "angles-on-a-line": Kind(_two_angles, _angles_on_a_line),
    "parallel-lines": Kind(_parallel_lines_draw, _parallel_lines),
    "inscribed-angle": Kind(_central_draw, _inscribed_angle),
    "central-angle": Kind(
        lambda rng, ranges: (_angle(rng, ranges, NARROWEST, 75), int(rng.integers(3, 8))), _central_angle
    ),
    "cyclic-quadrilateral": Kind(_cyclic_draw, _cyclic_quadrilateral),
    "semicircle-angle": Kind(_one_angle(NARROWEST, 65), _semicircle_angle),
    "tangent-angle": Kind(_one_angle(60, 130), _tangent_angle),
    "sector-share": Kind(_sector_draw, _sector_share),
}
