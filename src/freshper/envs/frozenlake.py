"""FrozenLake as text: cross a frozen lake without falling into a hole. Maps and dynamics are gymnasium's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from freshper.envs.core import (
    INVALID_REWARD,
    Outcome,
    Split,
    draw_level,
    read_action,
    with_options,
    write_action,
)
from freshper.errors import ConfigError, EnvError, MissingExtraError

ACTIONS = ("Left", "Down", "Right", "Up")  # in the order of gymnasium's action numbers
RANDOM_SHARE = 0.3  # of the demonstrator's actions

_SYMBOLS = "P_OGXQ"
_PLAYER, _FROZEN, _HOLE, _GOAL, _PLAYER_IN_HOLE, _PLAYER_AT_GOAL = list(_SYMBOLS)
_STANDING_ON = {_FROZEN: _PLAYER, _HOLE: _PLAYER_IN_HOLE, _GOAL: _PLAYER_AT_GOAL}
_FROM_GYMNASIUM = str.maketrans("SFHG", "P_OG")
_TO_GYMNASIUM = str.maketrans("P_OG", "SFHG")


@dataclass(frozen=True, slots=True)
class FrozenLakeSpec:
    """Settings of a FrozenLake task: ``size`` x ``size`` cells, start and goal in opposite corners.

    On a ``slippery`` lake two of three moves go off to a side. Raises :class:`ConfigError` for settings
    that hardly any level can meet.
    """

    size: int = 4
    frozen_probability: float = 0.8
    slippery: bool = False
    max_turns: int = 10

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ConfigError(f"size {self.size} must be >= 2: start and goal are different cells")
        if not 0.6 <= self.frozen_probability <= 1:
            raise ConfigError(
                f"frozen_probability {self.frozen_probability} must be in [0.6, 1]: "
                "with more holes a path across the lake is too rare to be drawn by chance"
            )
        if self.max_turns < 2 * (self.size - 1):
            raise ConfigError(
                f"max_turns {self.max_turns} must be >= {2 * (self.size - 1)}: "
                f"it takes as many moves to cross {self.size}x{self.size} cells"
            )


PRESETS: dict[str, tuple[FrozenLakeSpec, str]] = {
    "frozenlake": (
        FrozenLakeSpec(),
        "FrozenLake, 4x4 with frozen probability 0.8, not slippery, 10 turns: reach the goal around the holes.",
    ),
    "frozenlake-8x8": (
        FrozenLakeSpec(size=8, max_turns=20),
        "FrozenLake, 8x8 with frozen probability 0.8, not slippery, 20 turns.",
    ),
    "frozenlake-slippery": (
        FrozenLakeSpec(slippery=True, max_turns=30),
        "FrozenLake, 4x4 with frozen probability 0.8, 30 turns; two moves of three go off to a side.",
    ),
    "frozenlake-8x8-slippery": (
        FrozenLakeSpec(size=8, slippery=True, max_turns=100),
        "FrozenLake, 8x8 with frozen probability 0.8, 100 turns; two moves of three go off to a side.",
    ),
}


class FrozenLakeEnv:
    """FrozenLake on levels of one split: reach the goal and fall into no hole.

    Observation: the lake as rows of symbols: P player, _ frozen, O hole, G goal, X player in a hole, Q player at the
    goal.

    Actions: Left, Down, Right, Up, one a turn, written ``<answer> Right </answer>``. At the edge of the lake a move
    goes nowhere. On slippery ice a move goes where it should one time in three, otherwise off to a side.

    Rewards: 1 at the goal, 0 for other moves; an unreadable reply costs 0.15 and a turn.

    End: the goal (success), a hole, or ``max_turns`` replies. On slippery ice nobody always arrives: the best play
    does in 0.64 of the episodes at 4x4 with 30 turns, in 0.39 at 8x8 with 100.

    Parameters (:class:`FrozenLakeSpec`): ``size``, ``frozen_probability`` of every cell, ``slippery``, ``max_turns``.
    Levels that cannot be crossed in time (by one who never slips) are not played; a level's own hash decides its
    split.

    Source: maps and dynamics are gymnasium's; sizes and turns those of the paper (arXiv 2604.16918).
    """

    legend = (
        f"{_PLAYER} you, {_FROZEN} frozen, {_HOLE} hole, {_GOAL} goal, {_PLAYER_IN_HOLE} you in a hole, "
        f"{_PLAYER_AT_GOAL} you at the goal."
    )
    actions = ACTIONS

    _game: Any  # gymnasium's FrozenLakeEnv, which knows the map and the dynamics
    _lake: str  # the level without the player
    _cell: int  # where the player is, as an offset in that text

    def __init__(self, spec: FrozenLakeSpec, task: str, split: Split) -> None:
        self.spec = spec
        self.task = task
        self.split = split
        self.max_turns = spec.max_turns
        self.instructions = _instructions(spec, self.legend)
        self._turns_left = 0

    def reset(self, seed: int) -> str:
        """Start the level that ``seed`` decides and return it as text; it decides where one slips, too."""
        return self.start(draw_level(seed, self.split, lambda rng: sample_level(self.spec, rng)), seed)

    def start(self, level: str, seed: int = 0) -> str:
        """Start a level written by hand, in the symbols of an observation. Raises :class:`EnvError`."""
        _check_level(level)
        rows = level.translate(_TO_GYMNASIUM).split("\n")
        self._game = _gymnasium().FrozenLakeEnv(desc=rows, is_slippery=self.spec.slippery)
        self._game.reset(seed=int(seed))
        self._lake = level.replace(_PLAYER, _FROZEN)
        self._cell = level.index(_PLAYER)
        self._turns_left = self.max_turns
        return self._observation()

    def step(self, reply: str) -> Outcome:
        """Play one reply. Raises :class:`EnvError` when no episode is running."""
        self._require_running("step")
        self._turns_left -= 1
        action = read_action(reply, ACTIONS)
        reward = INVALID_REWARD
        if action is not None:
            position, reward, ended, _, _ = self._game.step(ACTIONS.index(action))
            row, column = divmod(position, self._game.ncol)
            self._cell = row * (self._game.ncol + 1) + column
            if ended:
                self._turns_left = 0
        success = self._lake[self._cell] == _GOAL
        return Outcome(self._observation(), float(reward), self._turns_left == 0, success, action is not None)

    def solution(self) -> list[str] | None:
        """The shortest way to the goal, None if there is none. On a slippery lake: for one who never slips."""
        self._require_running("solution")
        return solve(self._level())

    def demonstrate(self, rng: np.random.Generator) -> str:
        """The reply of a demonstrator that makes for the goal, sees no holes, and errs in three of ten replies."""
        self._require_running("demonstrate")
        nearer = _nearer(self._level())
        choice = ACTIONS if rng.random() < RANDOM_SHARE else nearer
        return write_action(choice[rng.integers(len(choice))])

    def _require_running(self, call: str) -> None:
        if self._turns_left == 0:
            raise EnvError(f"{self.task}: {call}() while no episode is running; call reset(seed) first")

    def _observation(self) -> str:
        return self._level()

    def _level(self) -> str:
        """The lake with the player, as text."""
        standing = _STANDING_ON[self._lake[self._cell]]
        return self._lake[: self._cell] + standing + self._lake[self._cell + 1 :]


def make_frozenlake(spec: FrozenLakeSpec, task: str, split: Split, **options: Any) -> FrozenLakeEnv:
    """A preset with some settings changed; ``options`` are fields of :class:`FrozenLakeSpec`."""
    return FrozenLakeEnv(with_options(spec, options), task, split)


def sample_level(spec: FrozenLakeSpec, rng: np.random.Generator) -> str | None:
    """One draw of gymnasium's map generator; None if the goal is too far for the turns."""
    seed = int(rng.integers(2**31))
    rows = _gymnasium().generate_random_map(spec.size, spec.frozen_probability, seed)
    level = "\n".join(rows).translate(_FROM_GYMNASIUM)
    moves = solve(level)
    return level if moves is not None and len(moves) <= spec.max_turns else None


