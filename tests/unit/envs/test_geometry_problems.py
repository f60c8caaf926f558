"""Problems of plane geometry: their answers are measured once more in the coordinates of their figures."""

import math
import re
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from freshper.envs.core import level_split
from freshper.envs.geometry.drawn import KINDS, PRESETS, GeometrySpec, pose, sample_problem
from freshper.envs.geometry.problem import Ranges, polar
from freshper.errors import EnvError

SPEC = PRESETS["geometry"][0]
DRAWS = 60


def drawn(kind: str, spec: GeometrySpec = SPEC, count: int = DRAWS) -> list[str]:
    """Levels of one kind."""
    rng = np.random.default_rng(sum(map(ord, kind)))
    levels = []
    while len(levels) < count:
        numbers = KINDS[kind].draw(rng, Ranges(spec.longest, spec.angle_step))
        if numbers is not None:
            levels.append(" ".join([kind, *map(str, numbers)]))
    return levels


def angle(points: dict, at: str) -> float:
    """Degrees between the rays from the middle point, by their scalar product."""
    one, vertex, other = (np.array(points[name]) for name in at)
    cosine = np.dot(one - vertex, other - vertex) / np.linalg.norm(one - vertex) / np.linalg.norm(other - vertex)
    return math.degrees(math.acos(np.clip(cosine, -1, 1)))


def length(points: dict, at: str) -> float:
    return math.dist(points[at[0]], points[at[1]])


def perimeter(points: dict, at: str) -> float:
    return sum(length(points, one + other) for one, other in pairwise(at + at[0]))


def area(points: dict, at: str) -> float:
    """Shoelace formula."""
    corners = [points[name] for name in at + at[0]]
    return abs(sum(x * next_y - next_x * y for (x, y), (next_x, next_y) in pairwise(corners))) / 2


MEASURES = {
    "angle": angle,
    "length": length,
    "perimeter": perimeter,
    "area": area,
    "share": lambda points, at: angle(points, at) / 360,
}


class TestFigures:
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_answer_is_what_the_figure_measures(self, kind):
        for level in drawn(kind):
            problem = pose(level)
            measured = MEASURES[problem.asked](problem.figure.points, problem.at)
            assert float(problem.answer) == pytest.approx(measured, rel=1e-9), level

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_label_is_true(self, kind):
        for level in drawn(kind):
            problem = pose(level)
            labels = [mark for mark in problem.figure.marks if mark.text]
            assert labels
            for mark in labels:
                wanted = problem.answer if mark.text == "x" else Fraction(mark.text.removesuffix("°"))
                assert float(wanted) == pytest.approx(MEASURES[mark.kind](problem.figure.points, mark.at)), level
                assert mark.text == "x" or mark.text.endswith("°") == (mark.kind == "angle")

    @pytest.mark.parametrize("kind", KINDS)
    def test_right_angles_equal_sides_and_parallels_are_what_they_claim(self, kind):
        for level in drawn(kind, count=20):
            figure = pose(level).figure
            kinds = {kind: [mark.at for mark in figure.marks if mark.kind == kind] for kind in ("right", "equal")}
            assert [angle(figure.points, at) for at in kinds["right"]] == pytest.approx([90] * len(kinds["right"]))
            equal = [length(figure.points, at) for at in kinds["equal"]]
            assert equal == pytest.approx(equal[:1] * len(equal))
            parallel = [mark.at for mark in figure.marks if mark.kind == "parallel"]
            ways = [np.subtract(figure.points[at[1]], figure.points[at[0]]) for at in parallel]
            for one, other in pairwise(way / np.linalg.norm(way) for way in ways):
                assert one == pytest.approx(other)  # also the same way: the arrowheads agree

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_unknown_is_asked_for_once(self, kind):
        for level in drawn(kind, count=20):
            problem = pose(level)
            unknown = [mark for mark in problem.figure.marks if mark.text == "x"]
            assert len(unknown) == (" x" in problem.question)
            assert all((mark.kind, mark.at) == (problem.asked, problem.at) for mark in unknown)

    @pytest.mark.parametrize("kind", KINDS)
    def test_names_in_the_question_stand_in_the_figure(self, kind):
        problem = pose(drawn(kind, count=1)[0])
        named = set("".join(re.findall(r"\{(\w+)\}", problem.question)))
        assert named <= {name for name in problem.figure.points if name.isupper()} <= set("ABCDEFO")

    @pytest.mark.parametrize(
        ("kind", "on_the_circle"),
        [
            ("inscribed-angle", "ABC"),
            ("central-angle", "ABC"),
            ("cyclic-quadrilateral", "ABCD"),
            ("semicircle-angle", "ABC"),
            ("tangent-angle", "AB"),
            ("sector-share", "AB"),
            ("tangent-length", "A"),
            ("crossing-chords", "ABCD"),
        ],
    )
    def test_points_of_a_circle_lie_on_it(self, kind, on_the_circle):
        for level in drawn(kind):
            figure = pose(level).figure
            ((center, radius),) = figure.circles
            distances = [length(figure.points, center + name) for name in on_the_circle]
            assert distances == pytest.approx([radius] * len(distances)), level

    @pytest.mark.parametrize(
        ("kind", "at"), [("tangent-angle", "OAC"), ("tangent-angle", "OBC"), ("tangent-length", "OAB")]
    )
    def test_a_tangent_is_square_to_its_radius(self, kind, at):
        assert [angle(pose(level).figure.points, at) for level in drawn(kind)] == pytest.approx([90] * DRAWS)

    def test_the_diameter_goes_through_the_center(self):
        for level in drawn("semicircle-angle", count=20):
            assert angle(pose(level).figure.points, "AOB") == pytest.approx(180)

    def test_chords_cross_inside(self):
        for level in drawn("crossing-chords"):
            points = pose(level).figure.points
            assert angle(points, "AEB") == pytest.approx(180)
            assert angle(points, "CED") == pytest.approx(180)

    def test_a_point_divides_each_of_two_sides(self):
        for level in drawn("similar-triangles"):
            points = pose(level).figure.points
            assert angle(points, "ADB") == pytest.approx(180)
            assert angle(points, "AEC") == pytest.approx(180)

    def test_no_triangle_is_too_flat_for_its_labels(self):
        for kind in ("triangle-angle", "exterior-angle", "isosceles-base", "isosceles-apex"):
            for level in drawn(kind):
                points = pose(level).figure.points
                angles = [angle(points, at) for at in ("ABC", "BCA", "CAB")]
                assert sum(angles) == pytest.approx(180)
                assert 24.9 < min(angles) <= max(angles) < 120.1, level

    def test_polar(self):
        assert polar((1, 2), 2, 90) == pytest.approx((1, 4))
        assert polar((0, 0), 1, 180) == pytest.approx((-1, 0))


