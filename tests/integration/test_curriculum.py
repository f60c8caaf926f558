"""A run on a mixture whose shares follow the success rates."""

import pytest

from freshper.training import train

WEIGHTS = {"frozenlake": 1.0, "sokoban": 1.0}
EASY = {"frozenlake": {"size": 2}}  # a step or two to the goal: the one task that so small a policy ever solves
CURRICULUM = {
    "run": {"task": "mixture", "iterations": 6},
    "env": {"curriculum": 0.9, "curriculum_window": 16, "options": {"weights": WEIGHTS, "options": EASY}},
    "rollout": {"episodes": 16},
    "replay": {"ratio": 0},
}
SHARES = ("rollout/frozenlake/share", "rollout/sokoban/share")


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("curriculum") / "whole"
    train(small(**CURRICULUM | {"run": CURRICULUM["run"] | {"folder": str(folder)}}))
    return folder


def test_the_task_with_more_to_learn_is_played_more(whole, rows):
    played = rows(whole)
    assert [played[0][name] for name in SHARES] == [0.5, 0.5]  # nothing was known
    assert all(sum(row[name] for name in SHARES) == pytest.approx(1) for row in played)
    # What an iteration has shown decides the next one's shares: by hand from the first one.
    first = played[0]
    learnable = []
    for task in ("frozenlake", "sokoban"):
        count = first[f"rollout/{task}/episodes"]
        rate = (first[f"rollout/{task}/success"] * count + 1) / (count + 2)
        learnable.append(rate * (1 - rate))
    expected = [0.05 + 0.9 * value / sum(learnable) for value in learnable]
    assert [played[1][name] for name in SHARES] == pytest.approx(expected)
    assert played[-1][SHARES[0]] > 0.6


def test_it_goes_on_bit_for_bit(small, whole, tmp_path, rows):
    parts = tmp_path / "parts"
    run = CURRICULUM["run"] | {"folder": str(parts)}
    train(small(**CURRICULUM | {"run": run | {"iterations": 4}}))
    train(small(**CURRICULUM | {"run": run}), resume=True)
    assert rows(parts) == rows(whole)
