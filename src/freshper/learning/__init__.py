"""Learning: advantages, losses, batches, and the learner. It gets trajectories and weights, and knows no buffer."""
