"""FrozenLake: rules by hand, levels by their solutions."""

import hashlib
import sys

import numpy as np
import pytest

from freshper.envs import FrozenLakeEnv, make_env, read_action, write_action
from freshper.envs.core import level_split
from freshper.envs.frozenlake import ACTIONS, solve
from freshper.errors import ConfigError, EnvError, MissingExtraError, UnknownNameError

SEEDS = 200
LAKE = ("P_O_", "____", "O__O", "___G")


def started(*rows: str, **options: object) -> FrozenLakeEnv:
    env = make_env("frozenlake", **options)
    assert env.start("\n".join(rows)) == "\n".join(rows)
    return env


def play(env: FrozenLakeEnv, *actions: str):
    """The outcomes of several actions."""
    return [env.step(write_action(action)) for action in actions]


class TestRules:
    def test_to_the_goal(self):
        outcomes = play(started(*LAKE), "Down", "Right", "Down", "Down", "Right", "Right")
        assert [outcome.observation.replace("\n", "/") for outcome in outcomes] == [
            "__O_/P___/O__O/___G",
            "__O_/_P__/O__O/___G",
            "__O_/____/OP_O/___G",
            "__O_/____/O__O/_P_G",
            "__O_/____/O__O/__PG",
            "__O_/____/O__O/___Q",
        ]
        assert [outcome.reward for outcome in outcomes] == [0, 0, 0, 0, 0, 1]
        assert [outcome.done for outcome in outcomes] == [False] * 5 + [True]
        assert [outcome.success for outcome in outcomes] == [False] * 5 + [True]
        assert all(outcome.valid for outcome in outcomes)

    def test_into_a_hole(self):
        env = started(*LAKE)
        last = play(env, "Right", "Right")[-1]
        assert last.observation == "__X_\n____\nO__O\n___G"
        assert (last.reward, last.done, last.success, last.valid) == (0.0, True, False, True)
        with pytest.raises(EnvError, match=r"frozenlake: step\(\) while no episode is running"):
            env.step(write_action("Left"))

    def test_at_the_edge_a_move_goes_nowhere(self):
        outcomes = play(started(*LAKE), "Up", "Left")
        assert {outcome.observation for outcome in outcomes} == {"\n".join(LAKE)}
        assert all(outcome.valid and outcome.reward == 0 and not outcome.done for outcome in outcomes)

    def test_back_up_over_the_start(self):
        assert play(started(*LAKE), "Down", "Up")[-1].observation == "\n".join(LAKE)

    @pytest.mark.parametrize("reply", ["", "Right", "<answer> Jump </answer>"])
    def test_an_unreadable_reply_costs_its_price_and_a_turn(self, reply):
        env = started(*LAKE)
        for turn in range(10):
            outcome = env.step(reply)
            assert outcome.reward == -0.15
            assert outcome.observation == "\n".join(LAKE)
            assert (outcome.done, outcome.success, outcome.valid) == (turn == 9, False, False)

    def test_the_turn_limit_ends_the_episode(self):
        outcomes = play(started(*LAKE), *["Up"] * 10)
        assert [outcome.done for outcome in outcomes] == [False] * 9 + [True]
        assert not outcomes[-1].success

    def test_a_slippery_lake_goes_astray_two_times_in_three(self):
        """And does so the same way under the same seed."""
        level = "___\n_P_\n__G"
        env = make_env("frozenlake", slippery=True)
        seen = []
        for seed in range(300):
            env.start(level, seed)
            seen.append(env.step(write_action("Up")).observation)
            env.start(level, seed)
            assert env.step(write_action("Up")).observation == seen[-1]
        shares = {text.replace("\n", "/"): seen.count(text) / 300 for text in seen}
        expected = dict.fromkeys(["_P_/___/__G", "___/P__/__G", "___/__P/__G"], 1 / 3)
        assert shares == pytest.approx(expected, abs=0.11)  # 4 standard errors

    @pytest.mark.parametrize("call", ["solution", "demonstrate"])
    def test_teaching_needs_a_running_episode(self, call):
        env = make_env("frozenlake")
        with pytest.raises(EnvError, match=rf"{call}\(\) while no episode is running"):
            env.solution() if call == "solution" else env.demonstrate(np.random.default_rng(0))

    @pytest.mark.parametrize(
        ("level", "message"),
        [
            ("P__G", "two or more rows"),
            ("P_\n_G_", "rows of equal length"),
            ("P_\n_?", "made of P_OG"),
            ("__\n_G", "one player P and one goal G"),
            ("PG\n_G", "one player P and one goal G"),
        ],
    )
    def test_a_level_that_is_none_is_refused(self, level, message):
        with pytest.raises(EnvError, match=message):
            make_env("frozenlake").start(level)


