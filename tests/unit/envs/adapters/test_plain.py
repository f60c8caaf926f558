"""A plain Python class as an environment."""

from functools import partial

import numpy as np
import pytest

from freshper.envs import Outcome, Pictured, Teachable, check_env, make_env, read_action
from freshper.envs.adapters.base import seed_of_split
from freshper.envs.adapters.pictures import encode_png
from freshper.envs.adapters.plain import PlainEnv, played
from freshper.envs.contract import check_splits
from freshper.errors import ConfigError, EnvError, UnknownNameError


class Count:
    """Count down to zero."""

    max_turns = 5

    def __init__(self, most=4):
        self.most = most

    def reset(self, seed):
        self.left = 2 + seed % self.most
        return f"{self.left} left, {seed}"

    def step(self, reply):
        if read_action(reply, ("Down",)):
            self.left -= 1
        return f"{self.left} left", -0.1 if self.left else 2.0, self.left == 0


DOWN = "<answer> Down </answer>"


def name(kind):
    return f"{__name__}:{kind.__name__}"


def test_a_class_with_reset_and_step_keeps_the_contract():
    for split in ("train", "eval"):
        check_env(partial(make_env, name(Count), split), [DOWN, "nothing"])
    check_splits(make_env(name(Count), "train"), make_env(name(Count), "eval"))


def test_what_the_class_says_of_itself_is_used():
    env = make_env(name(Count), most=1)
    assert (env.task, env.instructions, env.max_turns) == (name(Count), "Count down to zero.", 5)
    assert env.free_form
    assert env.reset(0).startswith("2 left")
    assert not isinstance(env, Teachable | Pictured)
    assert make_env(name(Count), max_turns=9).max_turns == 9


def test_an_episode_ends_by_its_own_rules_or_by_the_turns():
    env = make_env(name(Count), most=1)
    env.reset(3)
    assert env.step(DOWN) == Outcome("1 left", -0.1, False, False, True)
    assert env.step(DOWN) == Outcome("0 left", 2.0, True, True, True)
    with pytest.raises(EnvError, match="no episode is running"):
        env.step(DOWN)
    env.reset(3)
    outcomes = [env.step("") for _ in range(5)]
    assert [outcome.done for outcome in outcomes] == [False] * 4 + [True]
    assert not outcomes[-1].success


@pytest.mark.parametrize(("threshold", "success"), [(1.8, True), (1.95, False)])
def test_success_is_a_return_where_one_is_named(threshold, success):
    env = make_env(name(Count), most=1, success_return=threshold)
    env.reset(0)
    env.step(DOWN)
    assert env.step(DOWN).success is success


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (("a", 1, True), (1.0, True, False, None, True)),
        (("a", np.float32(1), np.bool_(False), {"valid": False}), (1.0, False, False, None, False)),
        (("a", 0.5, False, True, {"success": False}), (0.5, False, True, False, True)),
        (Outcome("a", 1.0, True, True, False), (1.0, True, False, True, False)),
        (Outcome("a", 1.0, False, False, True), (1.0, False, False, None, True)),
    ],
)
def test_the_forms_of_an_answer(answer, expected):
    one = played(answer)
    assert (one.reward, one.ended, one.cut, one.success, one.valid) == expected


def test_measures_come_through():
    assert played(("a", 0.0, True, {"measures": {"f1": 0.5}})).measures == {"f1": 0.5}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("text", r"step\(\) returned 'text': it must return \(observation, reward, done\)"),
        (("a", 1.0), r"must return \(observation, reward, done\)"),
        (("a", "1", True), "the reward '1': it must be a number"),
        (("a", True, True), "the reward True: it must be a number"),
        (("a", 1.0, 1), "done 1: it must be true or false"),
        (("a", 1.0, True, []), r"the info \[\]: it must be a dict"),
        (("a", 1.0, True, {"success": "yes"}), "success 'yes': it must be true or false"),
    ],
)
def test_other_forms_are_refused(answer, message):
    with pytest.raises(EnvError, match=message):
        played(answer)


class Broken(Count):
    answer = None

    def step(self, reply):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((b"bytes", 0.0, False), EnvError, "an observation must be text"),
        (("a", float("nan"), False), EnvError, "reward nan must be finite"),
        (ValueError("boom"), ValueError, "boom"),
    ],
)
def test_an_episode_that_breaks_is_over(answer, error, message):
    game = Broken()
    game.answer = answer
    env = PlainEnv(game, "broken", "train")
    env.reset(0)
    with pytest.raises(error, match=message):
        env.step("x")
    with pytest.raises(EnvError, match="no episode is running"):
        env.step("x")


