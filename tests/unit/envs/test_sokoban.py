"""Sokoban: rules and rewards by hand, levels and solver by enumeration."""

from itertools import permutations

import numpy as np
import pytest

from freshper.envs import SokobanEnv, SokobanSpec, make_env, read_action, write_action
from freshper.envs.core import level_split
from freshper.envs.sokoban import ACTIONS, PRESETS, solve
from freshper.errors import ConfigError, EnvError, UnknownNameError

SEEDS = {"sokoban": 400, "sokoban-walls": 300, "sokoban-simple": 300, "sokoban-8x8": 100, "sokoban-hard": 30}


def started(*rows: str, task: str = "sokoban") -> SokobanEnv:
    env = make_env(task)
    assert env.start("\n".join(rows)) == "\n".join(rows)
    return env


def play(env: SokobanEnv, *actions: str):
    """The last outcome of several actions, and the reward of each."""
    outcomes = [env.step(write_action(action)) for action in actions]
    return outcomes[-1], pytest.approx([outcome.reward for outcome in outcomes])


class TestRules:
    def test_a_move_costs_a_tenth(self):
        env = started("P___", "____", "_X__", "_O__")
        outcome, rewards = play(env, "Right", "Down")
        assert outcome.observation == "____\n_P__\n_X__\n_O__"
        assert rewards == [-0.1, -0.1]
        assert (outcome.done, outcome.success, outcome.valid) == (False, False, True)

    def test_the_last_push_earns_box_and_bonus(self):
        env = started("____", "_P__", "_X__", "_O__")
        outcome, rewards = play(env, "Down")
        assert outcome.observation == "____\n____\n_P__\n_*__"
        assert rewards == [-0.1 + 1 + 10]
        assert (outcome.done, outcome.success, outcome.valid) == (True, True, True)

    def test_box_on_off_and_on_again(self):
        env = started("######", "#PXO_#", "#____#", "#XO__#", "######", task="sokoban-hard")
        outcome, rewards = play(env, "Right")
        assert outcome.observation == "######\n#_P*_#\n#____#\n#XO__#\n######"
        assert rewards == [-0.1 + 1]
        assert not outcome.done
        outcome, rewards = play(env, "Right")
        assert outcome.observation == "######\n#__SX#\n#____#\n#XO__#\n######"
        assert rewards == [-0.1 - 1]

    def test_a_box_from_target_to_target_earns_nothing(self):
        env = started("PXOO_X")
        _, rewards = play(env, "Right", "Right")
        assert rewards == [0.9, -0.1]

    @pytest.mark.parametrize(
        ("level", "action"),
        [
            ("PX_O", "Left"),  # the edge, though no wall is drawn
            ("PX_O", "Up"),
            ("PX_O\n#___", "Down"),  # an inner wall
            ("O_PX", "Right"),  # a box at the edge
            ("OPX#", "Right"),  # a box at a wall
            ("PXX_OO", "Right"),  # a box behind the box
            ("__OX\nP___", "Left"),  # not round the line end
        ],
    )
    def test_bumping_is_a_move_that_changes_nothing(self, level, action):
        outcome, rewards = play(started(*level.split("\n")), action)
        assert outcome.observation == level
        assert rewards == [-0.1]
        assert outcome.valid

    @pytest.mark.parametrize("reply", ["", "Left", "<answer>", "<answer> Jump </answer>"])
    def test_an_unreadable_reply_costs_its_price_and_a_turn(self, reply):
        env = started("P___", "____", "_X__", "_O__")
        for turn in range(10):
            outcome = env.step(reply)
            assert outcome.reward == -0.15
            assert outcome.observation == "P___\n____\n_X__\n_O__"
            assert (outcome.done, outcome.success, outcome.valid) == (turn == 9, False, False)

    def test_the_turn_limit_ends_the_episode(self):
        env = started("P___", "____", "_X__", "_O__")
        outcome, rewards = play(env, *["Up"] * 10)
        assert (outcome.done, outcome.success) == (True, False)
        assert rewards == [-0.1] * 10
        with pytest.raises(EnvError, match=r"sokoban: step\(\) while no episode is running"):
            env.step(write_action("Up"))

    def test_solving_with_the_last_turn_counts(self):
        env = started("____", "_P__", "_X__", "_O__")
        outcome, _ = play(env, *["Up", "Down"] * 4, "Left", "Right")
        assert (outcome.done, outcome.success) == (True, False)
        env = started("____", "_P__", "_X__", "_O__")
        outcome, rewards = play(env, *["Up", "Down"] * 4, "Left")
        assert not outcome.done
        env = started("____", "P___", "_X__", "_O__")
        outcome, rewards = play(env, *["Up", "Down"] * 4, "Right", "Down")
        assert (outcome.done, outcome.success) == (True, True)
        assert rewards == [-0.1] * 9 + [10.9]

    def test_the_score_of_a_solved_level(self):
        env = started("____", "____", "P_X_", "__O_")
        _, rewards = play(env, *env.solution())
        assert rewards == [-0.1, -0.1, -0.1, 10.9]

    @pytest.mark.parametrize("call", ["solution", "demonstrate"])
    def test_teaching_needs_a_running_episode(self, call):
        env = make_env("sokoban")
        with pytest.raises(EnvError, match=rf"{call}\(\) while no episode is running"):
            env.solution() if call == "solution" else env.demonstrate(np.random.default_rng(0))


