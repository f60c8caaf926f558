"""Base priorities b_i: what makes a trajectory worth replaying, before freshness.

A **named** priority adds ``eps`` so that a measure of zero stays drawable. What a callable returns is final:
finite and >= 0, and 0 means never drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ConfigError, PriorityError, TrajectoryError
from freshper.replay.checks import check_name, checked_number, real_array, shown
from freshper.trajectory import Trajectory

PriorityFunction = Callable[[Trajectory], float]
Priority = str | PriorityFunction


def _reward(trajectory: Trajectory, eps: float) -> float:
    return abs(trajectory.episode_return) + eps


def _advantage(trajectory: Trajectory, eps: float) -> float:
    return _mean_magnitude(trajectory, "advantages") + eps


def _td_error(trajectory: Trajectory, eps: float) -> float:
    return _mean_magnitude(trajectory, "td_errors") + eps


def _uniform(trajectory: Trajectory, eps: float) -> float:  # noqa: ARG001 - one signature for all
    return 1.0


def _success(trajectory: Trajectory, eps: float) -> float:  # noqa: ARG001
    return 1.0 if trajectory.success else 0.0


def _mean_magnitude(trajectory: Trajectory, column: str) -> float:
    """Mean of |x_t| over the trajectory's own response tokens: padding and observations never count."""
    values = getattr(trajectory, column)
    if values is None:
        raise TrajectoryError(
            f"this priority needs {column}, which a trajectory of task {trajectory.task!r} lacks: "
            f"set them with trajectory.with_columns({column}=...) before it is added"
        )
    return float(np.abs(values[trajectory.response_mask].astype(np.float64)).mean())


NAMED_PRIORITIES: dict[str, Callable[[Trajectory, float], float]] = {
    "reward": _reward,  # |R_i| + eps
    "advantage": _advantage,  # mean_t |A_i,t| + eps
    "td_error": _td_error,  # mean_t |delta_i,t| + eps
    "uniform": _uniform,  # 1
    "success": _success,  # 1 or 0: only successful trajectories are ever drawn
}


def check_priority(priority: Priority, eps: float) -> None:
    """Raise :class:`ConfigError` unless ``priority`` is a known name or a callable and ``eps`` is finite, >= 0."""
    if not callable(priority):
        check_name("priority", priority, NAMED_PRIORITIES)
    number = checked_number("eps", eps)
    if not (np.isfinite(number) and number >= 0):
        raise ConfigError(f"eps {eps} must be finite and >= 0: it keeps a measure of zero drawable")


def base_priorities(trajectories: Sequence[Trajectory], priority: Priority, eps: float) -> NDArray[np.float64]:
    """Base priority of every trajectory, (n,).

    Raises :class:`PriorityError` where a value is negative, NaN or infinite; whatever a callable raises
    passes through.
    """
    if callable(priority):
        values = [priority(trajectory) for trajectory in trajectories]
    else:
        named = NAMED_PRIORITIES[priority]
        values = [named(trajectory, eps) for trajectory in trajectories]
    return checked_priorities(values, len(values), lambda at: f"trajectory {at}")


def checked_priorities(values: Any, count: int, name: Callable[[int], str]) -> NDArray[np.float64]:
    """``values`` as a float64 array (count,), each finite and >= 0; ``name`` says in the error whose value is wrong.

    Taken are bools, integers and floats. Raises :class:`PriorityError`.
    """
    try:
        array = real_array("base priorities", values, kinds="biuf", error=PriorityError)
    except PriorityError:
        if isinstance(values, (list, tuple)) and len(values) == count:  # of many, say which
            for at, value in enumerate(values):
                if value is None or isinstance(value, (str, bytes)):
                    raise PriorityError(
                        f"the base priority of {name(at)} is {shown(value)}: it must be a number, finite and >= 0"
                    ) from None
        raise
    if array.shape != (count,):
        raise PriorityError(f"base priorities have shape {array.shape}, but there are {count} items")
    bad = ~(np.isfinite(array) & (array >= 0))
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise PriorityError(
            f"the base priority of {name(at)} is {array[at]}: it must be finite and >= 0 (0: never drawn); "
            "nothing was changed"
        )
    return array
