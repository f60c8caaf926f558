"""``freshper envs``."""

import json
import re
import sys

import pytest

from freshper import cli, envs

SOUND = '''
"""An environment of one's own."""


class Echo:
    """Say the word that you are shown."""

    max_turns = 3

    def __init__(self, words=100):
        self.words = words

    def reset(self, seed):
        self.word = f"word{seed % self.words}"
        return self.word

    def step(self, reply):
        right = reply == self.word
        return self.word, float(right), right


class Forgetful(Echo):
    def reset(self, seed):
        self.rounds = getattr(self, "rounds", 0) + 1
        return f"{super().reset(seed)} {self.rounds}"


class Leaking(Echo):
    def __init__(self, split):
        super().__init__()
'''


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working directory with a module, of which the interpreter does not know."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    for name in ("echo_env", "broken_env"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "echo_env.py").write_text(SOUND, encoding="utf-8")
    (tmp_path / "broken_env.py").write_text("def half(:\n", encoding="utf-8")
    return tmp_path


def run(capsys, *words):
    code = cli.main(["envs", *words])
    return code, *capsys.readouterr()


def test_envs_lists_the_tasks_one_a_line(capsys):
    code, out, _ = run(capsys)
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == envs.task_names()
    assert [line.split(maxsplit=1)[1] for line in lines] == [envs.describe(task) for task in envs.task_names()]
    assert run(capsys, "list")[1] == out


def test_envs_as_json(capsys):
    code, out, _ = run(capsys, "--json")
    assert code == 0
    assert json.loads(out) == {task: envs.describe(task) for task in envs.task_names()}


@pytest.mark.parametrize("task", envs.task_names())
def test_every_task_has_a_page(capsys, task):
    code, out, _ = run(capsys, "show", task, "--json")
    shown = json.loads(out)
    assert code == 0
    assert shown["summary"] == envs.describe(task)
    words = ("observation", "action|reply", "reward", "end")
    assert [word for word in words if not re.search(rf"\b({word})", shown["page"], re.IGNORECASE)] == []
    assert shown["parameters"]


def test_a_page_as_text(capsys):
    code, out, _ = run(capsys, "show", "frozenlake")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == envs.describe("frozenlake")
    settings = lines[lines.index("Settings, as --env.options.NAME VALUE:") + 1 :]
    assert [line.split() for line in settings] == [
        ["size", "4"],
        ["frozen_probability", "0.8"],
        ["slippery", "False"],
        ["max_turns", "10"],
    ]


def test_the_page_of_an_environment_of_ones_own(capsys):
    code, out, _ = run(capsys, "show", "echo_env:Echo")
    assert code == 0
    assert "\nSay the word that you are shown.\n\nAn object with ``reset`` and ``step``" in out
    assert "  words           100\n" in out
    assert "has no docstring." in run(capsys, "show", "trl:echo_env:Forgetful")[1]
    assert "An environment of gymnasium's." in run(capsys, "show", "gymnasium:CartPole-v1")[1]


def test_a_sound_environment_passes(capsys):
    assert run(capsys, "check", "echo_env:Echo", "--replies", "word1", "word2") == (
        0,
        "echo_env:Echo keeps the contract, on both splits\n",
        "",
    )
    code, out, _ = run(capsys, "check", "echo_env:Echo", "--json")
    assert (code, json.loads(out)) == (0, {"task": "echo_env:Echo", "ok": True, "problem": None})


def test_a_registered_task_passes(capsys):
    assert run(capsys, "check", "frozenlake", "--options", "size=3", "slippery=true")[0] == 0


def test_what_is_wrong_is_said_in_one_line(capsys):
    code, out, err = run(capsys, "check", "echo_env:Forgetful")
    assert (code, out) == (1, "")
    assert err.startswith("freshper: echo_env:Forgetful: reset(0) gave 'word")
    assert err.count("\n") == 1
    code, out, err = run(capsys, "check", "echo_env:Forgetful", "--json")
    assert (code, err) == (1, "")
    assert json.loads(out)["ok"] is False
    assert "reset(0) gave 'word" in json.loads(out)["problem"]


def test_a_level_in_both_splits_is_found(capsys):
    code, _, err = run(capsys, "check", "echo_env:Leaking")
    assert code == 1
    assert "the train and the eval split both have the level 'word0'" in err


def test_levels_that_begin_alike_are_found(capsys):
    words = ("check", "echo_env:Echo", "--options", "words=1")
    code, _, err = run(capsys, *words)
    assert code == 1
    assert "8 levels begin with the same observation" in err
    assert run(capsys, *words, "split_by=seed")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check"], "`freshper envs check` needs a task"),
        (["show"], "`freshper envs show` needs a task"),
        (["list", "sokoban"], "`freshper envs show sokoban` shows one"),
        (["show", "sokobann"], "Did you mean 'sokoban'"),
        (["check", "echo_env:Ekko"], "echo_env.py) has no 'Ekko'"),
        (["check", "nowhere_env:Echo"], "module 'nowhere_env' of 'nowhere_env:Echo' cannot be imported"),
        (["check", "broken_env:Echo"], "cannot be imported: SyntaxError"),
        (["check", "echo_env:"], "names no environment: write MODULE:CLASS, gymnasium:ENV_ID"),
        (["check", "echo_env:Echo", "--options", "wrds=3"], "Did you mean 'words'"),
        (["check", "echo_env:Echo", "--options", "words"], "must have the form name=value"),
    ],
)
def test_wrong_words_are_named(capsys, words, message):
    code, _, err = run(capsys, *words)
    assert code == 2, err
    assert message in err
    assert err.count("\n") == 1
