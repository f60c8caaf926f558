"""What every adapter shares: episodes begin from a seed, stay in their split, end in time and say what they won."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from freshper.envs.core import Outcome, Pictured, Split, level_split
from freshper.errors import ConfigError, EnvError, UnknownNameError

SplitBy = Literal["observation", "seed", "env"]
PROBES = 8  # first observations that must not all be the same, where levels are told apart by them
TRIES = 500  # draws for a level of the wanted split: one in five is kept for evaluation

_NO_SPLIT = (
    "tell levels apart by their seed (split_by = 'seed'), or let the environment do it with an argument `split` of "
    "its own (split_by = 'env')"
)


@dataclass(frozen=True, slots=True)
class Played:
    """What an adapted environment said to one reply.

    ``ended`` by its own rules, ``cut`` off by a limit; ``success`` None where it does not say.
    """

    observation: str
    reward: float
    ended: bool
    cut: bool = False
    success: bool | None = None
    valid: bool = True
    measures: Mapping[str, float] = field(default_factory=dict)


class AdaptedEnv(ABC):
    """An environment of another make.

    The seed decides the level, within the split. ``split_by`` says how levels are told apart: by their first
    ``"observation"`` (its hash decides, so that equal levels never lie in both splits), by the ``"seed"`` that the
    environment gets (for levels that all begin alike; two seeds may then hide the same level), or by the
    ``"env"``ironment itself, which has been told its split.

    An episode ends when the environment says so, or after ``max_turns`` replies. It is a success when the
    environment says that; where it does not, when the episode's return has reached ``success_return``; without such
    a number, when the environment has ended it by its own rules with a return above 0.
    """

    free_form = False  # whether any reply may be an answer, so that none can be called unreadable

    def __init__(
        self,
        task: str,
        split: Split,
        *,
        instructions: str,
        max_turns: int,
        success_return: float | None,
        split_by: SplitBy,
    ) -> None:
        if not (isinstance(task, str) and task):
            raise ConfigError(f"task {task!r} must be a text: it names the environment in every number")
        if split_by not in get_args(SplitBy):
            raise UnknownNameError("split_by", str(split_by), get_args(SplitBy))
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise ConfigError(f"max_turns {max_turns!r} must be an int >= 1: episodes have to end")
        if success_return is not None and not math.isfinite(success_return):
            raise ConfigError(f"success_return {success_return} must be finite: no episode could be told a success")
        self.task = task
        self.split = split
        self.instructions = clean(instructions)
        self.max_turns = max_turns
        self.split_by = split_by
        self._success_return = success_return
        self._turns_left = 0
        self._return = 0.0
        self._last_turn = False  # while a reply is played that the limit of turns makes the last one
        self._told_apart = False
        self._shown: object = None  # the first observation of an environment that takes no seed

    def reset(self, seed: int) -> str:
        """Start the level that ``seed`` decides and return its first observation."""
        if seed < 0:
            raise ConfigError(f"seed {seed} must be >= 0: it seeds the generator that draws the level")
        self._turns_left = 0  # until it has started
        observation = self._draw(int(seed))
        self._turns_left, self._return = self.max_turns, 0.0
        return observation

    def step(self, reply: str) -> Outcome:
        """Play one reply. Raises :class:`EnvError` when no episode is running."""
        if self._turns_left == 0:
            raise EnvError(f"{self.task}: step() while no episode is running; call reset(seed) first")
        left, self._turns_left = self._turns_left - 1, 0  # if it raises, the episode is over
        self._last_turn = left == 0
        played = self._play(clean(reply))
        if not math.isfinite(played.reward):
            raise EnvError(f"{self.task}: reward {played.reward} must be finite")
        self._return += played.reward
        done = played.ended or played.cut or left == 0
        success = done and self._succeeded(played)
        observation, measures = clean(played.observation), dict(played.measures)
        self._turns_left = 0 if done else left
        return Outcome(observation, float(played.reward), done, success, played.valid, measures)

    @abstractmethod
    def _begin(self, seed: int) -> str:
        """Start the level of this seed of the adapted environment; its first observation."""

    @abstractmethod
    def _play(self, reply: str) -> Played:
        """Give the reply to the adapted environment."""

    def _same(self, shown: object) -> Any:
        """What was shown without a seed: one level. Were there more, the runs of a group would not share theirs."""
        if self._shown is not None and shown != self._shown:
            raise EnvError(
                f"{self.task}: reset() takes no seed and shows {shown!r:.100} after {self._shown!r:.100}: "
                "let it take a seed that decides the level"
            )
        self._shown = shown
        return shown

    def _succeeded(self, played: Played) -> bool:
        if played.success is not None:
            return played.success
        if self._success_return is not None:
            return self._return >= self._success_return
        return played.ended and self._return > 0

    def _draw(self, seed: int) -> str:
        if self.split_by == "env":
            return clean(self._begin(seed))
        rng = np.random.default_rng(seed)
        if self.split_by == "seed":
            return clean(self._begin(seed_of_split(rng, self.split)))
        self._check_told_apart()
        for _ in range(TRIES):
            observation = clean(self._begin(_candidate(rng)))
            if level_split(self._look(observation)) == self.split:
                return observation
        raise EnvError(
            f"{self.task}: none of {TRIES} levels lies in the {self.split} split, which their first observations "
            f"decide: there are too few of them; {_NO_SPLIT}"
        )

    def _check_told_apart(self) -> None:
        """Before the first level: where all begin alike, one split would have no level, and that much too late."""
        if not self._told_apart and len({self._look(clean(self._begin(seed))) for seed in range(PROBES)}) == 1:
            raise EnvError(
                f"{self.task}: {PROBES} levels begin with the same observation, by which train and eval levels are "
                f"told apart: {_NO_SPLIT}"
            )
        self._told_apart = True

    def _look(self, observation: str) -> str:
        """What is seen of a level at first, as one text."""
        images = self.images() if isinstance(self, Pictured) else ()
        return "\n".join([observation, *(hashlib.sha256(image).hexdigest() for image in images)])


def seed_of_split(rng: np.random.Generator, split: Split) -> int:
    """A seed that no level of the other split is made from."""
    while level_split(str(seed := _candidate(rng))) != split:
        pass
    return seed


def clean(text: object) -> str:
    """The text without what no tokenizer takes, lone surrogates. Raises :class:`EnvError` for what is no text."""
    if not isinstance(text, str):
        raise EnvError(f"the environment showed {text!r:.200}: an observation must be text")
    return text.encode("utf-8", "replace").decode()


def adopt(adapter: AdaptedEnv, inner: Any, *names: str) -> None:
    """Give the adapter the methods ``names`` of what it adapts, if that has all of them."""
    methods = [getattr(inner, name, None) for name in names]
    if all(callable(method) for method in methods):
        for name, method in zip(names, methods, strict=True):
            setattr(adapter, name, method)


def _candidate(rng: np.random.Generator) -> int:
    return int(rng.integers(2**31))
