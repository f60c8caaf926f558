"""Sokoban levels: how many there are, how fast they come, and that a faster solver changed none of them."""

import hashlib
import time
from itertools import islice

import numpy as np
import pytest

from freshper.envs import SokobanSpec, make_env
from freshper.envs.sokoban import ACTIONS, PRESETS, solve

# Digests of 50 levels of every preset and split with their solutions, taken before the solver was made faster:
# published results were measured on these levels.
PUBLISHED = {
    ("sokoban", "train"): "75c5beede975e473",
    ("sokoban", "eval"): "01db4b71c6cab810",
    ("sokoban-walls", "train"): "214cb0ccaf02b9aa",
    ("sokoban-walls", "eval"): "e8d26fa3179c14ce",
    ("sokoban-simple", "train"): "9b7cd651c148dcf3",
    ("sokoban-simple", "eval"): "9b0050a04a9399aa",
    ("sokoban-hard", "train"): "97efe4f59b02934b",
    ("sokoban-hard", "eval"): "3f4581861152e078",
}


@pytest.mark.parametrize(("task", "split"), PUBLISHED)
def test_levels_and_solutions_are_the_published_ones(task, split):
    env = make_env(task, split)
    digest = hashlib.sha256()
    for seed in range(50):
        digest.update(env.reset(seed).encode())
        digest.update(" ".join(env.solution()).encode())
    assert digest.hexdigest()[:16] == PUBLISHED[task, split]


def moves_by_brute_force(level: str, limit: int) -> int | None:
    """The length of a shortest solution, by another program: rows and columns, layer by layer, nothing left out."""
    grid = [list(row) for row in level.split("\n")]
    cells = {(row, column): symbol for row, line in enumerate(grid) for column, symbol in enumerate(line)}
    floor = {cell for cell, symbol in cells.items() if symbol != "#"}
    targets = {cell for cell, symbol in cells.items() if symbol in "O*S"}
    boxes = frozenset(cell for cell, symbol in cells.items() if symbol in "X*")
    (player,) = (cell for cell, symbol in cells.items() if symbol in "PS")
    layer, seen = {(player, boxes)}, {(player, boxes)}
    for moves in range(limit + 1):
        if any(boxes == targets for _, boxes in layer):
            return moves
        following = set()
        for (row, column), boxes in layer:
            for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1)):
                here, beyond = (row + down, column + right), (row + 2 * down, column + 2 * right)
                if here in boxes and (beyond not in floor or beyond in boxes):
                    continue
                if here in floor:
                    following.add((here, boxes - {here} | {beyond} if here in boxes else boxes))
        layer = following - seen
        seen |= layer
    return None


@pytest.mark.parametrize(
    ("spec", "draws"),
    [
        (SokobanSpec(4, 4, 1, 0.15, 2, 7, 10, outer_wall=False), 150),
        (SokobanSpec(4, 4, 2, 0.1, 2, 15, 15, outer_wall=False), 150),
        (SokobanSpec(6, 6, 2, 0.1, 2, 15, 15, outer_wall=True), 150),
    ],
)
def test_the_solver_finds_shortest_solutions_and_misses_none(spec, draws):
    rng = np.random.default_rng(0)
    found = 0
    for level in islice(any_levels(spec, rng), draws):
        expected = moves_by_brute_force(level, spec.max_moves)
        actions = solve(level, spec.max_moves)
        assert (None if actions is None else len(actions)) == expected
        if actions:
            found += 1
            assert set(actions) <= set(ACTIONS)
            assert solve(level) == actions  # a limit leaves out what comes too late, and nothing else
    assert 5 < found < draws


def any_levels(spec: SokobanSpec, rng: np.random.Generator):
    """Levels as they are drawn, also those that cannot be solved."""
    frame = int(spec.outer_wall)
    while True:
        room = np.full((spec.height, spec.width), "#")
        inside = room[frame : spec.height - frame, frame : spec.width - frame]
        inside[:] = np.where(rng.random(inside.shape) < spec.wall_probability, "#", "_")
        rows, columns = np.nonzero(inside == "_")
        pieces = ["X"] * spec.boxes + ["O"] * spec.boxes + ["P"]
        if len(rows) >= len(pieces):
            cells = rng.choice(len(rows), size=len(pieces), replace=False)
            inside[rows[cells], columns[cells]] = pieces
            yield "\n".join("".join(row) for row in room)


def test_walls_make_more_than_a_hundred_thousand_levels():
    """Of the 560 x 13 x 12 x 11 placements of three walls, player, box and target alone, by a sample of 1,500.

    All of them can be drawn, and each is another text. The share that can be played is 0.3: the bound lies 9 standard
    errors below it.
    """
    placements = 560 * 13 * 12 * 11
    spec, _ = PRESETS["sokoban-walls"]
    rng = np.random.default_rng(0)
    playable = 0
    for _ in range(1500):
        level = np.full(16, "_")
        level[rng.choice(16, size=6, replace=False)] = list("###PXO")
        moves = solve("\n".join("".join(row) for row in level.reshape(4, 4)), spec.max_moves)
        playable += moves is not None and len(moves) >= spec.min_moves
    share = playable / 1500
    assert placements * (share - 4 * np.sqrt(share * (1 - share) / 1500)) > 100_000


@pytest.mark.parametrize("task", ["sokoban-walls", "sokoban-simple", "sokoban-8x8", "sokoban-hard"])
def test_levels_with_walls_hardly_repeat(task):
    env = make_env(task)
    drawn = 60 if task == "sokoban-hard" else 300
    levels = [env.reset(seed) for seed in range(drawn)]
    assert len(set(levels)) >= 0.98 * drawn


@pytest.mark.parametrize("split", ["train", "eval"])
def test_two_hundred_simple_levels_a_second(split):
    """Each checked by the solver. The best of three, in processor time: others may be at work on the machine."""
    env = make_env("sokoban-simple", split)
    rates = []
    for first in (0, 100, 200):
        solve.cache_clear()
        began = time.process_time()
        for seed in range(first, first + 100):
            env.reset(seed)
        rates.append(100 / (time.process_time() - began))
    assert max(rates) > 200


@pytest.mark.parametrize(
    ("options", "moves"),
    [
        ({"min_moves": 2, "max_moves": 3}, range(2, 4)),
        ({"min_moves": 8, "max_moves": 10}, range(8, 11)),
        (
            {"height": 7, "width": 8, "boxes": 3, "wall_probability": 0.0, "max_moves": 20, "max_turns": 20},
            range(2, 21),
        ),
    ],
)
def test_difficulty_is_a_parameter(options, moves):
    env = make_env("sokoban-simple", **options)
    lengths = set()
    for seed in range(10):
        level = env.reset(seed)
        assert level.count("X") == level.count("O") == options.get("boxes", 1)
        assert len(level.split("\n")) == options.get("height", 6)
        if options.get("wall_probability") == 0.0:
            assert level.count("#") == 2 * (8 + 7) - 4
        lengths.add(len(env.solution()))
    assert lengths <= set(moves)
    assert len(lengths) > 1
