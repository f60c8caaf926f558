"""CliffWalking: the dynamics are gymnasium's, levels are all there, replies cost what they should."""

from itertools import pairwise

import numpy as np
import pytest
from gymnasium.envs.toy_text.cliffwalking import CliffWalkingEnv as Gymnasium

from freshper.envs import CliffWalkingEnv, CliffWalkingSpec, make_env, read_action, write_action
from freshper.envs.cliffwalking import ACTIONS, all_levels, moved
from freshper.envs.core import level_split
from freshper.errors import ConfigError, EnvError, UnknownNameError

CLASSIC = "____________\n____________\n____________\nACCCCCCCCCCG"
BOARD = CLASSIC.replace("A", "S")


def started(level: str = CLASSIC, seed: int = 0, **options: object) -> CliffWalkingEnv:
    env = make_env("cliffwalking", **options)
    assert env.start(level, seed) == level
    return env


def play(env: CliffWalkingEnv, *actions: str):
    return [env.step(write_action(action)) for action in actions]


class TestRules:
    def test_every_move_on_the_classic_board_is_gymnasiums(self):
        table = Gymnasium().P
        compared = 0
        for state, moves in table.items():
            row, column = divmod(state, 12)
            if BOARD[row * 13 + column] not in "_S":
                continue  # nobody stands there
            for action, [(probability, after, reward, ended)] in moves.items():
                cell, own_reward = moved(BOARD, row * 13 + column, action)
                there, across = divmod(int(after), 12)
                assert (cell, own_reward) == (there * 13 + across, reward)
                assert (BOARD[cell] == "G") == ended
                assert probability == 1
                compared += 1
        assert compared == 37 * 4

    def test_slipping_goes_where_gymnasiums_does(self):
        """A third each for the move and its neighbors, from the start and from beside the cliff."""
        table = Gymnasium(is_slippery=True).P
        for level, state in ((CLASSIC, 36), ("_" * 12 + "\n" + "_" * 12 + "\n__P_________\nSCCCCCCCCCCG", 26)):
            for action, name in enumerate(ACTIONS):
                expected: dict[int, float] = {}
                for probability, after, _, _ in table[state][action]:
                    expected[int(after)] = expected.get(int(after), 0) + probability
                seen = []
                for seed in range(400):
                    text = play(started(level, seed, slippery=True), name)[0].observation.replace("\n", "")
                    seen.append(next(cell for cell, symbol in enumerate(text) if symbol in "PAQ"))
                shares = {cell: seen.count(cell) / 400 for cell in seen}
                assert shares == pytest.approx(expected, abs=0.1)  # 4 standard errors

    def test_along_the_edge_to_the_goal(self):
        outcomes = play(started(), "Up", *["Right"] * 11, "Down")
        assert outcomes[0].observation == "____________\n____________\nP___________\nSCCCCCCCCCCG"
        assert outcomes[-1].observation == "____________\n____________\n____________\nSCCCCCCCCCCQ"
        assert [outcome.reward for outcome in outcomes] == [-1] * 13
        assert (
            [outcome.done for outcome in outcomes] == [outcome.success for outcome in outcomes] == [False] * 12 + [True]
        )

    def test_a_fall_costs_a_hundred_and_leads_back(self):
        env = started("____________\n____________\n_____P______\nSCCCCCCCCCCG")
        [outcome] = play(env, "Down")
        assert outcome.observation == CLASSIC
        assert (outcome.reward, outcome.done, outcome.success, outcome.valid) == (-100, False, False, True)

    def test_at_the_edge_a_move_goes_nowhere_and_costs_one(self):
        outcomes = play(started(), "Left", "Down")
        assert {outcome.observation for outcome in outcomes} == {CLASSIC}
        assert [outcome.reward for outcome in outcomes] == [-1, -1]

    @pytest.mark.parametrize("reply", ["", "Up", "<answer> Jump </answer>"])
    def test_an_unreadable_reply_costs_more_than_a_move_and_a_turn(self, reply):
        env = started()
        for turn in range(20):
            outcome = env.step(reply)
            assert outcome.reward == -1.15
            assert (outcome.done, outcome.success, outcome.valid) == (turn == 19, False, False)
        with pytest.raises(EnvError, match=r"cliffwalking: step\(\) while no episode is running"):
            env.step(write_action("Up"))

    def test_walking_to_the_goal_is_worth_more_than_anything_else(self):
        """From any start: more than standing at the edge, and more than babbling, until the end."""
        env = make_env("cliffwalking")
        for seed in range(50):
            env.reset(seed)
            assert len(env.solution()) < 0.75 * env.max_turns

    @pytest.mark.parametrize("call", ["solution", "demonstrate"])
    def test_teaching_needs_a_running_episode(self, call):
        env = make_env("cliffwalking")
        with pytest.raises(EnvError, match=rf"{call}\(\) while no episode is running"):
            env.solution() if call == "solution" else env.demonstrate(np.random.default_rng(0))

    @pytest.mark.parametrize(
        "level",
        [
            "",
            "P",
            "PCG",
            "P__\nSCG\n___",  # the cliff in the middle
            "___\nSCG",  # nobody there
            "P__\nACG",  # twice there
            "___\nPCG",  # at the start, but not drawn so
            "A__\nSCG",
            "P_\nSCG",
            "P__\nSGG",
            "P__\nCCG",
            "P__\nSC?",
        ],
    )
    def test_a_level_that_is_none_is_refused(self, level):
        with pytest.raises(EnvError, match="a level is two or more rows of ground"):
            make_env("cliffwalking").start(level)

    def test_instructions_say_what_counts(self):
        text = make_env("cliffwalking").instructions
        for fact in ("A you at the start", "-1 a move", "-100 a fall", "-1.15", "20 turns", "<answer> Up"):
            assert fact in text
        assert "slippery" not in text
        assert "slippery" in make_env("cliffwalking", slippery=True).instructions


