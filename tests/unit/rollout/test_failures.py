"""An environment that fails ends its own episode, is counted, and leaves nothing to learn from (case T20)."""

from dataclasses import replace

import numpy as np
import pytest

from freshper.envs.core import Outcome
from freshper.policies.scripted import ScriptedPolicy
from freshper.rollout.collect import Limits, Start, collect
from freshper.trajectory import SamplingParams, StopReason

LIMITS = Limits(max_reply_tokens=8, max_episode_tokens=1000)


class Steady:
    """Three turns, reward 1 each."""

    task = "steady"
    instructions = "Go on."
    max_turns = 3

    def reset(self, seed):
        self.turn = 0
        return "begin"

    def step(self, reply):
        self.turn += 1
        return Outcome(f"turn {self.turn}", 1.0, self.turn == 3, self.turn == 3, True)


class FailsInReset(Steady):
    def reset(self, seed):
        raise self.error


class FailsInStep(Steady):
    def step(self, reply):
        outcome = super().step(reply)
        if self.turn == 2:
            raise self.error
        return outcome


class Garbage(Steady):
    """The second outcome is altered."""

    def step(self, reply):
        outcome = super().step(reply)
        return self.alter(outcome) if self.turn == 2 else outcome


class NoText(Steady):
    def reset(self, seed):
        return self.observation


def with_part(**parts):
    return lambda outcome: replace(outcome, **parts)


GARBAGE = {
    "nothing": lambda outcome: None,
    "a tuple": lambda outcome: ("turn", 1.0, False, False, {}),
    "reward NaN": with_part(reward=float("nan")),
    "reward infinite": with_part(reward=-float("inf")),
    "reward none": with_part(reward=None),
    "reward text": with_part(reward="much"),
    "reward an array": with_part(reward=np.ones(2)),
    "reward too large": with_part(reward=10**400),
    "observation bytes": with_part(observation=b"turn"),
    "observation none": with_part(observation=None),
    "observation a list": with_part(observation=["turn"]),
    "observation a lone surrogate": with_part(observation="\ud800"),
    "last observation none": with_part(observation=None, done=True),
    "done none": with_part(done=None),
    "done an array": with_part(done=np.array([True, False])),
    "success text": with_part(success="yes", done=True),
    "valid a number": with_part(valid=1),
}
ERRORS = [
    ValueError("bad"),
    KeyError("x"),
    AssertionError(),
    StopIteration(),
    MemoryError(),
    RecursionError(),
    OSError(),
]


def play(env):
    """The environment between two steady ones."""
    policy = ScriptedPolicy(lambda observation: "ok", version=2)
    starts = [Start(row, f"g{row}") for row in range(3)]
    return collect([Steady(), env, Steady()], policy, starts, limits=LIMITS, sampling=SamplingParams(), seed=0)


def check_contained(rollout, turns):
    """Exactly the middle episode is an error, with what was played before; its neighbors are as without it."""
    assert [t.stop_reason for t in rollout.transcripts] == [
        StopReason.TERMINATED,
        StopReason.ERROR,
        StopReason.TERMINATED,
    ]
    assert rollout.errors == (rollout.transcripts[1],)
    assert rollout.errors[0].error
    assert not rollout.errors[0].success
    assert len(rollout.errors[0].turns) == turns
    expected = play(Steady())
    for got, want in zip(rollout.trajectories, expected.trajectories[::2], strict=True):
        assert got.tokens.tolist() == want.tokens.tolist()
        assert (got.turns, got.group, got.success) == (want.turns, want.group, want.success)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize(("kind", "turns"), [(FailsInReset, 0), (FailsInStep, 1)])
def test_whatever_an_environment_raises_is_data(kind, turns, error):
    env = kind()
    env.error = error
    rollout = play(env)
    check_contained(rollout, turns)
    assert rollout.errors[0].error == f"{type(error).__name__}: {error}"


def test_a_request_to_stop_is_obeyed():
    env = FailsInStep()
    env.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        play(env)


def test_an_environment_that_wants_the_program_to_exit_is_an_error():
    env = FailsInStep()
    env.error = SystemExit(0)
    assert play(env).errors[0].error == "EnvError: the environment asked the program to exit with 0"


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_is_an_error_and_never_half_an_episode(case):
    env = Garbage()
    env.alter = GARBAGE[case]
    check_contained(play(env), turns=1)


@pytest.mark.parametrize("observation", [None, b"begin", 3, ("begin", {}), "\udfff"])
def test_a_first_observation_that_is_no_text_is_an_error(observation):
    env = NoText()
    env.observation = observation
    check_contained(play(env), turns=0)


def test_instructions_that_are_no_text_are_an_error():
    env = Steady()
    env.instructions = None
    check_contained(play(env), turns=0)


def test_numpys_own_types_are_welcome():
    env = Garbage()
    env.alter = lambda outcome: Outcome(outcome.observation, np.float32(0.5), np.True_, np.True_, np.False_)
    rollout = play(env)
    assert rollout.errors == ()
    trajectory, transcript = rollout.trajectories[1], rollout.transcripts[1]
    assert trajectory.success is True
    assert [turn.reward for turn in trajectory.turns] == [1.0, 0.5]
    assert [type(turn.valid) for turn in transcript.turns] == [bool, bool]


def test_when_all_fail_nothing_is_left_to_learn_from():
    envs = [FailsInReset() for _ in range(3)]
    for env in envs:
        env.error = ValueError("no levels")
    policy = ScriptedPolicy(lambda observation: "ok")
    starts = [Start(0, "g")] * 3
    rollout = collect(envs, policy, starts, limits=LIMITS, sampling=SamplingParams(), seed=0)
    assert rollout.trajectories == ()
    assert len(rollout.errors) == 3
