"""Settings of tasks: of their own type, or refused in one line."""

import math
from dataclasses import dataclass

import pytest

from freshper.cli.envs import _page
from freshper.envs import make_env, task_names
from freshper.envs.core import faults_of, with_options
from freshper.errors import ConfigError, EnvError, FreshPERError


@dataclass(frozen=True)
class Spec:
    size: int = 4
    share: float = 0.5
    slippery: bool = False
    name: str = ""
    weights: tuple[float, ...] = ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("size", value) for value in ("big", "4", 4.0, True, [4], {"a": 1}, None, math.inf)),
        *(("share", value) for value in ("much", True, math.nan, math.inf, [0.5], None)),
        *(("slippery", value) for value in ("False", "no", "", 1, 0, 0.0, None)),
        *(("name", value) for value in (3, True, ["a"], None)),
    ],
)
def test_a_value_of_another_type_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"option {name} is .*: it must be"):
        with_options(Spec(), {name: value})


def test_values_of_their_own_type_are_taken():
    options = {"size": 5, "share": 1, "slippery": True, "name": "x", "weights": (1.0,)}
    assert with_options(Spec(), options) == Spec(5, 1, True, "x", (1.0,))


@pytest.mark.parametrize("task", sorted(set(task_names()) - {"aime", "geoqa", "gsm8k"}))  # these ask the hub
@pytest.mark.parametrize("value", ["big", "", [1], {"a": 1}, True, 1.5, -1, 0, math.nan])
def test_no_value_of_a_setting_is_more_than_one_line(task, value):
    """Whatever stands in a config: the program takes it, or says in one line what is wrong with it."""
    refused = 0
    for name, _ in _page(task)[1]:
        if name == "data":
            continue
        try:
            make_env(task, **{name: value})
        except FreshPERError:  # a line for the user; anything else fails here
            refused += 1
    assert refused or value in (True, 0, "", 1.5, -1)


def test_a_room_that_no_solver_could_search_is_refused():
    with pytest.raises(ConfigError, match="at most 64"):
        make_env("sokoban", height=10**9)


def test_what_the_code_of_an_environment_raises_names_its_task():
    with pytest.raises(EnvError, match="mytask raised KeyError: 'x'"), faults_of("mytask"):
        raise KeyError("x")
    env = make_env("mixture", weights={"sokoban": 1.0})
    broken = lambda: env.reset(0)[10**6]  # noqa: E731 - before it, the mixture had its own name
    with pytest.raises(EnvError, match="sokoban raised IndexError"), faults_of(env):
        broken()
    with pytest.raises(ConfigError), faults_of("mytask"):
        raise ConfigError("its own words")
    with pytest.raises(KeyboardInterrupt), faults_of("mytask"):
        raise KeyboardInterrupt
