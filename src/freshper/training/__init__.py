"""Training: the only place where all parts meet. ``from freshper.training import TrainConfig, train``."""

from freshper.errors import MissingExtraError

try:
    from freshper.training.arms import ARMS, apply_arm
    from freshper.training.config import TrainConfig
    from freshper.training.config_file import make_config
    from freshper.training.loop import train
    from freshper.training.presets import load_config
except ModuleNotFoundError as error:
    raise MissingExtraError(error.name or "a library", "train") from error

__all__ = ["ARMS", "TrainConfig", "apply_arm", "load_config", "make_config", "train"]
