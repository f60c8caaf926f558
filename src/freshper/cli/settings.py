"""Commands that train: their own arguments, and every setting as a dotted flag."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import field, make_dataclass
from typing import Annotated, Any, TypeVar

import tyro

from freshper.cli.terminal import parse

T = TypeVar("T")


def read_arguments(words: Sequence[str], command: type[T], name: str) -> tuple[T, list[str]] | None:
    """The command's own arguments and the flags of settings; None when help was asked for and given.

    Raises:
        ConfigError: An argument that does not exist or does not fit, or a flag without its value.
    """
    from freshper.training.config_file import split_flags

    if {"-h", "--help"} & set(words):
        _settings_help(command, name)
        return None
    own, flags = split_flags(words)
    return parse(command, name, own, "a setting is named with its section, as in --run.seed"), flags


def _settings_help(command: type[Any], name: str) -> None:
    """The command's own arguments and every setting, as tyro shows them."""
    from freshper.training.config import TrainConfig
    from freshper.training.sections import EnvConfig

    # A setting takes a value, also one that is true or false.
    whole_config = Annotated[TrainConfig, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    settings = (("settings", whole_config, field(default=TrainConfig(env=EnvConfig(options={"NAME": "VALUE"})))),)
    whole = make_dataclass(
        command.__name__, settings, bases=(command,), frozen=True, namespace={"__doc__": command.__doc__}
    )
    with contextlib.suppress(SystemExit):
        tyro.cli(whole, prog=f"freshper {name}", args=["--help"])
