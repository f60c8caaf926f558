"""Live progress: plain lines without control codes, a panel on a terminal, runs followed as they grow."""

import io
import json

import pytest
from rich.console import Console

from freshper.errors import ConfigError
from freshper.reports import CompareProgress, TrainProgress
from freshper.reports.follow import Follower
from freshper.reports.progress import PLAIN_SECONDS


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def plain():
    return Console(file=io.StringIO(), width=80)


@pytest.fixture
def terminal():
    return Console(file=io.StringIO(), width=100, force_terminal=True, color_system="truecolor")


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def append(folder, *lines):
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)


def test_plain_output_is_a_line_every_ten_seconds(make_run, plain, clock):
    with TrainProgress(60, "sokoban", plain, clock=clock) as progress:
        progress.note("warm start")
        for line in metrics_of(make_run(iterations=60)):
            progress.update(line)
            clock.now += 1
    text = plain.file.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert lines[0] == "sokoban: warm start"
    shown = [int(line.split("iteration ")[1].split("/")[0]) for line in lines[1:]]
    assert shown == [1, 11, 21, 31, 41, 51, 60]
    assert PLAIN_SECONDS == 10


def test_a_plain_line_tells_the_state(plain, clock):
    progress = TrainProgress(10, "t", plain, clock=clock)
    with progress:
        progress.update({"iteration": 1, "rollout/score": 1.0, "rollout/success": 0.5, "eval/greedy_success": 0.75})
        clock.now += 10
        told = {"replay/age_mean": 8.25, "replay/ess_fraction": 0.5, "time/tokens_per_s": 12_340.0}
        told |= {"episodes": 1280, "policy_version": 6}
        progress.update({"iteration": 2, "rollout/score": 3.0, "rollout/success": 0.25, **told})
    first, second = plain.file.getvalue().splitlines()
    assert "age" not in first
    assert "ETA –" in first
    for part in (
        "iteration 2/10",
        "score 3.00 (mean 2.00)",
        "success 0.250 (mean 0.375)",
        "episodes 1,280",
        "updates 6",
        "12.3k tokens/s",
        "age 8.2",
        "ESS 0.50",
        "greedy 0.750",  # the last evaluation stays
        "ETA 1:20",
    ):
        assert part in second


def test_a_resumed_run_has_the_pace_of_what_it_did_itself(plain, clock):
    with TrainProgress(100, "t", plain, clock=clock) as progress:
        progress.update({"iteration": 91})
        clock.now += 20
        progress.update({"iteration": 95})
    assert plain.file.getvalue().splitlines()[-1].endswith("ETA 0:25")


def test_the_panel_on_a_terminal(make_run, terminal, clock):
    lines = metrics_of(make_run(iterations=40))
    with TrainProgress(40, "sokoban [seed 0]", terminal, clock=clock) as progress:
        progress.note("training")
        for line in lines:
            clock.now += 1
            progress.update(line)
    text = terminal.file.getvalue()
    last = lines[-1]
    assert "\x1b[" in text
    for part in ("sokoban [seed 0]", "training", "40/40", "ETA 0:00", "1,280", "█"):
        assert part in text
    assert f"{last['rollout/score']:.2f}" in text
    assert f"{last['eval/sampled_success']:.3f}, greedy {last['eval/greedy_success']:.3f}" in text


def test_the_panel_before_anything_is_known(terminal, clock):
    with TrainProgress(5, "t", terminal, clock=clock) as progress:
        progress.note("warm start")
    assert "0/5" in terminal.file.getvalue()


def test_a_total_below_one_is_refused(plain):
    with pytest.raises(ConfigError, match="total_iterations is 0"):
        TrainProgress(0, "t", plain)
    with pytest.raises(ConfigError, match="total_iterations is -1"):
        CompareProgress({}, -1, plain)


def test_only_what_was_appended_is_read(tmp_path):
    file = tmp_path / "metrics.jsonl"
    follower = Follower(file)
    assert follower.poll() == []
    file.write_text('{"iteration": 1}\n{"iteration": 2}\n{"iter')
    assert [line["iteration"] for line in follower.poll()] == [1, 2]
    # What was read before is overwritten: reading it again would show.
    file.write_text('{"iteration": 8}\n{"iteration": 9}\n{"iter' + 'ation": 3}\n')
    assert follower.poll() == [{"iteration": 3}]
    assert follower.poll() == []
    assert not follower.restarted


def test_a_file_that_got_shorter_is_read_from_the_top(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"iteration": 1}\n{"iteration": 2}\n{"ite')
    follower = Follower(file)
    follower.poll()
    file.write_text('{"iteration": 1}\n')
    assert follower.poll() == [{"iteration": 1}]
    assert follower.restarted


def test_a_broken_line_is_counted_and_passed_over(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"iter\n[3]\n{"iteration": 2, "text": "no number"}\n')
    follower = Follower(file)
    assert follower.poll() == [{"iteration": 2}]
    assert follower.broken == 2


def test_runs_are_followed_until_all_have_ended(make_run, tmp_path, plain, clock):
    lines = metrics_of(make_run(iterations=20))
    done = make_run(name="done", iterations=20)
    growing, later = tmp_path / "growing", tmp_path / "later"
    with CompareProgress({"a": done, "b": growing, "c": later}, 20, plain, clock=clock) as progress:
        assert not progress.poll()
        growing.mkdir()
        append(growing, *lines[:10])
        clock.now += 10
        assert not progress.poll()
        append(growing, *lines[10:])
        make_run(name="growing", iterations=20, status="failed")
        make_run(name="later", iterations=20)
        clock.now += 1
        assert progress.poll()
    text = plain.file.getvalue()
    score = sum(line["rollout/score"] for line in lines[:10]) / 10
    assert "\x1b" not in text
    assert "a: finished at iteration 20" in text
    assert f"1/3 runs ended, 1 running, ETA 0:30  b 10/20 score {score:.2f}" in text
    assert "b: failed at iteration 20" in text
    assert text.splitlines()[-1].startswith("3/3 runs ended, 0 running, ETA 0:00")


def test_a_resumed_run_starts_its_row_again(make_run, plain, clock):
    folder = make_run(iterations=12, status=None)
    lines = metrics_of(folder)
    with CompareProgress({"a": folder}, 20, plain, clock=clock) as progress:
        progress.poll()
        (folder / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
        clock.now += 10
        progress.poll()
    assert f"a 1/20 score {lines[0]['rollout/score']:.2f}".replace("-", "−") in plain.file.getvalue()


def test_a_half_written_result_is_read_again_later(make_run, plain, clock):
    folder = make_run(iterations=3)
    whole = (folder / "result.json").read_text()
    (folder / "result.json").write_text(whole[:20])
    with CompareProgress({"a": folder}, 3, plain, clock=clock) as progress:
        assert not progress.poll()
        (folder / "result.json").write_text(whole)
        assert progress.poll()


def test_the_table_of_runs_on_a_terminal(make_run, tmp_path, terminal, clock):
    runs = {"per seed 0": make_run(iterations=30), "per [1]": make_run(name="b", iterations=7, status=None)}
    append(tmp_path / "b", {"iteration": 8})
    with (tmp_path / "b" / "metrics.jsonl").open("a") as stream:
        stream.write("broken\n")
    with CompareProgress({**runs, "not yet": tmp_path / "c"}, 30, terminal, clock=clock) as progress:
        assert not progress.poll()
    text = terminal.file.getvalue()
    for part in ("1 of 3 runs ended", "per seed 0", "finished", "30/30", "per [1]", "8/30", "waiting", "broken"):
        assert part in text
