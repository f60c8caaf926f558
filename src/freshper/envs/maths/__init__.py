"""Maths: questions of a data set, generated ones, and sums for the embedded policy."""

from collections.abc import Callable
from functools import partial

from freshper.envs.core import Env
from freshper.envs.maths.arithmetic import PRESETS as _ARITHMETIC
from freshper.envs.maths.arithmetic import make_arithmetic
from freshper.envs.maths.generated import PRESETS as _GENERATED
from freshper.envs.maths.generated import make_generated
from freshper.envs.maths.questions import PRESETS as _QUESTIONS
from freshper.envs.maths.questions import make_questions

TASKS: dict[str, tuple[Callable[..., Env], str]] = {
    **{task: (partial(make_questions, spec), summary) for task, (spec, summary) in _QUESTIONS.items()},
    **{task: (partial(make_generated, spec), summary) for task, (spec, summary) in _GENERATED.items()},
    **{task: (partial(make_arithmetic, spec), summary) for task, (spec, summary) in _ARITHMETIC.items()},
}
"""The factory and the summary of every maths task."""
