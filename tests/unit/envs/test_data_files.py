"""Rows out of every kind of file, and off the hub."""

import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from freshper.envs.datasets import DataSource, load_rows, picture, text, text_or_number
from freshper.errors import ConfigError, MissingExtraError

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


def write_csv(path: Path) -> str:
    lines = ["question,answer,note", *(f'"{row["question"]}",{row["answer"]},x' for row in QUESTIONS)]
    path.write_text("\ufeff" + "\n".join(lines) + "\n\n", encoding="utf-8")
    return str(path)


def write_parquet(path: Path) -> str:
    pq.write_table(pa.Table.from_pylist(QUESTIONS), path, row_group_size=7)
    return str(path)


def write_json(path: Path) -> str:
    path.write_text(json.dumps(QUESTIONS, indent=1))
    return str(path)


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "write"),
        [
            ("q.jsonl", write_jsonl),
            ("q.CSV", write_csv),
            ("q.parquet", write_parquet),
            ("q.json", write_json),
            ("lines.json", write_jsonl),
        ],
    )
    def test_every_kind_gives_the_same_rows(self, tmp_path, name, write):
        rows = load_rows(DataSource(write(tmp_path / name)), NEEDED)
        assert [dict(row) for row in rows.rows] == [
            {"question": row["question"], "answer": str(row["answer"])} for row in QUESTIONS
        ]
        (report,) = rows.reports
        assert (report.total, report.used, report.left_out, dict(report.unusable)) == (60, 60, 0, {})

    def test_columns_are_renamed(self, tmp_path):
        path = write_jsonl(tmp_path / "q.jsonl", [{"problem": "Why?", "solution": "So."}])
        rows = load_rows(DataSource(path, columns={"question": "problem", "answer": "solution"}), NEEDED)
        assert dict(rows[0]) == {"question": "Why?", "answer": "So."}

    def test_a_column_that_the_task_does_not_have_is_refused(self, tmp_path):
        source = DataSource(write_jsonl(tmp_path / "q.jsonl"), columns={"query": "question"})
        with pytest.raises(ConfigError, match="columns names query; the task has answer, question"):
            load_rows(source, NEEDED)

    def test_a_folder_by_split_and_subset(self, tmp_path):
        write_jsonl(tmp_path / "main" / "train-00000-of-00002.jsonl", QUESTIONS[:10])
        write_jsonl(tmp_path / "main" / "train-00001-of-00002.jsonl", QUESTIONS[10:20])
        write_jsonl(tmp_path / "main" / "test.jsonl", QUESTIONS[20:25])
        write_jsonl(tmp_path / "main" / "testing.jsonl", QUESTIONS[25:30])
        write_jsonl(tmp_path / "other" / "validation" / "0.jsonl", QUESTIONS[30:33])
        (tmp_path / "main" / "train.md").write_text("not data")

        def answers(split: str, subset: str = "") -> list[int]:
            source = DataSource(str(tmp_path), split=split, subset=subset)
            return [int(row["answer"]) for row in load_rows(source, NEEDED).rows]

        assert answers("train", "main") == list(range(1, 21))
        assert answers("test", "main") == list(range(21, 26))
        assert answers("validation") == [31, 32, 33]
        assert len(answers("")) == 33
        with pytest.raises(ConfigError, match=r"file of the split 'dev' in it; there are test\.jsonl, testing\.jsonl"):
            answers("dev", "main")
        with pytest.raises(ConfigError, match="there is no subset 'socratic'"):
            answers("train", "socratic")

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("nowhere.jsonl", "nowhere.jsonl: no such file or folder, and not the name of a hub data set"),
            ("../no/where", "no such file or folder"),
            ("a/b/c", "no such file or folder"),
            ("  ", "the source of a data set is empty"),
        ],
    )
    def test_a_source_that_is_not_there(self, source, message):
        with pytest.raises(ConfigError, match=message):
            load_rows(DataSource(source), NEEDED)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("q.txt", b"question", "unknown kind of file; known: .jsonl, .json, .csv, .parquet"),
            ("q.parquet", b"PAR1 but not really PAR1", "q.parquet (is damaged|cannot be read)"),
            ("q.json", b'[{"question": ', "q.json is damaged: Expecting value"),
            ("q.jsonl", b"\n \n", "there are no rows in it: the task has no questions"),
            ("q.csv", b"", "there are no rows in it"),
            ("q.csv", b"\n\n", "there are no rows in it"),
            ("q.csv", b"question,answer,answer\nwho,me,you\n", "q.csv has 2 columns 'answer': rename those not meant"),
        ],
    )
    def test_a_file_that_is_none(self, tmp_path, name, content, message):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            load_rows(DataSource(str(tmp_path / name)), NEEDED)

    def test_parquet_without_the_columns(self, tmp_path):
        path = tmp_path / "q.parquet"
        pq.write_table(pa.table({"text": ["a"]}), path)
        with pytest.raises(ConfigError, match=r"has no column 'answer' or 'question', only \['text'\]"):
            load_rows(DataSource(str(path)), NEEDED)

    @pytest.mark.parametrize(("library", "name"), [("pyarrow", "q.parquet"), ("datasets", "some/set")])
    def test_without_a_library_the_extra_is_named(self, tmp_path, monkeypatch, library, name):
        monkeypatch.chdir(tmp_path)
        if name == "q.parquet":
            write_parquet(tmp_path / name)
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(MissingExtraError, match=rf"{library} is needed here: pip install 'freshper\[data\]'"):
            load_rows(DataSource(name), NEEDED)


class TestHub:
    def test_rows_of_a_cached_set(self, tmp_path, monkeypatch):
        """What the hub library hands out, with pictures undecoded; the set itself comes from a file."""
        import datasets

        rows = [{"question": f"Why {n}?", "image": {"bytes": png(n), "path": None}} for n in range(3)]
        features = datasets.Features({"question": datasets.Value("string"), "image": datasets.Image()})
        asked = []

        def load(name, subset, split):
            asked.append((name, subset, split))
            return datasets.Dataset.from_list(rows, features=features)

        monkeypatch.setattr(datasets, "load_dataset", load)
        monkeypatch.chdir(tmp_path)
        loaded = load_rows(DataSource("some/pictures"), {"question": text, "image": picture})
        assert [dict(row) for row in loaded.rows] == [{"question": f"Why {n}?", "image": png(n)} for n in range(3)]
        load_rows(DataSource("some/pictures", split="test", subset="main"), {"question": text})
        assert asked == [("some/pictures", None, "train"), ("some/pictures", "main", "test")]
        with pytest.raises(ConfigError, match=r"has no column 'answer', only \['question', 'image'\]"):
            load_rows(DataSource("some/pictures"), {"answer": text})

    def test_without_a_connection(self, tmp_path, monkeypatch):
        import datasets

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(
            ConfigError, match=r"hub data set no/such train cannot be loaded: .*; without a connection, n"
        ):
            load_rows(DataSource("no/such"), NEEDED)
