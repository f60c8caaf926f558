"""Sums, digit by digit: the maths task that the embedded policy learns on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from freshper.envs.core import Split, draw_level, with_options, write_action
from freshper.envs.maths.check import CHECK_SECONDS, Verdict
from freshper.envs.maths.env import MathsEnv, Problem, check_limits
from freshper.errors import ConfigError

CARRY_SHARE = 0.5  # how often the demonstrator carries a one, whatever the column comes to


@dataclass(frozen=True, slots=True)
class ArithmeticSpec:
    """Settings: sums of two numbers of ``digits`` digits each, and the ``attempts`` at a sum."""

    digits: int = 2
    attempts: int = 1

    def __post_init__(self) -> None:
        check_limits(self.attempts, CHECK_SECONDS)
        if not 1 <= self.digits <= 18:
            raise ConfigError(f"digits {self.digits} must be in 1 to 18: numbers are drawn as 64-bit integers")


PRESETS: dict[str, tuple[ArithmeticSpec, str]] = {
    "arithmetic": (
        ArithmeticSpec(),
        "Sums of two numbers of two digits, written digit by digit: GSM8K's twin at CPU scale.",
    ),
    "aime-small": (
        ArithmeticSpec(attempts=3),
        "Sums of two numbers of two digits, three attempts with feedback: AIME's twin at CPU scale.",
    ),
}


class ArithmeticEnv(MathsEnv):
    """A sum of two numbers, written so that every digit is a word.

    Observation: ``3 7 + 4 8 =``; after a wrong answer, how many attempts are left. Reply: ``<answer> 8 5 </answer>``,
    blanks between the digits or not. Rewards and end are those of :class:`~freshper.envs.maths.env.MathsEnv`. No
    check takes time: a sum is the same text or it is wrong. A first digit is never 0.
    """

    def demonstrate(self, rng: np.random.Generator) -> str:
        """The reply of one who can add two digits, and carries by the toss of a coin.

        Raises :class:`EnvError` when no episode is running.
        """
        self._require_running("demonstrate")
        first, second = _terms(self._problem.question)
        digits: list[int] = []
        carry = 0
        for one, other in zip(reversed(first), reversed(second), strict=True):
            digits.append((int(one) + int(other) + carry) % 10)
            carry = int(rng.random() < CARRY_SHARE)
        if carry:
            digits.append(carry)
        return write_action(" ".join(map(str, reversed(digits))))

    def _check(self, answer: str) -> Verdict:
        right = "".join(answer.split()) == "".join(self._problem.answer.split())
        return Verdict.RIGHT if right else Verdict.WRONG

    def _measures(self) -> dict[str, float]:
        return {}  # every answer is decided


def make_arithmetic(spec: ArithmeticSpec, task: str, split: Split, **options: Any) -> ArithmeticEnv:
    """A preset with some settings changed; ``options`` are fields of :class:`ArithmeticSpec`."""
    spec = with_options(spec, options)
    draw = partial(_draw, spec.digits, split)
    return ArithmeticEnv(task, split, draw, attempts=spec.attempts, check_seconds=CHECK_SECONDS)


def _draw(digits: int, split: Split, seed: int) -> Problem:
    question = draw_level(seed, split, partial(_sample, digits))
    return Problem(question, " ".join(str(sum(map(int, _terms(question))))))


def _sample(digits: int, rng: np.random.Generator) -> str:
    terms = rng.integers(10 ** (digits - 1), 10**digits, size=2)
    return f"{' + '.join(' '.join(str(term)) for term in terms)} ="


def _terms(question: str) -> list[str]:
    return question.replace(" ", "").removesuffix("=").split("+")
