"""Training: the only place where all parts meet. ``from freshper.training import TrainConfig, train``."""

from freshper.training.arms import ARMS
from freshper.training.config import TrainConfig
from freshper.training.loop import train

__all__ = ["ARMS", "TrainConfig", "train"]
