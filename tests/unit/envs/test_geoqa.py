"""GeoQA from local data: pictures of all sorts, answers of all sorts, and rows that cannot be used."""

import io
import json
import sys
from functools import partial

import numpy as np
import pytest
from PIL import Image, ImageDraw

from freshper.envs import Pictured, check_env, make_env, write_action
from freshper.envs.geometry.geoqa import PRESETS, GeoQAEnv, GeoQASpec, scaled_down
from freshper.errors import ConfigError, EnvError, MissingExtraError, UnknownNameError

QUESTION = "What is the angle at {}?"
COLUMNS = {"question": "question", "answer": "answer"}


def figure(number: int = 0, size: tuple[int, int] = (40, 30), form: str = "PNG", mode: str = "RGB") -> bytes:
    """An encoded picture that differs by its number."""
    image = Image.new("RGB", size, (255, 255, 255))
    ImageDraw.Draw(image).line([(0, 0), (number % size[0], size[1])], fill=(0, 0, 0), width=3)
    written = io.BytesIO()
    image.convert(mode).save(written, form)
    return written.getvalue()


def write_rows(folder, rows, name="rows.jsonl"):
    """Rows whose pictures are files beside them."""
    lines = []
    for number, row in enumerate(rows):
        image = row.get("image")
        if isinstance(image, bytes):
            (folder / f"{name}-{number}.png").write_bytes(image)
            image = f"{name}-{number}.png"
        lines.append(json.dumps({**row, "image": image} if "image" in row else row))
    (folder / name).write_text("\n".join(lines))
    return str(folder / name)


def plain_rows(count, start=0):
    return [
        {"image": figure(number), "question": QUESTION.format(number), "answer": str(number + 10)}
        for number in range(start, start + count)
    ]


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path, plain_rows(60))


def asking(tmp_path, answer, **more) -> GeoQAEnv:
    """An environment with one question, whichever the split."""
    options = {name: more.pop(name) for name in ("attempts", "pixels", "choices") if name in more}
    row = {"image": figure(1), "question": QUESTION.format("A"), "answer": answer, **more}
    other = {"image": figure(2), "question": QUESTION.format("B"), "answer": answer, **more}
    train, evaluation = write_rows(tmp_path, [row], "train.jsonl"), write_rows(tmp_path, [other], "eval.jsonl")
    env = make_env("geoqa", data=train, eval_data=evaluation, **COLUMNS, **options)
    env.reset(0)
    return env


