"""Named starting points: one TOML file per task in freshper/configs, laid over the defaults."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from freshper.envs import task_names
from freshper.errors import UnknownNameError
from freshper.training.config import TrainConfig
from freshper.training.config_file import make_config, merged, read_toml

_FOLDER = "configs"
_PRETRAINED = "pretrained.toml"


def load_config(task_or_path: str, model: str | None = None) -> TrainConfig:
    """The settings of a TOML file, of a config in the package (``paper/gsm8k``), or of a task; for ``model`` if named.

    A task that has no config of its own, as your own ones, gets the defaults. Both are made for the embedded policy:
    for another model, what suits pretrained ones comes over them. A file of the user's own, and a config that is made
    for another model, keep their settings. Raises :class:`UnknownNameError` for a name that is nothing of these.
    """
    is_file = task_or_path.endswith(".toml")
    packaged = task_or_path in config_names()
    if not (is_file or packaged or ":" in task_or_path or task_or_path in task_names()):
        raise UnknownNameError("task or config file", task_or_path, [*task_names(), *config_names()])
    if is_file or packaged:
        values = read_toml(Path(task_or_path) if is_file else _preset(f"{task_or_path}.toml"))
    else:
        values = {"run": {"task": task_or_path}}
    if model is None:
        return make_config(values)
    if model != "tiny" and not is_file and "model" not in values.get("policy", {}):
        values = merged(values, read_toml(_preset(_PRETRAINED)))
    return make_config(merged(values, {"policy": {"model": model}}))


def config_names() -> list[str]:
    """The configs in the package by name, sorted: CPU-scale ones, and the paper's below paper/."""
    folder = _preset("")
    names = {str(path.relative_to(folder).with_suffix("").as_posix()) for path in folder.rglob("*.toml")}
    return sorted(names - {_PRETRAINED.removesuffix(".toml")})


def _preset(name: str) -> Path:
    return Path(str(files("freshper") / _FOLDER / name))
