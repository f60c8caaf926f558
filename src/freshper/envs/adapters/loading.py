"""Modules and classes of the user's, found by name."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from freshper.errors import ConfigError

# What importing a module of somebody else's may raise when that is broken; whatever is not here is just as loud.
_BROKEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def load(place: str) -> Any:
    """The object at ``module:name``. Raises :class:`ConfigError`."""
    module_name, _, name = place.partition(":")
    if not (module_name and name):
        raise ConfigError(f"{place!r} must be MODULE:CLASS")
    if os.getcwd() not in sys.path:  # an installed command does not look there by itself, as `python file.py` does
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except _BROKEN as error:
        raise ConfigError(f"module {module_name!r} of {place!r} cannot be imported: {error!r}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"module {module_name!r} ({module.__file__}) has no {name!r}") from None
