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


def load_config(task_or_path: str) -> TrainConfig:
    """The settings of a TOML file, or of a task's preset.

    A task that has no preset of its own gets the defaults. Raises :class:`UnknownNameError` for a name that is
    neither a file nor a task.
    """
    if task_or_path.endswith(".toml"):
        return make_config(read_toml(Path(task_or_path)))
    if task_or_path not in task_names():
        raise UnknownNameError("task or config file", task_or_path, task_names())
    preset = _preset(f"{task_or_path}.toml")
    return make_config(read_toml(preset) if preset.exists() else {"run": {"task": task_or_path}})


def with_model(config: TrainConfig, target: str, model: str) -> TrainConfig:
    """``config``, loaded from ``target``, for another model.

    A task's preset is made for the embedded policy: over it comes what suits pretrained models. A file of the user's
    own keeps its settings.
    """
    changes = {"policy": {"model": model}}
    if model != "tiny" and not target.endswith(".toml"):
        changes = merged(read_toml(_preset(_PRETRAINED)), changes)
    return make_config(merged(config.model_dump(), changes))


def _preset(name: str) -> Path:
    return Path(str(files("freshper") / _FOLDER / name))
