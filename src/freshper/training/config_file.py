"""Settings from and to files: nested values, TOML, and one-line errors that name the nearest setting."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from freshper.errors import ConfigError, FreshPERError
from freshper.training.config import TrainConfig

FREE = "env.options."
"""Settings below are the task's own: their names are checked by the task."""


def make_config(values: Mapping[str, Any]) -> TrainConfig:
    """Settings from nested ``values``. Raises :class:`ConfigError` in one line for the first thing wrong."""
    try:
        return TrainConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(_first_fault(error)) from None


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    place = ".".join(str(part) for part in fault["loc"])
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, FreshPERError):
        return str(cause)
    if fault["type"] == "extra_forbidden":
        return unknown_setting(place)
    return f"{place} = {fault['input']!r}: {fault['msg'][0].lower()}{fault['msg'][1:]}"


def field_paths(section: type[BaseModel] = TrainConfig, prefix: str = "") -> list[str]:
    """Dotted paths of all settings."""
    paths: list[str] = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            paths += field_paths(inner, f"{prefix}{name}.")
        else:
            paths.append(f"{prefix}{name}")
    return paths


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with nested ``changes`` laid over it."""
    result = dict(base)
    for key, value in changes.items():
        inner = result.get(key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            result[key] = merged(inner, value)
        else:
            result[key] = value
    return result


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises :class:`ConfigError` where it is missing or malformed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the config {path}: {error}") from None


def write_toml(config: TrainConfig, path: Path) -> None:
    """Write every setting under the sentence that explains it: enough to run again, and to read."""
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment("Resolved settings of a run: `freshper train THIS_FILE` repeats it."))
    _fill(document, config)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(tomlkit.dumps(document))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _fill(table: Any, section: BaseModel) -> None:
    import tomlkit

    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            inner = tomlkit.table()
            _fill(inner, value)
            table.add(name, inner)
        else:
            table.add(tomlkit.comment(field.description or ""))
            table.add(name, _inline(value) if isinstance(value, dict) else value)


def _inline(values: Mapping[str, Any]) -> Any:
    """A table on one line, tables in it too."""
    import tomlkit

    table = tomlkit.inline_table()
    table.update({name: _inline(value) if isinstance(value, Mapping) else value for name, value in values.items()})
    return table


def split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """``words`` without the dotted flags, and those: ``--section.name value`` and ``--section.name=value``."""
    own: list[str] = []
    flags: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            own.append(word)
            continue
        flags.append(word)
        if not equals and (value := next(rest, None)) is not None:
            flags.append(value)
    return own, flags


def with_flags(config: TrainConfig, flags: Sequence[str]) -> TrainConfig:
    """``config`` with dotted flags laid over it: ``--replay.freshness.tau 300``, or with ``=``.

    Raises :class:`ConfigError` for an unknown setting (naming the nearest), a missing value, or a wrong one.
    """
    changes: dict[str, Any] = {}
    words = iter(flags)
    for word in words:
        if not word.startswith("--"):
            raise ConfigError(f"unexpected argument {word!r}: settings are given as --section.name value")
        name, equals, inline = word[2:].partition("=")
        path = _path(name)
        if path not in field_paths() and not path.startswith(FREE):
            raise ConfigError(unknown_setting(path))
        value = inline if equals else next(words, None)
        if value is None:
            raise ConfigError(f"--{name} needs a value")
        changes = merged(changes, _nested(path, _free_value(value) if path.startswith(FREE) else value))
    return make_config(merged(config.model_dump(), changes)) if changes else config


def _path(name: str) -> str:
    """A flag's name as a dotted path. Below an option of the task, names are the task's own and may have hyphens."""
    path = name.replace("-", "_")
    if not path.startswith(FREE):
        return path
    depth = FREE.count(".") + 1
    return ".".join([*path.split(".")[:depth], *name.split(".")[depth:]])


def _free_value(text: str) -> Any:
    """A value of a setting whose type only the task knows: as TOML writes it, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _nested(path: str, value: Any) -> dict[str, Any]:
    """A value as text under a dotted path; the settings turn it into their own type."""
    head, _, rest = path.partition(".")
    if rest:
        return {head: _nested(rest, value)}
    return {head: value}


def unknown_setting(path: str) -> str:
    """The error for a setting that does not exist, with the one that may be meant.

    Which is: one inside it when it is a section; one of the same name in another section; a similar name in the same
    section; or, where the section is unknown too, a similar path.
    """
    known = field_paths()
    section, _, name = path.rpartition(".")
    inside = [other for other in known if other.startswith(f"{path}.")]
    namesakes = [other for other in known if other.rpartition(".")[2] == name]
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
    near = inside or difflib.get_close_matches(path, namesakes, cutoff=0)
    near = near or [siblings[other] for other in difflib.get_close_matches(name, siblings)]
    if not (near or siblings):
        near = difflib.get_close_matches(path, known)
    return f"unknown setting {path}." + (f" Did you mean {near[0]}?" if near else "")
