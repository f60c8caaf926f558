"""The invented world, its questions, and the demonstrator that knows how to search but seldom does it well."""

from collections import Counter
from functools import partial

import numpy as np
import pytest

from freshper.envs import Teachable, check_env, level_split, make_env, write_action
from freshper.envs.search.calls import read_call, write_search
from freshper.envs.search.env import Asked
from freshper.envs.search.small import ASKS_RIGHT, READS_RIGHT, SEARCHES_FIRST, SEARCHES_ON
from freshper.envs.search.world import MAX_PEOPLE, MAX_TOWNS, RELATIONS, check_size, make_world
from freshper.errors import ConfigError, EnvError, UnknownNameError

WORLD = make_world(300, 60, 0)
NO_EVAL = 9  # seed of a smallest world whose questions of one hop all fall to the training split
QUESTIONS = {question.text: question for question in (*WORLD.one_hop, *WORLD.two_hops)}


def passages(outcome):
    """The sentences of an information block, without their numbers."""
    return [line.split(" ", 1)[1] for line in outcome.observation.split("\n")[1:-1]]


class TestWorld:
    def test_what_is_known_about_everybody(self):
        known = Counter(relation for relation, _ in WORLD.facts)
        assert known == {"home": 300, "job": 300, "friend": 300, "river": 60, "mayor": 60}
        assert len(WORLD.corpus) == len(set(WORLD.corpus)) == 1020
        assert set(WORLD.corpus) == {f"the {r} of {e} is {value}" for (r, e), value in WORLD.facts.items()}
        assert all(value != entity for (_, entity), value in WORLD.facts.items())

    def test_thousands_of_questions_with_the_answers_that_the_facts_give(self):
        assert (len(WORLD.one_hop), len(WORLD.two_hops), len(QUESTIONS)) == (1020, 1680, 2700)
        for question in QUESTIONS.values():
            value = question.entity
            for relation in question.relations:
                value = WORLD.facts[relation, value]
            assert question.answer == value
            assert question.text.split()[0] == ("who" if question.relations[-1] in ("friend", "mayor") else "what")
        hops = {len(question.relations) for question in WORLD.two_hops}
        assert hops == {2}

    def test_a_question_reads_from_the_outside_in(self):
        text = f"what is the river of the home of {WORLD.one_hop[0].entity} ?"
        assert QUESTIONS[text].relations == ("home", "river")

    def test_words_are_single_and_few(self):
        words = {word for text in (*WORLD.corpus, *QUESTIONS) for word in text.split()}
        assert len(words) < 450
        assert all(word.isalpha() or word == "?" for word in words)

    def test_the_seed_decides_it(self):
        make_world.cache_clear()
        assert make_world(300, 60, 0) == WORLD
        assert make_world(300, 60, 1).facts.keys() != WORLD.facts.keys()

    def test_the_largest_and_the_smallest(self):
        assert len(make_world(MAX_PEOPLE, MAX_TOWNS, 3).corpus) == 3 * MAX_PEOPLE + 2 * MAX_TOWNS
        assert len(make_world(2, 2, 3).corpus) == 10

    @pytest.mark.parametrize(
        ("size", "message"),
        [
            ((1, 60, 0), r"people 1 must be in \[2, 640\]"),
            ((641, 60, 0), r"people 641 must be in \[2, 640\]"),
            ((300, 449, 0), r"towns 449 must be in \[2, 448\]"),
            ((300, 60, -1), "world_seed -1 must be >= 0"),
        ],
    )
    def test_a_world_without_names_is_refused(self, size, message):
        with pytest.raises(ConfigError, match=message):
            check_size(*size)
        with pytest.raises(ConfigError, match=message):
            make_env("search", people=size[0], towns=size[1], world_seed=size[2])


