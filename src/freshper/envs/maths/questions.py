"""Questions of a data set: GSM8K, AIME, and any other set of questions with answers that can be checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from freshper.envs.core import Split, with_options
from freshper.envs.data_settings import check_data, sources_of
from freshper.envs.datasets import Reader, Rows, split_rows, text, text_or_number
from freshper.envs.maths.check import CHECK_SECONDS
from freshper.envs.maths.env import MathsEnv, Problem, check_limits
from freshper.errors import ConfigError


@dataclass(frozen=True, slots=True)
class QuestionSpec:
    """Settings of a task made of a data set.

    Args:
        data: a local file, a folder, or the name of a hub data set; see :class:`~freshper.envs.datasets.DataSource`.
        subset: the hub's configuration, or a folder in ``data``. A single file has none.
        train_split: split of ``data`` that is trained on. A single file has none.
        eval_split: split that evaluates; empty divides the training questions by a hash of each.
        eval_data: another source for evaluation; empty takes ``data``. A question that stands in both is refused.
        question, answer: names of the columns.
        answer_mark: the answer is what stands behind the last such mark; empty takes the whole column.
        limit: the first so many usable rows of each source; 0 is all.
        shuffle_seed: order of the rows before the limit; -1 leaves it.
        attempts: replies that an episode may have.
        check_seconds: computing time of checking one answer.
    """

    data: str = ""
    subset: str = ""
    train_split: str = "train"
    eval_split: str = ""
    eval_data: str = ""
    question: str = "question"
    answer: str = "answer"
    answer_mark: str = ""
    limit: int = 0
    shuffle_seed: int = -1
    attempts: int = 1
    check_seconds: float = CHECK_SECONDS

    def __post_init__(self) -> None:
        check_limits(self.attempts, self.check_seconds)
        check_data(self)

    def rows(self, split: Split) -> Rows:
        """The questions of a split. Raises as :func:`~freshper.envs.datasets.split_rows` does."""
        if not self.data:
            raise ConfigError("data is empty: name a file, a folder or a hub data set (env.options.data)")
        columns = {"question": self.question, "answer": self.answer}
        needed: dict[str, Reader] = {"question": text, "answer": _behind(self.answer_mark)}
        return split_rows(split, *sources_of(self, columns), needed)


PRESETS: dict[str, tuple[QuestionSpec, str]] = {
    "gsm8k": (
        QuestionSpec("openai/gsm8k", "main", eval_split="test", answer_mark="####"),
        "GSM8K: grade-school word problems with a whole number as answer; from the hub, or a file (option data).",
    ),
    "aime": (
        QuestionSpec("di-zhang-fire/AIME_1983_2024", question="Question", answer="Answer", attempts=3),
        "AIME: competition problems, three attempts with feedback; from the hub, or a file (option data).",
    ),
    "questions": (
        QuestionSpec(),
        "Any set of questions whose answers math-verify can check: a file, a folder or a hub data set (option data).",
    ),
}


def make_questions(spec: QuestionSpec, task: str, split: Split, **options: Any) -> MathsEnv:
    """A preset with some settings changed; ``options`` are fields of :class:`QuestionSpec`.

    Reads the data: raises as :func:`~freshper.envs.datasets.split_rows` does.
    """
    spec = with_options(spec, options)
    rows = spec.rows(split)

    def draw(seed: int) -> Problem:
        if seed < 0:
            raise ConfigError(f"seed {seed} must be >= 0: it seeds the generator that draws the question")
        row = rows[int(np.random.default_rng(seed).integers(len(rows)))]
        return Problem(row["question"], row["answer"])

    return MathsEnv(task, split, draw, attempts=spec.attempts, check_seconds=spec.check_seconds)


@lru_cache(maxsize=16)
def _behind(mark: str) -> Reader:
    """Reads the answer behind a mark. One object per mark: what was loaded is found again by its readers."""
    if not mark:
        return text_or_number

    def read(value: Any) -> str:
        _, found, answer = text_or_number(value).rpartition(mark)
        if not found:
            raise ValueError(f"has no {mark}")
        if not answer.strip():
            raise ValueError(f"has nothing behind {mark}")
        return answer.strip()

    return read
