"""CliffWalking as text: walk along a cliff without falling off it. The dynamics are gymnasium's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from freshper.envs.core import (
    INVALID_REWARD,
    Outcome,
    Split,
    draw_level,
    level_split,
    read_action,
    with_options,
    write_action,
)
from freshper.errors import ConfigError, EnvError

ACTIONS = ("Up", "Right", "Down", "Left")  # in the order of gymnasium's action numbers
MOVE_REWARD = -1.0
CLIFF_REWARD = -100.0
RANDOM_SHARE = 0.3  # of the demonstrator's actions
DEMONSTRATED_MOVES = 5  # how many moves before the goal the demonstrator knows what to do

_SYMBOLS = "P_CSGAQ"
_PLAYER, _GROUND, _CLIFF, _START, _GOAL, _PLAYER_AT_START, _PLAYER_AT_GOAL = list(_SYMBOLS)
_STANDING_ON = {_GROUND: _PLAYER, _START: _PLAYER_AT_START, _GOAL: _PLAYER_AT_GOAL}
_STEPS = ((-1, 0), (0, 1), (1, 0), (0, -1))  # rows and columns, one for every action


@dataclass(frozen=True, slots=True)
class CliffWalkingSpec:
    """Settings of a CliffWalking task: ``height`` x ``width`` cells, the cliff along one long edge.

    With ``random_start`` the first cell is any that is safe, otherwise the start beside the cliff; ``mirrored`` boards
    may have the cliff at the top and the goal at the left. Neither leaves one board alone, gymnasium's. On
    ``slippery`` ground two of three moves go off to a side. Raises :class:`ConfigError` for settings that
    contradict each other.
    """

    height: int = 4
    width: int = 12
    random_start: bool = True
    mirrored: bool = True
    slippery: bool = False
    max_turns: int = 20

    def __post_init__(self) -> None:
        if self.height < 2 or self.width < 3:
            raise ConfigError(
                f"height {self.height} must be >= 2 and width {self.width} >= 3: start, cliff and goal share a row, "
                "the way around it is another"
            )
        # Around the cliff from the start, or across the whole board from the corner that is farthest from the goal.
        longest = max(self.width + 1, self.height + self.width - 2 if self.random_start else 0)
        if self.max_turns < longest:
            raise ConfigError(f"max_turns {self.max_turns} must be >= {longest}: so many moves the longest way takes")


PRESETS: dict[str, tuple[CliffWalkingSpec, str]] = {
    "cliffwalking": (
        CliffWalkingSpec(),
        "CliffWalking, 4x12, 20 turns: walk around the cliff to the goal, from any safe cell, on mirrored boards too.",
    ),
    "cliffwalking-8x8": (
        CliffWalkingSpec(height=8, width=8),
        "CliffWalking, 8x8, 20 turns, from any safe cell, on mirrored boards too.",
    ),
}


class CliffWalkingEnv:
    """CliffWalking on levels of one split: walk to the goal and do not fall off the cliff.

    Observation: the board as rows of symbols: P player, _ ground, C cliff, S start, G goal, A player at the start,
    Q player at the goal.

    Actions: Up, Right, Down, Left, one a turn, written ``<answer> Up </answer>``. At the edge of the board a move
    goes nowhere. On slippery ground a move goes where it should one time in three, otherwise off to a side.

    Rewards: -1 a move; -100 a move onto the cliff, which leads back to the start S; an unreadable reply costs a
    turn and 1.15, 0.15 more than a move: were it cheaper than one, babbling until the end would be worth more than
    walking to the goal.

    End: the goal (success), or ``max_turns`` replies. A fall does not end the episode.

    Parameters (:class:`CliffWalkingSpec`): ``height``, ``width``, ``random_start``, ``mirrored``, ``slippery``,
    ``max_turns``. A level is a board and the cell that the player starts from: 148 levels at 4x12, split by their
    own hash. ``random_start=False`` leaves the classic board and its mirror images: three to train on, gymnasium's own
    among them, and one held out. ``mirrored=False`` besides leaves gymnasium's alone: asking for held-out levels is
    then an error.

    Source: Sutton and Barto, Reinforcement Learning (2018), example 6.6; dynamics as in gymnasium's CliffWalking,
    whose board has one size and one start.
    """

    legend = (
        f"{_PLAYER} you, {_GROUND} ground, {_CLIFF} cliff, {_START} start, {_GOAL} goal, {_PLAYER_AT_START} you at "
        f"the start, {_PLAYER_AT_GOAL} you at the goal."
    )
    actions = ACTIONS

    _board: str  # the level without the player
    _cell: int  # where the player is, as an offset in that text
    _rng: np.random.Generator  # where one slips

    def __init__(self, spec: CliffWalkingSpec, task: str, split: Split) -> None:
        self.spec = spec
        self.task = task
        self.split = split
        self.max_turns = spec.max_turns
        self.instructions = _instructions(spec, self.legend)
        self._turns_left = 0
        self._levels = all_levels(spec)
        if not any(level_split(level) == split for level in self._levels):
            raise ConfigError(
                f"{task}: none of its {len(self._levels)} levels is in the {split} split; random_start and mirrored "
                "make more of them"
            )

    def reset(self, seed: int) -> str:
        """Start the level that ``seed`` decides and return it as text; it decides where one slips, too."""
        levels = self._levels
        return self.start(draw_level(seed, self.split, lambda rng: levels[rng.integers(len(levels))]), seed)

    def start(self, level: str, seed: int = 0) -> str:
        """Start a level written by hand, in the symbols of an observation. Raises :class:`EnvError`."""
        self._board, self._cell = _parse(level)
        self._rng = np.random.default_rng(seed)
        self._turns_left = self.max_turns
        return self._observation()

    def step(self, reply: str) -> Outcome:
        """Play one reply. Raises :class:`EnvError` when no episode is running."""
        self._require_running("step")
        self._turns_left -= 1
        action = read_action(reply, ACTIONS)
        reward = MOVE_REWARD + INVALID_REWARD
        if action is not None:
            turn = int(self._rng.integers(-1, 2)) if self.spec.slippery else 0
            self._cell, reward = moved(self._board, self._cell, (ACTIONS.index(action) + turn) % len(ACTIONS))
        success = self._board[self._cell] == _GOAL
        if success:
            self._turns_left = 0
        return Outcome(self._observation(), reward, self._turns_left == 0, success, action is not None)

    def solution(self) -> list[str]:
        """The shortest way to the goal. On slippery ground: for one who never slips."""
        self._require_running("solution")
        return list(_way(self._board, self._cell))

    def demonstrate(self, rng: np.random.Generator) -> str:
        """The reply of a demonstrator that knows only the last five moves, and errs in three of ten replies.

        Farther off it walks at random, and falls.
        """
        self._require_running("demonstrate")
        random_action = ACTIONS[rng.integers(len(ACTIONS))]
        way = _way(self._board, self._cell)
        known = rng.random() >= RANDOM_SHARE and len(way) <= DEMONSTRATED_MOVES
        return write_action(way[0] if known else random_action)

    def _require_running(self, call: str) -> None:
        if self._turns_left == 0:
            raise EnvError(f"{self.task}: {call}() while no episode is running; call reset(seed) first")

    def _observation(self) -> str:
        return _draw(self._board, self._cell)


def make_cliffwalking(spec: CliffWalkingSpec, task: str, split: Split, **options: Any) -> CliffWalkingEnv:
    """A preset with some settings changed; ``options`` are fields of :class:`CliffWalkingSpec`."""
    return CliffWalkingEnv(with_options(spec, options), task, split)


@lru_cache(maxsize=64)
def all_levels(spec: CliffWalkingSpec) -> tuple[str, ...]:
    """Every level of a task, each once."""
    boards = _boards(spec.height, spec.width)
    return tuple(
        _draw(board, cell)
        for board in (boards if spec.mirrored else boards[:1])
        for cell, symbol in enumerate(board)
        if symbol == _START or (symbol == _GROUND and spec.random_start)
    )


def moved(board: str, cell: int, action: int) -> tuple[int, float]:
    """Where a move in one of the four directions of ``ACTIONS`` ends, and its reward."""
    line = board.index("\n") + 1  # with its line end
    row, column = divmod(cell, line)
    down, right = _STEPS[action]
    row = min(max(row + down, 0), board.count("\n"))
    column = min(max(column + right, 0), line - 2)
    after = row * line + column
    if board[after] == _CLIFF:
        return board.index(_START), CLIFF_REWARD
    return after, MOVE_REWARD


@lru_cache(maxsize=1024)  # there are few states, and a demonstrator asks about each many times
def _way(board: str, start: int) -> tuple[str, ...]:
    """The shortest actions to the goal (breadth first), never over the cliff."""
    ways: dict[int, tuple[str, ...]] = {start: ()}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        if board[cell] == _GOAL:
            return ways[cell]
        for number, action in enumerate(ACTIONS):
            after, reward = moved(board, cell, number)
            if reward != CLIFF_REWARD and after not in ways:
                ways[after] = (*ways[cell], action)
                queue.append(after)
    raise EnvError(f"there is no way to the goal of this board:\n{board}")


def _boards(height: int, width: int) -> list[str]:
    """gymnasium's board of that size, then its mirror images; start and goal are seen, the player is not there yet."""
    ground = [_GROUND * width] * (height - 1)
    boards = []
    for edge in (_START + _CLIFF * (width - 2) + _GOAL, _GOAL + _CLIFF * (width - 2) + _START):
        boards += ["\n".join([*ground, edge]), "\n".join([edge, *ground])]
    return boards