class TestLevelText:
    @pytest.mark.parametrize(
        ("level", "message"),
        [
            ("PXO\n__", "rows of equal length"),
            ("PXO?", "rows of equal length made of #_OXP"),
            ("_XO", "0 players, 1 boxes and 1 targets"),
            ("PPXO", "2 players"),
            ("PXXO", "2 boxes and 1 targets"),
            ("P_*", "on a target already"),
        ],
    )
    def test_a_level_that_is_none_is_refused(self, level, message):
        with pytest.raises(EnvError, match=message):
            make_env("sokoban").start(level)

    def test_symbols_of_overlaps_are_read(self):
        env = started("SX_*", "____")
        outcome, _ = play(env, "Right", "Left")
        assert outcome.observation == "SX_*\n____".replace("SX_", "S_X")


class TestSolver:
    def test_1016_levels_of_the_open_room_take_2_to_7_moves(self):
        """Every placement of the open 4x4 room; the table was counted by a second program, with other code."""
        moves = [0] * 12
        for player, box, target in permutations(range(16), 3):
            cells = ["_"] * 16
            cells[player], cells[box], cells[target] = "PXO"
            actions = solve("\n".join("".join(cells[row : row + 4]) for row in range(0, 16, 4)))
            moves[len(actions) if actions else 0] += 1
        assert moves[1:] == [32, 80, 128, 184, 224, 256, 144, 88, 24, 16, 0]
        assert sum(moves[2:8]) == 1016

    def test_the_limit_bounds_the_search(self):
        level = "____\nP___\n_X__\n_O__"
        assert solve(level) == solve(level, 2) == ("Right", "Down")
        assert solve(level, 1) is None

    @pytest.mark.parametrize("level", ["X_P\n__O", "OX#P", "P#XO"])
    def test_unsolvable(self, level):
        assert solve(level) is None

    def test_a_box_makes_room_on_its_target_for_another(self):
        assert solve("P*O_\n_X#_\n____") == ("Right", "Left", "Down", "Down", "Right", "Up")

    def test_solution_follows_the_state(self):
        env = started("____", "____", "P_X_", "__O_")
        assert len(env.solution()) == 4
        play(env, "Up", "Right")
        assert env.solution() == ["Right", "Down"]

    def test_solution_of_a_lost_state_is_none(self):
        env = started("____", "__X_", "__P_", "_O__")
        play(env, "Up")
        assert env.solution() is None