class TestSolver:
    def test_shortest_way_around_the_holes(self):
        assert len(solve("\n".join(LAKE))) == 6
        assert solve("PO_\n_O_\n__G") == ["Down", "Down", "Right", "Right"]
        assert solve("P_O\nO__\n_OG") == ["Right", "Down", "Right", "Down"]

    def test_no_way(self):
        assert solve("PO\nOG") is None

    def test_not_round_the_line_end(self):
        assert solve("_P\nOO\nG_") is None

    def test_solution_follows_the_state(self):
        env = started(*LAKE)
        play(env, "Down", "Right", "Down", "Down")
        assert env.solution() == ["Right", "Right"]


class TestLevels:
    @pytest.mark.parametrize("split", ["train", "eval"])
    def test_every_level_is_solved_in_time_by_its_solution(self, split):
        env = make_env("frozenlake", split)
        for seed in range(SEEDS):
            level = env.reset(seed)
            assert level_split(level) == split
            actions = env.solution()
            assert 6 <= len(actions) <= env.max_turns == 10
            outcomes = play(env, *actions)
            assert outcomes[-1].success
            assert sum(outcome.reward for outcome in outcomes) == 1

    def test_levels_that_take_too_many_turns_are_passed_over(self):
        lengths = {}
        for max_turns in (8, 10):
            env = make_env("frozenlake", size=5, frozen_probability=0.6, max_turns=max_turns)
            lengths[max_turns] = {len(solve(env.reset(seed))) for seed in range(SEEDS)}
        assert lengths == {8: {8}, 10: {8, 10}}

    def test_what_a_level_looks_like(self):
        env = make_env("frozenlake")
        levels = [env.reset(seed) for seed in range(SEEDS)]
        assert all([len(row) for row in level.split("\n")] == [4] * 4 for level in levels)
        assert all(level[0] == "P" and level[-1] == "G" and level.count("G") == 1 for level in levels)
        holes = sum(level.count("O") for level in levels) / (14 * SEEDS)
        assert 0.1 < holes < 0.2  # 0.2 of all cells before the unsolvable maps are dropped

    def test_t8_training_and_evaluation_levels_are_disjoint(self):
        train, evaluation = (
            {make_env("frozenlake", split).reset(seed) for seed in range(SEEDS)} for split in ("train", "eval")
        )
        assert not train & evaluation
        assert min(len(train), len(evaluation)) > 80  # few holes: levels repeat

    def test_t8_the_seed_decides_the_level(self):
        one, other = make_env("frozenlake"), make_env("frozenlake")
        forward = [one.reset(seed) for seed in range(20)]
        assert [other.reset(np.int64(seed)) for seed in reversed(range(20))] == forward[::-1]


