"""The task nq-search: questions from a file, passages from a corpus or over HTTP."""

import json
import os
from functools import partial
from pathlib import Path

import pytest

from freshper import cli
from freshper.envs import Teachable, check_env, describe, make_env, write_action
from freshper.envs.search.calls import write_search
from freshper.envs.search.index import open_index
from freshper.envs.search.server import make_app
from freshper.errors import ConfigError, UnknownNameError

DATA = os.environ.get("FRESHPER_TEST_DATA", "")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FRESHPER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Questions about forty cities, and a corpus that knows the answers."""
    folder = tmp_path_factory.mktemp("nq")
    rows = [{"question": f"where does city{n} lie", "answer": [f"Land {n}", f"the land{n}"]} for n in range(40)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    passages = [{"id": n, "contents": f"city{n}\nThe city city{n} lies in land {n}."} for n in range(40)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    return {"data": str(folder / "questions.jsonl"), "corpus": str(folder / "corpus.jsonl")}


def played(env):
    """One episode that searches and answers rightly; the passages and the outcome."""
    city = env.reset(3).split()[2]
    found = env.step(write_search(city)).observation
    return found, env.step(write_action(f"Land {city[4:]}"))


def test_keeps_the_contract(files):
    for split in ("train", "eval"):
        check_env(partial(make_env, "nq-search", split, **files), [write_search("city1"), write_action("Land 1")])
    assert not isinstance(make_env("nq-search", **files), Teachable)


def test_an_episode(files):
    env = make_env("nq-search", topk=1, passage_words=7, **files)
    assert env.max_turns == 6
    found, end = played(env)
    number = env.asked.question.split()[2][4:]
    cut = f"1. city{number} The city city{number} lies in land ..."
    assert found == f"<information>\n{cut}\n</information>"
    assert (end.reward, end.success) == (1.0, True)
    assert end.measures == {"exact_match": 1.0, "f1": 1.0, "substring": 1.0, "searches": 1.0}


def test_over_http_the_same_passages_come(files, served):
    with served(make_app(open_index(files["corpus"]))) as url:
        far = make_env("nq-search", data=files["data"], retriever=url)
        assert played(far) == played(make_env("nq-search", **files))
        assert make_env("nq-search", data=files["data"], retriever=url)._retriever is far._retriever


def test_t8_splits_are_disjoint(files):
    train, evaluation = (
        {make_env("nq-search", split, **files).reset(seed) for seed in range(300)} for split in ("train", "eval")
    )
    assert not train & evaluation
    assert len(train | evaluation) == 40
    assert len(train) > len(evaluation) > 0


def test_two_sources_and_other_columns(files, tmp_path):
    (tmp_path / "eval.csv").write_text("ask,reply\nwho is he,Bo\nwho is she,Bea\n")
    (tmp_path / "train.csv").write_text("ask,reply\nwho am I,Me\n")
    options = {"question": "ask", "answer": "reply", "corpus": files["corpus"]}
    here = {"data": str(tmp_path / "train.csv"), "eval_data": str(tmp_path / "eval.csv")}
    env = make_env("nq-search", "eval", **here, **options)
    assert {env.reset(seed) for seed in range(30)} == {"who is he", "who is she"}
    folder = {"data": str(tmp_path), "train_split": "train", "eval_split": "eval"}
    assert make_env("nq-search", "train", **folder, **options).reset(0) == "who am I"
    with pytest.raises(ConfigError, match=r"1 of 1 questions of .* also stand in"):
        make_env("nq-search", **here | {"eval_data": here["data"]}, **options)


def test_a_part_of_the_questions(files):
    env = make_env("nq-search", limit=10, shuffle_seed=1, **files)
    first = {env.reset(seed) for seed in range(100)}
    assert 5 <= len(first) <= 10
    other = make_env("nq-search", limit=10, shuffle_seed=2, **files)
    assert {other.reset(seed) for seed in range(100)} != first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"neither of corpus and retriever: name a JSONL file of passages \(env.options.corpus\)"),
        ({"corpus": "x", "retriever": "http://x"}, "both of corpus and retriever"),
        ({"corpus": "/none.jsonl"}, r"the corpus /none\.jsonl cannot be read"),
        ({"retriever": "x"}, "retriever 'x' must be a URL"),
        ({"retriever": "http://x", "timeout": 0}, "timeout 0 must be above 0"),
        ({"retriever": "http://x", "data": "/none.jsonl"}, r"/none\.jsonl: no such file"),
        ({"retriever": "http://x", "limit": -1}, "limit -1 must be at least 0"),
        ({"retriever": "http://x", "topk": 0}, "topk 0 must be at least 1"),
    ],
)
def test_settings_that_cannot_be_met(options, message):
    with pytest.raises(ConfigError, match=message):
        make_env("nq-search", **options)


def test_t22_an_unknown_option_offers_the_nearest(files):
    with pytest.raises(UnknownNameError, match=r"unknown option 'retreiver'.*Did you mean 'retriever'"):
        make_env("nq-search", retreiver="http://x")


def test_the_task_says_what_it_needs(capsys):
    assert "option corpus or retriever" in describe("nq-search")
    assert cli.main(["envs"]) == 0
    assert "nq-search" in capsys.readouterr().out


@pytest.mark.skipif(not DATA, reason="FRESHPER_TEST_DATA names no folder of real samples")
def test_real_questions_and_their_answers(tmp_path):
    """NQ-open over a corpus made of its own questions and answers."""
    path = Path(DATA) / "nq_open_dev_sample.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"contents": f"{r['question']}\n{r['answer'][0]}"}) + "\n" for r in rows))
    accepted = {row["question"]: row["answer"] for row in rows}
    seen = set()
    for split in ("train", "eval"):
        env = make_env("nq-search", split, data=str(path), corpus=str(corpus), topk=1)
        for seed in range(200):
            question = env.reset(seed)
            seen.add(question)
            assert question in env.step(write_search(question)).observation
            assert env.step(write_action(accepted[question][-1])).success
    assert len(seen) > 200
    guesses = ", or ".join(accepted[env.reset(0)] + ["something else"])
    measured = env.step(write_action(guesses)).measures
    assert (measured["exact_match"], measured["substring"]) == (0.0, 1.0)
    assert 0 < measured["f1"] < 1
