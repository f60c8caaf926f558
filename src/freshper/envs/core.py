"""What an environment is: chat turns in, rewards out; the registry of tasks; the contract as a function."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from freshper.errors import EnvError, UnknownNameError

Split = Literal["train", "eval"]
EVAL_SHARE = 0.2  # share of all levels that is kept for evaluation


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one reply led to.

    ``observation`` is the next user message (what a person would be shown, also after the last reply),
    ``done`` whether the episode is over, ``success`` whether the task is solved (only ever true with
    ``done``), ``valid`` whether an action could be read from the reply.
    """

    observation: str
    reward: float
    done: bool
    success: bool
    valid: bool


@runtime_checkable
class Env(Protocol):
    """A multi-turn text task. One object runs one episode at a time; ``reset`` starts the next.

    ``instructions`` stands in the first turn of a conversation. ``max_turns`` is the task's own limit on
    replies: the environment itself says ``done`` when it is reached.
    """

    task: str
    instructions: str
    max_turns: int

    def reset(self, seed: int) -> str:
        """Start the level that ``seed`` decides (nothing else does) and return the first observation."""
        ...

    def step(self, reply: str) -> Outcome:
        """Play one reply. Any string is accepted: what cannot be read is an invalid action, never an exception."""
        ...
