"""Questions with one right answer: what is read from a reply, what it earns, where the questions come from."""

import json
import os
import random
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from freshper.envs import Teachable, check_env, make_env, write_action
from freshper.envs.core import level_split
from freshper.envs.maths import check
from freshper.envs.maths.answers import LONGEST, read_answer, read_boxed
from freshper.envs.maths.check import Verdict
from freshper.envs.maths.generated import DATASETS
from freshper.errors import ConfigError, EnvError, MissingExtraError, UnknownNameError


class TestReadAnswer:
    @pytest.mark.parametrize(
        ("reply", "answer"),
        [
            ("3 times 6 is 18. <answer> 18 </answer>", "18"),
            ("<answer>18</answer> I am sure: <answer> 18 </answer>", "18"),
            ("I shall write <answer> at the end. <answer>18</answer>", "18"),
            ("The tags are <answer></answer>. <answer>18</answer>", "18"),
            ("so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
            ("first \\boxed{17}, no, \\boxed{18}", "18"),
            ("\\boxed{17} <answer>18</answer>", "18"),
            ("<answer>\\boxed{18}</answer>", "18"),
            ("<answer>line\nend</answer>", "line\nend"),
            (f"<answer>{'1' * LONGEST}</answer>", "1" * LONGEST),
        ],
    )
    def test_readable(self, reply, answer):
        assert read_answer(reply) == answer

    @pytest.mark.parametrize(
        "reply",
        [
            "",
            "18",
            "<answer>18",
            "18</answer>",
            "<answer> </answer>",
            "<answer>17</answer><answer>18</answer>",
            "<answer><answer>18</answer></answer>",
            "\\boxed{18",
            "\\boxed{}",
            "<answer>\\boxed{ }</answer>",
            "\\boxed{" + "{" * 100_000 + "}" * 100_001,
            "\\boxed{" * 100_000,
            f"<answer>{'1' * (LONGEST + 1)}</answer>",
            "<answer>" * 100_000,
            "</answer>" * 100_000,
        ],
    )
    def test_unreadable(self, reply):
        assert read_answer(reply) is None

    def test_a_box_is_closed_by_its_own_brace(self):
        assert read_boxed("\\boxed{a{b}c}d}") == "a{b}c"
        assert read_boxed("no box") is None


def questions(tmp_path: Path, **options: object) -> partial:
    """A task of forty sums in a file."""
    path = tmp_path / "sums.jsonl"
    rows = [{"question": f"What is {n} + 1?", "answer": f"I count on.\n#### {n + 1:,}"} for n in range(990, 1030)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return partial(make_env, "gsm8k", data=str(path), **options)


class TestRules:
    def test_a_right_answer(self, tmp_path):
        env = questions(tmp_path)()
        question = env.reset(0)
        right = int(question.split()[2]) + 1
        outcome = env.step(f"Counting on. <answer> {right} </answer>")
        assert (outcome.reward, outcome.done, outcome.success, outcome.valid) == (1.0, True, True, True)
        assert (outcome.observation, outcome.measures) == ("Right.", {"undecided": 0.0})
        with pytest.raises(EnvError, match=r"gsm8k: step\(\) while no episode is running"):
            env.step("")
        with pytest.raises(EnvError, match=r"gsm8k: solution\(\) while no episode is running"):
            env.solution()

    def test_a_wrong_answer(self, tmp_path):
        env = questions(tmp_path)()
        env.reset(0)
        (right,) = env.solution()
        outcome = env.step(write_action("7"))
        assert (outcome.reward, outcome.done, outcome.success, outcome.valid) == (0.0, True, False, True)
        assert outcome.observation == f"Not right. The answer is {right} ."

    def test_a_reply_without_an_answer_costs_its_price(self, tmp_path):
        env = questions(tmp_path)()
        env.reset(0)
        outcome = env.step("Let me think.")
        assert (outcome.reward, outcome.done, outcome.success, outcome.valid) == (-0.15, True, False, False)
        assert outcome.observation.startswith("No answer can be read: give one like this: <answer> 42 </answer>.")

    def test_three_attempts_with_feedback(self, tmp_path):
        env = questions(tmp_path, attempts=3)()
        env.reset(0)
        (right,) = env.solution()
        outcomes = [env.step(reply) for reply in (write_action("7"), "?", write_action(right))]
        assert [outcome.reward for outcome in outcomes] == [0.0, -0.15, 1.0]
        assert [outcome.done for outcome in outcomes] == [False, False, True]
        assert outcomes[0].observation == "Not right. Attempts left: 2 ."
        assert outcomes[1].observation.endswith("</answer>. Attempts left: 1 .")
        assert outcomes[2].success
        assert right not in outcomes[0].observation + outcomes[1].observation
        assert "3 attempts" in env.instructions
        assert "attempts" not in questions(tmp_path)().instructions

    def test_the_attempts_end(self, tmp_path):
        env = questions(tmp_path, attempts=2)()
        env.reset(0)
        assert [env.step(write_action("7")).done for _ in range(2)] == [False, True]

    def test_an_undecided_answer_is_wrong_and_counted(self, tmp_path, monkeypatch):
        monkeypatch.setattr(check._Workers, "check", lambda *_: Verdict.UNDECIDED)
        env = questions(tmp_path, attempts=3)()
        for _ in range(2):  # the count is the episode's
            env.reset(0)
            outcomes = [env.step(write_action(answer)) for answer in ("x = 9", "0 m", "7")]
            assert not outcomes[-1].success
            assert [outcome.measures for outcome in outcomes] == [{}, {}, {"undecided": 2.0}]
            assert outcomes[0].valid


class TestQuestions:
    @pytest.mark.parametrize("split", ["train", "eval"])
    def test_contract(self, tmp_path, split):
        check_env(partial(questions(tmp_path, attempts=3), split=split), [write_action("1000"), "no answer"])

    def test_the_answer_stands_behind_the_mark(self, tmp_path):
        env = questions(tmp_path)()
        env.reset(3)
        assert env.solution()[0].replace(",", "").isdigit()

    def test_without_the_mark_a_row_is_of_no_use(self, tmp_path):
        (tmp_path / "q.jsonl").write_text('{"question": "Why?", "answer": "5"}\n{"question": "Who?", "answer": "####"}')
        with pytest.raises(
            ConfigError, match=r"'answer' has no #### .*; 1 cannot be: 'answer' has nothing behind ####"
        ):
            make_env("gsm8k", data=str(tmp_path / "q.jsonl"))
        (tmp_path / "q.jsonl").write_text('{"question": "Why?", "answer": 5}\n{"question": "Who?", "answer": 6}\n' * 9)
        env = make_env("gsm8k", "train", data=str(tmp_path / "q.jsonl"), answer_mark="")
        env.reset(0)
        assert env.solution()[0] in ("5", "6")

    def test_the_seed_decides_and_splits_share_nothing(self, tmp_path):
        make = questions(tmp_path)
        train, evaluation = ({make(split=split).reset(seed) for seed in range(300)} for split in ("train", "eval"))
        assert not train & evaluation
        assert len(train | evaluation) == 40
        assert [make().reset(seed) for seed in range(5)] == [make().reset(np.int64(seed)) for seed in range(5)]
        with pytest.raises(ConfigError, match="seed -1 must be >= 0"):
            make().reset(-1)

    def test_two_sources(self, tmp_path):
        (tmp_path / "own.jsonl").write_text('{"question": "What is 5 + 1?", "answer": "#### 6"}\n')
        make = questions(tmp_path, eval_data=str(tmp_path / "own.jsonl"))
        assert {make(split="eval").reset(seed) for seed in range(9)} == {"What is 5 + 1?"}
        assert len({make().reset(seed) for seed in range(300)}) == 40
        (tmp_path / "own.jsonl").write_text('{"question": "What is 999 + 1?", "answer": "#### 1000"}\n')
        with pytest.raises(ConfigError, match=r"1 of 1 questions of .*own\.jsonl also stand in"):
            make()

    def test_a_folder_with_splits(self, tmp_path):
        for name, number in (("train", 3), ("test", 4)):
            (tmp_path / f"{name}.jsonl").write_text(f'{{"question": "Say {number}.", "answer": "#### {number}"}}\n')
        assert make_env("gsm8k", "eval", data=str(tmp_path), subset="").reset(0) == "Say 4."
        assert make_env("gsm8k", "train", data=str(tmp_path), subset="").reset(0) == "Say 3."

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, r"data is empty: name a file, a folder or a hub data set \(env.options.data\)"),
            ({"data": "x.jsonl"}, "x.jsonl: no such file or folder"),
            ({"attempts": 0}, "attempts 0 must be at least 1"),
            ({"check_seconds": 0}, "check_seconds 0 must be above 0 and at most 60"),
            ({"limit": -1}, "limit -1 must be at least 0"),
            ({"dta": "x"}, "unknown option 'dta'.*Did you mean 'data'"),
        ],
    )
    def test_bad_options_are_refused(self, options, message):
        with pytest.raises(ConfigError, match=message):
            make_env("questions", **options)


