"""A process that forks while threads use a buffer."""

import os
import signal
import threading
from collections.abc import Callable

import pytest

from freshper import ReplayBuffer, Trajectory

PATIENCE = 60  # seconds until a child that hangs is called failed


def _in_child(check: Callable[[], bool]) -> int:
    """Exit code of a child that answers ``check``; -SIGALRM when it hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE)
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_waits_for_a_change_that_another_thread_is_making(make_trajectory: Callable[..., Trajectory]) -> None:
    buffer = ReplayBuffer(8)
    buffer.add([make_trajectory()] * 4, policy_version=0)
    inside, go_on = threading.Event(), threading.Event()
    put = buffer._core.sampler.put

    def slow_put(*arguments: object, **named: object) -> None:
        inside.set()
        go_on.wait(0.2)  # long enough for the fork to come; nobody sets it
        put(*arguments, **named)  # type: ignore[arg-type]

    buffer._core.sampler.put = slow_put  # type: ignore[method-assign]
    adding = threading.Thread(target=lambda: buffer.add([make_trajectory()] * 2, policy_version=0))
    adding.start()
    assert inside.wait(PATIENCE)
    code = _in_child(
        lambda: len(buffer.keys()) == 6 and buffer.drawable == 6 and len(buffer.sample(3, policy_version=0)) == 3
    )
    adding.join()
    assert code == 0
    assert len(buffer.sample(3, policy_version=0)) == 3, "the parent holds nothing any more"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_inside_a_call_of_ones_own_does_not_wait_for_itself(make_trajectory: Callable[..., Trajectory]) -> None:
    codes = []

    def priority(_: Trajectory) -> float:
        codes.append(_in_child(lambda: True))
        return 1.0

    buffer = ReplayBuffer(8, priority=priority)
    buffer.add([make_trajectory()], policy_version=0)
    with buffer._changing():
        codes.append(_in_child(lambda: len(buffer.keys()) == 1))
    assert codes == [0, 0]
