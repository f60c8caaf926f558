"""check_env: the contract of an environment as a function, for our own environments and for anybody's."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import numpy as np

from freshper.envs.core import Env, Outcome, Pictured, Teachable, write_action
from freshper.errors import EnvError, MissingExtraError

_EPISODE_SEEDS = range(5)
_LEVEL_SEEDS = range(20)  # levels may repeat, but not that often
_GARBAGE = {
    "an empty reply": "",
    "a reply of blanks": " \n\t",
    "a reply of a million characters": "x" * 1_000_000,
    "a unicode reply": "\u2190 \u202e \x00 \U0001f45f \ud800",
    "a reply of 100,000 emoji": "\U0001f9ca" * 100_000,
    "a reply of NULs": "\x00" * 1000,
    "a reply of terminal commands": "\x1b[2J\x1b]0;title\x07\x9b31m" * 1000,
    "an opening tag alone": "<answer>",
    "a closing tag alone": "</answer>",
    "a thousand opening tags": "<answer>" * 1000,
    "an empty answer": "<answer></answer>",
    "nested tags": "<answer><answer> Left </answer></answer>",
}
# What code raises that did not expect a reply. Anything else passes through, which is just as loud.
_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def check_env(make: Callable[[], Env], replies: Sequence[str] = ()) -> None:
    """Raise :class:`EnvError` that names what is broken if the environments ``make`` builds break the contract.

    Checked, on a few seeds: ``reset`` depends on the seed alone; equal replies lead to equal outcomes; any
    string can be a reply; every episode ends within ``max_turns``; a reply without a running episode is
    refused; outcomes are well formed, text can be encoded, measures are finite; of a :class:`Pictured` one, that
    its pictures can be decoded and are the same whenever they are asked for; the global random generators are left
    alone.

    Two attributes lift a check. ``split_by = "seed"``: levels may all begin alike, what differs is hidden.
    ``free_form = True``: any reply may be an answer, so that none has to be invalid.

    Args:
        make: builds a new environment, the same one every time.
        replies: some that the environment can read, to play with. A :class:`Teachable` one needs none: it
            demonstrates and solves.
    """
    env = make()
    before = _global_rng()  # after the first one: it imports what it needs, and a library may draw while it is imported
    _check_attributes(env)
    _check_refuses(env, "before reset()")
    if not _begins_alike(env) and len({_reset(env, seed) for seed in _LEVEL_SEEDS}) == 1:
        _fail(
            env,
            f"reset() shows the same level for all seeds 0 to {_LEVEL_SEEDS[-1]}: the seed must decide it (or this "
            "split holds one level only)",
        )
    for name, reply in _GARBAGE.items():
        _reset(env, 0)
        outcome, _ = _step(env, reply, name)
        if outcome.valid and not getattr(env, "free_form", False):
            _fail(env, f"{name} counts as valid: no action can be read from it, so valid must be False")
    for seed in _EPISODE_SEEDS:
        _play([env], seed, lambda: "")
        _check_deterministic(make, seed, replies)
        if isinstance(env, Teachable):
            _check_solution(env, seed)
    if _global_rng() != before:
        _fail(env, "the global state of random or numpy.random changed: use a generator made from the seed")


def check_splits(train: Env, evaluation: Env) -> None:
    """Raise :class:`EnvError` if a level of one split is also one of the other, on a few seeds.

    Levels are compared by their first observation; an environment whose levels all begin alike passes.
    """
    if _begins_alike(train):
        return
    both = {_reset(train, seed) for seed in _LEVEL_SEEDS} & {_reset(evaluation, seed) for seed in _LEVEL_SEEDS}
    if both:
        text, _ = min(both)
        _fail(
            train,
            f"the train and the eval split both have the level {text[:200]!r}: an evaluation would be on what was "
            "trained on",
        )


def _begins_alike(env: Env) -> bool:
    return getattr(env, "split_by", None) == "seed"


def _check_attributes(env: Env) -> None:
    for name in ("task", "instructions"):
        text = getattr(env, name, None)
        if not (isinstance(text, str) and text):
            raise EnvError(f"{type(env).__name__}.{name} is {text!r}: it must be a text that is not empty")
    turns = getattr(env, "max_turns", None)
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        _fail(env, f"max_turns is {turns!r}: it must be an int >= 1, or episodes have no end")


def _check_refuses(env: Env, when: str) -> None:
    try:
        env.step("")
    except EnvError:
        return
    except _FAULTS as error:
        raise EnvError(f"{env.task}: step() {when} raised {error!r}: it must raise EnvError") from error
    _fail(env, f"step() {when} was played: it must raise EnvError, no episode is running")


def _check_deterministic(make: Callable[[], Env], seed: int, replies: Sequence[str]) -> None:
    """An object that was used before, even for half an episode, plays like a new one."""
    used = make()
    rng = np.random.default_rng(seed)

    def reply() -> str:
        if isinstance(used, Teachable):
            return used.demonstrate(rng)
        return replies[int(rng.integers(len(replies)))] if replies else write_action("Left")

    _play([used, make()], seed, reply)
    _play([used, make()], seed, reply)
    _reset(used, seed + 1)
    for _ in range(used.max_turns // 2):
        if _step(used, reply())[0].done:
            break
    _play([used, make()], seed, reply)


def _check_solution(env: Teachable, seed: int) -> None:
    """Following ``solution()`` is an episode like any other, and the solver does not lose its way."""

    def reply() -> str:
        actions = env.solution()
        if not actions:
            _fail(env, f"seed {seed}: solution() is {actions!r} in an episode that follows it; levels must be solvable")
        return write_action(actions[0])

    _play([env], seed, reply)


def _play(envs: Sequence[Env], seed: int, reply: Callable[[], str]) -> None:
    """One episode, side by side on every object: they must agree, end in time, and refuse another reply."""
    first = envs[0]
    _agree(first, f"reset({seed})", [_reset(env, seed) for env in envs])
    for turn in range(first.max_turns):
        text = reply()
        outcomes = [_step(env, text) for env in envs]
        _agree(first, f"seed {seed}, reply {turn} ({text!r})", outcomes)
        if outcomes[0][0].done:
            break
    else:
        _fail(first, f"seed {seed}: not done after max_turns = {first.max_turns} replies")
    for env in envs:
        _check_refuses(env, "after done")


def _agree(env: Env, where: str, seen: Sequence[tuple[object, _Images]]) -> None:
    (said, images), *others = seen
    for other, other_images in others:
        if other != said:
            _fail(env, f"{where} gave {said!r} on one object and {other!r} on another: the seed must decide it")
        if other_images != images:
            _fail(env, f"{where} showed other pictures on one object than on another: the seed must decide them")


_Images = tuple[bytes, ...]


def _reset(env: Env, seed: int) -> tuple[str, _Images]:
    observation = env.reset(seed)
    _check_observation(env, f"reset({seed})", observation)
    return observation, _check_images(env, f"after reset({seed})")


def _step(env: Env, reply: str, name: str = "") -> tuple[Outcome, _Images]:
    shown = name or repr(reply[:200])
    try:
        outcome = env.step(reply)
    except _FAULTS as error:
        raise EnvError(f"{env.task}: step() raised {error!r} on {shown}: any string can be a reply") from error
    if not isinstance(outcome, Outcome):
        _fail(env, f"step() returned {outcome!r} on {shown}: it must return an Outcome")
    _check_observation(env, f"step() on {shown}", outcome.observation)
    if not (isinstance(outcome.reward, float) and math.isfinite(outcome.reward)):
        _fail(env, f"reward {outcome.reward!r} on {shown} must be a finite float")
    for flag in ("done", "success", "valid"):
        if not isinstance(getattr(outcome, flag), bool):
            _fail(env, f"{flag} is {getattr(outcome, flag)!r} on {shown}: it must be a bool")
    if outcome.success and not outcome.done:
        _fail(env, f"success without done on {shown}: a solved episode is over")
    _check_measures(env, shown, outcome.measures)
    return outcome, _check_images(env, f"after step() on {shown}")


def _check_observation(env: Env, where: str, observation: object) -> None:
    if not (isinstance(observation, str) and observation):
        _fail(env, f"{where} gave the observation {observation!r}: it must be a text that is not empty")
    try:
        observation.encode()
    except UnicodeEncodeError as error:
        raise EnvError(f"{env.task}: {where} gave an observation that no tokenizer takes: {error}") from error


def _check_measures(env: Env, shown: str, measures: object) -> None:
    if not isinstance(measures, Mapping):
        _fail(env, f"measures is {measures!r} on {shown}: it must map names to numbers")
    for name, value in measures.items():
        if not (isinstance(name, str) and name):
            _fail(env, f"measures has the name {name!r} on {shown}: it must be a text that is not empty")
        if not (isinstance(value, float) and math.isfinite(value)):
            _fail(env, f"measure {name} is {value!r} on {shown}: it must be a finite float")


def _check_images(env: Env, where: str) -> _Images:
    """The pictures that are shown now; asking for them changes nothing."""
    if not isinstance(env, Pictured):
        return ()
    images = env.images()
    if not isinstance(images, tuple):
        _fail(env, f"images() returned a {type(images).__name__} {where}: it must be a tuple of encoded pictures")
    for number, image in enumerate(images):
        if not (isinstance(image, bytes) and image):
            _fail(env, f"picture {number} is {image!r:.100} {where}: it must be encoded, as PNG or JPEG")
        if fault := _undecodable(image):
            _fail(env, f"picture {number} cannot be decoded {where}: {fault}")
    if env.images() != images:
        _fail(env, f"images() gave other pictures when asked again {where}")
    return images


def _undecodable(image: bytes) -> str:
    """What is wrong with an encoded picture, nothing if it can be decoded."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow", "vision") from error
    try:
        with Image.open(io.BytesIO(image)) as picture:
            picture.load()
    except (OSError, RuntimeError, SyntaxError, ValueError) as error:
        return str(error)
    return ""


def _global_rng() -> object:
    """The state of both global generators, in a form that can be compared."""
    state = np.random.get_state(legacy=False)  # noqa: NPY002 - only looked at
    return random.getstate(), repr(state["state"]["key"].tolist()), state["state"]["pos"], state["gauss"]


def _fail(env: Env, what: str) -> NoReturn:
    raise EnvError(f"{env.task}: {what}")
