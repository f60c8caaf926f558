"""Learning: advantages, losses, batches, and the learner. It gets trajectories and weights, and knows no buffer."""

from freshper.learning.advantages import ADVANTAGES, reinforce_plus_plus, returns_to_go
from freshper.learning.critic import Critic
from freshper.learning.gae import gae
from freshper.learning.learner import Learner, LearnerUpdate
from freshper.learning.losses import LOSSES, Clip
from freshper.learning.objective import Objective

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "Clip",
    "Critic",
    "Learner",
    "LearnerUpdate",
    "Objective",
    "gae",
    "reinforce_plus_plus",
    "returns_to_go",
]
