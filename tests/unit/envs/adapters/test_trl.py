"""Classes made for TRL's environment_factory."""

import json
from functools import partial

import numpy as np
import pytest

from freshper.envs import check_env, level_split, make_env
from freshper.envs.adapters.trl import TrlEnv
from freshper.errors import ConfigError, EnvError, UnknownNameError


class Counter:
    """Bring the counter to its goal."""

    def __init__(self, largest: int = 50):
        self.largest = largest

    def reset(self, seed=None, goal=None, **row):
        self.goal = goal or int(np.random.default_rng(seed).integers(2, self.largest))
        self.count, self.done = 0, False
        return f"Reach {self.goal}."

    def increment(self, step: int) -> str:
        """
        Increment the counter.

        Args:
            step: By how much.

        Returns:
            The counter.
        """
        self.count += step
        return f"Counter: {self.count}"

    async def finish(self) -> str:
        """Say that it is done."""
        self.done = True
        return ""

    def get_reward(self) -> float:
        return 1.0 if self.count == self.goal else -0.5

    def _secret(self):
        raise AssertionError("no tool")


def task(kind=Counter):
    return f"trl:{__name__}:{kind.__name__}"


def call(name, **arguments):
    return f"I try <tool>{json.dumps({'name': name, 'arguments': arguments})}</tool>"


FINISH = call("finish")


def test_the_contract_is_kept():
    for split in ("train", "eval"):
        check_env(partial(make_env, task(), split), [call("increment", step=1), FINISH, "done", call("nothing")])


def test_the_tools_are_shown():
    shown = make_env(task()).instructions
    assert shown.startswith("Bring the counter to its goal.\n\nYou have these tools:\n\n")
    assert "increment(step: int) -> str\nIncrement the counter." in shown
    assert "finish() -> str\nSay that it is done." in shown
    assert "You have 10 turns" in shown
    assert "reset(" not in shown
    assert "get_reward(" not in shown
    assert "_secret" not in shown


def test_an_episode_of_tool_calls():
    env = make_env(task())
    shown = env.reset(0)
    goal = env._inner.goal
    assert shown == f"Reach {goal}."
    first = env.step(call("increment", step=goal))
    assert (first.observation, first.reward, first.done, first.valid) == (f"Counter: {goal}", 0.0, False, True)
    last = env.step(FINISH)
    assert (last.observation, last.reward, last.done, last.success) == ("(nothing)", 1.0, True, True)


def test_a_reply_without_a_call_ends_it_as_in_trl():
    env = make_env(task())
    env.reset(1)
    outcome = env.step("I give up.")
    assert (outcome.reward, outcome.done, outcome.success, outcome.valid) == (-0.5, True, False, True)


def test_the_last_turn_gets_the_reward_too():
    env = make_env(task(), max_turns=2)
    env.reset(1)
    assert env.step(call("increment", step=1)).reward == 0.0
    outcome = env.step(call("increment", step=0))
    assert (outcome.reward, outcome.done, outcome.success) == (-0.5, True, False)


@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        ("<tool>increment(1)</tool>", "no call can be read"),
        ("<tool>[1]</tool>", "no call can be read"),
        ('<tool>{"name": 3}</tool>', "no call can be read"),
        ('<tool>{"name": "increment", "arguments": [1]}</tool>', "no call can be read"),
        ('<tool>{"name": "finish"}</tool><tool>{"name": "finish"}</tool>', "no call can be read"),
        ('</tool><tool>{"name": "finish"}', "no call can be read"),
        ("<tool>" + "[" * 5000 + "</tool>", "no call can be read"),
        (call("get_reward"), "there is no tool 'get_reward', only finish, increment"),
        (call("_secret"), "there is no tool '_secret'"),
    ],
)
def test_a_call_that_cannot_be_read_costs_a_turn(reply, shown):
    env = make_env(task())
    env.reset(1)
    outcome = env.step(reply)
    assert outcome.observation.startswith("error: ")
    assert shown in outcome.observation
    assert (outcome.reward, outcome.done, outcome.valid) == (-0.15, False, False)


