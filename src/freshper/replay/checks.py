"""Arguments of a buffer's verbs, checked before anything changes."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freshper.errors import ClockError, ConfigError, FreshPERError, UnknownNameError
from freshper.trajectory import MAX_POLICY_VERSION

MAX_BATCH_SIZE = 2**31 - 1
_MANY_BITS = 1024  # an int of more is told by its size: Python refuses to print the longest ones
_BRIEF = reprlib.Repr()
_BRIEF.maxstring, _BRIEF.maxother = 80, 120


def shown(value: object) -> str:
    """``value`` for a message: in full where that is short, arrays and tensors by their dtype and shape."""
    if isinstance(value, int) and value.bit_length() > _MANY_BITS:
        return f"an int of {value.bit_length()} bits"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of dtype {getattr(value, 'dtype', None)} and shape {tuple(shape)}"
    return _BRIEF.repr(value)


def checked_number(name: str, value: object) -> float:
    """``value`` as a float. Raises :class:`ConfigError` for what is no single real number, or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} {shown(value)} must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{name} is {shown(value)}: it must be finite, and a float ends at 1.8e308") from None


def check_name(kind: str, name: object, known: Iterable[str]) -> None:
    """Raise :class:`UnknownNameError` unless ``name`` is a str among the ``known``."""
    if not isinstance(name, str):
        raise UnknownNameError(kind, shown(name), known)
    if name not in known:
        raise UnknownNameError(kind, name, known)


def real_array(
    name: str, values: object, *, kinds: str = "iuf", error: type[FreshPERError] = ConfigError
) -> NDArray[np.float64]:
    """``values`` as float64, of any shape. Raises ``error`` unless their dtype is one of ``kinds`` (of numpy's).

    Python's own numbers that no integer dtype holds are taken as floats.
    """
    try:
        array = np.asarray(values)
        if array.dtype.kind == "O" and array.size and all(isinstance(value, Real) for value in array.flat):
            array = array.astype(np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as problem:  # RuntimeError: a tensor with a gradient
        raise error(
            f"{name} must be numbers, not {shown(values)} ({problem}); of a torch tensor pass .detach().float().cpu()"
        ) from None
    if array.dtype.kind not in kinds:
        raise error(f"{name} must be numbers, not {shown(values)} (their dtype is {array.dtype})")
    with np.errstate(over="ignore"):  # a longdouble becomes inf, which is refused where it matters
        return array.astype(np.float64)


def checked_version(policy_version: int, clock: int) -> int:
    """``policy_version`` as an int. Raises TypeError and :class:`ClockError`."""
    if isinstance(policy_version, bool) or not isinstance(policy_version, (int, np.integer)):
        raise TypeError(f"policy_version {shown(policy_version)} must be an int: optimizer updates applied")
    if policy_version < clock:
        raise ClockError(
            f"policy_version {shown(policy_version)} is older than {clock}, which an earlier call gave: "
            "the clock counts optimizer updates and never runs backwards"
        )
    if policy_version > MAX_POLICY_VERSION:
        raise ClockError(f"policy_version {shown(policy_version)} must be < 2^63: versions are kept as int64")
    return int(policy_version)


def check_ages(versions: NDArray[np.int64], version: int, max_age: int | None) -> None:
    """Raise :class:`ClockError` for items that would leave at once, by their ``versions`` (n,)."""
    if max_age is not None and len(versions) and version - int(versions.min()) > max_age:
        raise ClockError(
            f"item {int(versions.argmin())} was written by policy version {versions.min()}, older than max_age "
            f"{max_age} at {version}: it would leave before anybody could draw it; nothing was added"
        )


def checked_count(batch_size: int) -> int:
    """``batch_size`` as an int. Raises :class:`ConfigError`."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise ConfigError(f"batch_size {shown(batch_size)} must be an int >= 1")
    if batch_size > MAX_BATCH_SIZE:
        raise ConfigError(f"batch_size {shown(batch_size)} must be <= {MAX_BATCH_SIZE}: no draw of more fits in memory")
    return int(batch_size)


def checked_keys(keys: ArrayLike) -> NDArray[Any]:
    """``keys`` as an integer array (n,). Raises TypeError."""
    try:
        asked = np.asarray(keys)
    except (ValueError, OverflowError, RuntimeError) as problem:
        raise TypeError(f"keys are no integer array ({problem}): pass those of a draw or an add") from None
    if asked.size == 0:
        asked = asked.astype(np.int64)
    if asked.dtype.kind not in "iu":  # not np.integer: a timedelta64 is one
        raise TypeError(f"keys have dtype {asked.dtype}: pass the integer keys of a draw or an add")
    if asked.ndim != 1:
        raise TypeError(f"keys have shape {asked.shape}: they must be (n,)")
    return asked


def checked_values(name: str, values: ArrayLike, count: int) -> NDArray[np.float64]:
    """``values`` as float64 (count,). Raises :class:`ConfigError`."""
    array = real_array(name, values)
    if array.shape != (count,):
        raise ConfigError(f"{name} has shape {array.shape}, but the batch has {count} trajectories")
    return array
