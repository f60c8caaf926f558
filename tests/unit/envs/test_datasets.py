"""The loader: which rows are taken, what cannot be used, and what training and evaluation may share."""

import io
import json
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from freshper.envs.core import level_split
from freshper.envs.datasets import (
    DataSource,
    load_rows,
    picture,
    pictured_identity,
    question_identity,
    split_rows,
    text,
    text_or_number,
    texts,
)
from freshper.errors import ConfigError

NEEDED = {"question": text, "answer": text_or_number}
QUESTIONS = [{"question": f"What is {n} + 1?", "answer": n + 1, "note": "x"} for n in range(60)]


def png(shade: int = 0) -> bytes:
    encoded = io.BytesIO()
    Image.new("L", (4, 4), shade).save(encoded, format="PNG")
    return encoded.getvalue()


def write_jsonl(path: Path, rows=QUESTIONS) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class TestUnusableRows:
    def test_every_reason_is_counted_with_its_first_row(self, tmp_path, caplog):
        lines = [
            b'{"question": "Why?", "answer": "So."}',
            b'{"question": "Wh',
            b"",
            b"[1, 2]",
            b'{"question": "  ", "answer": "So."}',
            b'{"answer": "So."}',
            b'{"question": "Why?", "answer": null}',
            b'{"question": ["Why?"], "answer": "So."}',
            b'{"question": "Why \xff?", "answer": "So."}',
            b'{"question": "Why?", "answer": NaN}',
            b'{"question": "Why?", "answer": true}',
            b"[" * 100_000,
            b'{"question": "Who?", "answer": 4.0}',
        ]
        path = tmp_path / "q.jsonl"
        path.write_bytes(b"\n".join(lines))
        with caplog.at_level(logging.WARNING, "freshper.envs"):
            rows = load_rows(DataSource(str(path)), NEEDED)
        assert [row["answer"] for row in rows.rows] == ["So.", "4"]
        (report,) = rows.reports
        assert (report.total, report.used) == (12, 2)
        assert {reason: kind.count for reason, kind in report.unusable.items()} == {
            "it is no JSON": 2,
            "it is no JSON object": 1,
            "'question' is empty": 1,
            "there is no 'question'": 1,
            "'answer' is null": 1,
            "'question' is no text": 1,
            "'question' is no valid Unicode": 1,
            "'answer' is no finite number": 1,
            "'answer' is no text": 1,
        }
        first = report.unusable["it is no JSON"].first
        assert first.startswith('q.jsonl line 2: \'{"question": "Wh')
        assert len(first) < 120
        assert "q.jsonl: 2 of 12 rows are used; 2 cannot be: it is no JSON (first: q.jsonl line 2" in caplog.text

    def test_damaged_lines_of_a_csv(self, tmp_path):
        path = tmp_path / "q.csv"
        path.write_text(f"question,answer\nWhy?,So.\nWhy?\na,b,c\n{'x' * 200_000},1\nWho?,Me.\n")
        rows = load_rows(DataSource(str(path)), NEEDED)
        assert [row["answer"] for row in rows.rows] == ["So.", "Me."]
        counts = {reason: kind.count for reason, kind in rows.reports[0].unusable.items()}
        assert counts.pop("it has not 2 fields, as the header has") == 2
        assert list(counts.values()) == [1]
        assert "field larger than field limit" in next(iter(counts))

    def test_blank_lines_of_a_csv_stand_anywhere(self, tmp_path):
        path = tmp_path / "q.csv"
        path.write_text("\n\nquestion,answer\n\nWhy?,So.\n\n")
        assert [row["answer"] for row in load_rows(DataSource(str(path)), NEEDED).rows] == ["So."]

    def test_without_a_usable_row(self, tmp_path):
        path = write_jsonl(tmp_path / "q.jsonl", [{"problem": "Why?"}] * 3)
        message = r"0 of 3 rows are used; 3 cannot be: there is no 'question' \(first: .* it has 'problem'\)"
        with pytest.raises(ConfigError, match=message):
            load_rows(DataSource(path), NEEDED)

    def test_a_second_read_is_quiet_and_the_same_object(self, tmp_path, caplog):
        path = write_jsonl(tmp_path / "q.jsonl", [*QUESTIONS, {}])
        with caplog.at_level(logging.WARNING, "freshper.envs"):
            first = load_rows(DataSource(path), NEEDED)
            assert load_rows(DataSource(path), dict(NEEDED)) is first
        assert len(caplog.records) == 1