@pytest.mark.parametrize("arguments", [{}, {"step": "much"}, {"step": 1, "more": 2}])
def test_what_a_tool_raises_is_shown(arguments):
    env = make_env(task())
    env.reset(1)
    outcome = env.step(call("increment", **arguments))
    assert outcome.observation.startswith("error: ")
    assert (outcome.reward, outcome.done, outcome.valid) == (0.0, False, True)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": "Please: "}]
    made = [{"goal": goal, "prompt": chat if goal % 2 else "Now: "} for goal in range(1, 60)]
    path.write_text("\n".join(json.dumps(row) for row in made), encoding="utf-8")
    return path


def test_rows_are_levels_and_lie_in_one_split(rows):
    seen = {}
    for split in ("train", "eval"):
        env = make_env(task(), split, rows=str(rows))
        shown = {env.reset(seed) for seed in range(300)}
        seen[split] = {int(text.rpartition(" ")[2].rstrip(".")) for text in shown}
        assert {text.partition("Reach")[0] for text in shown} == {"Please: ", "Now: "}
    assert not seen["train"] & seen["eval"]
    assert seen["train"] | seen["eval"] == set(range(1, 60))
    check_env(partial(make_env, task(), rows=str(rows)), [FINISH])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.txt", "{}", "must be a .jsonl, .json or .csv file"),
        ("none.jsonl", None, "must be a .jsonl, .json or .csv file, and be there"),
        ("rows.jsonl", '{"goal": 1}\nnonsense', "rows.jsonl line 2 cannot be given to reset"),
        ("rows.jsonl", '{"goal": 1}', "has no row of the (train|eval) split"),
    ],
)
def test_unusable_rows_are_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    other = "eval" if level_split('{"goal": 1}') == "train" else "train"
    with pytest.raises(ConfigError, match=message):
        make_env(task(), other, rows=str(tmp_path / name))


class Silent:
    """Keeps its reward as an attribute, and begins without a word."""

    reward = 0.25

    def reset(self, **row):
        return None

    def look(self) -> str:
        """Look."""
        return "dark"


def test_a_reward_may_be_an_attribute_and_a_beginning_silent():
    env = make_env(task(Silent), split_by="seed", success_return=0.25)
    assert env.reset(0) == "Begin."
    assert env.step(call("look")).observation == "dark"
    assert env.step("dark").success


class Unrewarded(Silent):
    reward = None


def test_a_missing_reward_is_an_error():
    env = make_env(task(Unrewarded), split_by="seed")
    env.reset(0)
    with pytest.raises(EnvError, match=r"reward is None: get_reward\(\) must return a number"):
        env.step("done")


class Pictures(Silent):
    def reset(self, **row):
        return [{"type": "image"}]


def test_only_text_can_be_shown():
    with pytest.raises(EnvError, match="only text can be shown"):
        make_env(task(Pictures), split_by="seed").reset(0)


class Toolless:
    def reset(self):
        return "a"


class Unset:
    def look(self):
        return "a"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Toolless, {}, "it has no tools"),
        (Unset, {}, r"Unset has no method reset\(\)"),
        (Counter, {"split_by": "env"}, "know no splits"),
        (Counter, {"largst": 3}, "Did you mean 'largest'"),
        (Counter, {"max_turns": 0}, "max_turns 0 must be an int >= 1"),
    ],
)
def test_wrong_classes_and_settings_are_named(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        make_env(task(kind), **options)


def test_options_go_to_the_constructor():
    env = make_env(task(), largest=3)
    assert isinstance(env, TrlEnv)
    assert env._inner.largest == 3
    with pytest.raises(UnknownNameError):
        make_env(task(), smallest=3)
    with pytest.raises(ConfigError, match="it must be a class"):
        make_env(f"trl:{__name__}:FINISH")
