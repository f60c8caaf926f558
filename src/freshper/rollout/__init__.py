"""Rollout: environments and a policy become trajectories."""
