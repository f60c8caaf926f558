"""gymnasium's environments as text and as pictures."""

import io
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from freshper.envs import Pictured, Teachable, check_env, make_env, write_action
from freshper.envs.adapters.gymnasium import TextWrapper
from freshper.envs.adapters.pictures import encode_png
from freshper.envs.adapters.spaces import read_answer, read_space, write_space
from freshper.errors import ConfigError, EnvError, UnknownNameError


class Walk(gymnasium.Env):
    """Walk to the right end of a row of cells, seen in a picture or as a number."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - gymnasium's way

    def __init__(self, render_mode=None, cells=100, drawn=False):
        self.render_mode, self.cells, self.drawn = render_mode, cells, drawn
        self.action_space = spaces.Discrete(2, start=5)
        box = spaces.Box(0, 255, (4, cells, 3), np.uint8)
        self.observation_space = box if drawn else spaces.Discrete(cells)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell = int(self.np_random.integers(self.cells - 1))
        return self.see(), {}

    def see(self):
        return self.render() if self.drawn else self.cell

    def step(self, action):
        self.cell += 1 if action == 6 else -1
        there = self.cell == self.cells - 1
        return self.see(), 1.0 if there else 0.0, there or self.cell < 0, False, {"success": there}

    def render(self):
        picture = np.zeros((4, self.cells, 3), np.uint8)
        picture[:, max(self.cell, 0)] = 255
        return picture


gymnasium.register("freshper-test/Walk-v0", Walk, max_episode_steps=7)
WALK = "gymnasium:freshper-test/Walk-v0"


class Spoken(TextWrapper):
    """Its own words for everything."""

    def instructions(self, max_turns):
        return f"Walk within {max_turns} turns."

    def show(self, observation, info):
        return f"you are at {observation}"

    def caption(self, observation, info):
        return "your way"

    def read(self, reply):
        return {"l": 5, "r": 6}.get(reply)

    def solution(self):
        return ["r"]

    def demonstrate(self, rng):
        return "r"


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("gymnasium:CartPole-v1", {"actions": "left, right", "max_turns": 6}),
        ("gymnasium:Pendulum-v1", {"max_turns": 3}),
        ("gymnasium:Blackjack-v1", {}),
        ("gymnasium:CliffWalking-v1", {"split_by": "seed", "max_turns": 4}),
        (WALK, {"pictures": "render", "pixels": 64}),
        (WALK, {"pictures": "observation", "make": {"drawn": True}}),
    ],
)
def test_the_contract_is_kept(task, options, split):
    check_env(partial(make_env, task, split, **options), [write_action(a) for a in ("left", "0", "[0.5]", "6")])


def test_an_episode_of_cartpole_is_gymnasiums():
    env = make_env("gymnasium:CartPole-v1", actions=["left", "right"], digits=6)
    assert (env.task, env.max_turns, env.split_by) == ("gymnasium:CartPole-v1", 500, "observation")
    assert env.instructions.startswith("You act in CartPole-v1. You have 500 turns, one action a turn: left, right. ")
    env.reset(3)
    own = gymnasium.make("CartPole-v1")
    rng = np.random.default_rng(3)
    shown = ""
    while shown != env._text:  # the first candidate of the split, whose observation is shown
        observation, _ = own.reset(seed=int(rng.integers(2**31)))
        shown = write_space(observation, 6)
    for number in range(500):
        observation, reward, terminated, _, _ = own.step(number % 3 == 0)
        outcome = env.step(write_action("RIGHT" if number % 3 == 0 else "left"))
        assert (outcome.observation, outcome.reward, outcome.done) == (write_space(observation, 6), reward, terminated)
        if terminated:
            break
    assert not outcome.success  # far below gymnasium's threshold of 475
    assert outcome.done


def test_a_reply_that_cannot_be_read_costs_a_turn_and_changes_nothing():
    env = make_env(WALK)
    first = env.reset(0)
    outcome = env.step("right, please")
    assert (outcome.observation, outcome.reward, outcome.valid, outcome.done) == (first, -0.15, False, False)
    assert env.step(write_action("6")).observation == str(int(first) + 1)
    assert [env.step("").done for _ in range(5)] == [False] * 4 + [True]


def walk_to_the_end(env):
    env.reset(0)
    env._env.unwrapped.cell = 97
    env.step(write_action("6"))
    return env.step(write_action("6"))


@pytest.mark.parametrize("threshold", [None, 0.5, 2.0])
def test_what_the_info_says_of_success_goes_before_a_threshold(threshold):
    outcome = walk_to_the_end(make_env(WALK, success_return=threshold))
    assert (outcome.reward, outcome.done, outcome.success) == (1.0, True, True)


def test_gymnasiums_own_limit_cuts():
    env = make_env(WALK, max_turns=50)
    env.reset(0)
    env._env.unwrapped.cell = 50
    outcomes = [env.step(write_action(str(5 + turn % 2))) for turn in range(7)]
    assert [outcome.done for outcome in outcomes] == [False] * 6 + [True]
    assert not outcomes[-1].success


def test_pictures_are_of_what_is_shown():
    env = make_env(WALK, pictures="render", pixels=200)
    assert isinstance(env, Pictured)
    assert env.images() == ()
    assert env.reset(0) == "The picture shows the state."
    before = env.images()
    picture = Image.open(io.BytesIO(before[0]))
    assert (picture.format, picture.size) == ("PNG", (200, 8))
    env.step(write_action("6"))
    assert len(env.images()) == 1
    assert env.images() != before
    assert not isinstance(make_env(WALK), Pictured)


def test_a_wrapper_changes_every_word():
    env = make_env(WALK, wrapper=f"{__name__}:Spoken", max_turns=3)
    assert env.instructions == "Walk within 3 turns."
    cell = int(env.reset(0).removeprefix("you are at "))
    assert env.step("r").observation == f"you are at {cell + 1}"
    assert not env.step(write_action("6")).valid
    assert isinstance(env, Teachable)
    seen = make_env(WALK, wrapper=f"{__name__}:Spoken", pictures="render")
    assert seen.reset(0) == "your way"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.array([0.012345, -2.0, 1e-12, -0.0]), "[0.0123, -2, 1e-12, 0]"),
        (np.array([[1, 0], [0, 1]]), "[1, 0]\n[0, 1]"),
        (np.array(3), "3"),
        (np.zeros((1, 1, 2), np.int64), "[[0, 0]]"),
        ({"hand": (1, 2), "name": "x"}, "hand: [1, 2]\nname: x"),
        (np.int64(4), "4"),
        (True, "True"),
    ],
)
def test_observations_as_text(value, text):
    assert write_space(value, 3) == text


BOX = spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("space", "answer", "action"),
    [
        (BOX, "[0.5, -1]", [0.5, -1.0]),
        (BOX, "[0.5, 2]", None),
        (BOX, "[0.5]", None),
        (BOX, "[[0.5], [1, 2]]", None),
        (BOX, "[1e999, 0]", None),
        (BOX, "[NaN, 0]", None),
        (BOX, "[true, 0]", None),
        (BOX, '["1", 0]', None),
        (BOX, "{}", None),
        (BOX, "0.5", None),
        (BOX, "[" * 100_000, None),
        (BOX, "[" * 5_000, None),
        (BOX, f"[0, 1{'0' * 5000}]", None),
        (spaces.MultiDiscrete([3, 2]), "[2, 1]", [2, 1]),
        (spaces.MultiDiscrete([3, 2]), "[2.5, 1]", None),
        (spaces.MultiDiscrete([3, 2]), "[2, 2]", None),
        (spaces.MultiBinary(2), "[1, 0]", [1, 0]),
        (spaces.MultiBinary(2), "[256, 0]", None),
        (spaces.Text(5, charset="abc"), "abc", "abc"),
        (spaces.Text(5, charset="abc"), "abcabc", None),
    ],
)
def test_actions_from_replies(space, answer, action):
    read = read_space(space, f"I say <answer>{answer}</answer>", ())
    assert (read.tolist() if isinstance(read, np.ndarray) else read) == action


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<answer> a b </answer>", "a b"),
        ("<answer></answer>", None),
        ("</answer><answer>a</answer>", None),
        ("<answer>a</answer><answer>b</answer>", None),
        ("<answer><answer>a</answer>", None),
        ("<answer>a", None),
    ],
)
def test_what_an_answer_is(reply, answer):
    assert read_answer(reply) == answer


class Odd(Walk):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.action_space = spaces.Dict({"a": spaces.Discrete(2)})


gymnasium.register("freshper-test/Odd-v0", Odd)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("gymnasium:Nope-v1", {}, "gymnasium cannot make 'Nope-v1'"),
        (WALK, {"make": {"sells": 3}}, "gymnasium cannot make"),
        (WALK, {"actions": "left"}, "must be 2 different names"),
        (WALK, {"actions": "left,LEFT"}, "must be 2 different names"),
        ("gymnasium:Pendulum-v1", {"actions": "left"}, "name those of a Discrete space"),
        ("gymnasium:freshper-test/Odd-v0", {}, "has no written form: give a TextWrapper"),
        (WALK, {"split_by": "env"}, "know no splits"),
        (WALK, {"pixels": -1}, "pixels -1 must be >= 0"),
        (WALK, {"pictures": "rendered"}, "unknown pictures 'rendered'. Did you mean 'render'"),
        (WALK, {"turns": 4}, "unknown option of .* 'turns'"),
        (WALK, {"wrapper": "nowhere:Here"}, "module 'nowhere' of 'nowhere:Here' cannot be imported"),
    ],
)
def test_wrong_settings_are_named(task, options, message):
    with pytest.raises(ConfigError, match=message):
        make_env(task, **options)


def test_unknown_options_offer_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'max_turns'"):
        make_env(WALK, max_turn=4)


@pytest.mark.parametrize(
    "pixels", [np.zeros((2, 2)), np.zeros((2, 2, 2), np.uint8), np.zeros((0, 2), np.uint8), None, "picture"]
)
def test_what_is_no_picture_is_refused(pixels):
    with pytest.raises(EnvError, match=r"walk: a picture must be \(height, width\)"):
        encode_png(pixels, 0, "walk")


def test_pictures_keep_their_shape():
    pixels = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    same = np.asarray(Image.open(io.BytesIO(encode_png(pixels, 0, "walk"))))
    assert (same == pixels).all()
    assert Image.open(io.BytesIO(encode_png(pixels, 100, "walk"))).size == (100, 80)
    assert Image.open(io.BytesIO(encode_png(np.zeros((400, 2), np.uint8), 50, "walk"))).size == (1, 50)