def test_text_that_no_tokenizer_takes_is_mended():
    game = Broken()
    game.answer = ("a\ud800b", 0.0, False)
    env = PlainEnv(game, "broken", "train")
    env.reset(0)
    assert env.step("x").observation == "a?b"


class NoSeed:
    """Always the same."""

    shown = 0

    def reset(self):
        return "start", {"info": 1}

    def step(self, reply):
        return "on", 1.0, True


class Random(NoSeed):
    def reset(self):
        Random.shown += 1
        return f"start {self.shown}"


def test_without_a_seed_there_is_one_level_and_that_must_be_said():
    with pytest.raises(EnvError, match=r"8 levels begin with the same observation.*split_by = 'seed'"):
        make_env(name(NoSeed)).reset(0)
    make = partial(make_env, name(NoSeed), split_by="seed")
    assert make().reset(0) == make().reset(1) == "start"
    check_env(make)


@pytest.mark.parametrize("split_by", ["observation", "seed"])
def test_levels_that_no_seed_decides_are_refused(split_by):
    env = make_env(name(Random), split_by=split_by)
    with pytest.raises(EnvError, match=r"reset\(\) takes no seed and shows 'start [0-9]+' after 'start [0-9]+'"):
        [env.reset(0) for _ in range(2)]


class FewLevels(Count):
    def reset(self, seed):
        self.left = 2
        return "one" if seed % 2 else "here"  # both fall to the train split


def test_a_split_without_levels_is_refused():
    with pytest.raises(EnvError, match="none of 500 levels lies in the eval split"):
        make_env(name(FewLevels), "eval").reset(0)


def test_seeds_lie_in_one_split_only():
    rng = np.random.default_rng(0)
    train, evaluation = ({seed_of_split(rng, split) for _ in range(300)} for split in ("train", "eval"))
    assert not train & evaluation
    assert len(train) > 290


class Told:
    """Keeps our contract itself."""

    task, instructions, max_turns = "told", "Go.", 1

    def __init__(self, split, size=1):
        self.split = split

    def reset(self, seed):
        return f"{self.split} {seed}"

    def step(self, reply):
        return Outcome("end", 0.0, True, False, False)


def test_a_class_that_is_told_its_split_keeps_levels_apart_itself():
    env = make_env(name(Told), "eval", max_turns=4, size=3)
    assert (env.task, env.instructions, env.max_turns, env.split_by) == ("told", "Go.", 4, "env")
    assert env.reset(5) == "eval 5"
    assert env.step("x") == Outcome("end", 0.0, True, False, False)
    check_env(partial(make_env, name(Told)))


class Seen(Count):
    def images(self):
        return (encode_png(np.full((2, 2), self.left, np.uint8), 0, "seen"),)

    def solution(self):
        return ["Down"] * self.left

    def demonstrate(self, rng):
        return DOWN if rng.random() < 0.5 else ""


def test_pictures_and_demonstrations_come_through():
    make = partial(make_env, name(Seen))
    env = make()
    assert isinstance(env, Pictured)
    assert isinstance(env, Teachable)
    check_env(partial(make, max_turns=8))


class NoStep:
    def reset(self, seed):
        return "a"


def test_wrong_classes_and_options_are_named():
    with pytest.raises(ConfigError, match=r"NoStep has no method step\(\)"):
        make_env(name(NoStep))
    with pytest.raises(ConfigError, match="it must be a class"):
        make_env(f"{__name__}:DOWN")
    with pytest.raises(UnknownNameError, match=r"unknown option of .* 'mots'. Did you mean 'most'"):
        make_env(name(Count), mots=3)
    with pytest.raises(UnknownNameError, match=r"unknown split_by 'sead'. Did you mean 'seed'"):
        make_env(name(Count), split_by="sead")
    with pytest.raises(ConfigError, match="max_turns 0 must be an int >= 1"):
        make_env(name(Count), max_turns=0)
    with pytest.raises(ConfigError, match="success_return nan must be finite"):
        make_env(name(Count), success_return=float("nan"))
    with pytest.raises(ConfigError, match="seed -1 must be >= 0"):
        make_env(name(Count)).reset(-1)


class Needy(Count):
    def __init__(self, size):
        super().__init__(size)


def test_an_option_without_a_default_must_be_given():
    with pytest.raises(ConfigError, match="needs the option 'size'"):
        make_env(name(Needy))
    assert make_env(name(Needy), size=2).reset(1)
