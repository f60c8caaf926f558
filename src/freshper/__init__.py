"""Freshness-aware prioritized experience replay for LLM and VLM reinforcement learning."""

from freshper.replay.buffer import PriorityUpdate, ReplayBuffer
from freshper.replay.freshness import Exponential, NoDecay
from freshper.replay.sampler import SampledBatch
from freshper.trajectory import SamplingParams, StopReason, Trajectory, Turn

__all__ = [
    "Exponential",
    "NoDecay",
    "PriorityUpdate",
    "ReplayBuffer",
    "SampledBatch",
    "SamplingParams",
    "StopReason",
    "Trajectory",
    "Turn",
]
__version__ = "0.1.0"
