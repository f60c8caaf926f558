"""BM25 over a corpus: what is found, and the index in the cache: whole, mapped, shared, repaired."""

import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from freshper.envs.search.corpus import read_corpus
from freshper.envs.search.index import Bm25Index, open_index
from freshper.errors import ConfigError, MissingExtraError, SnapshotError

TEXTS = ["the cat sat", "a dog and a cat", "a dog barks", "caf\u00e9 \U0001f45f caf\u00e9", "", "fish"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FRESHPER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": str(n), "contents": t}) + "\n" for n, t in enumerate(TEXTS) if t))
    return path


def again(path):
    """The same content under another time, as a new process would find it."""
    facts = path.stat()
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1_000_000_000))
    return open_index(path)


def texts(index, query, topk=10):
    return [passage.text for passage in index.retrieve(query, topk)]


class TestRetrieval:
    index = Bm25Index.build(TEXTS)

    def test_best_first_and_nothing_that_shares_no_word(self):
        assert texts(self.index, "barks dog") == ["a dog barks", "a dog and a cat"]
        assert texts(self.index, "barks dog", 1) == ["a dog barks"]
        assert texts(self.index, "caf\u00e9") == ["caf\u00e9 \U0001f45f caf\u00e9"]
        scores = [passage.score for passage in self.index.retrieve("barks dog", 3)]
        assert scores == sorted(scores, reverse=True)
        assert min(scores) > 0

    @pytest.mark.parametrize("query", ["", "zebra", "the a of", "!?", "\x00 \U0001f45f", "\ud800", "x" * 100_000])
    def test_nothing_is_found(self, query):
        assert self.index.retrieve(query, 3) == []

    def test_case_and_punctuation_do_not_count(self):
        assert texts(self.index, "CAT, dog!") == texts(self.index, "cat dog")

    def test_no_more_than_there_is_and_no_less_than_none(self):
        assert len(texts(self.index, "cat dog fish", 1000)) == 4
        assert self.index.retrieve("cat", 0) == []

    def test_equal_scores_come_in_the_order_of_the_corpus(self):
        many = Bm25Index.build([f"same word{n}" for n in range(300)])
        assert texts(many, "same", 7) == [f"same word{n}" for n in range(7)]
        assert texts(many, "same word150", 3) == ["same word150", "same word0", "same word1"]

    def test_scores_are_those_of_the_formula(self):
        """Lucene's BM25 by hand, k1 1.5 and b 0.75; English stop words and single letters are left out."""
        words = [["cat", "sat"], ["dog", "cat"], ["dog", "barks"], ["caf\u00e9", "caf\u00e9"], [], ["fish"]]
        mean = np.mean([len(one) for one in words])
        idf = np.log(1 + (6 - 2 + 0.5) / (2 + 0.5))
        expected = idf * 1 / (1 + 1.5 * (1 - 0.75 + 0.75 * 2 / mean))
        assert [p.score for p in self.index.retrieve("dog", 2)] == pytest.approx([expected] * 2, rel=1e-5)

    def test_a_corpus_without_a_word_is_refused(self):
        with pytest.raises(ConfigError, match="none of the 2 passages of the corpus has a word"):
            Bm25Index.build(["!", "a"])

    def test_without_bm25s_the_extra_is_named(self, tmp_path):
        code = (
            "import sys; sys.modules['bm25s'] = None\n"
            "from freshper.envs import make_env\n"
            "from freshper.errors import MissingExtraError\n"
            "try: make_env('search')\n"
            "except MissingExtraError as error: print(error)\n"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert run.stdout.startswith("bm25s is needed here: pip install 'freshper[search]'")
        assert issubclass(MissingExtraError, ImportError)


class TestCache:
    def test_the_mapped_index_finds_what_the_built_one_finds(self, cache, corpus):
        built, mapped = Bm25Index.build([text for text in TEXTS if text]), open_index(corpus)
        assert len(mapped) == len(built) == 5
        for query in ("cat dog", "caf\u00e9", "fish barks", "zebra"):
            assert mapped.retrieve(query, 5) == built.retrieve(query, 5)
        assert isinstance(mapped._bm25.scores["data"], np.memmap)
        assert isinstance(mapped._bm25.scores["indices"], np.memmap)

    def test_it_is_built_once(self, cache, corpus, monkeypatch):
        first = open_index(corpus)
        assert open_index(str(corpus)) is first
        monkeypatch.setattr(Bm25Index, "build", None)
        assert texts(again(corpus), "fish") == ["fish"]
        assert len(list(cache.iterdir())) == 1

    def test_a_changed_corpus_gets_an_index_of_its_own(self, cache, corpus):
        open_index(corpus)
        corpus.write_text(corpus.read_text() + json.dumps({"contents": "a zebra"}) + "\n")
        assert texts(open_index(corpus), "zebra") == ["a zebra"]
        assert len(list(cache.iterdir())) == 2

    @pytest.mark.parametrize("name", ["texts.utf8", "ends.npy", "data.csc.index.npy", "manifest.json"])
    @pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
    def test_a_damaged_one_is_built_again(self, cache, corpus, name, damage):
        open_index(corpus)
        (folder,) = cache.iterdir()
        file = folder / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0x55
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(content if damage == "flipped" else content[: len(content) // 2])
        with pytest.raises(SnapshotError, match=r"is damaged: .* changed since|holds no whole index"):
            Bm25Index.load(folder)
        assert texts(again(corpus), "fish cat", 1) == ["fish"]
        assert [entry.name for entry in cache.iterdir()] == [folder.name]
        Bm25Index.load(folder)

    def test_several_processes_build_at_once(self, cache, corpus):
        code = (
            "import sys; from freshper.envs.search.index import open_index\n"
            "print(open_index(sys.argv[1]).retrieve('fish', 1)[0].text)"
        )
        runs = [
            subprocess.Popen([sys.executable, "-c", code, str(corpus)], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        assert [run.communicate(timeout=60)[0] for run in runs] == ["fish\n"] * 2
        assert len(list(cache.iterdir())) == 1

    def test_a_corpus_that_is_not_there(self, cache, tmp_path):
        with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read: No such file"):
            open_index(tmp_path / "none.jsonl")
        with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
            open_index(tmp_path)

    def test_a_cache_that_cannot_be_written(self, corpus, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FRESHPER_CACHE", str(tmp_path / "file"))
        with pytest.raises(ConfigError, match="set FRESHPER_CACHE to a folder that can be written"):
            open_index(corpus)


class TestCorpus:
    def write(self, tmp_path, *lines, name="corpus.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
        return path

    def test_contents_or_title_and_text(self, tmp_path):
        path = self.write(
            tmp_path,
            {"id": 1, "contents": "Paris\nA city."},
            {"title": "Lyon", "text": "Another."},
            {"text": "No title."},
            b"  ",
            {"title": "", "text": "An empty one."},
            {"title": "ignored", "contents": "whole"},
        )
        assert read_corpus(path) == ["Paris\nA city.", "Lyon\nAnother.", "No title.", "An empty one.", "whole"]

    def test_what_holds_no_passage_is_counted_and_shown(self, tmp_path, caplog):
        path = self.write(
            tmp_path,
            {"contents": "good"},
            b"{broken",
            ["a list"],
            {"title": "only"},
            {"contents": 7},
            {"contents": " "},
            b'{"contents": "half \\ud800"}',
            b'{"contents": "bad \xff"}',
        )
        with caplog.at_level(logging.WARNING, "freshper.envs"):
            assert read_corpus(path) == ["good"]
        assert "7 rows hold no passage and are left out; corpus.jsonl line 2: it is no JSON" in caplog.text

    def test_csv_too(self, tmp_path):
        assert read_corpus(self.write(tmp_path, b"title,text", b"Lyon,A city", name="c.csv")) == ["Lyon\nA city"]

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            ([b""], "holds no passage: it is empty"),
            ([b"x", {"a": 1}], "none of its 2 rows does; corpus.jsonl line 1: it is no JSON"),
            ([{"contents": ""}], "line 1: it has neither contents nor text"),
        ],
    )
    def test_no_passage_at_all_is_an_error(self, tmp_path, lines, message):
        with pytest.raises(ConfigError, match=message):
            read_corpus(self.write(tmp_path, *lines))
