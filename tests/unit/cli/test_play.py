"""``freshper play``: what a person types, and how pictures are shown and kept."""

import io
import re
import sys

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from freshper import cli
from freshper.cli.pictures import PictureShow, half_blocks
from freshper.cli.play import read_options, run_play
from freshper.envs import Outcome, make_env, task_names
from freshper.errors import ConfigError, EnvError

NEED_DATA = {"aime", "geoqa", "gsm8k", "nq-search", "questions"}  # rows from the hub or from a file of one's own


@pytest.fixture
def types(monkeypatch):
    """Somebody who types these lines, and then leaves."""

    def typed(*lines: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return typed


@pytest.fixture
def terminal():
    """A console in full color, and what it was sent."""
    sent = io.StringIO()
    return Console(
        file=sent, force_terminal=True, color_system="truecolor", width=80, height=60, markup=False, highlight=False
    ), sent


class Quiz:
    """A question without a list of actions."""

    task = "quiz"
    instructions = "Answer.\x1b[2J\a"
    max_turns = 2

    def __init__(self, split="eval"):
        self.heard = []

    def reset(self, seed):
        return f"What is {seed} + 2?\r\x00"

    def step(self, reply):
        self.heard.append(reply)
        right = reply == "<answer> 5 </answer>"
        done = right or len(self.heard) == self.max_turns
        return Outcome(
            "\x9b1mover" if done else "again",
            float(right),
            done,
            right,
            "<answer>" in reply,
            {"f1": 0.5} if done else {},
        )


@pytest.fixture
def quiz(tmp_path, monkeypatch):
    """The name of an environment of one's own, and the object that was made of it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_quiz.py").write_text("")
    import own_quiz

    made = []
    own_quiz.Quiz = lambda *args, **options: made.append(Quiz(*args, **options)) or made[-1]
    monkeypatch.setattr("freshper.envs.make_env", lambda task, split, **options: own_quiz.Quiz(**options))
    return "own_quiz:Quiz", made


class TestTyping:
    @pytest.mark.parametrize("how", ["{}", " {} ", "<answer>{}</answer>"])
    def test_an_action_needs_no_tags(self, types, capsys, how):
        env = make_env("sokoban", "eval")
        env.reset(4)
        types(*(how.format(action.lower()) for action in env.solution()))
        assert cli.main(["play", "sokoban", "--seed", "4"]) == 0
        out = capsys.readouterr().out
        assert "not a valid reply" not in out
        assert out.splitlines()[-1].startswith("solved, return +1")

    def test_the_beginning_of_an_action_is_enough(self, types, capsys):
        env = make_env("frozenlake", "eval")
        env.reset(2)
        types(*(action[0] for action in env.solution()))
        assert cli.main(["play", "frozenlake", "--seed", "2"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "solved, return +1.00"

    def test_an_empty_line_is_no_beginning_of_anything(self, types, capsys):
        types("", "upwards", "x")
        assert cli.main(["play", "frozenlake"]) == 0
        out = capsys.readouterr().out
        assert out.count("-0.15  (not a valid reply)") == 3
        assert out.endswith("left the game\n")

    def test_a_whole_action_is_meant_before_a_longer_one(self):
        from freshper.cli.play import _reply

        assert _reply("1", ("1", "10", "12")) == "<answer> 1 </answer>"
        assert _reply("12", ("1", "10", "12")) == "<answer> 12 </answer>"
        assert _reply("u", ("Up", "Under")) == "<answer> u </answer>"  # either could be meant: the task refuses it

    def test_a_reply_to_a_question_goes_as_it_is(self, types, quiz, capsys):
        name, made = quiz
        types("five", "<answer> 5 </answer>")
        assert cli.main(["play", name, "--seed", "3"]) == 0
        assert made[0].heard == ["five", "<answer> 5 </answer>"]
        out = capsys.readouterr().out
        assert "your reply: " in out
        assert out.splitlines()[-1] == "solved, return +1.00, f1 0.5"

    def test_signs_that_steer_a_terminal_are_shown_instead(self, types, quiz, capsys):
        types("a", "b")
        assert cli.main(["play", quiz[0], "--seed", "3"]) == 0
        out = capsys.readouterr().out
        assert not set(out) & {"\x1b", "\a", "\r", "\x00", "\x9b"}
        assert "Answer.\u241b[2J\u2407" in out
        assert "What is 3 + 2?\u240d\u2400" in out

    @pytest.mark.parametrize("task", sorted(set(task_names()) - NEED_DATA))
    def test_every_task_that_needs_no_data_can_be_played(self, types, capsys, task):
        types("hm")
        assert cli.main(["play", task, "--seed", "1"]) == 0
        assert make_env(task, "eval").instructions.splitlines()[0][:40] in capsys.readouterr().out


class TestOptions:
    def test_settings_change_the_task(self, types, capsys):
        types()
        assert cli.main(["play", "frozenlake", "--options", "size=5", "slippery=true", "max_turns=11"]) == 0
        out = capsys.readouterr().out
        assert "slippery" in out
        assert "You have 11 turns" in out
        assert re.search(r"^P[_O]{4}$", out, flags=re.MULTILINE)

    def test_values_are_toml_or_text(self):
        words = ["a=1", "b=1.5", "c=true", "d=[1, 2]", "e=plain words", "f='quoted'", "g=", "h=a=b"]
        values = {"a": 1, "b": 1.5, "c": True, "d": [1, 2], "e": "plain words", "f": "quoted", "g": "", "h": "a=b"}
        assert read_options(words) == values

    @pytest.mark.parametrize(
        ("words", "complaint"),
        [
            (["--options", "size"], "option 'size' must have the form name=value"),
            (["--options", "=3"], "option '=3' must have the form name=value"),
            (["--options", "siz=3"], "unknown option 'siz'. Did you mean 'size'?"),
            (["--options", "size=1"], "size 1 must be >= 2"),
        ],
    )
    def test_wrong_ones_are_one_line(self, capsys, words, complaint):
        assert cli.main(["play", "frozenlake", *words]) == 2
        assert complaint in capsys.readouterr().err


class TestPictures:
    def test_they_are_written_as_they_were_shown(self, types, capsys, tmp_path):
        folder = tmp_path / "new" / "pictures"
        env = make_env("sokoban-image", "eval")
        env.reset(4)
        actions = env.solution()
        env.reset(4)
        shown = [env.images()[0]]
        for action in actions:
            env.step(f"<answer>{action}</answer>")
            shown.append(env.images()[0])
        types(*actions)
        assert cli.main(["play", "sokoban-image", "--seed", "4", "--save-images", str(folder)]) == 0
        names = [f"turn-{turn + 1:02}.png" for turn in range(len(actions))] + ["final.png"]
        assert sorted(path.name for path in folder.iterdir()) == sorted(names)
        assert [(folder / name).read_bytes() for name in names] == shown
        out = capsys.readouterr().out
        assert f"{len(names)} pictures saved" in out
        assert f"picture ({folder / 'turn-01.png'})" in out
        assert "\u2584" not in out, "this is no terminal"

    def test_a_terminal_shows_them_in_color(self, types, terminal):
        console, sent = terminal
        types("up")
        assert run_play(["frozenlake-image"], console) == 0
        blocks = [line for line in sent.getvalue().splitlines() if "\u2584" in line]
        assert len(blocks) == 2 * 64 // 2  # two pictures of 64 pixels, two of them in a line
        assert all(line.count("\u2584") == 64 for line in blocks)
        assert "--save-images DIR keeps it" in sent.getvalue()

    def test_half_blocks_by_hand(self):
        picture = Image.new("RGB", (2, 3))
        picture.putdata([(1, 0, 0), (2, 0, 0), (3, 0, 0), (4, 0, 0), (5, 0, 0), (6, 0, 0)])
        file = io.BytesIO()
        picture.save(file, "PNG")
        text = half_blocks(file.getvalue(), 64)
        assert text.plain == "\u2584\u2584\n\u2584\u2584"
        colors = [(span.style.bgcolor.triplet.red, span.style.color.triplet.red) for span in text.spans]
        assert colors == [(1, 3), (2, 4), (5, 5), (6, 6)]

    @pytest.mark.parametrize(("width", "height", "side"), [(200, 80, 112), (200, 37, 56), (50, 80, 38), (10, 10, 32)])
    def test_large_pictures_shrink_to_the_terminal_by_whole_factors(self, width, height, side):
        sent = io.StringIO()
        console = Console(file=sent, force_terminal=True, color_system="truecolor", width=width, height=height)
        env = make_env("frozenlake-image", pixels=112)
        env.reset(0)
        PictureShow(console, None).show(env.images(), "turn-01")
        lines = [line.count("\u2584") for line in sent.getvalue().splitlines() if "\u2584" in line]
        assert set(lines) == {side if side != 32 else 28}
        assert len(lines) == (side if side != 32 else 28) // 2

    def test_shrinking_averages(self):
        rows = np.zeros((4, 4, 3), dtype=np.uint8)
        rows[::2] = 200
        file = io.BytesIO()
        Image.fromarray(rows).save(file, "PNG")
        assert {span.style.color.triplet.red for span in half_blocks(file.getvalue(), 2).spans} == {100}

    def test_several_in_one_turn_and_other_formats(self, tmp_path, terminal):
        jpeg = io.BytesIO()
        Image.new("RGB", (8, 8), "red").save(jpeg, "JPEG")
        env = make_env("frozenlake-image")
        env.reset(0)
        show = PictureShow(terminal[0], tmp_path / "both")
        show.show((*env.images(), jpeg.getvalue()), "turn-03")
        assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["turn-03-1.png", "turn-03-2.jpg"]
        assert show.saved == 2

    def test_bytes_that_are_no_picture(self, terminal):
        with pytest.raises(EnvError, match="a task showed 5 bytes that begin with b'hello': no picture"):
            PictureShow(terminal[0], None).show([b"hello"], "turn-01")

    def test_a_folder_with_other_things_is_left_alone(self, capsys, tmp_path):
        (tmp_path / "turn-01.png").write_text("mine")
        for folder in (tmp_path, tmp_path / "turn-01.png"):
            assert cli.main(["play", "frozenlake-image", "--save-images", str(folder)]) == 2
            assert "exists and is no empty folder" in capsys.readouterr().err
        assert (tmp_path / "turn-01.png").read_text() == "mine"

    def test_an_empty_folder_is_taken(self, tmp_path, terminal):
        with pytest.raises(ConfigError, match="is no empty folder"):
            PictureShow(terminal[0], tmp_path.parent)
        PictureShow(terminal[0], tmp_path)
