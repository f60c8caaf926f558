"""Drawn geometry: figures with their questions and exact answers, made from the seed. No data set."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from freshper.envs.core import Split, draw_level, with_options, write_action
from freshper.envs.geometry.angles import ANGLES
from freshper.envs.geometry.drawing import Look, draw
from freshper.envs.geometry.lengths import LENGTHS
from freshper.envs.geometry.problem import Kind, Problem, Ranges
from freshper.envs.geometry.question import FigureEnv, FigureProblem, check_kinds, check_pixels
from freshper.envs.maths.check import CHECK_SECONDS, Verdict
from freshper.envs.maths.env import check_limits
from freshper.errors import ConfigError, EnvError

KINDS: dict[str, Kind] = ANGLES | LENGTHS

_ALPHABETS = ("ABCDEF", "PQRSTU", "KLMNPQ", "UVWXYZ")
_LONGEST = 40  # characters of a number; those that are right have a few
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(\s*/\s*\d+)?", re.ASCII)
_DEGREES = re.compile(r"\s*(°|\^\{?\\circ\}?|degrees?)$")


@dataclass(frozen=True, slots=True)
class GeometrySpec:
    """Settings of drawn geometry.

    Args:
        kinds: of problems, a list of the names in ``KINDS``; empty is all of them.
        longest: lengths are whole numbers up to this.
        angle_step: angles are multiples of so many degrees: 1, 5 or 10.
        pixels: pictures are so wide and high, 64 to 448; 160 or more are easy to read.
        attempts: replies that an episode may have.
    """

    kinds: tuple[str, ...] = ()
    longest: int = 20
    angle_step: int = 1
    pixels: int = 224
    attempts: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", check_kinds(self.kinds, KINDS))  # lists come from files
        if not 8 <= self.longest <= 99:
            raise ConfigError(
                f"longest {self.longest} must be in [8, 99]: shorter ones repeat, longer ones fill labels"
            )
        if self.angle_step not in (1, 5, 10):
            raise ConfigError(f"angle_step {self.angle_step} must be 1, 5 or 10")
        check_pixels(self.pixels)
        check_limits(self.attempts, CHECK_SECONDS)


PRESETS: dict[str, tuple[GeometrySpec, str]] = {
    "geometry": (
        GeometrySpec(),
        f"Geometry in drawn figures: angles, lengths and areas, problems of {len(KINDS)} kinds with exact answers.",
    ),
}


class GeometryEnv(FigureEnv):
    """Problems of plane geometry that are made, drawn and solved here.

    Observation: a picture (PNG) of a figure with labeled angles or lengths, and the question ("What is the angle x,
    in degrees?"). After an answer that is not right, that it was not and how many attempts are left.
    Actions: any reasoning, and a number in ``<answer>…</answer>``: an integer, a decimal or a fraction such as 35/2.
    Rewards: 1 for the right answer, 0 for a wrong one, -0.15 for a reply without an answer.
    End: the right answer, or no attempt left.
    Parameters: :class:`GeometrySpec`.
    Source: own problems of the kinds in ``KINDS``, more than 10^4 of them. The numbers of a problem decide its split;
    the seed also decides how the figure is turned, mirrored and lettered.
    """

    def __init__(self, spec: GeometrySpec, task: str, split: Split) -> None:
        super().__init__(
            task,
            split,
            partial(draw_problem, spec, split),
            instructions="Solve the problem of plane geometry. The figure is drawn to scale, its labels are exact. "
            "Give a number: an integer, a decimal or a fraction, without a unit.",
            example="35/2",
            attempts=spec.attempts,
        )
        self.spec = spec

    def demonstrate(self, rng: np.random.Generator) -> str:
        """The reply of one who knows angles only: of anything else, any number that can be met.

        Raises :class:`EnvError` when no episode is running.
        """
        self._require_running("demonstrate")
        if self._problem.kind in ANGLES:
            return write_action(self._problem.answer)
        return write_action(str(rng.integers(1, self.spec.longest**2)))

    def _check(self, answer: str) -> Verdict:
        number = exact_number(answer)
        return Verdict.RIGHT if number == Fraction(self._problem.answer) else Verdict.WRONG

    def _measures(self) -> dict[str, float]:
        return {}  # every answer is decided


def make_geometry(spec: GeometrySpec, task: str, split: Split, **options: Any) -> GeometryEnv:
    """A preset with some settings changed; ``options`` are fields of :class:`GeometrySpec`."""
    return GeometryEnv(with_options(spec, options), task, split)


def draw_problem(spec: GeometrySpec, split: Split, seed: int) -> FigureProblem:
    """The problem that a seed decides, and the look of its figure."""
    level = draw_level(seed, split, partial(sample_problem, spec))
    rng = np.random.default_rng([int(seed), 1])  # another stream than the one that drew the problem
    alphabet = _ALPHABETS[rng.integers(len(_ALPHABETS))]
    look = Look(float(rng.integers(360)), bool(rng.integers(2)), alphabet)
    return show(level, look, spec.pixels)


def show(level: str, look: Look, pixels: int) -> FigureProblem:
    """A problem as it is asked: with its picture, and the letters of the picture in its question."""
    posed = pose(level)
    question = re.sub(r"\{(\w+)\}", lambda names: look.rename(names[1]), posed.question)
    kind = level.split(maxsplit=1)[0]
    return FigureProblem(question, str(posed.answer), draw(posed.figure, look, pixels), kind)


def sample_problem(spec: GeometrySpec, rng: np.random.Generator) -> str | None:
    """One draw: a kind and its numbers ("triangle-angle 50 60"); None if the numbers do not fit the kind."""
    kinds = spec.kinds or tuple(KINDS)
    kind = kinds[rng.integers(len(kinds))]
    numbers = KINDS[kind].draw(rng, Ranges(spec.longest, spec.angle_step))
    return None if numbers is None else " ".join([kind, *map(str, numbers)])


def pose(level: str) -> Problem:
    """The problem that a text of :func:`sample_problem` stands for. Raises :class:`EnvError` for any other text."""
    kind, *numbers = level.split() or [""]
    if kind not in KINDS:
        raise EnvError(f"{level!r} is no problem: it must begin with one of {', '.join(KINDS)}")
    wanted = len(inspect.signature(KINDS[kind].build).parameters)
    if len(numbers) != wanted or not all(number.isdecimal() for number in numbers):
        raise EnvError(f"{level!r} is no problem: {kind} takes {wanted} whole numbers")
    try:
        posed = KINDS[kind].build(*map(int, numbers))
    except (ArithmeticError, LookupError, ValueError) as error:
        raise EnvError(f"{level!r} is no problem: there is no figure with these numbers ({error})") from error
    if posed.answer <= 0:
        raise EnvError(f"{level!r} is no problem: its answer would be {posed.answer}")
    return posed


def exact_number(text: str) -> Fraction | None:
    """An integer, a decimal or a fraction, with or without a degree sign; None for anything else."""
    bare = _DEGREES.sub("", text.strip())
    if len(bare) > _LONGEST or not _NUMBER.fullmatch(bare):
        return None
    above, _, below = bare.partition("/")
    divisor = Fraction(below.strip() or "1")
    return Fraction(above.strip()) / divisor if divisor else None
