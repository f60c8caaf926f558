"""Which task of a mixture is played how often, by its success rate."""

from types import SimpleNamespace

import numpy as np
import pytest

from freshper.envs import make_env
from freshper.errors import ConfigError, SnapshotError
from freshper.training.config_file import make_config
from freshper.training.curriculum import Curriculum

WEIGHTS = {"sokoban": 3.0, "frozenlake": 1.0, "cliffwalking": 4.0}


def played(**successes):
    """Episodes of tasks, by name: a list of whether each succeeded, None for one that broke after a success."""
    return [
        SimpleNamespace(task=task, success=success is not False, error="it broke" if success is None else None)
        for task, own in successes.items()
        for success in own
    ]


@pytest.fixture
def mixture():
    return make_env("mixture", weights=WEIGHTS)


def test_a_part_of_the_episodes_goes_by_weight_and_what_is_to_learn(mixture):
    curriculum = Curriculum(0.6, 100)
    curriculum.observe(played(sokoban=[True] * 8, frozenlake=[True, False, True, False], cliffwalking=[False] * 18))
    shares = curriculum.apply([mixture])
    # By hand: p = 9/10, 3/6 and 1/20; w p (1 - p) = 3/8 x 9/100, 1/8 x 1/4, 4/8 x 19/400.
    learnable = np.array([27 / 800, 1 / 32, 19 / 800])
    expected = 0.4 * np.array([3, 1, 4]) / 8 + 0.6 * learnable / learnable.sum()
    np.testing.assert_allclose(list(shares.values()), expected, rtol=1e-12)
    assert list(shares) == list(WEIGHTS)
    drawn = []
    for seed in range(2000):
        mixture.reset(seed)
        drawn.append(mixture.task)
    for task, share in shares.items():
        assert drawn.count(task) / 2000 == pytest.approx(share, abs=0.045)  # 4 standard errors


def test_a_task_that_is_solved_leaves_room_and_comes_back_when_it_is_forgotten(mixture):
    curriculum = Curriculum(0.5, 20)
    first = curriculum.apply([mixture])
    np.testing.assert_allclose(list(first.values()), [3 / 8, 1 / 8, 4 / 8])  # nothing is known: by weight
    curriculum.observe(played(cliffwalking=[True] * 500))
    solved = curriculum.apply([mixture])["cliffwalking"]
    assert 0.25 <= solved < 0.35  # by weight alone it keeps a quarter
    curriculum.observe(played(cliffwalking=[False, True] * 10))
    assert curriculum.apply([mixture])["cliffwalking"] == pytest.approx(0.5)


def test_only_the_latest_episodes_count():
    curriculum = Curriculum(1.0, 4)
    curriculum.observe(played(sokoban=[True] * 50 + [False, False, True, True]))
    assert curriculum.success_rate("sokoban") == 0.5
    assert curriculum.success_rate("frozenlake") == 0.5


def test_a_task_that_breaks_is_played_less(mixture):
    curriculum = Curriculum(1.0, 64)
    curriculum.observe(played(sokoban=[None] * 40, frozenlake=[True, False] * 20))
    shares = curriculum.apply([mixture])
    assert shares["sokoban"] < 0.06 < 3 / 8 < shares["cliffwalking"]


def test_switched_off_it_changes_nothing(mixture):
    curriculum = Curriculum(0.0, 4)
    curriculum.observe(played(sokoban=[True] * 9))
    assert curriculum.apply([mixture]) == {}
    same = make_env("mixture", weights=WEIGHTS)
    assert [mixture.reset(seed) for seed in range(20)] == [same.reset(seed) for seed in range(20)]


def test_other_tasks_are_let_alone():
    assert Curriculum(1.0, 4).apply([make_env("sokoban")]) == {}


def test_it_goes_on_from_its_state(mixture):
    first, second = Curriculum(0.7, 8), Curriculum(0.7, 8)
    first.observe(played(sokoban=[True] * 6 + [False], frozenlake=[False] * 20))
    second.restore(first.state())
    for curriculum in (first, second):
        curriculum.observe(played(sokoban=[False] * 3))
    assert first.apply([mixture]) == second.apply([mixture])
    assert first.state() == second.state()


@pytest.mark.parametrize("state", [[1], {"sokoban": 1}, None])
def test_a_damaged_state_is_refused_and_changes_nothing(state):
    curriculum = Curriculum(0.7, 8)
    curriculum.observe(played(sokoban=[True] * 6))
    with pytest.raises(SnapshotError, match="the saved curriculum is damaged"):
        curriculum.restore(state)
    assert curriculum.success_rate("sokoban") == 7 / 8


def test_one_task_has_no_curriculum():
    with pytest.raises(ConfigError, match=r"env\.curriculum 0\.5 chooses between the tasks of a mixture, and sokoban"):
        make_config({"run": {"task": "sokoban"}, "env": {"curriculum": 0.5}})
