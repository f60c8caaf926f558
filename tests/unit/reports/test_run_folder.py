"""Reading run and compare folders: what is read, what is refused, what is left out."""

import json
import subprocess
import sys

import numpy as np
import pytest

from freshper.errors import RunFolderError
from freshper.reports import is_compare, read_compare, read_run


def append(file, text):
    with file.open("a", encoding="utf-8") as stream:
        stream.write(text)


def test_a_run_is_read_with_every_part(make_run):
    folder = make_run(iterations=30)
    run = read_run(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert (run.task, run.arm, run.seed, run.status) == ("sokoban", "freshper", "0", "finished")
    assert len(run) == run.iterations == 30
    for name in ("episodes", "rollout/score", "replay/age_mean"):
        assert run.column(name).tolist() == [line[name] for line in lines]
    assert run.config["replay"] == {"alpha": 0.6, "tau": 12.0}
    assert run.outcome("warm_start", "sampled_success") == 0.0712
    assert len(run.samples) == 4
    assert run.torn == ()


def test_absent_names_are_nan_and_aligned(make_run):
    run = read_run(make_run(iterations=25))
    greedy = run.column("eval/greedy_success")
    assert np.flatnonzero(np.isfinite(greedy)).tolist() == [9, 19, 24]
    assert np.isnan(run.column("no/such")).all()
    assert len(run.column("no/such")) == 25
    assert run.has("replay/")
    assert not run.has("no/")


def test_arrays_cannot_be_changed(make_run):
    column = read_run(make_run(iterations=3)).column("rollout/score")
    with pytest.raises(ValueError, match="read-only"):
        column[0] = 1.0


def test_null_and_nan_are_nan(make_run):
    folder = make_run(iterations=1)
    append(folder / "metrics.jsonl", '{"iteration": 2, "rollout/score": null, "fresh/loss": NaN}\n')
    run = read_run(folder)
    assert np.isnan(run.column("rollout/score")[1])
    assert np.isnan(run.column("fresh/loss")[1])


def test_drift_bins_are_ordered_and_complete(make_run):
    folder = make_run(iterations=10)
    bins = [{"age_low": 9, "age_high": 20, "n": 5, "kl": 0.2}, {"age_low": 1, "age_high": 8, "n": 7, "kl": 0.1}]
    append(folder / "drift.jsonl", json.dumps({"iteration": 11, "bins": bins}) + "\n")
    latest = read_run(folder).drift[-1]
    assert [(b.age_low, b.n, b.kl) for b in latest.bins] == [(1, 7, 0.1), (9, 5, 0.2)]
    assert np.isnan(latest.bins[0].ess_fraction)


@pytest.mark.parametrize("tail", ['{"iteration": 4, "rollout/sco', '{"iteration": 4,\n', '{"reply": "\xc3'])
@pytest.mark.parametrize("name", ["metrics.jsonl", "drift.jsonl", "samples.jsonl"])
def test_a_torn_last_line_is_left_out_and_told(make_run, name, tail):
    folder = make_run(iterations=3)
    (folder / name).touch()
    whole = read_run(folder)
    append(folder / name, tail)
    run = read_run(folder)
    assert run.torn == (name,)
    assert (len(run), len(run.drift), len(run.samples)) == (len(whole), len(whole.drift), len(whole.samples))


def test_torn_inside_a_character(make_run):
    folder = make_run(iterations=3)
    with (folder / "samples.jsonl").open("ab") as stream:
        stream.write('{"turns": "ä'.encode()[:-1])
    assert read_run(folder).torn == ("samples.jsonl",)


def test_a_broken_line_elsewhere_names_file_and_line(make_run):
    folder = make_run(iterations=3)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[1] = lines[1][:40]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl:2: broken line"):
        read_run(folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"iteration": 2, "rollout/score": 1}', r"metrics\.jsonl:3: iteration 2 does not follow 2"),
        ('{"rollout/score": 1}', r"metrics\.jsonl:3: iteration nan"),
        ('{"iteration": 3, "rollout/score": "high"}', r"metrics\.jsonl:3: rollout/score is 'high'"),
        ("[1, 2]", r"metrics\.jsonl:3: list where an object"),
    ],
)
def test_metrics_that_make_no_sense_are_refused(make_run, line, message):
    folder = make_run(iterations=2)
    append(folder / "metrics.jsonl", line + "\n")
    with pytest.raises(RunFolderError, match=message):
        read_run(folder)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.toml", "[run", "not valid TOML"),
        ("result.json", "{", "not valid JSON"),
        ("result.json", "[]", "expected an object"),
        ("result.json", '{"status": "done"}', "'done' is none of finished, interrupted, failed"),
        ("drift.jsonl", '{"iteration": 1}\n', r"drift\.jsonl:1: expected an integer iteration"),
        ("drift.jsonl", '{"iteration": 1, "bins": [{"n": 3}]}\n', "no age_low"),
        ("samples.jsonl", '{"iteration": 1}\n', r"samples\.jsonl:1: turns is NoneType"),
    ],
)
def test_other_broken_files_are_named(make_run, name, text, message):
    folder = make_run(iterations=2)
    (folder / name).write_text(text)
    with pytest.raises(RunFolderError, match=message) as caught:
        read_run(folder)
    assert name in str(caught.value)


def test_what_is_no_run_folder_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="is not a folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match=r"no config\.toml"):
        read_run(tmp_path)
    with pytest.raises(RunFolderError, match=r"no compare\.json"):
        read_compare(tmp_path)


def test_a_run_that_has_just_begun_is_read(make_run):
    folder = make_run(iterations=0, status=None, extras=False)
    (folder / "metrics.jsonl").unlink()
    run = read_run(folder)
    assert (len(run), run.iterations, run.status) == (0, 0, "running")
    assert (run.drift, run.samples, run.result) == ((), (), None)


def test_a_comparison_is_read_with_what_is_missing(make_compare):
    folder = make_compare(iterations=5, seeds=(0, 3), skip=[("per", 3)])
    compare = read_compare(folder)
    assert is_compare(folder)
    assert not is_compare(folder / "per" / "seed0")
    assert (compare.task, compare.arms, compare.seeds) == ("sokoban", ("on-policy", "per", "freshper"), (0, 3))
    assert compare.command.startswith("freshper compare")
    assert compare.missing == (("per", 3),)
    assert sorted(compare.runs) == [("freshper", 0), ("freshper", 3), ("on-policy", 0), ("on-policy", 3), ("per", 0)]
    assert compare.runs["freshper", 3].seed == "3"


@pytest.mark.parametrize("plan", ['{"arms": [], "seeds": [0]}', '{"arms": ["a"], "seeds": ["0"]}', "{}", "nothing"])
def test_a_broken_plan_is_refused(tmp_path, plan):
    (tmp_path / "compare.json").write_text(plan)
    with pytest.raises(RunFolderError, match=r"compare\.json"):
        read_compare(tmp_path)


def test_importing_the_room_loads_nothing_heavy():
    code = (
        "import sys, freshper.reports; "
        "print([name for name in ('rich', 'plotly', 'scipy', 'torch', 'tensorboard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
