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
    """The settings of a TOML file, or of a task's preset, for ``model`` where one is named.

    A task that has no preset of its own gets the defaults. Both are made for the embedded policy: for another model,
    what suits pretrained ones comes over them. A file of the user's own keeps its settings.
    Raises :class:`UnknownNameError` for a name that is neither a file nor a task.
    """
    is_file = task_or_path.endswith(".toml")
    if not is_file and task_or_path not in task_names():
        raise UnknownNameError("task or config file", task_or_path, task_names())
    preset = Path(task_or_path) if is_file else _preset(f"{task_or_path}.toml")
    values = read_toml(preset) if is_file or preset.exists() else {"run": {"task": task_or_path}}
    if model is None:
        return make_config(values)
    if model != "tiny" and not is_file:
        values = merged(values, read_toml(_preset(_PRETRAINED)))
    return make_config(merged(values, {"policy": {"model": model}}))


def _preset(name: str) -> Path:
    return Path(str(files("freshper") / _FOLDER / name))
