"""Whether the trees run compiled, and the compiling. numba is loaded here and nowhere else, and only when wanted.

The kernels are compiled in memory, about a second once per process. numba's cache on disk would save half of
that and is not used: its index is read and written without a lock, and processes that start together on an
empty cache are known to crash or to load each other's files.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from freshper.errors import ConfigError, MissingExtraError
from freshper.replay.draw import kernels

Kernel = Callable[..., Any]

SWITCH = "FRESHPER_COMPILED"
"""Environment variable: 1 compiles every tree, 0 none; unset or empty decides by size."""
WORTHWHILE = 10_000
"""Slots from which on the second of loading and compiling is spent without being asked for."""

_REPAIR = f"repair it with pip install -U 'freshper[fast]', or set {SWITCH}=0 to run on numpy: same results, slower"
# What a broken or mismatched numba, or the machine code library below it, raises.
_FAULTS = (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError, LookupError, SystemError)
_compiling = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Unusable:
    """Why there is no kernel."""

    error: ConfigError | MissingExtraError
    silent: bool  # a numba that is not there, or switched off by its own switch, is nobody's fault


def twins(*functions: Kernel, capacity: int, compiled: bool | None = None) -> tuple[Kernel, ...] | None:
    """The compiled twins of these functions of :mod:`~freshper.replay.draw.kernels`, or None to run on numpy.

    ``compiled`` true or false is an order. None leaves it to the environment variable FRESHPER_COMPILED (1 or
    0), and without that to the size: trees of 10,000 slots or more are compiled when numba is installed.

    Raises :class:`MissingExtraError` when an order or the variable asks for numba and it is not installed,
    :class:`ConfigError` when it does not work; without an order that is a :class:`RuntimeWarning`, given once.
    """
    if compiled is None:
        compiled = _switch()
    if compiled is False or (compiled is None and capacity < WORTHWHILE):
        return None
    with _compiling:  # threads that build their first trees together compile once
        made = [_twin(function) for function in functions]
        for kernel in made:
            if isinstance(kernel, _Unusable):
                if compiled:
                    raise kernel.error
                if not kernel.silent:
                    _warn_once(str(kernel.error))
                return None
    return tuple(kernel for kernel in made if not isinstance(kernel, _Unusable))


def _switch() -> bool | None:
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{SWITCH}={value!r} in the environment must be 1 (compiled) or 0 (numpy), or unset")
    return None if value == "" else value == "1"


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(f"the replay index runs on numpy: {message}", RuntimeWarning, stacklevel=4)


@functools.cache
def _numba() -> ModuleType | _Unusable:
    """numba, imported once; an attempt that failed is not repeated for every tree."""
    try:
        import numba
    except ModuleNotFoundError as error:
        if error.name == "numba":
            return _Unusable(MissingExtraError("numba", "fast"), silent=True)
        return _broken("cannot be imported", error)
    except _FAULTS as error:
        return _broken("cannot be imported", error)
    module: ModuleType = numba
    return module


@functools.cache
def _twin(function: Kernel) -> Kernel | _Unusable:
    numba = _numba()
    if isinstance(numba, _Unusable):
        return numba
    try:
        if numba.config.DISABLE_JIT:
            message = f"compiled trees were asked for, but NUMBA_DISABLE_JIT is set: unset it, or set {SWITCH}=0"
            return _Unusable(ConfigError(message), silent=True)
        return _compile(function, numba)
    except _FAULTS as error:
        return _broken(f"cannot compile {function.__name__}", error)


def _compile(function: Kernel, numba: Any) -> Kernel:
    try:
        # Neither fastmath nor parallel: sums keep their order. The lock of the interpreter is free meanwhile.
        # Divisions by 0 give what numpy gives.
        compile_ = functools.partial(numba.njit, nogil=True, cache=False, error_model="numpy")
        names = vars(kernels) | {"sum_above": compile_()(kernels.sum_above)}  # what other kernels call
        kernel: Kernel = compile_(_signature(function, numba))(FunctionType(function.__code__, names))
    except numba.core.errors.NumbaError as error:  # its own family, known only once it is loaded
        raise RuntimeError(str(error)) from error
    return kernel


def _broken(what: str, error: BaseException) -> _Unusable:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return _Unusable(ConfigError(f"numba is installed but {what} ({reason}): {_REPAIR}"), silent=False)


def _signature(function: Kernel, numba: Any) -> Any:
    """Argument types of a kernel; ``given`` arrays are only read, and may be read-only."""
    types = numba.types
    number, real, truth = types.int64, types.float64, types.boolean
    floats, ints = (types.Array(kind, 1, "C") for kind in (real, number))
    items = types.Array(numba.from_dtype(kernels.ITEM), 1, "C")
    given_floats, given_ints = (types.Array(kind, 1, "C", readonly=True) for kind in (real, number))
    signatures = {
        kernels.find_slots: truth(floats, floats, floats, truth, ints),
        kernels.write_leaves: truth(floats, floats, number, given_ints, given_floats),
        kernels.write_items: types.Tuple((real, number, number))(
            floats, floats, items, given_ints, given_floats, given_floats
        ),
        kernels.sum_all: types.void(floats, floats),
        kernels.replay_matches: types.void(ints, floats, ints, given_ints),
        kernels.ratios_to_least: types.void(given_floats, floats),
    }
    return signatures[function]