class TestChoice:
    def test_a_limit_is_reported(self, tmp_path):
        rows = load_rows(DataSource(write_jsonl(tmp_path / "q.jsonl", [{}, *QUESTIONS]), limit=5), NEEDED)
        assert [row["answer"] for row in rows.rows] == ["1", "2", "3", "4", "5"]
        assert (rows.reports[0].total, rows.reports[0].left_out) == (61, 55)
        assert "5 of 61 rows are used, 55 lie beyond the limit; 1 cannot be" in str(rows.reports[0])

    def test_the_seed_decides_the_order(self, tmp_path):
        path = write_jsonl(tmp_path / "q.jsonl")

        def order(seed: int | None) -> list[str]:
            return [row["answer"] for row in load_rows(DataSource(path, shuffle_seed=seed, limit=20), NEEDED).rows]

        assert order(None) == [str(n) for n in range(1, 21)]
        assert order(3) == order(3) != order(4)
        assert order(3) != order(None)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"limit": 0}, "limit 0 must be at least 1"),
            ({"shuffle_seed": -1}, "shuffle_seed -1 must be >= 0"),
            ({"split": "test"}, "a single file has no subset and no split"),
            ({"subset": "main"}, "a single file has no subset and no split"),
        ],
    )
    def test_bad_choices_are_refused(self, tmp_path, changes, message):
        path = write_jsonl(tmp_path / "q.jsonl")
        with pytest.raises(ConfigError, match=message):
            DataSource(path, **changes)

    def test_a_changed_file_is_read_again(self, tmp_path):
        path = write_jsonl(tmp_path / "q.jsonl")
        assert len(load_rows(DataSource(path), NEEDED)) == 60
        write_jsonl(tmp_path / "q.jsonl", QUESTIONS[:7])
        assert len(load_rows(DataSource(path), NEEDED)) == 7
        os.utime(path, ns=(1, 1))
        assert len(load_rows(DataSource(path), NEEDED)) == 7

    def test_threads_share_one_reading(self, tmp_path, caplog):
        path = write_jsonl(tmp_path / "q.jsonl", [*QUESTIONS, {}])
        got = []
        ask = [threading.Thread(target=lambda: got.append(load_rows(DataSource(path), NEEDED))) for _ in range(8)]
        with caplog.at_level(logging.WARNING, "freshper.envs"):
            for thread in ask:
                thread.start()
            for thread in ask:
                thread.join()
        assert len({id(rows) for rows in got}) == 1
        assert len(caplog.records) == 1


class TestReaders:
    def test_texts(self):
        assert texts(" one ") == ("one",)
        assert texts(["a", "b "]) == ("a", "b")
        for bad in ([], ["a", ""], 5, ["a", 5]):
            with pytest.raises(ValueError, match="is"):
                texts(bad)

    def test_numbers(self):
        assert [text_or_number(value) for value in (7, 7.0, -0.5, " 7 ", 10**30)] == [
            "7",
            "7",
            "-0.5",
            "7",
            str(10**30),
        ]

    def test_pictures_in_every_form(self, tmp_path):
        (tmp_path / "p").mkdir()
        (tmp_path / "p" / "a.png").write_bytes(png(9))
        for value in (png(9), {"bytes": png(9), "path": None}, {"bytes": None, "path": "p/a.png"}, "p/a.png"):
            assert picture(value, tmp_path) == png(9)
        assert picture(str(tmp_path / "p" / "a.png")) == png(9)
        drawn = picture(Image.open(io.BytesIO(png(9))))
        assert np.asarray(Image.open(io.BytesIO(drawn))).tolist() == [[9] * 4] * 4

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (b"", "is no picture"),
            (5, "is no picture"),
            ({}, "is no picture"),
            ("missing.png", "names a file that is not there"),
            (b"GIF89a but not a picture", "is a damaged picture"),
            (png()[:40], "is a damaged picture"),
        ],
    )
    def test_pictures_that_are_none(self, value, message):
        with pytest.raises(ValueError, match=message):
            picture(value)

    def test_pictures_of_rows(self, tmp_path):
        """Paths are relative to the data; one that is missing spoils its row alone."""
        (tmp_path / "a.png").write_bytes(png(1))
        rows = [{"question": "Why?", "image": "a.png"}, {"question": "Who?", "image": "b.png"}]
        path = write_jsonl(tmp_path / "q.jsonl", rows)
        loaded = load_rows(DataSource(path), {"question": text, "image": picture})
        assert [row["image"] for row in loaded.rows] == [png(1)]
        assert list(loaded.reports[0].unusable) == ["'image' names a file that is not there"]
        stored = pa.Table.from_pylist([{"question": "Why?", "image": {"bytes": png(2), "path": "x.png"}}])
        pq.write_table(stored, tmp_path / "q.parquet")
        loaded = load_rows(DataSource(str(tmp_path / "q.parquet")), {"question": text, "image": picture})
        assert loaded[0]["image"] == png(2)


