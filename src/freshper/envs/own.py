"""An environment of one's own, by name: from the text in front of the colon to what builds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from freshper.envs.adapters.loading import load
from freshper.envs.core import Env
from freshper.errors import ConfigError

FORMS = "MODULE:CLASS, gymnasium:ENV_ID, openenv:URL or trl:MODULE:CLASS"


def is_own(task: str) -> bool:
    """Whether this names an environment of one's own: names of registered tasks have no colon."""
    return ":" in task


def resolve(task: str) -> Callable[..., Env]:
    """What builds the environment that ``task`` names, as ``factory(task, split, **options)``.

    ``MODULE:CLASS`` is a Python class (:mod:`~freshper.envs.adapters.plain`), ``gymnasium:ENV_ID`` an environment
    that gymnasium knows, ``openenv:URL`` an OpenEnv server, ``trl:MODULE:CLASS`` a class made for TRL's
    ``environment_factory``. Modules are looked for in the working directory first.

    Raises :class:`ConfigError` for a name of no such form, and for a module or class that cannot be imported.
    """
    kind, _, rest = task.partition(":")
    if not (kind and rest):
        raise ConfigError(f"{task!r} names no environment: write {FORMS}")
    if kind == "gymnasium":
        from freshper.envs.adapters.gymnasium import make_gymnasium

        return make_gymnasium
    if kind == "openenv":
        from freshper.envs.adapters.openenv import make_openenv

        return make_openenv
    if kind == "trl":
        from freshper.envs.adapters.trl import make_trl

        load(rest)
        return make_trl
    from freshper.envs.adapters.plain import make_plain

    load(task)
    return make_plain


def own_class(task: str) -> Any:
    """The Python class that ``task`` names, None where it names none. Raises :class:`ConfigError`."""
    kind, _, rest = task.partition(":")
    return None if kind in ("gymnasium", "openenv") else load(rest if kind == "trl" else task)
