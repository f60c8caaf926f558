"""The rules of an episode, over a real index of four passages."""

from functools import partial

import pytest

from freshper.envs import check_env, write_action
from freshper.envs.search.calls import write_search
from freshper.envs.search.env import Asked, SearchEnv, SearchRules
from freshper.envs.search.index import Bm25Index
from freshper.errors import ConfigError, EnvError

INDEX = Bm25Index.build(
    ["Paris\nParis is the capital of France.", "Berlin\nthe capital of Germany", "Lyon lies in France", "a red fox"]
)
ASKED = [Asked(f"what is the capital of country {number} ?", ("Paris", "city of Paris")) for number in range(30)]


def make(retriever=INDEX, **rules):
    return SearchEnv("test-search", "train", [ASKED], retriever, SearchRules(**rules))


def started(**rules):
    env = make(**rules)
    env.start(ASKED[0])
    return env


def test_keeps_the_contract():
    check_env(make)
    check_env(partial(make, max_searches=1), [write_search("France"), write_action("Paris"), "neither"])


def test_search_and_answer():
    env = started(topk=2)
    found = env.step(write_search("France"))
    assert found.observation == (
        "<information>\n1. Lyon lies in France\n2. Paris Paris is the capital of France.\n</information>"
    )
    assert (found.reward, found.done, found.success, found.valid) == (0.0, False, False, True)
    end = env.step("I see. " + write_action("The city of Paris!"))
    assert (end.reward, end.done, end.success, end.valid) == (1.0, True, True, True)
    assert end.measures == {"exact_match": 1.0, "f1": 1.0, "substring": 1.0, "searches": 1.0}
    assert end.observation == "Right: The city of Paris!. Accepted: Paris; city of Paris"
    with pytest.raises(EnvError, match=r"test-search: step\(\) while no episode is running"):
        env.step(write_action("Paris"))


def test_t15_a_list_of_guesses_is_wrong_and_its_measures_say_how_near_it_was():
    end = started().step(write_action("london, paris"))
    assert (end.reward, end.done, end.success, end.valid) == (0.0, True, False, True)
    assert end.measures == {"exact_match": 0.0, "f1": pytest.approx(2 / 3), "substring": 1.0, "searches": 0.0}


def test_nothing_found_is_an_empty_block():
    assert started().step(write_search("zebra")).observation == "<information>\n</information>"


@pytest.mark.parametrize("reply", ["", "Paris", write_search("x") + write_action("Paris"), "<search> France"])
def test_an_unreadable_reply_costs_its_price_and_a_turn(reply):
    env = started(max_searches=2)
    for turn in range(3):
        outcome = env.step(reply)
        assert (outcome.reward, outcome.done, outcome.success, outcome.valid) == (-0.15, turn == 2, False, False)
        assert outcome.observation == (
            ASKED[0].question if turn < 2 else "Not answered. Accepted: Paris; city of Paris"
        )
    assert outcome.measures == {"exact_match": 0.0, "f1": 0.0, "substring": 0.0, "searches": 0.0}


def test_at_most_so_many_searches():
    asked = []

    class Counting:
        def retrieve(self, query, topk):
            asked.append((query, topk))
            return INDEX.retrieve(query, topk)

    env = make(Counting(), max_searches=5)
    assert env.max_turns == 6
    env.start(ASKED[0])
    outcomes = [env.step(write_search(f"France {number}")) for number in range(6)]
    assert asked == [(f"France {number}", 3) for number in range(5)]  # nobody would read what the sixth finds
    assert [outcome.done for outcome in outcomes] == [False] * 5 + [True]
    assert all(outcome.valid and outcome.reward == 0 for outcome in outcomes)
    assert outcomes[-1].measures["searches"] == 5


def test_an_answer_after_the_last_search_counts():
    env = started(max_searches=1)
    env.step(write_search("France"))
    assert env.step(write_action("Paris")).success


def test_a_new_episode_forgets_the_old_one():
    env = started(max_searches=1)
    env.step(write_search("France"))
    env.start(ASKED[1])
    env.step(write_search("France"))
    assert env.step(write_action("Paris")).measures["searches"] == 1


def test_a_failing_retriever_is_an_env_error():
    class Broken:
        def retrieve(self, query, topk):
            raise EnvError("http://x/retrieve gave no answer")

    env = make(Broken())
    env.reset(0)
    with pytest.raises(EnvError, match="gave no answer"):
        env.step(write_search("France"))


def test_the_seed_decides_the_question_and_every_kind_is_as_likely():
    kinds = [ASKED, [Asked("the only one of its kind", ("x",))]]
    env = SearchEnv("test", "train", kinds, INDEX, SearchRules())
    questions = [env.reset(seed) for seed in range(300)]
    assert questions == [env.reset(seed) for seed in range(300)]
    assert 100 < questions.count("the only one of its kind") < 200  # 150 on average, 5.8 standard errors
    assert len(set(questions)) > 25
    with pytest.raises(ConfigError, match="seed -1 must be >= 0"):
        env.reset(-1)


def test_instructions_name_the_limits():
    text = make(max_searches=4, topk=7).instructions
    assert "up to 7 passages" in text
    assert "4 times at most" in text
    assert "-0.15" in text


@pytest.mark.parametrize("rule", ["max_searches", "topk", "passage_words"])
def test_rules_that_find_nothing_are_refused(rule):
    with pytest.raises(ConfigError, match=f"{rule} 0 must be at least 1"):
        SearchRules(**{rule: 0})