class TestSplits:
    def test_one_source_is_divided_by_its_questions(self, tmp_path):
        source = DataSource(write_jsonl(tmp_path / "q.jsonl"))
        train, evaluation = (split_rows(split, source, None, NEEDED) for split in ("train", "eval"))
        assert len(train) + len(evaluation) == 60
        assert 4 <= len(evaluation) <= 22  # 12 expected
        assert {level_split(question_identity(row)) for row in evaluation.rows} == {"eval"}
        assert split_rows("train", source, None, NEEDED) is train

    def test_duplicates_lie_on_one_side(self, tmp_path):
        """Also where case, blanks and the width of letters differ."""
        copies = [
            {"question": form, "answer": 1}
            for row in QUESTIONS
            for form in (row["question"], row["question"].upper(), f"  {row['question'].replace(' ', '  ')}", "\uff37")
        ]
        source = DataSource(write_jsonl(tmp_path / "q.jsonl", copies))
        sides = [
            {question_identity(row) for row in split_rows(s, source, None, NEEDED).rows} for s in ("train", "eval")
        ]
        assert not sides[0] & sides[1]
        assert len(sides[0] | sides[1]) == 61

    def test_an_empty_side_is_refused(self, tmp_path):
        source = DataSource(write_jsonl(tmp_path / "q.jsonl", QUESTIONS[:1]))
        side = "eval" if level_split(question_identity(QUESTIONS[0])) == "train" else "train"
        with pytest.raises(ConfigError, match=f"none of its 1 rows falls to the {side} split"):
            split_rows(side, source, None, NEEDED)

    def test_two_sources(self, tmp_path):
        train = DataSource(write_jsonl(tmp_path / "train.jsonl", QUESTIONS[:50]))
        evaluation = DataSource(write_jsonl(tmp_path / "eval.jsonl", QUESTIONS[50:]))
        assert len(split_rows("train", train, evaluation, NEEDED)) == 50
        assert len(split_rows("eval", train, evaluation, NEEDED)) == 10
        assert len(split_rows("eval", train, evaluation, NEEDED).reports) == 2

    @pytest.mark.parametrize("split", ["train", "eval"])
    def test_leakage_is_refused(self, tmp_path, split):
        train = DataSource(write_jsonl(tmp_path / "train.jsonl", QUESTIONS[:50]))
        again = [*QUESTIONS[50:], {"question": "what is  7 + 1? ", "answer": 8}]
        evaluation = DataSource(write_jsonl(tmp_path / "eval.jsonl", again))
        message = r"1 of 11 questions of .*eval\.jsonl also stand in .*train\.jsonl, the first is 'what is  7 \+ 1\?'"
        with pytest.raises(ConfigError, match=message):
            split_rows(split, train, evaluation, NEEDED)

    def test_the_same_question_of_another_picture_is_another_question(self):
        rows = [{"question": "Find x.", "image": png(shade)} for shade in (1, 2, 1)]
        first, other, same = map(pictured_identity, rows)
        assert first == same != other


@pytest.mark.skipif("FRESHPER_TEST_DATA" not in os.environ, reason="FRESHPER_TEST_DATA names no folder of real data")
class TestRealData:
    @pytest.mark.parametrize(
        ("name", "count", "columns", "answer"),
        [
            ("gsm8k_test_sample.jsonl", 600, {}, text),
            ("nq_open_dev_sample.jsonl", 1000, {}, texts),
            ("aime24.jsonl", 20, {"question": "problem"}, text_or_number),
        ],
    )
    def test_every_row_is_usable(self, name, count, columns, answer):
        path = Path(os.environ["FRESHPER_TEST_DATA"]) / name
        rows = load_rows(DataSource(str(path), columns=columns), {"question": text, "answer": answer})
        assert len(rows) == count
        assert not rows.reports[0].unusable