def _parse(level: str) -> tuple[str, int]:
    """The board and the player's cell."""
    rows = level.split("\n")
    players = [cell for cell, symbol in enumerate(level) if symbol in _PLAYER + _PLAYER_AT_START]
    if len(players) == 1 and len(rows) > 1 and len(rows[0]) > 2:
        (cell,) = players
        under = _START if level[cell] == _PLAYER_AT_START else _GROUND
        board = level[:cell] + under + level[cell + 1 :]
        if board in _boards(len(rows), len(rows[0])):
            return board, cell
    raise EnvError(
        "a level is two or more rows of ground _ with one player P, and an edge row, first or last, of start S, "
        f"cliff C and goal G (A is the player at the start), not:\n{level}"
    )


def _draw(board: str, cell: int) -> str:
    return board[:cell] + _STANDING_ON[board[cell]] + board[cell + 1 :]


def _instructions(spec: CliffWalkingSpec, legend: str) -> str:
    slippery = " The ground is slippery: two moves of three go off to a side." if spec.slippery else ""
    return (
        "You walk along a cliff: reach the goal and do not fall.\n"
        f"{legend} At the edge of the board a move goes nowhere. Who steps onto the cliff falls and is back at the "
        f"start.{slippery}\n"
        f"Rewards: {MOVE_REWARD:+g} a move, {CLIFF_REWARD:+g} a fall, {MOVE_REWARD + INVALID_REWARD:+g} a reply that "
        "cannot be read.\n"
        f"You have {spec.max_turns} turns, one action a turn: {', '.join(ACTIONS)}. "
        f"Reply like this: {write_action('Up')}"
    )