BY_HAND = [
    ("triangle-angle 50 60", "70"),
    ("exterior-angle 40 65", "105"),
    ("isosceles-base 45", "135/2"),
    ("isosceles-apex 70", "40"),
    ("angles-on-a-line 30 65", "85"),
    ("parallel-lines 65 0", "65"),
    ("parallel-lines 65 1", "65"),
    ("parallel-lines 65 2", "115"),
    ("inscribed-angle 85 5", "85/2"),
    ("central-angle 40 5", "80"),
    ("cyclic-quadrilateral 75 5 5", "105"),
    ("semicircle-angle 35", "55"),
    ("tangent-angle 110", "70"),
    ("sector-share 90", "1/4"),
    ("rectangle-area 4 7", "28"),
    ("rectangle-perimeter 4 7", "22"),
    ("right-triangle 6 8 10 0", "6"),
    ("right-triangle 6 8 10 2", "10"),
    ("triangle-area 7 5 4", "35/2"),
    ("trapezoid-area 4 5 9 2", "28"),
    ("corner-cut-area 6 8 2 3", "42"),
    ("corner-cut-perimeter 6 8 2 3", "28"),
    ("regular-polygon 5 7", "35"),
    ("similar-triangles 4 6 6", "15"),
    ("tangent-length 5 12 13", "12"),
    ("crossing-chords 4 6 3 90", "8"),
]


class TestLevels:
    @pytest.mark.parametrize(("level", "answer"), BY_HAND)
    def test_by_hand(self, level, answer):
        assert pose(level).answer == Fraction(answer)

    def test_every_kind_is_worked_by_hand(self):
        assert {level.split()[0] for level, _ in BY_HAND} == set(KINDS)
        assert len(KINDS) == 23

    @pytest.mark.parametrize(
        ("level", "message"),
        [
            ("", "must begin with one of triangle-angle"),
            ("hexagon 3", "must begin with one of"),
            ("triangle-angle 50", "triangle-angle takes 2 whole numbers"),
            ("triangle-angle 50 60 70", "takes 2 whole numbers"),
            ("triangle-angle 50 x", "takes 2 whole numbers"),
            ("triangle-angle 50 -60", "takes 2 whole numbers"),
            ("triangle-angle 90 90", "its answer would be 0"),
            ("triangle-angle 100 120", "its answer would be -40"),
            ("isosceles-base 180", "its answer would be 0"),
            ("parallel-lines 50 3", "no figure with these numbers"),
            ("crossing-chords 4 6 0 90", "no figure with these numbers"),
            ("tangent-length 13 12 5", "no figure with these numbers"),
        ],
    )
    def test_what_is_no_problem_is_refused(self, level, message):
        with pytest.raises(EnvError, match=message):
            pose(level)

    def test_more_than_ten_thousand_problems_of_all_kinds(self):
        rng = np.random.default_rng(0)
        levels = {sample_problem(SPEC, rng) for _ in range(70_000)} - {None}
        assert len(levels) > 10_000
        kinds = Counter(level.split()[0] for level in levels)
        assert kinds.keys() == KINDS.keys()
        assert min(kinds.values()) >= 20
        splits = Counter(map(level_split, levels))
        assert splits["eval"] / len(levels) == pytest.approx(0.2, abs=0.02)

    def test_answers_are_integers_or_simple_fractions(self):
        rng = np.random.default_rng(0)
        levels = [sample_problem(SPEC, rng) for _ in range(3000)]
        answers = [pose(level).answer for level in levels if level]
        assert all(answer > 0 for answer in answers)
        assert max(answer.denominator for answer in answers) <= 24  # of a share; halves to quarters elsewhere
        assert sum(answer.denominator == 1 for answer in answers) > 0.7 * len(answers)

    def test_the_ranges_are_kept(self):
        rng = np.random.default_rng(0)
        spec = GeometrySpec(longest=9, angle_step=10)
        for level in filter(None, (sample_problem(spec, rng) for _ in range(2000))):
            for mark in pose(level).figure.marks:
                if mark.text.endswith("°"):
                    assert int(mark.text[:-1]) % 10 == 0
                elif mark.text and mark.text != "x" and "triangle" not in level and "tangent" not in level:
                    assert int(mark.text) <= 9
        numbers = {number for level in drawn("right-triangle", spec) for number in level.split()[1:4]}
        assert max(map(int, numbers)) <= 4 * 9

    def test_kinds_can_be_chosen(self):
        rng = np.random.default_rng(0)
        spec = GeometrySpec(kinds=("rectangle-area", "sector-share"))
        levels = filter(None, (sample_problem(spec, rng) for _ in range(100)))
        assert {level.split()[0] for level in levels} == {"rectangle-area", "sector-share"}
