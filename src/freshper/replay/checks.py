"""Arguments of a buffer's verbs, checked before anything changes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freshper.errors import ClockError, ConfigError
from freshper.trajectory import MAX_POLICY_VERSION


def checked_version(policy_version: int, clock: int) -> int:
    """``policy_version`` as an int. Raises TypeError and :class:`ClockError`."""
    if isinstance(policy_version, bool) or not isinstance(policy_version, (int, np.integer)):
        raise TypeError(f"policy_version {policy_version!r} must be an int: optimizer updates applied")
    if policy_version < clock:
        raise ClockError(
            f"policy_version {policy_version} is older than {clock}, which an earlier call gave: "
            "the clock counts optimizer updates and never runs backwards"
        )
    if policy_version > MAX_POLICY_VERSION:
        raise ClockError(f"policy_version {policy_version} must be < 2^63: versions are kept as int64")
    return int(policy_version)


def checked_count(batch_size: int) -> int:
    """``batch_size`` as an int. Raises :class:`ConfigError`."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise ConfigError(f"batch_size {batch_size!r} must be an int >= 1")
    return int(batch_size)


def checked_keys(keys: ArrayLike) -> NDArray[Any]:
    """``keys`` as an integer array (n,). Raises TypeError."""
    asked = np.asarray(keys)
    if asked.size == 0:
        asked = asked.astype(np.int64)
    if not np.issubdtype(asked.dtype, np.integer):
        raise TypeError(f"keys have dtype {asked.dtype}: pass the integer keys of a draw or an add")
    if asked.ndim != 1:
        raise TypeError(f"keys have shape {asked.shape}: they must be (n,)")
    return asked


def checked_values(name: str, values: ArrayLike, count: int) -> NDArray[np.float64]:
    """``values`` as float64 (count,). Raises :class:`ConfigError`."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} must be numbers, not {values!r}") from None
    if array.shape != (count,):
        raise ConfigError(f"{name} has shape {array.shape}, but the batch has {count} trajectories")
    return array
