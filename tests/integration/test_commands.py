"""The commands on a finished run: eval, play, report, and what they print for people and for programs."""

import io
import json
import re
import sys

import pytest

from freshper import cli
from freshper.training import train


@pytest.fixture
def command(capsys):
    """Calls a command that must succeed; returns its output."""

    def call(*words):
        code = cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        return out

    return call


def test_train_prints_where_everything_is(command, small_flags, tmp_path):
    folder = tmp_path / "a folder with [brackets] and a name so long that it would not fit into eighty columns" / "run"
    out = command("train", "frozenlake", *small_flags, "--run.folder", folder, "--arm", "per")
    lines = out.splitlines()
    assert lines[-1] == f"report      {folder / 'report.html'}"
    assert lines[-2] == f"run folder  {folder}"
    assert lines[-3].startswith("finished after 12 episodes and 9 updates; held-out success 0.")
    assert lines[-3].endswith(" now"), "a sentence is one line, also where it is longer than a terminal is wide"
    assert lines[0].startswith("frozenlake / per: ")
    assert any("iteration 3/3" in line for line in lines)
    assert (folder / "report.html").exists()


def test_signs_that_a_terminal_does_not_know_do_not_end_a_run(small_flags, tmp_path, monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert cli.main(["train", "frozenlake", *small_flags, "--run.folder", str(tmp_path / "run–1")]) == 0
    screen.seek(0)
    shown = screen.read()
    assert "finished after 12 episodes" in shown
    assert "ETA ?" in shown, "a dash stands there where the terminal knows one"
    assert "run folder" in shown


def test_eval_prints_both_kinds(command, trained):
    out = command("eval", trained, "--episodes", "5")
    first, sampled, greedy = out.splitlines()
    assert first.startswith("frozenlake, best policy (version ")
    assert first.endswith("5 levels")
    assert sampled.split()[:2] == ["sampled", "success"]
    assert greedy.split()[:2] == ["greedy", "success"]


def test_eval_as_json_agrees_with_the_run(command, trained):
    run = json.loads((trained / "result.json").read_text())
    numbers = json.loads(command("eval", trained, "--json", "--which", "last", "--episodes", "4", "--seed", "1000"))
    assert numbers == {"task": "frozenlake", "policy_version": 9} | run["eval"]
    other = json.loads(command("eval", trained, "--json", "--which", "last", "--episodes", "40"))
    assert other["policy_version"] == 9
    assert 0 <= other["greedy_success"] <= 1


def test_play_shows_an_episode_of_the_policy(command, trained):
    out = command("play", trained, "--seed", "3")
    assert out == command("play", trained, "--seed", "3")
    assert out.startswith("turn 1\n")
    turns = re.findall(r"^turn (\d+)$", out, flags=re.MULTILINE)
    assert turns == [str(number + 1) for number in range(len(turns))]
    assert len(re.findall(r"   [+-]\d\.\d\d$", out, flags=re.MULTILINE)) == len(turns)
    assert out.splitlines()[-1].split(",")[0] in ("solved", "not solved")
    shown = {command("play", trained, "--seed", str(seed), "--no-greedy") for seed in range(4)}
    assert len(shown) == 4


def test_report_of_a_run_prints_its_path(command, trained):
    out = command("report", trained)
    assert out == f"{trained / 'report.html'}\n"
    page = (trained / "report.html").read_text()
    assert "freshper training run" in page
    assert "tau" in page


def test_report_of_a_run_that_is_going_on(command, trained, tmp_path):
    folder = tmp_path / "going-on"
    folder.mkdir()
    for name in ("config.toml", "metrics.jsonl"):
        (folder / name).write_bytes((trained / name).read_bytes())
    (folder / "metrics.jsonl").open("a").close()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "epis')  # killed while it wrote
    assert command("report", folder) == f"{folder / 'report.html'}\n"
    assert "running or killed" in (folder / "report.html").read_text()


def test_report_of_a_comparison_as_json(command, trained, small, tmp_path):
    folder = tmp_path / "compare"
    train(small(run={"arm": "per", "folder": str(folder / "per" / "seed0")}))
    plan = {"task": "frozenlake", "arms": ["per", "epochs"], "seeds": [0], "command": "freshper compare [x]"}
    (folder / "compare.json").write_text(json.dumps(plan))
    numbers = json.loads(command("report", folder, "--json"))
    assert numbers["command"] == "freshper compare [x]"
    assert numbers["arms"]["per"]["final_score"]["n"] == 1
    assert [run["arm"] for run in numbers["incomplete"]] == ["epochs"]
    assert (folder / "report.html").exists()


class Typed(io.TextIOWrapper):
    """What somebody types, byte by byte."""

    def __init__(self, text):
        super().__init__(io.BytesIO(text if isinstance(text, bytes) else text.encode()), encoding="utf-8")


def _solution(task, seed):
    from freshper.envs import make_env

    env = make_env(task, split="eval")
    env.reset(seed)
    return env.solution()


def test_a_person_can_solve_a_level(command, monkeypatch):
    moves = _solution("frozenlake", 5)
    monkeypatch.setattr(sys, "stdin", Typed("\n".join(moves) + "\n"))
    out = command("play", "frozenlake", "--seed", "5")
    assert out.count("your reply") == len(moves)
    assert "<answer> Right </answer>" in out, "the instructions show how to reply"
    assert out.splitlines()[-1] == "solved, return +1.00"


def test_a_person_may_write_the_tags_and_garbage(command, monkeypatch):
    typed = b"<answer>Down</answer>\n\n[bold]up[/bold]\n\xff\xfe\n" + b"dwon\n" * 20
    monkeypatch.setattr(sys, "stdin", Typed(typed))
    out = command("play", "sokoban", "--seed", "1")
    assert out.count("your reply") == 10
    assert out.count("(not a valid reply)") == 9
    assert out.splitlines()[-1].startswith("not solved, return -1.")


def test_a_person_can_leave(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Typed("up\n"))
    out = command("play", "sokoban")
    assert out.endswith("\nleft the game\n")


def test_ctrl_c_leaves_too(monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert cli.main(["play", "sokoban"]) == 130
    assert capsys.readouterr().err == "freshper: interrupted\n"