class TestEnv:
    @pytest.mark.parametrize("hops", ["one", "two"])
    def test_keeps_the_contract(self, hops):
        check_env(partial(make_env, "search", hops=hops, people=20, towns=10))
        assert isinstance(make_env("search"), Teachable)

    def test_t8_splits_are_disjoint_and_follow_the_question(self):
        seen = {}
        for split in ("train", "eval"):
            env = make_env("search", split)
            seen[split] = {env.reset(seed) for seed in range(500)}
            assert {level_split(question) for question in seen[split]} == {split}
        assert len(seen["train"]) > 350

    @pytest.mark.parametrize(("hops", "share"), [("one", 1.0), ("two", 0.0), ("both", 0.5)])
    def test_hops(self, hops, share):
        env = make_env("search", hops=hops)
        one = [len(QUESTIONS[env.reset(seed)].relations) == 1 for seed in range(400)]
        assert np.mean(one) == pytest.approx(share, abs=0.1)  # 4 standard errors

    def test_every_question_can_be_answered_by_searching(self):
        """Also those of two hops: the right query always brings up its fact, but where it is is not said."""
        env = make_env("search", "eval")
        places = Counter()
        for seed in range(300):
            question = QUESTIONS[env.reset(seed)]
            value = question.entity
            for relation in question.relations:
                found = passages(env.step(write_search(f"{relation} {value}")))
                (place,) = [n for n, text in enumerate(found) if text.startswith(f"the {relation} of {value} is ")]
                places[relation == "friend", place] += 1
                value = found[place].split()[-1]
            outcome = env.step(write_action(value))
            assert outcome.success
            assert outcome.reward == 1
            assert outcome.measures["searches"] == len(question.relations)
        assert places[False, 1] == 0
        assert min(places[True, 0], places[True, 1]) > 20  # who is whose friend has to be read

    def test_the_solution_is_the_answer(self):
        env = make_env("search")
        question = QUESTIONS[env.reset(5)]
        assert env.solution() == [question.answer]
        with pytest.raises(EnvError, match="no question about this world"):
            env.start(Asked("who is it ?", ("nobody",)))

    def test_contradictions_are_refused(self):
        with pytest.raises(UnknownNameError, match=r"unknown hops 'tow'\. Did you mean 'two'"):
            make_env("search", hops="tow")
        with pytest.raises(ConfigError, match="max_searches 0 must be at least 1"):
            make_env("search", max_searches=0)
        with pytest.raises(ConfigError, match="a world of 2 people has no question in the eval split"):
            make_env("search", "eval", people=2, towns=2, hops="one", world_seed=NO_EVAL)
        with pytest.raises(UnknownNameError, match="unknown option 'tokp'"):
            make_env("search", tokp=1)


class TestDemonstrator:
    def replies(self, env, draws=2000):
        rng = np.random.default_rng(0)
        return Counter(env.demonstrate(rng) for _ in range(draws))

    def started(self, question):
        env = make_env("search")
        env.start(Asked(question.text, (question.answer,)))
        return env

    def test_at_first(self):
        question = WORLD.two_hops[0]
        replies = self.replies(self.started(question))
        assert replies[write_action(question.entity)] / 2000 == pytest.approx(1 - SEARCHES_FIRST, abs=0.045)
        wrong = SEARCHES_FIRST * (1 - ASKS_RIGHT) / len(RELATIONS)
        for relation in RELATIONS:
            right = SEARCHES_FIRST * ASKS_RIGHT if relation == question.relations[0] else 0.0
            share = replies[write_search(f"{relation} {question.entity}")] / 2000
            assert share == pytest.approx(right + wrong, abs=0.045)  # 4 standard errors

    @pytest.mark.parametrize("hops", [1, 2])
    @pytest.mark.parametrize("relation", ["home", "friend"])
    def test_after_a_search(self, hops, relation):
        asked = (WORLD.one_hop, WORLD.two_hops)[hops - 1]
        question = next(one for one in asked if one.relations[0] == relation)
        env = self.started(question)
        found = passages(env.step(write_search(f"{relation} {question.entity}")))
        right = WORLD.facts[relation, question.entity]
        (other,) = {text.split()[-1] for text in found} - {right}
        replies = self.replies(env)
        calls = Counter(read_call(reply).kind for reply in replies.elements())
        assert calls["search"] / 2000 == pytest.approx(SEARCHES_ON if hops == 2 else 0, abs=0.045)
        answers = {reply: count for reply, count in replies.items() if read_call(reply).kind == "answer"}
        assert answers.keys() == {write_action(right), write_action(other)}
        assert answers[write_action(right)] / calls["answer"] == pytest.approx(READS_RIGHT, abs=0.06)
        searched = {read_call(reply).text.split()[1] for reply in replies if read_call(reply).kind == "search"}
        assert searched == ({right, other} if hops == 2 else set())

    def test_reads_anything_after_a_search_for_something_else(self):
        env = self.started(WORLD.one_hop[0])
        shown = passages(env.step(write_search("zebra home")))
        assert len(shown) == 2
        assert self.replies(env).keys() == {write_action(text.split()[-1]) for text in shown}

    def test_answers_where_no_search_would_be_run(self):
        env = make_env("search", max_searches=1, hops="two")
        question = QUESTIONS[env.reset(0)]
        env.step(write_search(f"home {question.entity}"))
        assert {read_call(reply).kind for reply in self.replies(env, 200)} == {"answer"}

    def test_tries_again_where_nothing_was_found(self):
        env = make_env("search")
        question = QUESTIONS[env.reset(0)]
        env.step(write_search("zebra"))
        assert {read_call(reply).text.split()[1] for reply in self.replies(env, 200)} == {question.entity}

    def test_needs_a_running_episode(self):
        with pytest.raises(EnvError, match=r"demonstrate\(\) while no episode is running"):
            make_env("search").demonstrate(np.random.default_rng(0))

    def test_is_weak(self):
        env, rng = make_env("search"), np.random.default_rng(0)
        solved = {1: [], 2: []}
        for seed in range(1500):
            hops = len(QUESTIONS[env.reset(seed)].relations)
            done = False
            while not done:
                outcome = env.step(env.demonstrate(rng))
                done = outcome.done
            solved[hops].append(outcome.success)
        assert 0.25 < np.mean(solved[1]) < 0.42
        assert 0.05 < np.mean(solved[2]) < 0.16
