"""Figures with questions: of a data set (geoqa), drawn (geometry), and small ones for the embedded policy."""

from collections.abc import Callable
from functools import partial

from freshper.envs.core import Env
from freshper.envs.geometry.drawn import PRESETS as _DRAWN
from freshper.envs.geometry.drawn import make_geometry
from freshper.envs.geometry.geoqa import PRESETS as _GEOQA
from freshper.envs.geometry.geoqa import make_geoqa
from freshper.envs.geometry.small import PRESETS as _SMALL
from freshper.envs.geometry.small import make_small_geometry

TASKS: dict[str, tuple[Callable[..., Env], str]] = {
    **{task: (partial(make_geoqa, spec), summary) for task, (spec, summary) in _GEOQA.items()},
    **{task: (partial(make_geometry, spec), summary) for task, (spec, summary) in _DRAWN.items()},
    **{task: (partial(make_small_geometry, spec), summary) for task, (spec, summary) in _SMALL.items()},
}
"""The factory and the summary of every task with a figure."""
