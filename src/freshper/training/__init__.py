"""Training: the only place where all parts meet. ``from freshper.training import TrainConfig, train``."""

from freshper.errors import MissingExtraError

try:
    from freshper.training.arms import ARMS
    from freshper.training.config import TrainConfig
    from freshper.training.loop import train
except ModuleNotFoundError as error:
    raise MissingExtraError(error.name or "a library", "train") from error

__all__ = ["ARMS", "TrainConfig", "train"]