class TestPresets:
    @pytest.mark.parametrize("split", ["train", "eval"])
    @pytest.mark.parametrize("task", PRESETS)
    def test_every_level_is_solved_in_time_by_its_solution(self, task, split):
        spec, _ = PRESETS[task]
        env = make_env(task, split)
        for seed in range(SEEDS[task]):
            level = env.reset(seed)
            assert level_split(level) == split
            actions = env.solution()
            assert spec.min_moves <= len(actions) <= spec.max_moves <= env.max_turns
            outcomes = [env.step(write_action(action)) for action in actions]
            assert outcomes[-1].success
            assert not any(outcome.done for outcome in outcomes[:-1])
            assert sum(outcome.reward for outcome in outcomes) == pytest.approx(10 + spec.boxes - 0.1 * len(actions))

    @pytest.mark.parametrize("task", PRESETS)
    def test_t8_training_and_evaluation_levels_are_disjoint(self, task):
        train, evaluation = (
            {make_env(task, split).reset(seed) for seed in range(SEEDS[task])} for split in ("train", "eval")
        )
        assert not train & evaluation
        assert min(len(train), len(evaluation)) > 25

    @pytest.mark.parametrize("task", PRESETS)
    def test_t8_the_seed_decides_the_level(self, task):
        one, other = make_env(task), make_env(task)
        forward = [one.reset(seed) for seed in range(20)]
        assert [other.reset(seed) for seed in reversed(range(20))] == forward[::-1]

    @pytest.mark.parametrize(
        ("task", "shape", "boxes", "turns"),
        [
            ("sokoban", (4, 4), 1, 10),
            ("sokoban-walls", (4, 4), 1, 10),
            ("sokoban-simple", (6, 6), 1, 10),
            ("sokoban-8x8", (8, 8), 1, 20),
            ("sokoban-hard", (8, 8), 2, 20),
        ],
    )
    def test_what_a_level_looks_like(self, task, shape, boxes, turns):
        env = make_env(task)
        levels = [np.array([list(row) for row in env.reset(seed).split("\n")]) for seed in range(10)]
        for level in levels:
            assert level.shape == shape
            counts = [int((level == symbol).sum()) for symbol in "XOP"]
            assert counts == [boxes, boxes, 1]
        edge = np.concatenate([levels[0][0], levels[0][-1], levels[0][:, 0], levels[0][:, -1]])
        assert (edge == "#").all() == (task in {"sokoban-simple", "sokoban-8x8", "sokoban-hard"})
        inner = any((level[1:-1, 1:-1] == "#").any() for level in levels)
        assert inner == (task != "sokoban")
        assert env.max_turns == turns

    def test_instructions_say_what_counts(self):
        text = make_env("sokoban").instructions
        for fact in ("# wall", "* box on a target", "-0.1 a move", "+10 all", "-0.15", "10 turns", "<answer> Left"):
            assert fact in text


class TestDemonstrator:
    def replies(self, *rows: str, draws: int = 2000) -> dict[str, float]:
        env = started(*rows)
        rng = np.random.default_rng(0)
        seen = [read_action(env.demonstrate(rng), ACTIONS) for _ in range(draws)]
        return {action: seen.count(action) / draws for action in ACTIONS}

    def test_knows_the_last_three_moves_but_for_three_in_ten(self):
        shares = self.replies("____", "P___", "_X__", "_O__")
        assert shares["Right"] == pytest.approx(0.7 + 0.3 / 4, abs=0.04)  # 4 standard errors
        assert shares["Left"] == pytest.approx(0.3 / 4, abs=0.03)

    @pytest.mark.parametrize("rows", [("____", "____", "P_X_", "__O_"), ("X__P", "____", "_O__", "____")])
    def test_walks_at_random_when_far_off_or_lost(self, rows):
        assert self.replies(*rows) == pytest.approx(dict.fromkeys(ACTIONS, 0.25), abs=0.04)

    def test_is_weak(self):
        env, rng = make_env("sokoban"), np.random.default_rng(0)
        solved = 0
        for seed in range(300):
            env.reset(seed)
            done = False
            while not done:
                outcome = env.step(env.demonstrate(rng))
                done = outcome.done
            solved += outcome.success
        assert 0.2 < solved / 300 < 0.45


class TestSpec:
    def test_t22_unknown_option_offers_the_nearest(self):
        with pytest.raises(UnknownNameError, match=r"unknown option 'boxs'.*Did you mean 'boxes'"):
            make_env("sokoban", boxs=2)

    def test_options_change_a_preset(self):
        env = make_env("sokoban", width=5, max_turns=12)
        assert env.max_turns == 12
        assert env.reset(0).index("\n") == 5

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"wall_probability": 1.0}, "wall_probability 1.0 must be in"),
            ({"min_moves": 0}, "1 <= min_moves <= max_moves <= max_turns"),
            ({"max_moves": 11}, "max_moves 11, max_turns 10"),
            ({"min_moves": 8}, "min_moves 8, max_moves 7"),
            ({"boxes": 0}, "boxes 0 must be >= 1"),
            ({"boxes": 8}, "boxes 8 .* in 16 cells"),
            ({"outer_wall": True, "boxes": 2}, "boxes 2 .* in 4 cells"),
        ],
    )
    def test_contradictions_are_refused(self, options, message):
        with pytest.raises(ConfigError, match=message):
            make_env("sokoban", **options)

    def test_a_room_too_full_of_walls_is_an_error_not_a_hang(self):
        spec = SokobanSpec(3, 3, 3, 0.9, 1, 5, 5, outer_wall=False)
        with pytest.raises(EnvError, match="none of 10000 draws"):
            SokobanEnv(spec, "crammed", "eval").reset(0)
