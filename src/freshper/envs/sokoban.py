"""Sokoban as text: push every box onto a target. Levels are drawn at random and kept if a solver solves them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
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

ACTIONS = ("Up", "Down", "Left", "Right")
MOVE_REWARD = -0.1
BOX_ON_REWARD = 1.0  # a box goes onto a target; the same is taken back when one leaves it
SOLVED_REWARD = 10.0
RANDOM_SHARE = 0.3  # of the demonstrator's actions
LARGEST = 64  # cells a side: a solver that looks at every state has no use for more
DEMONSTRATED_MOVES = 3  # how many moves before the end the demonstrator knows what to do

_SYMBOLS = "#_OXP*S"
_WALL, _FLOOR, _TARGET, _BOX, _PLAYER, _BOX_ON, _PLAYER_ON = list(_SYMBOLS)
_LIFTED = str.maketrans("XP*S", "__OO")  # what is left when player and boxes are lifted off


@dataclass(frozen=True, slots=True)
class SokobanSpec:
    """Settings of a Sokoban task. ``height`` and ``width`` are those of the text, a drawn outer wall included.

    A level is kept when its shortest solution has ``min_moves`` to ``max_moves`` moves. Raises
    :class:`ConfigError` for settings that contradict each other.
    """

    height: int
    width: int
    boxes: int
    wall_probability: float  # of every cell of the room to be an inner wall
    min_moves: int
    max_moves: int
    max_turns: int
    outer_wall: bool  # drawn; undrawn, the edge of the text is a wall all the same

    def __post_init__(self) -> None:
        if max(self.height, self.width) > LARGEST:
            raise ConfigError(f"height {self.height} and width {self.width} must be at most {LARGEST}")
        if not 0 <= self.wall_probability < 1:
            raise ConfigError(f"wall_probability {self.wall_probability} must be in [0, 1)")
        if not 1 <= self.min_moves <= self.max_moves <= self.max_turns:
            raise ConfigError(
                f"min_moves {self.min_moves}, max_moves {self.max_moves}, max_turns {self.max_turns} must satisfy "
                "1 <= min_moves <= max_moves <= max_turns: every level can be solved in time"
            )
        frame = 2 if self.outer_wall else 0
        cells = max(self.height - frame, 0) * max(self.width - frame, 0)
        if self.boxes < 1 or 2 * self.boxes + 1 > cells:
            raise ConfigError(f"boxes {self.boxes} must be >= 1 and fit, with targets and player, in {cells} cells")


PRESETS: dict[str, tuple[SokobanSpec, str]] = {
    "sokoban": (
        SokobanSpec(
            height=4, width=4, boxes=1, wall_probability=0.0, min_moves=2, max_moves=7, max_turns=10, outer_wall=False
        ),
        "Sokoban, an open 4x4 room with one box, solvable in 2 to 7 moves, 10 turns: the CPU-scale task.",
    ),
    "sokoban-walls": (
        SokobanSpec(
            height=4, width=4, boxes=1, wall_probability=0.15, min_moves=2, max_moves=7, max_turns=10, outer_wall=False
        ),
        "Sokoban, a 4x4 room with random inner walls and one box, solvable in 2 to 7 moves, 10 turns.",
    ),
    "sokoban-simple": (
        SokobanSpec(
            height=6, width=6, boxes=1, wall_probability=0.15, min_moves=2, max_moves=10, max_turns=10, outer_wall=True
        ),
        "Sokoban, 6x6 with its outer wall, random inner walls, one box, 10 turns: the paper's simple task.",
    ),
    "sokoban-8x8": (
        SokobanSpec(
            height=8, width=8, boxes=1, wall_probability=0.15, min_moves=4, max_moves=20, max_turns=20, outer_wall=True
        ),
        "Sokoban, 8x8 with its outer wall, random inner walls, one box, 20 turns.",
    ),
    "sokoban-hard": (
        SokobanSpec(
            height=8, width=8, boxes=2, wall_probability=0.15, min_moves=4, max_moves=20, max_turns=20, outer_wall=True
        ),
        "Sokoban, 8x8 with its outer wall, random inner walls, two boxes, 20 turns: the paper's hard task.",
    ),
}


@dataclass(frozen=True, slots=True)
class _Board:
    """What never changes in a level. A cell is an offset in the text; whatever is no floor stops like a wall."""

    background: str  # the text without player and boxes
    floor: frozenset[int]
    targets: frozenset[int]
    strides: dict[str, int]  # action -> distance between a cell and its neighbor


_State = tuple[int, frozenset[int]]  # the player's cell and those of the boxes


class SokobanEnv:
    """Sokoban on levels of one split: push every box onto a target.

    Observation: the room as rows of symbols: # wall, _ floor, O target, X box, P player, * box on a target, S player
    on a target. Beyond the edge of the text is wall.

    Actions: Up, Down, Left, Right, one a turn, written ``<answer> Left </answer>``. Walking into a box pushes it
    if the cell behind it is neither wall nor box; otherwise nothing moves.

    Rewards: -0.1 a move (walking into a wall is one), +1 a box goes onto a target, -1 one leaves a target, +10 when
    all boxes are on targets; an unreadable reply costs 0.15 and a turn.

    End: all boxes are on targets (success), or ``max_turns`` replies.

    Parameters (:class:`SokobanSpec`): ``height``, ``width``, ``boxes``, ``wall_probability``, ``outer_wall``, and the
    difficulty: ``min_moves`` and ``max_moves`` of the shortest solution, and ``max_turns``. Every level is drawn at
    random and kept if the solver finds such a solution; its own hash decides the split. The open 4x4 room has 1,016
    levels of 2 to 7 moves; with inner walls there are more than 100,000.

    Source: the rewards and sizes of the paper (arXiv 2604.16918), which follow gym-sokoban.
    """

    legend = (
        f"{_WALL} wall, {_FLOOR} floor, {_TARGET} target, {_BOX} box, {_PLAYER} you, "
        f"{_BOX_ON} box on a target, {_PLAYER_ON} you on a target. Beyond the edge of the grid is wall."
    )
    actions = ACTIONS

    _board: _Board
    _state: _State

    def __init__(self, spec: SokobanSpec, task: str, split: Split) -> None:
        self.spec = spec
        self.task = task
        self.split = split
        self.max_turns = spec.max_turns
        self.instructions = _instructions(spec, self.legend)
        self._turns_left = 0

    def reset(self, seed: int) -> str:
        """Start the level that ``seed`` decides and return it as text."""
        return self.start(draw_level(seed, self.split, lambda rng: sample_level(self.spec, rng, self.split)))

    def start(self, level: str) -> str:
        """Start a level written by hand, in the symbols of an observation. Raises :class:`EnvError`."""
        self._board, self._state = _parse(level)
        if self._solved():
            raise EnvError(f"every box of this level is on a target already, there is nothing to play:\n{level}")
        self._turns_left = self.max_turns
        return self._observation()

    def step(self, reply: str) -> Outcome:
        """Play one reply. Raises :class:`EnvError` when no episode is running."""
        self._require_running("step")
        self._turns_left -= 1
        action = read_action(reply, ACTIONS)
        reward = INVALID_REWARD if action is None else self._move(action)
        solved = self._solved()
        if solved:
            self._turns_left = 0
        return Outcome(self._observation(), reward, self._turns_left == 0, solved, action is not None)

    def solution(self) -> list[str] | None:
        """The shortest list of actions that solves the current state, None if it cannot be solved any more."""
        self._require_running("solution")
        moves = solve(self._level())
        return None if moves is None else list(moves)

    def demonstrate(self, rng: np.random.Generator) -> str:
        """The reply of a demonstrator that knows only the last three moves, and errs in three of ten replies."""
        self._require_running("demonstrate")
        random_action = ACTIONS[rng.integers(len(ACTIONS))]
        if rng.random() < RANDOM_SHARE:
            return write_action(random_action)
        moves = solve(self._level(), DEMONSTRATED_MOVES)
        return write_action(moves[0] if moves else random_action)

    def _require_running(self, call: str) -> None:
        if self._turns_left == 0:
            raise EnvError(f"{self.task}: {call}() while no episode is running; call reset(seed) first")

    def _solved(self) -> bool:
        return self._state[1] == self._board.targets

    def _move(self, action: str) -> float:
        targets = self._board.targets
        on_before = len(self._state[1] & targets)
        self._state = _moved(self._board, self._state, action) or self._state
        gained = len(self._state[1] & targets) - on_before
        return MOVE_REWARD + BOX_ON_REWARD * gained + SOLVED_REWARD * self._solved()

    def _observation(self) -> str:
        return self._level()

    def _level(self) -> str:
        """The room with player and boxes, as text."""
        return _draw(self._board, self._state)


def _instructions(spec: SokobanSpec, legend: str) -> str:
    return (
        "You play Sokoban: push every box onto a target.\n"
        f"{legend}\n"
        "Walk into a box to push it; it moves if the cell behind it is neither wall nor box. Boxes cannot be pulled.\n"
        f"Rewards: {MOVE_REWARD:+g} a move, {BOX_ON_REWARD:+g} a box goes onto a target, {-BOX_ON_REWARD:+g} a box "
        f"leaves one, {SOLVED_REWARD:+g} all boxes are on targets, {INVALID_REWARD:+g} a reply that cannot be read.\n"
        f"You have {spec.max_turns} turns, one action a turn: {', '.join(ACTIONS)}. "
        f"Reply like this: {write_action('Left')}"
    )


def make_sokoban(spec: SokobanSpec, task: str, split: Split, **options: Any) -> SokobanEnv:
    """A preset with some settings changed; ``options`` are fields of :class:`SokobanSpec`."""
    return SokobanEnv(with_options(spec, options), task, split)


def sample_level(spec: SokobanSpec, rng: np.random.Generator, split: Split) -> str | None:
    """One draw: walls, then boxes, targets and player on distinct cells; None if it does not suit.

    It suits when it lies in the split and its shortest solution has as many moves as it should.
    """
    room = np.full((spec.height, spec.width), _FLOOR)
    inside = room
    if spec.outer_wall:
        room[:] = _WALL
        inside = room[1:-1, 1:-1]
        inside[:] = _FLOOR
    inside[rng.random(inside.shape) < spec.wall_probability] = _WALL
    rows, columns = np.nonzero(inside == _FLOOR)
    pieces = [_BOX] * spec.boxes + [_TARGET] * spec.boxes + [_PLAYER]
    if len(rows) < len(pieces):
        return None
    cells = rng.choice(len(rows), size=len(pieces), replace=False)
    inside[rows[cells], columns[cells]] = pieces
    level = "\n".join("".join(row) for row in room)
    if level_split(level) != split:  # asked before the solver, which takes a hundred times longer
        return None
    moves = solve(level, spec.max_moves)
    return level if moves is not None and len(moves) >= spec.min_moves else None


@lru_cache(maxsize=8192)  # more than the states of the open 4x4 room, which come back all the time
def solve(level: str, limit: int | None = None) -> tuple[str, ...] | None:
    """The shortest actions that solve a level (breadth first); None if there are none, or none within ``limit``."""
    board, start = _parse(level)
    needed = _pushes_needed(board)
    if start[1] == board.targets:
        return ()
    if any(box not in needed for box in start[1]):
        return None
    # Only a push changes how many pushes the boxes still need at least, so that number is kept with a state.
    came_from: dict[_State, tuple[_State, str] | None] = {start: None}
    queue = deque([(start, 0, sum(needed[box] for box in start[1]))])
    floor, strides = board.floor, list(board.strides.items())
    while queue:
        state, depth, pushes = queue.popleft()
        if limit is not None and depth + pushes > limit:
            continue  # too late from here, and so is whatever follows
        player, boxes = state
        for action, stride in strides:
            cell, left = player + stride, pushes
            if cell not in floor:
                continue
            after = cell, boxes
            if cell in boxes:
                pushed = cell + stride
                if pushed not in needed or pushed in boxes:
                    continue
                left += needed[pushed] - needed[cell]
                after = cell, boxes - {cell} | {pushed}
            if after in came_from:
                continue
            came_from[after] = state, action
            if left == 0:
                return _way(came_from, after)
            queue.append((after, depth + 1, left))
    return None


def _way(came_from: Mapping[_State, tuple[_State, str] | None], state: _State) -> tuple[str, ...]:
    """The actions that lead to a state."""
    actions = []
    while (step := came_from[state]) is not None:
        state, action = step
        actions.append(action)
    return tuple(reversed(actions))


def _pushes_needed(board: _Board) -> dict[int, int]:
    """How many pushes a lone box needs to a target, from every cell from which it can reach one."""
    needed = dict.fromkeys(board.targets, 0)
    pulled = deque(board.targets)
    while pulled:  # away from the targets, breadth first
        cell = pulled.popleft()
        for stride in board.strides.values():
            box, player = cell + stride, cell + 2 * stride
            if box in board.floor and player in board.floor and box not in needed:
                needed[box] = needed[cell] + 1
                pulled.append(box)
    return needed


def _moved(board: _Board, state: _State, action: str) -> _State | None:
    """The state after an action, None if it changes nothing: the way is blocked."""
    player, boxes = state
    stride = board.strides[action]
    player += stride
    if player not in board.floor:
        return None
    if player not in boxes:
        return player, boxes
    pushed = player + stride
    if pushed not in board.floor or pushed in boxes:
        return None
    return player, boxes - {player} | {pushed}


def _parse(level: str) -> tuple[_Board, _State]:
    rows = level.split("\n")
    line = len(rows[0]) + 1  # with its line end
    if any(len(row) + 1 != line for row in rows) or not set(level) <= set(_SYMBOLS + "\n"):
        raise EnvError(f"a level is rows of equal length made of {_SYMBOLS}, not:\n{level}")
    players, boxes, targets, floor = (
        frozenset(at for at, symbol in enumerate(level) if symbol in kind)
        for kind in (_PLAYER + _PLAYER_ON, _BOX + _BOX_ON, _TARGET + _BOX_ON + _PLAYER_ON, _SYMBOLS[1:])
    )
    if len(players) != 1 or len(boxes) != len(targets):
        raise EnvError(
            f"{len(players)} players, {len(boxes)} boxes and {len(targets)} targets; "
            f"a level has one player and as many boxes as targets:\n{level}"
        )
    (player,) = players
    strides = dict(zip(ACTIONS, (-line, line, -1, 1), strict=True))
    return _Board(level.translate(_LIFTED), floor, targets, strides), (player, boxes)


def _draw(board: _Board, state: _State) -> str:
    player, boxes = state
    cells = list(board.background)
    for box in boxes:
        cells[box] = _BOX_ON if box in board.targets else _BOX
    cells[player] = _PLAYER_ON if player in board.targets else _PLAYER
    return "".join(cells)
