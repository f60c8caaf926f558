"""A question, reasoning, and a final answer that is checked: one environment for every set of such questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from freshper.envs.core import INVALID_REWARD, Outcome, Split, write_action
from freshper.envs.maths.answers import read_answer
from freshper.envs.maths.check import Verdict, check_answer
from freshper.errors import ConfigError, EnvError


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its right answer."""

    question: str
    answer: str


def check_limits(attempts: int, check_seconds: float) -> None:
    """Raise :class:`ConfigError` for settings under which no answer could be given or checked."""
    if attempts < 1:
        raise ConfigError(f"attempts {attempts} must be at least 1: no answer could be given")
    if not 0 < check_seconds <= 60:
        raise ConfigError(f"check_seconds {check_seconds} must be above 0 and at most 60: nothing else bounds a check")


class MathsEnv:
    r"""A question that is answered after some reasoning; the answer is checked by math-verify.

    Observation: the question; after an answer that is not right, that it was not and how many attempts are left.
    Reply: any reasoning, and the final answer in ``<answer>…</answer>`` or ``\boxed{…}``; see
    :func:`~freshper.envs.maths.answers.read_answer`. Rewards: 1 for the right answer, 0 for a wrong one, -0.15 for a
    reply without one. The episode ends with the right answer, or after ``attempts`` replies.

    The measure ``undecided`` counts the answers that could not be checked within ``check_seconds`` of computing:
    they count as wrong.

    Args:
        task: name of the task.
        split: which levels it plays.
        draw: the problem that a seed decides.
        attempts: replies that an episode may have.
        check_seconds: computing time of one check, see :func:`~freshper.envs.maths.check.check_answer`.
    """

    def __init__(
        self, task: str, split: Split, draw: Callable[[int], Problem], *, attempts: int, check_seconds: float
    ) -> None:
        self.task = task
        self.split = split
        self.max_turns = attempts
        self.instructions = _instructions(attempts)
        self._draw = draw
        self._check_seconds = check_seconds
        self._problem = Problem("", "")
        self._attempts_left = 0
        self._undecided = 0

    def reset(self, seed: int) -> str:
        """Ask the question that ``seed`` decides."""
        self._problem = self._draw(seed)
        self._attempts_left = self.max_turns
        self._undecided = 0
        return self._problem.question

    def step(self, reply: str) -> Outcome:
        """Check the answer in a reply. Raises :class:`EnvError` when no episode is running."""
        self._require_running("step")
        self._attempts_left -= 1
        answer = read_answer(reply)
        verdict = self._check(answer) if answer is not None else Verdict.WRONG
        self._undecided += verdict is Verdict.UNDECIDED
        right = verdict is Verdict.RIGHT
        if right:
            self._attempts_left = 0
        reward = INVALID_REWARD if answer is None else float(right)
        done = self._attempts_left == 0
        measures = self._measures() if done else {}
        return Outcome(self._feedback(right, answer is not None), reward, done, right, answer is not None, measures)

    def solution(self) -> list[str]:
        """The right answer. Raises :class:`EnvError` when no episode is running."""
        self._require_running("solution")
        return [self._problem.answer]

    def _check(self, answer: str) -> Verdict:
        return check_answer(self._problem.answer, answer, self._check_seconds)

    def _measures(self) -> dict[str, float]:
        return {"undecided": float(self._undecided)}

    def _require_running(self, call: str) -> None:
        if self._attempts_left == 0:
            raise EnvError(f"{self.task}: {call}() while no episode is running; call reset(seed) first")

    def _feedback(self, right: bool, valid: bool) -> str:
        if right:
            return "Right."
        said = "Not right." if valid else f"No answer can be read: give one like this: {write_action('42')}."
        if self._attempts_left == 0:
            return f"{said} The answer is {self._problem.answer} ."
        return f"{said} Attempts left: {self._attempts_left} ."


def _instructions(attempts: int) -> str:
    again = "" if attempts == 1 else f" You have {attempts} attempts, and are told when an answer is not right."
    return (
        "Solve the problem. Reason step by step, then give the final answer, and nothing but the number or the "
        f"expression, without a unit.{again}\n"
        f"Rewards: +1 the right answer, 0 a wrong one, {INVALID_REWARD:+g} a reply without an answer.\n"
        f"End your reply like this: {write_action('42')}"
    )