class TestGenerated:
    @pytest.mark.parametrize("dataset", DATASETS)
    def test_every_set_accepts_its_own_answers(self, dataset, monkeypatch):
        """And needs no process for it: one number is the answer."""
        monkeypatch.setattr(check._Workers, "check", lambda *_: pytest.fail("math-verify was asked"))
        env = make_env("maths", dataset=dataset)
        for seed in range(20):
            question = env.reset(seed)
            assert level_split(question) == "train"
            assert env.step(write_action(env.solution()[0])).success, question

    def test_the_seed_decides_and_splits_share_nothing(self):
        train, evaluation = (
            [make_env("maths", split).reset(seed) for seed in range(60)] for split in ("train", "eval")
        )
        assert train == [make_env("maths").reset(np.int64(seed)) for seed in range(60)]
        assert not set(train) & set(evaluation)
        assert len(set(train)) > 50

    def test_parameters_make_it_harder(self):
        lengths = []
        for terms in (2, 6):
            parameters = {"min_terms": terms, "max_terms": terms}
            question = make_env("maths", dataset="chain_sum", parameters=parameters).reset(0)
            lengths.append(question.count("+") + question.count(" - ") + 1)
        assert lengths == [2, 6]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dataset": "gsm_symbol"}, "unknown dataset 'gsm_symbol'. Did you mean 'gsm_symbolic'"),
            ({"dataset": "sudoku"}, "unknown dataset 'sudoku'"),
            ({"parameters": {"hardness": 3}}, "parameters {'hardness': 3} do not suit gsm_symbolic"),
            ({"dataset": "chain_sum", "parameters": {"min_terms": -1}}, "do not suit chain_sum: min_terms"),
            ({"attempts": 0}, "attempts 0 must be at least 1"),
        ],
    )
    def test_bad_options_are_refused(self, options, message):
        with pytest.raises(ConfigError, match=message):
            make_env("maths", **options)

    def test_without_reasoning_gym_the_extra_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "reasoning_gym", None)
        before = random.getstate()
        with pytest.raises(MissingExtraError, match=r"reasoning-gym is needed here: pip install 'freshper\[maths\]'"):
            make_env("maths")
        assert random.getstate() == before