class TestRows:
    @pytest.mark.parametrize("split", ["train", "eval"])
    def test_the_contract(self, data, split):
        check_env(partial(make_env, "geoqa", split, data=data, **COLUMNS), (write_action("12"), write_action("x")))
        check_env(partial(make_env, "geoqa", split, data=data, attempts=3, **COLUMNS), (write_action("1"), "no"))

    def test_observation_and_picture(self, data):
        env = make_env("geoqa", data=data, **COLUMNS)
        assert isinstance(env, Pictured)
        assert env.images() == ()
        seen = set()
        for seed in range(40):
            number = int(env.reset(seed).removeprefix("What is the angle at ").removesuffix("?"))
            (picture,) = env.images()
            assert picture == scaled_down(figure(number), 448)
            assert env.step(write_action(str(number + 10))).success
            assert env.images() == ()
            seen.add(number)
        assert len(seen) > 20

    def test_the_splits_are_divided_by_picture_and_question(self, tmp_path):
        rows = plain_rows(60)
        same_question = [{**row, "question": "What is x?"} for row in rows]
        path = write_rows(tmp_path, same_question)
        pictures = {}
        for split in ("train", "eval"):
            env = make_env("geoqa", split, data=path, **COLUMNS)
            pictures[split] = {(env.reset(seed), env.images())[1] for seed in range(200)}
        assert min(map(len, pictures.values())) > 5
        assert not pictures["train"] & pictures["eval"]

    def test_a_question_in_both_sources_is_refused(self, tmp_path):
        train = write_rows(tmp_path, plain_rows(10), "train.jsonl")
        evaluation = write_rows(tmp_path, plain_rows(10, start=9), "eval.jsonl")
        with pytest.raises(ConfigError, match="1 of 10 questions"):
            make_env("geoqa", data=train, eval_data=evaluation, **COLUMNS)

    def test_the_splits_of_a_folder(self, tmp_path):
        write_rows(tmp_path, plain_rows(5), "train.jsonl")
        write_rows(tmp_path, plain_rows(5, start=5), "test.jsonl")
        asked = {}
        for split in ("train", "eval"):
            env = make_env("geoqa", split, data=str(tmp_path), eval_split="test", **COLUMNS)
            asked[split] = {env.reset(seed) for seed in range(60)}
        assert asked["train"] == {QUESTION.format(number) for number in range(5)}
        assert asked["eval"] == {QUESTION.format(number) for number in range(5, 10)}

    def test_a_parquet_file_as_the_hub_keeps_it(self, tmp_path):
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        table = pa.table(
            {
                "image": [{"bytes": figure(number), "path": f"{number}.png"} for number in range(8)],
                "problem": [QUESTION.format(number) for number in range(8)],
                "solution": [f"<answer> {number + 10}° </answer>" for number in range(8)],
            }
        )
        pq.write_table(table, tmp_path / "rows.parquet")
        env = make_env("geoqa", data=str(tmp_path / "rows.parquet"))
        for seed in range(8):
            number = int(env.reset(seed).removeprefix("What is the angle at ").removesuffix("?"))
            assert env.images() == (scaled_down(figure(number), 448),)
            assert env.step(write_action(str(number + 10))).success

    def test_rows_that_cannot_be_used_are_counted(self, tmp_path):
        good = plain_rows(20)
        rows = [
            *good,
            {**good[0], "image": b"no picture"},
            {**good[0], "image": figure(3)[:60]},
            {**good[0], "image": "not-there.png"},
            {**good[0], "image": None},
            {"question": "?", "answer": "1"},
            {**good[0], "answer": ""},
            {**good[0], "answer": "<answer> 1 </answer><answer> 2 </answer>"},
            {**good[0], "question": "  "},
        ]
        path = write_rows(tmp_path, rows)
        (report,) = GeoQASpec(data=path, **COLUMNS).rows("train").reports
        assert (report.total, report.used) == (28, 20)
        assert sum(kind.count for kind in report.unusable.values()) == 8
        reasons = " ".join(report.unusable)
        assert "damaged picture" in reasons
        assert "names a file that is not there" in reasons
        assert "has no single answer" in reasons

    def test_choices_that_are_none_are_counted(self, tmp_path):
        good = [{**row, "choices": ["10", "11"]} for row in plain_rows(5)]
        rows = [*good, *({**good[0], "choices": wrong} for wrong in ("10", 3, ["10"], [str(n) for n in range(11)]))]
        path = write_rows(tmp_path, rows)
        (report,) = GeoQASpec(data=path, choices="choices", **COLUMNS).rows("train").reports
        assert (report.total, report.used) == (9, 5)

    def test_a_wrong_column_names_those_that_are_there(self, data):
        with pytest.raises(ConfigError, match=r"there is no 'problem'.*'question'"):
            make_env("geoqa", data=data)

    def test_limit_and_order(self, data):
        env = make_env("geoqa", data=data, limit=6, **COLUMNS)
        asked = {env.reset(seed) for seed in range(60)}
        assert asked <= {QUESTION.format(number) for number in range(6)}
        shuffled = make_env("geoqa", data=data, limit=6, shuffle_seed=1, **COLUMNS)
        assert {shuffled.reset(seed) for seed in range(60)} != asked


class TestAnswers:
    @pytest.mark.parametrize(
        ("stored", "reply"),
        [
            ("145°", "145"),
            ("145", "145°"),
            ("145", r"145^\circ"),
            ("5cm", "5"),
            ("12.5", "25/2"),
            ("12 cm^2", "12"),
            ("A", "a"),
            ("A", "(A)"),
            (7, "7"),
            (7.0, "7"),
            ("<answer> 30° </answer>", "30"),
            ("so that \\boxed{30}", "30 degrees"),
        ],
    )
    def test_right(self, tmp_path, stored, reply):
        outcome = asking(tmp_path, stored).step(f"Because of the tangent, {write_action(reply)}")
        assert (outcome.reward, outcome.done, outcome.success, outcome.valid) == (1.0, True, True, True)

    def test_expressions_are_compared_by_math_verify(self, tmp_path):
        pytest.importorskip("math_verify")
        env = asking(tmp_path, r"2\sqrt{3}", attempts=2)
        assert not env.step(write_action(r"3\sqrt{2}")).success
        assert env.step(r"\boxed{\sqrt{12}}").success

    @pytest.mark.parametrize(("stored", "reply"), [("145", "144"), ("A", "B"), ("A", "145"), ("30", "60/3")])
    def test_wrong(self, tmp_path, stored, reply):
        outcome = asking(tmp_path, stored).step(write_action(reply))
        assert (outcome.reward, outcome.done, outcome.success, outcome.valid) == (0.0, True, False, True)

    def test_no_answer(self, tmp_path):
        outcome = asking(tmp_path, "145").step("It is 145.")
        assert (outcome.reward, outcome.done, outcome.success, outcome.valid) == (-0.15, True, False, False)

    def test_attempts(self, tmp_path):
        env = asking(tmp_path, "145", attempts=2)
        assert "2 attempts" in env.instructions
        first = env.step(write_action("144"))
        assert not first.done
        assert "145" not in first.observation
        assert env.images() == ()
        assert env.step(write_action("145")).success
        with pytest.raises(EnvError, match=r"geoqa: step\(\) while no episode is running"):
            env.step("")


