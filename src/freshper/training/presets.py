"""Named starting points: one TOML file per task in freshper/configs, laid over the defaults."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from freshper.envs import task_names
from freshper.errors import UnknownNameError
from freshper.training.config import TrainConfig
from freshper.training.config_file import make_config, read_toml


def load_config(task_or_path: str) -> TrainConfig:
    """The settings of a TOML file, or of a task's preset.

    A task that has no preset of its own gets the defaults. Raises :class:`UnknownNameError` for a name that is
    neither a file nor a task.
    """
    if task_or_path.endswith(".toml"):
        return make_config(read_toml(Path(task_or_path)))
    if task_or_path not in task_names():
        raise UnknownNameError("task or config file", task_or_path, task_names())
    preset = Path(str(files("freshper") / "configs" / f"{task_or_path}.toml"))
    return make_config(read_toml(preset) if preset.exists() else {"run": {"task": task_or_path}})
