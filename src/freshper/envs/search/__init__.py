"""The search agent: a question, a search tool, an answer. Retrieval is behind one protocol."""

from collections.abc import Callable
from functools import partial

from freshper.envs.core import Env
from freshper.envs.search.nq import PRESETS as _NQ
from freshper.envs.search.nq import make_nq_search
from freshper.envs.search.small import PRESETS as _SMALL
from freshper.envs.search.small import make_small_search

TASKS: dict[str, tuple[Callable[..., Env], str]] = {
    **{task: (partial(make_small_search, spec), summary) for task, (spec, summary) in _SMALL.items()},
    **{task: (partial(make_nq_search, spec), summary) for task, (spec, summary) in _NQ.items()},
}
"""The factory and the summary of every search task."""
