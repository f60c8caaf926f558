"""Figures of plane geometry, and how they become small pictures with labels that can be read."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from freshper.errors import MissingExtraError

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom

MARGIN = 0.13  # share of the picture that is left free on every side, for labels
SUPERSAMPLING = 3  # drawn that much larger and scaled down: smooth lines

_ARC = 0.085  # radius of the arc that marks an angle, as a share of the picture
_TICK = 0.022  # half length of the marks across a line
_INK, _SHADE, _PAPER = (20, 20, 20), (170, 205, 255), (255, 255, 255)


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that is written into a figure.

    ``at`` names its points, a letter each: the three of an angle with the vertex in the middle, or the two ends
    of a segment. ``text`` is what an angle or a length is labeled with.
    """

    kind: Literal["angle", "length", "right", "equal", "parallel"]
    at: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure in coordinates of its own, y upward. Points with a lower-case letter carry no name in the picture.

    ``lines`` and ``dashed`` are pairs of points, ``circles`` are centers with a radius, ``sector`` is shaded: a
    point on a circle, its center, and another point on it.
    """

    points: Mapping[str, Point]
    lines: tuple[str, ...]
    marks: tuple[Mark, ...]
    circles: tuple[tuple[str, float], ...] = ()
    dashed: tuple[str, ...] = ()
    sector: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """What a picture shows in one of many ways and no answer depends on.

    Turned by ``rotation`` degrees, perhaps ``mirrored``; point A is named ``letters[0]``, B ``letters[1]``, ...
    The center O stays O.
    """

    rotation: float = 0.0
    mirrored: bool = False
    letters: str = "ABCDEF"

    def rename(self, names: str) -> str:
        """The names that the points have in the picture."""
        return "".join(name if name == "O" else self.letters["ABCDEF".index(name)] for name in names)


@dataclass(frozen=True, slots=True)
class Label:
    """A text and the box in the picture that it fills."""

    text: str
    box: Box


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything of a figure is in a picture of ``size`` x ``size``, y downward."""

    size: int
    points: Mapping[str, Point]
    radii: Mapping[str, float]
    labels: tuple[Label, ...]


