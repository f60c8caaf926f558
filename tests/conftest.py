"""Small trajectories and buffers for the tests of every room."""

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from freshper import ReplayBuffer, StopReason, Trajectory, Turn
from freshper.replay.freshness import Freshness


def _own_return(trajectory: Trajectory) -> float:
    return trajectory.episode_return


def _trajectory(reward: float = 1.0, version: int = 0, **parts: Any) -> Trajectory:
    """Two turns of two tokens, an observation and a reply each; ``parts`` replace what they name."""
    mask = np.array([False, True, False, True])
    whole: dict[str, Any] = {
        "tokens": [5, 6, 7, 8],
        "response_mask": mask,
        "behavior_logprobs": np.where(mask, -0.5, 0.0),
        "turns": (Turn(0, 1, 2, 0.0), Turn(2, 3, 4, reward)),
        "stop_reason": StopReason.TERMINATED,
        "success": reward > 0,
        "policy_version": version,
        "task": "test",
        "group": "test/0",
        "seed": 0,
    }
    return Trajectory(**(whole | parts))


def _buffer(
    bases: Sequence[float],
    versions: Sequence[int] | None = None,
    *,
    capacity: int | None = None,
    freshness: Freshness | None = None,
    alpha: float = 1.0,
    seed: int = 0,
) -> ReplayBuffer:
    """A buffer whose items have exactly these base priorities, added one after the other."""
    buffer = ReplayBuffer(
        capacity or max(len(bases), 1), priority=_own_return, freshness=freshness, alpha=alpha, seed=seed
    )
    ages = versions if versions is not None else [0] * len(bases)
    if len(bases):
        items = [_trajectory(base, version) for base, version in zip(bases, ages, strict=True)]
        buffer.add(items, policy_version=max(ages))
    return buffer


@pytest.fixture(scope="session", autouse=True)
def _processes_can_be_interrupted() -> Iterator[None]:
    """A background job of a shell ignores SIGINT, and so would its children; a handler becomes the default in them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def make_trajectory() -> Callable[..., Trajectory]:
    return _trajectory


@pytest.fixture(scope="session")
def make_buffer() -> Callable[..., ReplayBuffer]:
    return _buffer


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ReplayBuffer], bytes]:
    """All that a buffer holds, as bytes: equal before and after a call means that the call changed nothing."""
    path = tmp_path_factory.mktemp("everything") / "buffer"

    def snapshot(buffer: ReplayBuffer) -> bytes:
        with mock.patch("os.fsync"):  # nothing has to survive here, and a busy disk takes its time
            buffer.save(path)
        return path.read_bytes()

    return snapshot