class TestArithmetic:
    @pytest.mark.parametrize("split", ["train", "eval"])
    def test_sums_digit_by_digit(self, split):
        env = make_env("arithmetic", split)
        for seed in range(100):
            question = env.reset(seed)
            assert level_split(question) == split
            words = question.split()
            assert [len(word) for word in words] == [1] * 6
            first, second = int(words[0] + words[1]), int(words[3] + words[4])
            assert env.solution() == [" ".join(str(first + second))]
            assert env.step(f"<answer>{first + second}</answer>").success

    @pytest.mark.parametrize("answer", ["0 8 5", "8 6", "8 5 .", "4 8 + 3 7", "85.0"])
    def test_anything_else_is_wrong(self, answer):
        env = make_env("arithmetic")
        seed = next(seed for seed in range(10_000) if env.reset(seed) and env.solution() == ["8 5"])
        env.reset(seed)
        outcome = env.step(write_action(answer))
        assert (outcome.reward, outcome.success, outcome.valid, outcome.measures) == (0.0, False, True, {})

    def test_the_demonstrator_adds_digits_and_guesses_carries(self):
        env, rng = make_env("arithmetic"), np.random.default_rng(0)
        seed = next(seed for seed in range(10_000) if env.reset(seed) == "3 7 + 4 8 =")
        env.reset(seed)
        replies = [env.demonstrate(rng) for _ in range(400)]
        shares = {reply: replies.count(reply) / 400 for reply in replies}
        assert shares == pytest.approx(
            {write_action(sum_): 0.25 for sum_ in ("7 5", "8 5", "1 7 5", "1 8 5")}, abs=0.09
        )  # 4 standard errors

    @pytest.mark.parametrize(("task", "low", "high"), [("arithmetic", 0.2, 0.3), ("aime-small", 0.5, 0.65)])
    def test_the_demonstrator_is_weak(self, task, low, high):
        env, rng = make_env(task), np.random.default_rng(0)
        assert isinstance(env, Teachable)
        solved = 0
        for seed in range(500):
            env.reset(seed)
            done = False
            while not done:
                outcome = env.step(env.demonstrate(rng))
                done = outcome.done
            solved += outcome.success
        assert low < solved / 500 < high  # 1 - 0.75^attempts

    def test_more_digits(self):
        env = make_env("arithmetic", digits=18)
        assert len(env.reset(0).split()) == 38
        assert env.step(write_action(env.solution()[0])).success

    @pytest.mark.parametrize("digits", [0, 19])
    def test_bad_options_are_refused(self, digits):
        with pytest.raises(ConfigError, match=f"digits {digits} must be in 1 to 18"):
            make_env("arithmetic", digits=digits)

    def test_unknown_option(self):
        with pytest.raises(UnknownNameError, match="Did you mean 'digits'"):
            make_env("arithmetic", digit=3)


@pytest.mark.skipif("FRESHPER_TEST_DATA" not in os.environ, reason="FRESHPER_TEST_DATA names no folder of real data")
class TestRealData:
    @pytest.mark.parametrize(
        ("task", "name", "options"),
        [
            ("gsm8k", "gsm8k_test_sample.jsonl", {}),
            ("aime", "aime24.jsonl", {"question": "problem", "answer": "answer"}),
        ],
    )
    def test_every_question_accepts_its_answer(self, task, name, options):
        path = Path(os.environ["FRESHPER_TEST_DATA"]) / name
        make = partial(make_env, task, data=str(path), **options)
        check_env(make, [write_action("7")])
        for split in ("train", "eval"):
            env = make(split)
            for seed in range(100):
                env.reset(seed)
                assert env.step(f"I reckon \\boxed{{{env.solution()[0]}}}").success