def draw(figure: Figure, look: Look, pixels: int) -> bytes:
    """The figure as a PNG of ``pixels`` x ``pixels``. The same figure and look give the same bytes."""
    image_module, draw_module = _pillow()
    size = pixels * SUPERSAMPLING
    font = _font(font_size(size))

    def extent(text: str) -> Point:
        left, top, right, bottom = font.getbbox(text)
        return right - left, bottom - top

    layout = arrange(figure, look, size, extent)
    image = image_module.new("RGB", (size, size), _PAPER)
    _draw_strokes(draw_module.Draw(image), figure, layout)
    pen = draw_module.Draw(image)
    halo = max(2, size // 150)
    for label in layout.labels:
        center = ((label.box[0] + label.box[2]) / 2, (label.box[1] + label.box[3]) / 2)
        pen.text(center, label.text, font=font, anchor="mm", fill=_INK, stroke_width=halo, stroke_fill=_PAPER)
    small = image.resize((pixels, pixels), image_module.Resampling.BOX)
    written = io.BytesIO()
    small.save(written, "PNG")
    return written.getvalue()


def font_size(size: int) -> int:
    """Height of the letters in a picture of ``size`` x ``size``."""
    return max(9 * SUPERSAMPLING, round(size * 0.068))


def arrange(figure: Figure, look: Look, size: int, extent: Callable[[str], Point]) -> Layout:
    """Turn and fit the figure into the picture and find a place for every label. ``extent``: width and height."""
    points, scale = _fitted(figure, look, size)
    radii = {center: radius * scale for center, radius in figure.circles}
    labels = _Labels(size, _ink(figure, points, radii), extent)
    center = _mean(points.values())
    pad = size * 0.012
    for mark in figure.marks:
        if mark.kind == "angle" and mark.text:
            labels.put(mark.text, _angle_places(mark, points, size, extent(mark.text)))
    for mark in figure.marks:
        if mark.kind == "length" and mark.text:
            labels.put(mark.text, _length_places(mark, points, center, extent(mark.text), pad))
    for name, point in points.items():
        if name.isupper():
            text = look.rename(name)
            away = _outward(name, figure, points, center)
            labels.put(text, _name_places(point, away, extent(text), pad))
    return Layout(size, points, radii, tuple(labels.placed))


def _fitted(figure: Figure, look: Look, size: int) -> tuple[dict[str, Point], float]:
    turn = math.radians(look.rotation)
    side = -1.0 if look.mirrored else 1.0
    turned = {
        name: (
            side * (x * math.cos(turn) - y * math.sin(turn)),
            -(x * math.sin(turn) + y * math.cos(turn)),  # y downward from here on
        )
        for name, (x, y) in figure.points.items()
    }
    spread = list(turned.values())
    for name, radius in figure.circles:
        x, y = turned[name]
        spread += [(x - radius, y - radius), (x + radius, y + radius)]
    left, top = (min(point[axis] for point in spread) for axis in (0, 1))
    right, bottom = (max(point[axis] for point in spread) for axis in (0, 1))
    scale = size * (1 - 2 * MARGIN) / max(right - left, bottom - top)
    shift_x, shift_y = size / 2 - scale * (left + right) / 2, size / 2 - scale * (top + bottom) / 2
    return {name: (x * scale + shift_x, y * scale + shift_y) for name, (x, y) in turned.items()}, scale


class _Labels:
    """Puts one label after the other where it covers the least of what is there already."""

    def __init__(self, size: int, ink: Sequence[Point], extent: Callable[[str], Point]) -> None:
        self.size = size
        self.ink = ink
        self.extent = extent
        self.placed: list[Label] = []

    def put(self, text: str, centers: Iterable[Point]) -> None:
        width, height = self.extent(text)
        boxes = [(x - width / 2, y - height / 2, x + width / 2, y + height / 2) for x, y in centers]
        costs = [self._cost(box) + 0.2 * rank for rank, box in enumerate(boxes)]
        self.placed.append(Label(text, boxes[costs.index(min(costs))]))

    def _cost(self, box: Box) -> float:
        left, top, right, bottom = box
        inside = _overlap(box, (0, 0, self.size, self.size))
        outside = 1 - inside / ((right - left) * (bottom - top))
        covered = sum(_overlap(box, label.box) > 0 for label in self.placed)
        crossed = sum(left < x < right and top < y < bottom for x, y in self.ink)
        return 100 * outside + 50 * covered + crossed


def _overlap(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0


def _ink(figure: Figure, points: Mapping[str, Point], radii: Mapping[str, float]) -> list[Point]:
    """Points all along the lines and circles."""
    ink: list[Point] = []
    for line in (*figure.lines, *figure.dashed):
        (x, y), (to_x, to_y) = points[line[0]], points[line[1]]
        ink += [(x + (to_x - x) * part / 60, y + (to_y - y) * part / 60) for part in range(61)]
    for center, radius in radii.items():
        ink += [_polar(points[center], radius, math.tau * part / 120) for part in range(120)]
    return ink


def _angle_places(mark: Mark, points: Mapping[str, Point], size: int, extent: Point) -> list[Point]:
    """Along the bisector, beyond the arc, and far enough out for the text to fit between the rays."""
    vertex = points[mark.at[1]]
    start, sweep = _sweep(mark.at, points)
    half = math.radians(sweep / 2)
    direction = math.radians(start + sweep / 2)
    fits = 0.55 * extent[1] / math.sin(half) + 0.35 * extent[0]
    nearest = max(_ARC * size + 0.65 * math.hypot(*extent), fits)
    return [
        _polar(vertex, nearest * step, direction + lean * half)
        for step in (1, 1.25, 1.5, 0.85)
        for lean in (0, 0.25, -0.25)
    ]


def _length_places(mark: Mark, points: Mapping[str, Point], center: Point, extent: Point, pad: float) -> list[Point]:
    """Beside the segment: outside before inside, the middle before the ends."""
    (x, y), (to_x, to_y) = points[mark.at[0]], points[mark.at[1]]
    length = math.hypot(to_x - x, to_y - y)
    normal = ((to_y - y) / length, (x - to_x) / length)
    middle = ((x + to_x) / 2, (y + to_y) / 2)
    if (middle[0] - center[0]) * normal[0] + (middle[1] - center[1]) * normal[1] < 0:
        normal = (-normal[0], -normal[1])
    off = 0.5 * (abs(normal[0]) * extent[0] + abs(normal[1]) * extent[1]) + 1.5 * pad
    return [
        (x + (to_x - x) * part + side * off * normal[0], y + (to_y - y) * part + side * off * normal[1])
        for part in (0.5, 0.4, 0.6, 0.3, 0.7)
        for side in (1, -1)
    ]


def _name_places(point: Point, away: float, extent: Point, pad: float) -> list[Point]:
    distance = 0.5 * math.hypot(*extent) + 1.5 * pad
    turns = (0, 25, -25, 50, -50, 80, -80, 110, -110, 145, -145, 180)
    return [_polar(point, distance, away + math.radians(turn)) for turn in turns]


def _outward(name: str, figure: Figure, points: Mapping[str, Point], center: Point) -> float:
    """The direction from a point, in radians, in which the fewest lines go."""
    x, y = points[name]
    pull_x = pull_y = 0.0
    for line in (*figure.lines, *figure.dashed):
        if name in line:
            other_x, other_y = points[line.replace(name, "")]
            length = math.hypot(other_x - x, other_y - y)
            pull_x, pull_y = pull_x + (other_x - x) / length, pull_y + (other_y - y) / length
    if math.hypot(pull_x, pull_y) < 0.1:
        pull_x, pull_y = center[0] - x, center[1] - y
    return math.atan2(-pull_y, -pull_x)


def _draw_strokes(pen: ImageDraw, figure: Figure, layout: Layout) -> None:
    """Everything but the labels."""
    size, points = layout.size, layout.points
    width = max(SUPERSAMPLING, round(size * 0.008))
    if figure.sector:
        start, sweep = _sweep(figure.sector, points)
        around = _around(points[figure.sector[1]], layout.radii[figure.sector[1]])
        pen.pieslice(around, start, start + sweep, fill=_SHADE)
    for center, radius in layout.radii.items():
        pen.ellipse(_around(points[center], radius), outline=_INK, width=width)
        if center.isupper():
            pen.ellipse(_around(points[center], 1.2 * width), fill=_INK)
    strokes = [(points[line[0]], points[line[1]]) for line in figure.lines]
    for line in figure.dashed:
        strokes += _dashes(points[line[0]], points[line[1]], size * 0.025)
    for stroke in strokes:
        pen.line(stroke, fill=_INK, width=width)
    for mark in figure.marks:
        if mark.kind == "angle":
            start, sweep = _sweep(mark.at, points)
            pen.arc(_around(points[mark.at[1]], size * _ARC), start, start + sweep, fill=_INK, width=width)
        elif mark.kind != "length":
            pen.line(_mark_stroke(mark, points, size), fill=_INK, width=width)


def _mark_stroke(mark: Mark, points: Mapping[str, Point], size: int) -> list[Point]:
    """The corner of a right angle, the tick of equal sides, or the arrowhead of parallel lines."""
    tick = size * _TICK
    if mark.kind == "right":
        vertex = points[mark.at[1]]
        one, other = (_toward(vertex, points[name], 2 * tick) for name in (mark.at[0], mark.at[2]))
        return [one, (one[0] + other[0] - vertex[0], one[1] + other[1] - vertex[1]), other]
    start, end = points[mark.at[0]], points[mark.at[1]]
    direction, length = _direction(start, end), math.dist(start, end)
    if mark.kind == "equal":
        middle = _polar(start, 0.5 * length, direction)
        return [_polar(middle, tick, direction + side * math.pi / 2) for side in (1, -1)]
    head = _polar(start, 0.75 * length, direction)  # not in the middle, where lines cross and labels stand
    back = [_polar(head, 1.5 * tick, direction + side * 0.8 * math.pi) for side in (1, -1)]
    return [back[0], head, back[1]]


def _sweep(at: str, points: Mapping[str, Point]) -> tuple[float, float]:
    """Where an angle below 180 degrees starts and how far it goes, in degrees and clockwise as the picture shows it."""
    vertex = points[at[1]]
    one, other = (math.degrees(_direction(vertex, points[name])) for name in (at[0], at[2]))
    sweep = (other - one) % 360
    return (one, sweep) if sweep <= 180 else (other, 360 - sweep)


def _direction(start: Point, end: Point) -> float:
    return math.atan2(end[1] - start[1], end[0] - start[0])


def _polar(center: Point, radius: float, angle: float) -> Point:
    return center[0] + radius * math.cos(angle), center[1] + radius * math.sin(angle)


def _toward(start: Point, end: Point, distance: float) -> Point:
    return _polar(start, distance, _direction(start, end))


def _around(center: Point, radius: float) -> Box:
    return center[0] - radius, center[1] - radius, center[0] + radius, center[1] + radius


def _dashes(start: Point, end: Point, length: float) -> list[tuple[Point, Point]]:
    count = max(1, round(math.dist(start, end) / (2 * length)))
    step = math.dist(start, end) / (2 * count)
    return [
        (_toward(start, end, 2 * step * dash), _toward(start, end, 2 * step * dash + step)) for dash in range(count)
    ]


def _mean(points: Iterable[Point]) -> Point:
    spread = list(points)
    return sum(x for x, _ in spread) / len(spread), sum(y for _, y in spread) / len(spread)


@functools.lru_cache(maxsize=16)
def _font(size: int) -> FreeTypeFont:
    """The font that Pillow brings along: the same letters on every machine."""
    try:
        from PIL import ImageFont
    except ImportError as error:
        raise MissingExtraError("pillow", "vision") from error
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise MissingExtraError("a pillow with FreeType", "vision")
    return font


def _pillow() -> tuple[ModuleType, ModuleType]:
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise MissingExtraError("pillow", "vision") from error
    return Image, ImageDraw