def solve(level: str) -> list[str] | None:
    """The shortest actions from the player to the goal (breadth first), None if holes bar every way."""
    line = level.index("\n") + 1
    strides = dict(zip(ACTIONS, (-1, line, 1, -line), strict=True))
    start = level.index(_PLAYER)
    paths: dict[int, list[str]] = {start: []}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        if level[cell] == _GOAL:
            return paths[cell]
        for action, stride in strides.items():
            after = cell + stride
            if 0 <= after < len(level) and level[after] in (_FROZEN, _GOAL) and after not in paths:
                paths[after] = [*paths[cell], action]
                queue.append(after)
    return None


def _nearer(level: str) -> list[str]:
    """The actions that shorten the way to the goal as the crow flies."""
    line = level.index("\n") + 1
    row, column = divmod(level.index(_PLAYER), line)
    goal_row, goal_column = divmod(level.index(_GOAL), line)
    shortens = {
        "Left": goal_column < column,
        "Down": goal_row > row,
        "Right": goal_column > column,
        "Up": goal_row < row,
    }
    return [action for action in ACTIONS if shortens[action]]


def _check_level(level: str) -> None:
    rows = level.split("\n")
    if len(rows) < 2 or len({len(row) for row in rows}) > 1 or not set("".join(rows)) <= set("P_OG"):
        raise EnvError(f"a level is two or more rows of equal length made of P_OG, not:\n{level}")
    if level.count(_PLAYER) != 1 or level.count(_GOAL) != 1:
        raise EnvError(f"a level has one player P and one goal G, not:\n{level}")


def _gymnasium() -> ModuleType:
    """gymnasium's FrozenLake, imported when the first level is drawn: the import takes 0.3 s."""
    try:
        from gymnasium.envs.toy_text import frozen_lake
    except ImportError as error:
        raise MissingExtraError("gymnasium", "train") from error
    return frozen_lake  # type: ignore[no-any-return]


def _instructions(spec: FrozenLakeSpec, legend: str) -> str:
    slippery = " The ice is slippery: two moves of three go off to a side." if spec.slippery else ""
    return (
        "You cross a frozen lake: reach the goal and fall into no hole.\n"
        f"{legend} At the edge of the lake a move goes nowhere.{slippery}\n"
        f"Rewards: +1 at the goal, 0 for every other move, {INVALID_REWARD:+g} a reply that cannot be read.\n"
        f"You have {spec.max_turns} turns, one action a turn: {', '.join(ACTIONS)}. "
        f"Reply like this: {write_action('Right')}"
    )
