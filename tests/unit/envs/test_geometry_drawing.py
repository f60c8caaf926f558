"""Figures as pictures: where lines, circles and labels stand, and that they can be read."""

import hashlib
import io
import math
import os
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from PIL import Image, ImageFont

from freshper.envs.geometry.drawing import MARGIN, SUPERSAMPLING, Figure, Look, Mark, arrange, draw, font_size
from freshper.envs.geometry.drawn import KINDS, PRESETS, pose, sample_problem
from freshper.errors import MissingExtraError

SQUARE = Figure(
    {"A": (0.0, 0.0), "B": (2.0, 0.0), "C": (2.0, 2.0), "D": (0.0, 2.0)},
    ("AB", "BC", "CD", "DA"),
    (Mark("length", "AB", "12"), Mark("angle", "DAB", "90°"), Mark("right", "BCD"), Mark("parallel", "DC")),
)
UPRIGHT = Look()


def extent(text: str) -> tuple[float, float]:
    """A font of plain boxes."""
    return 6.0 * len(text), 10.0


def pixels(png: bytes) -> np.ndarray:
    """(height, width, 3), and the file is one that everybody can read."""
    with Image.open(io.BytesIO(png)) as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB")
        return np.asarray(picture).astype(int)


def overlap(one, other) -> bool:
    return min(one[2], other[2]) > max(one[0], other[0]) and min(one[3], other[3]) > max(one[1], other[1])


def figures(count: int, seed: int = 0):
    """Figures of all kinds in random looks."""
    rng = np.random.default_rng(seed)
    spec = PRESETS["geometry"][0]
    while count:
        level = sample_problem(spec, rng)
        if level is not None:
            count -= 1
            look = Look(float(rng.integers(360)), bool(rng.integers(2)), "PQRSTU")
            yield level, pose(level).figure, look


class TestArrange:
    def test_a_square_fills_the_picture_between_the_margins(self):
        layout = arrange(SQUARE, UPRIGHT, 200, extent)
        low, high = 200 * MARGIN, 200 * (1 - MARGIN)
        assert layout.points["A"] == pytest.approx((low, high))  # y goes down in pictures
        assert layout.points["C"] == pytest.approx((high, low))

    def test_turned_counter_clockwise(self):
        layout = arrange(SQUARE, Look(rotation=90), 200, extent)
        assert layout.points["A"] == pytest.approx((174, 174))
        assert layout.points["B"] == pytest.approx((174, 26))

    def test_mirrored(self):
        layout = arrange(SQUARE, Look(mirrored=True), 200, extent)
        assert layout.points["A"] == pytest.approx((174, 174))
        assert layout.points["B"] == pytest.approx((26, 174))

    def test_every_look_keeps_the_shape(self):
        for level, figure, look in figures(60):
            layout = arrange(figure, look, 300, extent)
            before = [math.dist(figure.points[a], figure.points[b]) for a, b in combinations(figure.points, 2)]
            after = [math.dist(layout.points[a], layout.points[b]) for a, b in combinations(figure.points, 2)]
            scale = after[0] / before[0]
            assert after == pytest.approx([scale * distance for distance in before], abs=1e-6), level
            for center, radius in figure.circles:
                assert layout.radii[center] == pytest.approx(scale * radius)

    def test_nothing_lies_in_the_margin_but_labels(self):
        for level, figure, look in figures(60, seed=1):
            layout = arrange(figure, look, 300, extent)
            edges = [(x, y) for x, y in layout.points.values()]
            for center, radius in layout.radii.items():
                x, y = layout.points[center]
                edges += [(x - radius, y - radius), (x + radius, y + radius)]
            assert np.min(edges) >= 300 * MARGIN - 1e-6, level
            assert np.max(edges) <= 300 * (1 - MARGIN) + 1e-6, level

    def test_every_name_and_every_text_is_a_label(self):
        for level, figure, look in figures(60, seed=2):
            names = [look.rename(name) for name in figure.points if name.isupper()]
            texts = [mark.text for mark in figure.marks if mark.text]
            layout = arrange(figure, look, 300, extent)
            assert sorted(label.text for label in layout.labels) == sorted(names + texts), level

    @pytest.mark.parametrize("size", [160, 224])
    def test_labels_lie_inside_and_apart(self, size):
        large = size * SUPERSAMPLING
        font = ImageFont.load_default(font_size(large))

        def real(text):
            left, top, right, bottom = font.getbbox(text)
            return right - left, bottom - top

        for level, figure, look in figures(400, seed=size):
            boxes = [label.box for label in arrange(figure, look, large, real).labels]
            assert all(min(box) >= 0 and max(box) <= large for box in boxes), level
            assert not any(overlap(one, other) for one, other in combinations(boxes, 2)), level

    def test_a_length_stands_beside_the_middle_of_its_segment_and_outside(self):
        layout = arrange(SQUARE, UPRIGHT, 200, extent)
        (box,) = [label.box for label in layout.labels if label.text == "12"]
        assert (box[0] + box[2]) / 2 == pytest.approx(100)
        assert 174 < box[1] < 184  # below the lower side

    def test_an_angle_stands_between_its_rays(self):
        layout = arrange(SQUARE, UPRIGHT, 200, extent)
        (box,) = [label.box for label in layout.labels if label.text == "90°"]
        assert 26 < box[0] < box[2] < 90
        assert 110 < box[1] < box[3] < 174

    def test_letters(self):
        assert Look(letters="PQRSTU").rename("AOCF") == "PORU"


