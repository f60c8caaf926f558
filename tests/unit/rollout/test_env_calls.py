"""Calls of environments in threads and within a time limit (T20)."""

import sys
import threading

import numpy as np
import pytest

from freshper.envs.core import Outcome
from freshper.errors import ConfigError, EnvError
from freshper.policies.scripted import ScriptedPolicy
from freshper.rollout.collect import Limits, Start, collect
from freshper.rollout.env_calls import EnvCalls
from freshper.trajectory import SamplingParams, StopReason

LIMITS = Limits(100, 10_000)


class Counting:
    """Says a number three times."""

    task, instructions, max_turns = "counting", "Say a number.", 3

    def __init__(self, hang_at=None):
        self.turn, self.hang_at, self.release = 0, hang_at, threading.Event()
        self.threads = set()

    def reset(self, seed):
        self.turn = 0
        return self.show()

    def step(self, reply):
        self.turn += 1
        return Outcome(self.show(), 1.0, self.turn == 3, self.turn == 3, True, {"turns": float(self.turn)})

    def show(self):
        self.threads.add(threading.get_ident())
        if self.turn == self.hang_at:
            self.release.wait(60)
        return f"number {self.turn}"


def gather(envs, **how):
    starts = [Start(n, f"{n}") for n in range(len(envs))]
    policy = ScriptedPolicy(lambda observation: "yes")
    return collect(envs, policy, starts, sampling=SamplingParams(), seed=0, **{"limits": LIMITS} | how)


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("hang_at", [0, 1, 3])
def test_t20_a_call_that_hangs_ends_its_episode_alone(threads, hang_at):
    envs = [Counting(), Counting(hang_at), Counting(), Counting(hang_at)]
    rollout = gather(envs, env_threads=threads, env_timeout=0.2)
    assert [t.stop_reason for t in rollout.transcripts] == [StopReason.TERMINATED, StopReason.ERROR] * 2
    assert rollout.transcripts[1].error == ("EnvError: the environment did not answer within 0.2 s, and was given up")
    assert rollout.hung == (1, 3)
    assert len(rollout.trajectories) == 2  # half an episode is never learned from
    for env in envs:
        env.release.set()


@pytest.mark.parametrize(("threads", "timeout"), [(0, 30.0), (1, None), (3, 30.0), (3, None)])
def test_threads_and_time_limits_change_nothing_else(threads, timeout):
    plain = gather([Counting() for _ in range(5)])
    other = gather([Counting() for _ in range(5)], env_threads=threads, env_timeout=timeout)
    assert other.transcripts == plain.transcripts
    for one, two in zip(plain.trajectories, other.trajectories, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
    assert other.hung == ()


def test_without_both_calls_stay_in_the_callers_thread():
    env = Counting()
    gather([env])
    assert env.threads == {threading.get_ident()}


def test_the_time_limit_does_not_count_the_wait_for_a_thread():
    """One thread, five calls of 0.1 s each: the last waits longer than the limit, but no call takes so long."""
    with EnvCalls(1, 0.3) as calls:
        event = threading.Event()
        for row in range(5):
            calls.call(row, lambda: event.wait(0.1))
        answers = {}
        while len(answers) < 5:
            answers |= dict(calls.answers(wait=True))
    assert answers == dict.fromkeys(range(5), False)
    assert calls.hung == set()


def test_an_environment_that_wants_to_exit_the_program_is_an_error():
    with EnvCalls(1, None) as calls:
        calls.call(0, lambda: sys.exit(3))
        ((row, answer),) = calls.answers(wait=True)
    assert row == 0
    assert isinstance(answer, EnvError)
    assert "exit with 3" in str(answer)


def test_a_request_to_stop_in_a_thread_reaches_the_caller():
    def stop():
        raise KeyboardInterrupt

    with EnvCalls(0, 5.0) as calls, pytest.raises(KeyboardInterrupt):
        calls.call(0, stop)


@pytest.mark.parametrize(("threads", "timeout"), [(-1, None), (0, 0.0), (0, -1.0)])
def test_impossible_settings_are_refused(threads, timeout):
    with pytest.raises(ConfigError, match="must be"):
        EnvCalls(threads, timeout)


@pytest.mark.parametrize("turns", [1, 2, None])
def test_measures_of_the_last_outcome_are_kept_also_where_a_limit_ended_it(turns):
    (transcript,) = gather([Counting()], limits=Limits(100, 10_000, turns)).transcripts
    assert transcript.measures == {"turns": float(turns or 3)}
    assert transcript.task == "counting"
