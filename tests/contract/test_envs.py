"""Every registered task keeps the contract, and check_env catches one broken environment per clause."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from freshper.envs import Outcome, check_env, make_env, read_action, task_names, write_action
from freshper.errors import EnvError

NEED_DATA = {"aime", "geoqa", "gsm8k", "nq-search", "questions"}  # rows from the hub or from a file: in their own tests


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("task", sorted(set(task_names()) - NEED_DATA))
def test_registered_task(task, split):
    check_env(partial(make_env, task, split))


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("frozenlake", {"slippery": True}),
        ("frozenlake-image", {"slippery": True, "size": 5, "pixels": 90}),
        ("cliffwalking", {"slippery": True}),
        ("cliffwalking", {"random_start": False}),
        ("sokoban-image", {"width": 5, "height": 3, "pixels": 71}),
    ],
)
def test_with_other_settings(task, options):
    check_env(partial(make_env, task, **options))


class Corridor:
    """Walk right to the end of a corridor as long as the seed says. Keeps the contract."""

    task = "corridor"
    instructions = "Walk."
    max_turns = 6

    def __init__(self):
        self.running = False

    def reset(self, seed):
        self.left = self.length(seed)
        self.turns = 0
        self.running = True
        return self.show()

    def length(self, seed):
        return 2 + seed % 4

    def show(self):
        return f"{self.left} to go"

    def step(self, reply):
        if not self.running:
            raise EnvError("no episode is running")
        action = read_action(reply, ("Left", "Right"))
        self.left -= {"Right": 1, "Left": -1, None: 0}[action]
        self.turns += 1
        self.running = self.left > 0 and self.turns < self.max_turns
        return Outcome(self.show(), -0.1, not self.running, self.left == 0, action is not None)


class TeachableCorridor(Corridor):
    def solution(self):
        return ["Right"] * self.left

    def demonstrate(self, rng):
        return write_action(("Left", "Right")[rng.integers(2)])


REPLIES = (write_action("Right"), write_action("Left"), "nothing")


def test_a_sound_environment_passes():
    check_env(Corridor)
    check_env(Corridor, REPLIES)
    check_env(TeachableCorridor)


class WithOutcome(Corridor):
    """A corridor whose outcomes are altered."""

    def step(self, reply):
        return self.alter(super().step(reply))


class NoTask(Corridor):
    task = ""


class NoInstructions(Corridor):
    instructions = None


class NoTurns(Corridor):
    max_turns = 0


class StepsBeforeReset(Corridor):
    def __init__(self):
        self.reset(0)


class FaultBeforeReset(Corridor):
    def __init__(self):
        self.running = True  # and nothing else is there yet


class OneLevel(Corridor):
    def length(self, seed):
        return 3


class EmptyObservation(Corridor):
    def show(self):
        return ""


class BytesObservation(Corridor):
    def show(self):
        return b"3 to go"


class ChokesOnEmpty(Corridor):
    def step(self, reply):
        return super().step(reply[0] + reply[1:] if self.running else reply)


class ChokesOnUnicode(Corridor):
    def step(self, reply):
        return super().step(reply.encode().decode())


class ChokesOnHalfATag(Corridor):
    def step(self, reply):
        if "<answer>" in reply:
            reply.index("</answer>")
        return super().step(reply)


class RefusesLongReplies(Corridor):
    def step(self, reply):
        if self.running and len(reply) > 100_000:
            raise EnvError("too long")
        return super().step(reply)


class TakesNestedTags(Corridor):
    def step(self, reply):
        return super().step(reply.replace("<answer><answer>", "<answer>"))


class EverythingIsValid(WithOutcome):
    def alter(self, outcome):
        return replace(outcome, valid=True)


class NoOutcome(WithOutcome):
    def alter(self, outcome):
        return outcome.observation, outcome.reward, outcome.done


class IntReward(WithOutcome):
    def alter(self, outcome):
        return replace(outcome, reward=0)


class NanReward(WithOutcome):
    def alter(self, outcome):
        return replace(outcome, reward=float("nan"))


class NumpyDone(WithOutcome):
    def alter(self, outcome):
        return replace(outcome, done=np.bool_(outcome.done))


class SuccessTooEarly(WithOutcome):
    def alter(self, outcome):
        return replace(outcome, success=self.left <= 1)


class NeverDone(WithOutcome):
    def alter(self, outcome):
        self.running = True
        return replace(outcome, done=False, success=False)


class FreeGarbage(TeachableCorridor):
    """What cannot be read costs no turn, so an episode of it has no end."""

    def step(self, reply):
        outcome = super().step(reply)
        if not outcome.valid:
            self.turns -= 1
            self.running = True
        return replace(outcome, done=not self.running)


class StepsAfterDone(WithOutcome):
    def alter(self, outcome):
        self.running = True
        return outcome


class ForgetsTheSeed(Corridor):
    def length(self, seed):
        return int(np.random.default_rng().integers(2, 1_000_000))


class CountsEpisodes(Corridor):
    episodes = 0

    def length(self, seed):
        self.episodes += 1
        return super().length(seed) + self.episodes


class KeepsItsTurns(Corridor):
    """An episode that was cut off leaves its turns to the next."""

    turns = 0

    def reset(self, seed):
        before = self.turns if self.running else 0
        shown = super().reset(seed)
        self.turns = before
        return shown


class SharedState(Corridor):
    """Two objects walk the same corridor."""

    shared: dict[str, int] = {}  # noqa: RUF012 - sharing is the fault

    @property
    def left(self):
        return self.shared["left"]

    @left.setter
    def left(self, value):
        self.shared["left"] = value


class RandomReward(WithOutcome):
    def alter(self, outcome):
        return replace(outcome, reward=float(np.random.default_rng().random()))


class UsesGlobalNumpy(Corridor):
    def reset(self, seed):
        np.random.seed(seed)  # noqa: NPY002 - the fault
        return super().reset(seed)


class UsesGlobalRandom(WithOutcome):
    def alter(self, outcome):
        random.random()
        return outcome


class LosesItsWay(TeachableCorridor):
    def solution(self):
        return None if self.left == 1 else super().solution()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (NoTask, "NoTask.task is '': it must be a text"),
        (NoInstructions, "NoInstructions.instructions is None: it must be a text"),
        (NoTurns, "corridor: max_turns is 0"),
        (StepsBeforeReset, r"step\(\) before reset\(\) was played: it must raise EnvError"),
        (FaultBeforeReset, r"step\(\) before reset\(\) raised AttributeError.*: it must raise EnvError"),
        (OneLevel, r"reset\(\) shows the same level for all seeds 0 to 19"),
        (EmptyObservation, r"reset\(0\) gave the observation ''"),
        (BytesObservation, r"reset\(0\) gave the observation b'"),
        (ChokesOnEmpty, r"step\(\) raised IndexError.* on an empty reply"),
        (ChokesOnUnicode, r"step\(\) raised UnicodeEncodeError.* on a unicode reply"),
        (ChokesOnHalfATag, r"step\(\) raised ValueError.* on an opening tag alone"),
        (RefusesLongReplies, r"step\(\) raised EnvError.* on a reply of a million characters"),
        (TakesNestedTags, "nested tags counts as valid"),
        (EverythingIsValid, "an empty reply counts as valid"),
        (NoOutcome, r"step\(\) returned .* on an empty reply: it must return an Outcome"),
        (IntReward, "reward 0 on an empty reply must be a finite float"),
        (NanReward, "reward nan on an empty reply must be a finite float"),
        (NumpyDone, r"done is np\.False_ on an empty reply: it must be a bool"),
        (SuccessTooEarly, "success without done on '<answer> Right </answer>'"),
        (NeverDone, "seed 0: not done after max_turns = 6 replies"),
        (FreeGarbage, "seed 0: not done after max_turns = 6 replies"),
        (StepsAfterDone, r"step\(\) after done was played"),
        (ForgetsTheSeed, r"reset\(0\) gave .* on one object and .* on another"),
        (CountsEpisodes, r"reset\(0\) gave .* on one object and .* on another"),
        (KeepsItsTurns, r"seed 0, reply \d .* gave Outcome\(.* on one object and Outcome\(.* on another"),
        (SharedState, r"seed 0, reply \d .* gave Outcome\(.* on one object and Outcome\(.* on another"),
        (RandomReward, r"seed 0, reply 0 .* gave Outcome\(.* on one object and Outcome\(.* on another"),
        (UsesGlobalNumpy, "the global state of random or numpy.random changed"),
        (UsesGlobalRandom, "the global state of random or numpy.random changed"),
        (LosesItsWay, r"seed 0: solution\(\) is None in an episode that follows it"),
    ],
)
def test_a_broken_environment_is_caught(broken, message):
    with pytest.raises(EnvError, match=message):
        check_env(broken, REPLIES)


def test_faults_of_the_environment_keep_their_cause():
    with pytest.raises(EnvError) as caught:
        check_env(ChokesOnUnicode)
    assert isinstance(caught.value.__cause__, UnicodeEncodeError)