class TestDraw:
    @pytest.mark.parametrize("size", [64, 224, 448])
    def test_size_and_colors(self, size):
        picture = pixels(draw(SQUARE, UPRIGHT, size))
        assert picture.shape == (size, size, 3)
        assert (picture[0, 0] == 255).all()
        middle_of_the_left_side = picture[size // 2, round(size * MARGIN)]
        assert middle_of_the_left_side.max() < 130
        assert 0.02 < (picture.mean(axis=2) < 128).mean() < 0.2

    def test_the_circle_and_its_center(self):
        figure = Figure({"O": (0.0, 0.0)}, (), (), circles=(("O", 3.0),))
        picture = pixels(draw(figure, UPRIGHT, 200)).mean(axis=2)
        radius = 200 * (0.5 - MARGIN)
        for direction in range(0, 360, 15):
            x = round(100 + (radius - 1) * math.cos(math.radians(direction)))
            y = round(100 + (radius - 1) * math.sin(math.radians(direction)))
            assert picture[y - 1 : y + 2, x - 1 : x + 2].min() < 100, direction
        assert picture[100, 100] < 100
        assert picture[100 - 40, 100] == 255

    @pytest.mark.parametrize("mirrored", [False, True])
    def test_the_sector_is_shaded_and_no_more(self, mirrored):
        for degrees in (40, 90, 150):
            look = Look(rotation=30, mirrored=mirrored)
            picture = pixels(draw(pose(f"sector-share {degrees}").figure, look, 224))
            blue = (picture[:, :, 2] > 200) & (picture[:, :, 0] < 200)
            disc = math.pi * (224 * (0.5 - MARGIN)) ** 2
            assert blue.sum() / disc == pytest.approx(degrees / 360, rel=0.25)  # less lines and the label

    def test_an_angle_has_its_arc(self):
        bare = Figure(SQUARE.points, SQUARE.lines, ())
        arced = Figure(SQUARE.points, SQUARE.lines, (Mark("angle", "DAB"),))
        changed = (pixels(draw(bare, UPRIGHT, 224)) != pixels(draw(arced, UPRIGHT, 224))).any(axis=2)
        rows, columns = np.nonzero(changed)
        corner = (224 * MARGIN, 224 * (1 - MARGIN))
        distances = np.hypot(columns - corner[0], rows - corner[1])
        assert len(rows) > 10
        assert 13 < distances.min() < distances.max() < 23
        assert columns.min() >= 26  # inside the square
        assert rows.max() <= 224 * (1 - MARGIN) + 2

    @pytest.mark.parametrize(("kind", "at"), [("right", "BCD"), ("equal", "AB"), ("parallel", "AB")])
    def test_marks_leave_a_trace_at_their_place(self, kind, at):
        bare = Figure(SQUARE.points, SQUARE.lines, ())
        marked = Figure(SQUARE.points, SQUARE.lines, (Mark(kind, at),))
        changed = (pixels(draw(bare, UPRIGHT, 224)) != pixels(draw(marked, UPRIGHT, 224))).any(axis=2)
        rows, columns = np.nonzero(changed)
        place = {"right": (195 - 5, 29 + 5), "equal": (112, 195), "parallel": (153, 195)}[kind]
        assert (columns.mean(), rows.mean()) == pytest.approx(place, abs=4)

    def test_dashes_have_gaps(self):
        whole = Figure({"a": (0.0, 0.0), "b": (1.0, 0.0)}, ("ab",), ())
        dashed = Figure(whole.points, (), (), dashed=("ab",))
        dark = [(pixels(draw(figure, UPRIGHT, 224)).mean(axis=2) < 128).sum() for figure in (whole, dashed)]
        assert 0.35 * dark[0] < dark[1] < 0.75 * dark[0]

    def test_labels_are_ink(self):
        for level, figure, look in figures(20, seed=3):
            size = 224
            picture = pixels(draw(figure, look, size)).mean(axis=2)
            without = Figure(
                {name.lower(): point for name, point in figure.points.items()},
                tuple(line.lower() for line in figure.lines),
                (),
                tuple((center.lower(), radius) for center, radius in figure.circles),
                tuple(line.lower() for line in figure.dashed),
            )
            bare = pixels(draw(without, look, size)).mean(axis=2)
            texts = sum(len(mark.text) for mark in figure.marks) + sum(name.isupper() for name in figure.points)
            assert (picture < 128).sum() - (bare < 128).sum() > 4 * texts, level

    def test_letters_change_the_picture_and_nothing_else_does(self):
        figure = pose("rectangle-area 4 7").figure
        assert draw(figure, Look(letters="ABCDEF"), 224) != draw(figure, Look(letters="PQRSTU"), 224)
        assert draw(figure, Look(rotation=10), 224) == draw(figure, Look(rotation=10), 224)

    def test_the_same_bytes_in_every_process(self):
        level, look = "inscribed-angle 85 5", Look(33, True, "KLMNPQ")
        script = (
            "import hashlib\n"
            "from freshper.envs.geometry.drawing import Look, draw\n"
            "from freshper.envs.geometry.drawn import pose\n"
            f"png = draw(pose({level!r}).figure, {look!r}, 160)\n"
            "print(hashlib.sha256(png).hexdigest())"
        )
        there = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": "7"},
        )
        here = hashlib.sha256(draw(pose(level).figure, look, 160)).hexdigest()
        assert there.stdout.strip() == here

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_can_be_drawn_small_and_large(self, kind):
        rng = np.random.default_rng(0)
        spec = PRESETS["geometry"][0].__class__(kinds=(kind,))
        level = next(level for level in iter(lambda: sample_problem(spec, rng), 0) if level)
        for size in (64, 448):
            assert pixels(draw(pose(level).figure, UPRIGHT, size)).shape[0] == size

    def test_without_pillow_the_extra_is_named(self, monkeypatch):
        for module in ("PIL", "PIL.Image", "PIL.ImageDraw", "PIL.ImageFont"):
            monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtraError, match=r"pillow is needed here: pip install 'freshper\[vision\]'"):
            draw(SQUARE, UPRIGHT, 64)
