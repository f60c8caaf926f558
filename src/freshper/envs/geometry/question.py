"""What all tasks with a figure and a question share: the picture stands with the question, in the first turn alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from freshper.envs.core import INVALID_REWARD, Outcome, Split, write_action
from freshper.envs.maths.check import CHECK_SECONDS
from freshper.envs.maths.env import MathsEnv, Problem
from freshper.errors import ConfigError, UnknownNameError

SMALLEST, LARGEST = 64, 448  # pixels of a picture


@dataclass(frozen=True, slots=True)
class FigureProblem(Problem):
    """A question, its right answer and its picture (PNG); ``kind`` and ``choices`` where the task has them."""

    picture: bytes
    kind: str = ""
    choices: tuple[str, ...] = ()


class FigureEnv(MathsEnv):
    """A picture and a question about it, with one or more attempts at the answer.

    Args:
        task, split, attempts, check_seconds: see :class:`~freshper.envs.maths.env.MathsEnv`.
        draw: the problem that a seed decides.
        instructions: what there is to do, and how it is answered; rewards are added here.
    """

    _problem: FigureProblem

    def __init__(
        self,
        task: str,
        split: Split,
        draw: Callable[[int], FigureProblem],
        *,
        instructions: str,
        example: str,
        attempts: int = 1,
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        super().__init__(task, split, draw, attempts=attempts, check_seconds=check_seconds)
        again = "" if attempts == 1 else f"You have {attempts} attempts, and are told when an answer is not right.\n"
        self.instructions = (
            f"{instructions}\n{again}Rewards: +1 the right answer, 0 a wrong one, {INVALID_REWARD:+g} a reply without "
            f"an answer.\nEnd your reply like this: {write_action(example)}"
        )
        self._shown: tuple[bytes, ...] = ()

    def reset(self, seed: int) -> str:
        """Ask the question that ``seed`` decides."""
        question = super().reset(seed)
        self._shown = (self._problem.picture,)
        return question

    def step(self, reply: str) -> Outcome:
        """Check the answer in a reply. Raises :class:`EnvError` when no episode is running."""
        outcome = super().step(reply)
        self._shown = ()
        return outcome

    def images(self) -> tuple[bytes, ...]:
        """The picture of the question; none with what follows, as the conversation shows it already."""
        return self._shown


def check_pixels(pixels: Any) -> None:
    """Raise :class:`ConfigError` for a size that no picture of a figure can have."""
    if isinstance(pixels, bool) or not isinstance(pixels, int) or not SMALLEST <= pixels <= LARGEST:
        raise ConfigError(
            f"pixels {pixels!r} must be a whole number in [{SMALLEST}, {LARGEST}]: smaller figures cannot be read, "
            "larger ones cost a model hundreds of tokens more"
        )


def check_kinds(kinds: Any, known: Any) -> tuple[str, ...]:
    """A list of kinds as a tuple. Raises :class:`ConfigError`, :class:`UnknownNameError` for what is none."""
    if isinstance(kinds, str):
        raise ConfigError(f"kinds {kinds!r} must be a list of names, such as [{kinds!r}]")
    for kind in kinds:
        if kind not in known:
            raise UnknownNameError("kind of problem", kind, known)
    return tuple(kinds)