class TestPresets:
    @pytest.mark.parametrize(
        ("task", "size", "slippery"),
        [
            ("frozenlake", 4, False),
            ("frozenlake-8x8", 8, False),
            ("frozenlake-slippery", 4, True),
            ("frozenlake-8x8-slippery", 8, True),
        ],
    )
    @pytest.mark.parametrize("split", ["train", "eval"])
    def test_every_level_can_be_crossed(self, task, size, slippery, split):
        env = make_env(task, split)
        assert ("slippery" in env.instructions) == slippery
        levels = set()
        for seed in range(30):
            level = env.reset(seed)
            levels.add(level)
            assert level_split(level) == split
            assert [len(row) for row in level.split("\n")] == [size] * size
            actions = env.solution()
            assert 2 * (size - 1) <= len(actions) <= env.max_turns
            outcomes = play(env, *actions) if not slippery else []
            assert slippery or outcomes[-1].success
        assert len(levels) > (25 if size == 8 else 15)

    @pytest.mark.parametrize(("task", "optimum"), [("frozenlake-slippery", 0.64), ("frozenlake-8x8-slippery", 0.39)])
    def test_the_best_play_on_slippery_ice(self, task, optimum):
        """By backward induction over the turns, on the table of moves that gymnasium plays by."""
        env = make_env(task)
        chances = []
        for seed in range(60):
            env.reset(seed)
            table = env._game.P
            moves = np.zeros((len(table), 4, len(table)))
            goal = np.zeros((len(table), 4))
            for cell, action in np.ndindex(len(table), 4):
                for probability, after, reward, ended in table[cell][action]:
                    goal[cell, action] += probability * reward
                    moves[cell, action, after] += probability * (not ended)
            chance = np.zeros(len(table))
            for _ in range(env.max_turns):
                chance = (goal + moves @ chance).max(axis=1)
            chances.append(chance[0])
        assert np.mean(chances) == pytest.approx(optimum, abs=0.09)

    @pytest.mark.parametrize(("split", "digest"), [("train", "784f9b7227fdb5e4"), ("eval", "33f383293010a2ab")])
    def test_levels_are_the_ones_that_results_were_published_on(self, split, digest):
        env = make_env("frozenlake", split)
        levels = "/".join(env.reset(seed) for seed in range(50))
        assert hashlib.sha256(levels.encode()).hexdigest()[:16] == digest


class TestDemonstrator:
    def replies(self, env: FrozenLakeEnv, draws: int = 2000) -> dict[str, float]:
        rng = np.random.default_rng(0)
        seen = [read_action(env.demonstrate(rng), ACTIONS) for _ in range(draws)]
        return {action: seen.count(action) / draws for action in ACTIONS}

    def test_makes_for_the_goal_but_for_three_in_ten(self):
        toward, away = 0.35 + 0.3 / 4, 0.3 / 4
        expected = {"Left": away, "Down": toward, "Right": toward, "Up": away}
        assert self.replies(started(*LAKE)) == pytest.approx(expected, abs=0.045)  # 4 standard errors

    def test_sees_no_holes_and_turns_no_further_than_the_goal(self):
        env = started("P__", "OOO", "__G")
        play(env, "Right", "Right")
        expected = {"Left": 0.075, "Down": 0.775, "Right": 0.075, "Up": 0.075}
        assert self.replies(env) == pytest.approx(expected, abs=0.04)

    def test_finds_a_goal_behind_it(self):
        expected = {"Left": 0.425, "Down": 0.075, "Right": 0.075, "Up": 0.425}
        assert self.replies(started("G__", "___", "__P")) == pytest.approx(expected, abs=0.045)

    def test_is_weak(self):
        env, rng = make_env("frozenlake"), np.random.default_rng(0)
        solved = 0
        for seed in range(300):
            env.reset(seed)
            done = False
            while not done:
                outcome = env.step(env.demonstrate(rng))
                done = outcome.done
            solved += outcome.success
        assert 0.2 < solved / 300 < 0.4


class TestSpec:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"size": 1}, "size 1 must be >= 2"),
            ({"frozen_probability": 0.3}, r"frozen_probability 0.3 must be in \[0.6, 1\]"),
            ({"size": 8}, "max_turns 10 must be >= 14"),
        ],
    )
    def test_contradictions_are_refused(self, options, message):
        with pytest.raises(ConfigError, match=message):
            make_env("frozenlake", **options)

    def test_t22_unknown_option_offers_the_nearest(self):
        with pytest.raises(UnknownNameError, match=r"unknown option 'slippry'.*Did you mean 'slippery'"):
            make_env("frozenlake", slippry=True)

    def test_options_change_a_preset(self):
        env = make_env("frozenlake", size=5, max_turns=12)
        assert env.reset(0).index("\n") == 5
        assert env.max_turns == 12
        assert "slippery" not in env.instructions
        assert "slippery" in make_env("frozenlake", slippery=True).instructions

    def test_without_gymnasium_the_extra_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "gymnasium.envs.toy_text", None)
        with pytest.raises(MissingExtraError, match=r"gymnasium is needed here: pip install 'freshper\[train\]'"):
            make_env("frozenlake").reset(0)