class TestChoices:
    CHOICES = ("35°", "55°", "65°")

    def ask(self, tmp_path, answer, **more):
        return asking(tmp_path, answer, **{"choices": "options", "options": list(self.CHOICES), **more})

    def test_they_are_shown_with_letters(self, tmp_path):
        env = self.ask(tmp_path, "B")
        assert env.reset(0) == "What is the angle at A?\nA. 35°\nB. 55°\nC. 65°"

    @pytest.mark.parametrize("stored", ["B", "(b)", "55°", "55"])
    @pytest.mark.parametrize("reply", ["B", "b", "(B)", "B.", "55°", "55"])
    def test_letter_or_text(self, tmp_path, stored, reply):
        assert self.ask(tmp_path, stored).step(write_action(reply)).success

    @pytest.mark.parametrize("reply", ["A", "C", "D", "35", "A B", "B, C"])
    def test_wrong(self, tmp_path, reply):
        outcome = self.ask(tmp_path, "B").step(write_action(reply))
        assert (outcome.success, outcome.valid) == (False, True)


class TestPictures:
    def test_large_ones_are_scaled_down(self, tmp_path):
        picture = scaled_down(figure(5, size=(1000, 500)), 448)
        with Image.open(io.BytesIO(picture)) as image:
            assert (image.size, image.mode, image.format) == ((448, 224), "RGB", "PNG")

    def test_small_ones_keep_their_size(self):
        with Image.open(io.BytesIO(scaled_down(figure(5), 448))) as image:
            assert image.size == (40, 30)

    @pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
    def test_every_format_becomes_png(self, form):
        with Image.open(io.BytesIO(scaled_down(figure(5, form=form), 64))) as image:
            assert (image.format, image.mode) == ("PNG", "RGB")
            assert np.asarray(image).min() < 60
            assert np.asarray(image).max() > 240

    @pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA"])
    def test_every_mode_becomes_rgb(self, mode):
        with Image.open(io.BytesIO(scaled_down(figure(5, mode=mode), 64))) as image:
            assert image.mode == "RGB"
            assert np.asarray(image)[0, -1].min() > 240

    def test_what_is_transparent_becomes_white(self):
        written = io.BytesIO()
        Image.new("RGBA", (20, 20), (0, 0, 0, 0)).save(written, "PNG")
        with Image.open(io.BytesIO(scaled_down(written.getvalue(), 64))) as image:
            assert (np.asarray(image) == 255).all()

    def test_a_damaged_one_is_named(self):
        with pytest.raises(EnvError, match="a picture of 60 bytes cannot be decoded"):
            scaled_down(figure(5)[:60], 64)

    def test_the_option(self, tmp_path):
        env = asking(tmp_path, "1", pixels=64)
        with Image.open(io.BytesIO(env.images()[0])) as image:
            assert max(image.size) <= 64

    def test_without_pillow_the_extra_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(MissingExtraError, match=r"pillow is needed here: pip install 'freshper\[vision\]'"):
            scaled_down(b"an unseen one", 64)


class TestSpec:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"pixels": 500}, r"pixels 500 must be a whole number in \[64, 448\]"),
            ({"attempts": 0}, "attempts 0 must be at least 1"),
            ({"check_seconds": 0}, "check_seconds 0 must be above 0"),
            ({"limit": -1}, "limit -1 must be at least 0"),
            ({"data": ""}, "the source of a data set is empty"),
            ({"data": "nowhere.jsonl"}, "nowhere.jsonl: no such file or folder"),
        ],
    )
    def test_out_of_range(self, options, message):
        with pytest.raises(ConfigError, match=message):
            make_env("geoqa", **options)

    def test_a_negative_seed(self, data):
        with pytest.raises(ConfigError, match="seed -1 must be >= 0"):
            make_env("geoqa", data=data, **COLUMNS).reset(-1)

    def test_t22_unknown_option_offers_the_nearest(self):
        with pytest.raises(UnknownNameError, match=r"unknown option 'pixel'.*Did you mean 'pixels'"):
            make_env("geoqa", pixel=64)

    def test_the_default_is_the_set_on_the_hub(self):
        spec = PRESETS["geoqa"][0]
        assert (spec.data, spec.question, spec.answer) == ("leonardPKU/GEOQA_R1V_Train_8K", "problem", "solution")
