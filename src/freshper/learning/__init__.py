"""Learning: advantages, losses, batches, and the learner. It gets trajectories and weights, and knows no buffer."""

from freshper.learning.advantages import reinforce_plus_plus, returns_to_go
from freshper.learning.learner import Learner, LearnerUpdate

__all__ = ["Learner", "LearnerUpdate", "reinforce_plus_plus", "returns_to_go"]
