"""Settings from and to files: nested values, TOML, and one-line errors that name the nearest setting."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from freshper.errors import ConfigError, FreshPERError
from freshper.training.config import TrainConfig


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
        near = difflib.get_close_matches(place, list(field_paths()), n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        return f"unknown setting {place}.{hint}"
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
    temporary.write_text(tomlkit.dumps(document), encoding="utf-8")
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
            table.add(name, list(value) if isinstance(value, tuple) else value)