class TestLevels:
    def test_every_safe_cell_of_four_mirrored_boards(self):
        levels = all_levels(CliffWalkingSpec())
        assert len(set(levels)) == len(levels) == 4 * 37
        assert CLASSIC in levels
        for flipped in (CLASSIC[::-1], "\n".join(CLASSIC.split("\n")[::-1])):
            assert flipped in levels

    def test_the_classic_board_alone_has_no_level_held_out(self):
        options = {"random_start": False, "mirrored": False}
        env = make_env("cliffwalking", **options)
        assert [env.reset(seed) for seed in range(5)] == [CLASSIC] * 5
        with pytest.raises(ConfigError, match="none of its 1 levels is in the eval split"):
            make_env("cliffwalking", "eval", **options)

    def test_the_classic_boards_leave_one_held_out(self):
        seen = {
            split: {make_env("cliffwalking", split, random_start=False).reset(seed) for seed in range(30)}
            for split in ("train", "eval")
        }
        assert {split: len(levels) for split, levels in seen.items()} == {"train": 3, "eval": 1}
        assert CLASSIC in seen["train"]

    @pytest.mark.parametrize("task", ["cliffwalking", "cliffwalking-8x8"])
    def test_t8_training_and_evaluation_levels_are_disjoint(self, task):
        seen = {}
        for split in ("train", "eval"):
            env = make_env(task, split)
            seen[split] = {env.reset(seed) for seed in range(400)}
            assert {level_split(level) for level in seen[split]} == {split}
            assert set(seen[split]) <= set(all_levels(env.spec))
        assert not seen["train"] & seen["eval"]
        assert len(seen["train"]) > 100
        assert len(seen["eval"]) > 20

    def test_every_level_is_solved_in_time_by_its_solution(self):
        for task in ("cliffwalking", "cliffwalking-8x8"):
            env = make_env(task)
            longest = 0
            for level in all_levels(env.spec):
                env.start(level)
                actions = env.solution()
                longest = max(longest, len(actions))
                outcomes = play(env, *actions)
                assert outcomes[-1].success
                assert all(outcome.reward == -1 for outcome in outcomes)
            assert longest == max(env.spec.width + 1, env.spec.height + env.spec.width - 2)

    def test_solution_is_as_short_as_can_be(self):
        """Every step of a shortest way is one nearer, and no step from anywhere is two nearer."""
        env = started()
        distances = {}
        for level in all_levels(CliffWalkingSpec(mirrored=False)):
            env.start(level)
            distances[level] = len(env.solution())
        assert distances[CLASSIC] == 13
        for level, distance in distances.items():
            env.start(level)
            seen = [distances.get(outcome.observation, 0) for outcome in play(env, *env.solution())]
            assert [before - after for before, after in pairwise([distance, *seen])] == [1] * distance
            for action in ACTIONS:
                env.start(level)
                assert distances.get(play(env, action)[0].observation, 0) >= distance - 1

    def test_t8_the_seed_decides_the_level(self):
        one, other = make_env("cliffwalking"), make_env("cliffwalking")
        forward = [one.reset(seed) for seed in range(20)]
        assert [other.reset(np.int64(seed)) for seed in reversed(range(20))] == forward[::-1]


class TestDemonstrator:
    def replies(self, level: str, draws: int = 2000) -> dict[str, float]:
        env, rng = started(level), np.random.default_rng(0)
        seen = [read_action(env.demonstrate(rng), ACTIONS) for _ in range(draws)]
        return {action: seen.count(action) / draws for action in ACTIONS}

    def test_knows_the_last_five_moves_but_for_three_in_ten(self):
        shares = self.replies("____________\n____________\n_______P____\nSCCCCCCCCCCG")
        assert shares == pytest.approx(dict.fromkeys(ACTIONS, 0.075) | {"Right": 0.775}, abs=0.04)  # 4 standard errors

    def test_walks_at_random_when_far_off(self):
        shares = self.replies("____________\n____________\n______P_____\nSCCCCCCCCCCG")
        assert shares == pytest.approx(dict.fromkeys(ACTIONS, 0.25), abs=0.04)

    @pytest.mark.parametrize("task", ["cliffwalking", "cliffwalking-8x8"])
    def test_is_weak(self, task):
        env, rng = make_env(task), np.random.default_rng(0)
        solved = 0
        for seed in range(300):
            env.reset(seed)
            done = False
            while not done:
                outcome = env.step(env.demonstrate(rng))
                done = outcome.done
            solved += outcome.success
        assert 0.25 < solved / 300 < 0.5


class TestSpec:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"height": 1}, "height 1 must be >= 2"),
            ({"width": 2}, "width 2 >= 3"),
            ({"max_turns": 13}, "max_turns 13 must be >= 14"),
            ({"max_turns": 12, "random_start": False}, "max_turns 12 must be >= 13"),
        ],
    )
    def test_contradictions_are_refused(self, options, message):
        with pytest.raises(ConfigError, match=message):
            make_env("cliffwalking", **options)

    def test_t22_unknown_option_offers_the_nearest(self):
        with pytest.raises(UnknownNameError, match=r"unknown option 'slipery'.*Did you mean 'slippery'"):
            make_env("cliffwalking", slipery=True)

    def test_options_change_a_preset(self):
        env = make_env("cliffwalking", height=3, width=5, max_turns=9)
        assert [len(row) for row in env.reset(0).split("\n")] == [5] * 3
        assert env.max_turns == 9
