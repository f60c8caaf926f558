"""GeoQA: figures with questions from a data set, answers checked by a maths verifier."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from freshper.envs.core import Split, with_options
from freshper.envs.data_settings import check_data, sources_of
from freshper.envs.datasets import (
    Reader,
    Rows,
    picture,
    pictured_identity,
    split_rows,
    text,
    text_or_number,
)
from freshper.envs.geometry.question import FigureEnv, FigureProblem, check_pixels
from freshper.envs.maths.answers import read_answer
from freshper.envs.maths.check import CHECK_SECONDS, Verdict, check_answer
from freshper.envs.maths.env import check_limits
from freshper.errors import ConfigError, EnvError, MissingExtraError

LETTERS = "ABCDEFGHIJ"  # of choices

_PAPER = (255, 255, 255)  # behind what is transparent
_LETTER = re.compile(r"\(?([A-Ja-j])\)?[.:]?")
_UNIT = re.compile(r"\s*(°|\^\{?\\circ\}?|degrees?|\\?(text\{)?\s*[cmk]?m\}?(²|\^\{?2\}?)?)$")


@dataclass(frozen=True, slots=True)
class GeoQASpec:
    """Settings of GeoQA.

    Args:
        data: a local file, a folder, or the name of a hub data set; see :class:`~freshper.envs.datasets.DataSource`.
        subset: the hub's configuration, or a folder in ``data``. A single file has none.
        train_split: split of ``data`` that is trained on. A single file has none.
        eval_split: split that evaluates; empty divides the training questions by a hash of picture and question.
        eval_data: another source for evaluation; empty takes ``data``. A question that stands in both is refused.
        image, question, answer: names of the columns. A picture may be bytes, a path relative to the data, or the
            hub's mapping of both. Of an answer with tags or a box, what stands inside counts.
        choices: name of a column with a list of choices, which are shown with letters; empty for free answers.
        limit: the first so many usable rows of each source; 0 is all.
        shuffle_seed: order of the rows before the limit; -1 leaves it.
        pixels: longer sides of pictures are scaled down to this, 64 to 448.
        attempts: replies that an episode may have.
        check_seconds: computing time of checking one answer.
    """

    data: str = "leonardPKU/GEOQA_R1V_Train_8K"
    subset: str = ""
    train_split: str = "train"
    eval_split: str = ""
    eval_data: str = ""
    image: str = "image"
    question: str = "problem"
    answer: str = "solution"
    choices: str = ""
    limit: int = 0
    shuffle_seed: int = -1
    pixels: int = 448
    attempts: int = 1
    check_seconds: float = CHECK_SECONDS

    def __post_init__(self) -> None:
        check_pixels(self.pixels)
        check_limits(self.attempts, self.check_seconds)
        check_data(self)

    def rows(self, split: Split) -> Rows:
        """The questions of a split. Raises as :func:`~freshper.envs.datasets.split_rows` does."""
        columns = {"image": self.image, "question": self.question, "answer": self.answer}
        needed: dict[str, Reader] = {"image": picture, "question": text, "answer": _final_answer}
        if self.choices:
            columns["choices"], needed["choices"] = self.choices, _choices
        return split_rows(split, *sources_of(self, columns), needed, pictured_identity)


PRESETS: dict[str, tuple[GeoQASpec, str]] = {
    "geoqa": (
        GeoQASpec(),
        "GeoQA: a figure and a question about it, the answer checked by math-verify; from the hub, or a file or folder "
        "(option data).",
    ),
}


class GeoQAEnv(FigureEnv):
    r"""A figure and a question of a data set; the answer is checked by math-verify.

    Observation: the figure (PNG, at most ``pixels`` wide and high) and the question, with lettered choices where the
    data has them. After an answer that is not right, that it was not and how many attempts are left.
    Actions: any reasoning, and the final answer in ``<answer>…</answer>`` or ``\boxed{…}``: a number, an expression,
    or the letter or the text of a choice. Degree signs and units of length are left aside.
    Rewards: 1 for the right answer, 0 for a wrong one, -0.15 for a reply without an answer.
    End: the right answer, or no attempt left (one, unless ``attempts`` says more).
    Parameters: :class:`GeoQASpec`. The measure ``undecided`` counts answers that could not be checked in time.
    Source: GeoQA (Chen et al. 2021), by default in the form of ``leonardPKU/GEOQA_R1V_Train_8K`` on the hub.
    """

    def _check(self, answer: str) -> Verdict:
        given, wanted = (self._chosen(said) for said in (answer, self._problem.answer))
        if given.casefold() == wanted.casefold():
            return Verdict.RIGHT
        if _LETTER.fullmatch(wanted):
            return Verdict.WRONG  # a letter is no quantity
        return check_answer(wanted, given, self._check_seconds)

    def _chosen(self, said: str) -> str:
        """What is meant: the text of a choice where its letter stands for it, and no unit."""
        letter = _LETTER.fullmatch(said.strip())
        if letter:
            place = LETTERS.index(letter[1].upper())
            said = self._problem.choices[place] if place < len(self._problem.choices) else letter[1].upper()
        return _UNIT.sub("", said.strip())


def make_geoqa(spec: GeoQASpec, task: str, split: Split, **options: Any) -> GeoQAEnv:
    """A preset with some settings changed; ``options`` are fields of :class:`GeoQASpec`.

    Reads the data: raises as :func:`~freshper.envs.datasets.split_rows` does.
    """
    spec = with_options(spec, options)
    rows = spec.rows(split)

    def draw(seed: int) -> FigureProblem:
        if seed < 0:
            raise ConfigError(f"seed {seed} must be >= 0: it seeds the generator that draws the question")
        row = rows[int(np.random.default_rng(seed).integers(len(rows)))]
        choices = row.get("choices", ())
        lines = [row["question"], *(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))]
        return FigureProblem(
            "\n".join(lines), row["answer"], scaled_down(row["image"], spec.pixels), choices=tuple(choices)
        )

    return GeoQAEnv(
        task,
        split,
        draw,
        instructions="Solve the problem about the figure. Reason step by step, then give the final answer, and nothing "
        "but the number, the expression or the letter of the right choice, without a unit.",
        example="42",
        attempts=spec.attempts,
        check_seconds=spec.check_seconds,
    )


@lru_cache(maxsize=1024)
def scaled_down(image: bytes, pixels: int) -> bytes:
    """A picture as a PNG in RGB whose longer side is at most ``pixels``. Raises :class:`EnvError` for a damaged one."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow", "vision") from error
    try:
        with Image.open(io.BytesIO(image)) as opened:
            # A palette's transparency must become an alpha channel first, or pillow warns.
            whole = opened.convert("RGBA")
    except (OSError, SyntaxError, ValueError) as error:
        raise EnvError(f"a picture of {len(image)} bytes cannot be decoded: {error}") from error
    flat = Image.new("RGB", whole.size, _PAPER)
    flat.paste(whole, mask=whole.getchannel("A"))
    flat.thumbnail((pixels, pixels), Image.Resampling.LANCZOS)
    written = io.BytesIO()
    flat.save(written, "PNG")
    return written.getvalue()


def _final_answer(value: Any) -> str:
    """The answer column: a number or text, or a solution with the answer in tags or in a box."""
    whole = text_or_number(value)
    if "<answer>" not in whole and "\\boxed{" not in whole:
        return whole
    answer = read_answer(whole)
    if answer is None:
        raise ValueError("has no single answer in its tags or its box")
    return answer


def _choices(value: Any) -> tuple[str, ...]:
    """Two choices or more, as many as there are letters for."""
    if not isinstance(value, list | tuple):
        raise ValueError("is no list")
    choices = tuple(text_or_number(choice) for choice in value)
    if not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(f"has {len(choices)} choices, not 2 to {len(LETTERS)}")
    return choices
