"""The background refresh in a forked process, and after a decay that failed has been changed."""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freshper import Exponential, ReplayBuffer, Trajectory
from freshper.errors import RefreshError
from freshper.replay.draw.tasks import TaskReplay
from freshper.replay.freshness import PowerLaw

Make = Callable[..., Trajectory]
PATIENCE = 60  # seconds until a test that hangs is called failed


class Held:
    """f = 1 / (1 + age / 10), which a thread other than the maker's computes only when it may."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self._maker = threading.get_ident()

    def __call__(self, ages: NDArray[np.int64]) -> NDArray[np.float64]:
        if threading.get_ident() != self._maker:
            self.entered.set()
            assert self.release.wait(PATIENCE)
            if self.error is not None:
                raise self.error
        return 1 / (1 + ages / 10.0)


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.release.set()  # or the interpreter would wait for the thread


def buffer_of(freshness: Any, make: Make, **arguments: Any) -> ReplayBuffer:
    settings = {"priority": lambda item: item.episode_return, "alpha": 1.0, "refresh": "background"} | arguments
    buffer = ReplayBuffer(100, freshness=freshness, **settings)
    buffer.add([make(1.0 + at % 7, at) for at in range(40)], policy_version=40)
    buffer.sample(4, policy_version=50)
    return buffer


def check_version(buffer: ReplayBuffer, version: int) -> None:
    """That draws are exact for ``version``."""
    ages = version - np.arange(40)
    weights = (1.0 + np.arange(40) % 7) / (1 + ages / 10.0)
    np.testing.assert_allclose(buffer.probabilities(), weights / weights.sum(), rtol=1e-12)


def succeeds_in_a_child(work: Callable[[], None]) -> bool:
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(PATIENCE)  # a child that hangs ends by that
            work()
            os._exit(0)
        finally:  # whatever it raised: a second pytest must not go on from here
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


forks = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # of Python 3.12, where threads run
]


class TestForked:
    pytestmark = forks

    def test_a_child_forked_in_the_middle_of_a_pass_begins_anew(self, held: Held, make_trajectory: Make) -> None:
        buffer = buffer_of(held, make_trajectory)
        buffer.sample(4, policy_version=60)
        assert held.entered.wait(PATIENCE)

        def work() -> None:
            held.release = threading.Event()  # the parent's may have been copied while it was locked
            held.release.set()
            buffer.wait_for_refresh()  # the parent's pass is none of the child's
            check_version(buffer, 50)
            buffer.update_priorities(buffer.keys()[:1], [1.0])
            assert buffer._core.sampler.indexes[0]._dirty is None  # nothing is remembered for a pass that never ends
            assert buffer.sample(4, policy_version=60).index_version == 50
            buffer.wait_for_refresh()
            assert buffer.sample(4, policy_version=60).index_version == 60
            check_version(buffer, 60)
            buffer.close()

        assert succeeds_in_a_child(work)
        held.release.set()
        buffer.wait_for_refresh()
        check_version(buffer, 60)  # the parent's own pass went on
        buffer.close()

    @pytest.mark.parametrize("first", ["request", "close"])
    def test_a_child_forked_after_a_pass_begins_anew(self, make_trajectory: Make, first: str) -> None:
        buffer = buffer_of(PowerLaw(10.0), make_trajectory)
        buffer.sample(4, policy_version=60)
        buffer.wait_for_refresh()

        def work() -> None:
            if first == "request":
                buffer.sample(4, policy_version=70)
                buffer.wait_for_refresh()
                check_version(buffer, 70)
            buffer.close()

        assert succeeds_in_a_child(work)
        assert buffer.sample(4, policy_version=60).index_version == 60
        buffer.close()

    def test_a_childs_own_failure_is_told_there(self, held: Held, make_trajectory: Make) -> None:
        held.release.set()
        buffer = buffer_of(held, make_trajectory)
        buffer.sample(4, policy_version=60)
        buffer.wait_for_refresh()

        def work() -> None:
            held.error = ZeroDivisionError()
            buffer.sample(4, policy_version=70)
            with pytest.raises(RefreshError):
                buffer.wait_for_refresh()

        assert succeeds_in_a_child(work)
        buffer.close()


def failed_pass(held: Held, make: Make, **arguments: Any) -> ReplayBuffer:
    """A buffer whose pass for version 60 has failed, and nobody was told yet."""
    buffer = buffer_of(held, make, **arguments)
    held.error = ZeroDivisionError("no such decay")
    held.release.set()
    buffer.sample(4, policy_version=60)
    assert buffer._background is not None
    assert buffer._background._pass is not None
    assert buffer._background._pass.exception(PATIENCE) is held.error
    return buffer


@pytest.mark.parametrize("way", ["draw", "wait"])
@pytest.mark.parametrize("change", ["recomputed", "factor", "alpha", "same"])
def test_the_failure_of_a_decay_that_was_changed_is_not_told(
    held: Held, make_trajectory: Make, change: str, way: str
) -> None:
    buffer = failed_pass(held, make_trajectory)
    held.error = None
    if change == "alpha":
        buffer.set_alpha(0.5)
    else:
        buffer.set_freshness({"recomputed": PowerLaw(10.0), "factor": Exponential(9.0), "same": held}[change])
    if way == "wait":
        buffer.wait_for_refresh()
    assert buffer.sample(4, policy_version=60).index_version == 60
    buffer.sample(4, policy_version=70)  # a pass of the new one is made, where one is due
    buffer.wait_for_refresh()
    assert buffer.sample(4, policy_version=70).index_version == 70
    if change in ("recomputed", "same"):
        check_version(buffer, 70)
    buffer.close()


@pytest.mark.parametrize("way", ["draw", "wait"])
def test_the_failure_of_a_decay_that_stays_is_told(held: Held, make_trajectory: Make, way: str) -> None:
    buffer = failed_pass(held, make_trajectory)
    with pytest.raises(RefreshError, match="no such decay"):
        buffer.wait_for_refresh() if way == "wait" else buffer.sample(4, policy_version=61)
    buffer.close()


def test_the_failure_of_one_task_is_told_though_another_was_changed(held: Held, make_trajectory: Make) -> None:
    tasks = {"other": TaskReplay(PowerLaw(3.0)), "test": TaskReplay(held)}
    buffer = failed_pass(held, make_trajectory, tasks=tasks)
    buffer.set_freshness(PowerLaw(5.0), task="other")
    with pytest.raises(RefreshError, match="no such decay"):
        buffer.sample(4, policy_version=61)
    buffer.close()
