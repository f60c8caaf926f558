"""Freshness-aware prioritized experience replay for LLM and VLM reinforcement learning."""

from freshper.replay.auto_tau import AutoTau, TauChange
from freshper.replay.batch import PriorityUpdate, SampledBatch
from freshper.replay.buffer import ReplayBuffer
from freshper.replay.disk.interchange import read_trajectories, write_trajectories
from freshper.replay.draw.tasks import TaskReplay
from freshper.replay.freshness import Exponential, Floored, NoDecay, PowerLaw
from freshper.replay.store.columns import Columns
from freshper.trajectory import SamplingParams, StopReason, Trajectory, Turn

__all__ = [
    "AutoTau",
    "Columns",
    "Exponential",
    "Floored",
    "NoDecay",
    "PowerLaw",
    "PriorityUpdate",
    "ReplayBuffer",
    "SampledBatch",
    "SamplingParams",
    "StopReason",
    "TaskReplay",
    "TauChange",
    "Trajectory",
    "Turn",
    "read_trajectories",
    "write_trajectories",
]
__version__ = "0.1.0"
