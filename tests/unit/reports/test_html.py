"""The pages: their numbers, what they say is absent, and that nothing in them runs or loads by itself."""

import itertools
import json
import os
from html.parser import HTMLParser

import pytest

from freshper.errors import RunFolderError
from freshper.reports import read_compare, read_run, summarize_compare, summarize_run, write_report
from freshper.reports.page import safe_json
from freshper.reports.text import number

ATTACK = '</script><b>bold</b><img src="http://evil.example/x" onerror="alert(1)">'
LOADING = {"src", "href", "srcset", "data", "action", "poster", "background"}


class Document(HTMLParser):
    """A parsed page: its tags, its text, its scripts, and the plots' data."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.scripts, self.styles, self._text, self._inside = [], [], [], [], ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        self.text = " ".join(" ".join(self._text).split())
        data = [text for attrs, text in self.scripts if attrs.get("id") == "figures"]
        self.figures = json.loads(data[0]) if data else {}

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)
        elif self._inside == "style":
            self.styles.append(data)
        else:
            self._text.append(data)

    def count(self, tag):
        return sum(name == tag for name, _ in self.tags)

    def trace(self, label):
        """Every trace of that name, the last one first: the bold one follows the faint one."""
        traces = [trace for figure in self.figures.values() for trace in figure["data"]]
        return [trace for trace in reversed(traces) if trace.get("name") == label]


def check_offline(document):
    for tag, attrs in document.tags:
        inside = tag == "img" and attrs["src"].startswith("data:image/png;base64,")  # a picture, not a link to one
        assert not LOADING & (attrs.keys() - ({"src"} if inside else set())), (tag, attrs)
        assert not any(name.startswith("on") for name in attrs), (tag, attrs)
    assert not {"link", "iframe", "object", "embed", "base"} & {tag for tag, _ in document.tags}
    style = "".join(document.styles)
    assert "url(" not in style
    assert "@import" not in style
    policy = next(attrs["content"] for tag, attrs in document.tags if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def figures_are_valid(document):
    import plotly.graph_objects as go

    placed = [attrs["id"] for tag, attrs in document.tags if attrs.get("class") == "plot"]
    for figure in document.figures.values():
        go.Figure(figure)  # raises on a name or value that plotly does not know
    return placed == list(document.figures)


@pytest.fixture
def report(make_run):
    def write(**options):
        return Document(write_report(make_run(**options)))

    return write


def test_a_run_page_is_whole_and_offline(report):
    document = report(iterations=40)
    check_offline(document)
    assert figures_are_valid(document)
    assert len(document.figures) == 20
    library = [text for attrs, text in document.scripts if "plotly.js v" in text]
    assert len(library) == 1
    assert len(document.scripts) == 3
    assert "absent" not in {attrs.get("class") for _, attrs in document.tags}
    for heading in ("Learning", "Replay", "Drift by age", "Updates", "Speed", "Episodes", "Configuration"):
        assert heading in document.text


def test_a_run_page_tells_the_numbers(make_run):
    folder = make_run(iterations=40)
    document = Document(write_report(folder))
    run = read_run(folder)
    values = summarize_run(run).values
    assert f"0.071 → {number(values['heldout_success'])}" in document.text
    assert f"0.123 → {number(values['heldout_greedy'])}" in document.text
    assert number(values["heldout_success"]) in document.text
    assert f"area under curve {number(values['auc_score'], 2)}" in document.text
    assert "in training, last 6 iterations" in document.text
    for part in ("sokoban · freshper", "finished", "seed 0", "1,280", "1:03", "tau = 12.0"):
        assert part in document.text
    faint = document.trace("training")[-1]
    assert faint["x"] == [32 * i for i in range(1, 41)]
    assert faint["y"] == pytest.approx(run.column("rollout/score").tolist(), rel=1e-5)
    sizes = document.trace("stored")
    assert len(sizes) == 1
    assert sizes[0]["y"] == run.column("replay/size").tolist()


def test_drift_is_drawn_as_measured(make_run):
    folder = make_run(iterations=40)
    document = Document(write_report(folder))
    drift = read_run(folder).drift
    latest = drift[-1].bins
    kl, ess = document.trace("iteration 40")
    assert kl["y"] == pytest.approx([b.kl for b in latest], rel=1e-5)
    assert ess["x"] == [(b.age_low + b.age_high) / 2 for b in latest]
    assert ess["y"] == pytest.approx([b.ess_fraction for b in latest], rel=1e-5)
    heat = [t for figure in document.figures.values() for t in figure["data"] if t["type"] == "heatmap"]
    cells = heat[1]["z"]
    assert heat[1]["x"] == [record.iteration for record in drift]
    assert heat[1]["y"] == [1, 4, 11, 31, 61, 110]
    assert [row[-1] for row in cells] == pytest.approx([b.kl for b in latest], rel=1e-5)
    assert [row[0] for row in cells[3:]] == [None, None]  # no trajectory was that old at iteration 5


def test_many_different_bins_share_a_grid(make_run):
    folder = make_run(iterations=5)
    records = []
    for iteration in range(1, 51):
        edges = [1, 4 + iteration, 50 + 2 * iteration]
        bins = [{"age_low": a, "age_high": b - 1, "n": 200, "kl": a / 100} for a, b in itertools.pairwise(edges)]
        records.append({"iteration": iteration, "bins": bins})
    (folder / "drift.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    document = Document(write_report(folder))
    heat = [t for figure in document.figures.values() for t in figure["data"] if t["type"] == "heatmap"][1]
    assert len(heat["y"]) == 41
    column = [row[9] for row in heat["z"]]  # iteration 10: ages 1 to 13, then 14 to 69
    centers = [(a + b) / 2 for a, b in itertools.pairwise(heat["y"])]
    expected = [0.01 if center < 14 else 0.14 if center <= 70 else None for center in centers]
    assert column == expected


def test_an_on_policy_run_of_one_iteration_says_what_is_absent(report):
    document = report(arm="on-policy", iterations=1, status="interrupted", extras=False)
    check_offline(document)
    assert figures_are_valid(document)
    for part in (
        "interrupted",
        "The run is interrupted after iteration 1",
        "No replay in this run",
        "No drift was measured",
        "No episode was kept",
        "last iteration",
    ):
        assert part in document.text
    assert document.trace("replay") == []


def test_a_run_that_has_just_begun_has_a_page_without_plots(make_run):
    folder = make_run(iterations=0, status=None, extras=False)
    document = Document(write_report(folder))
    check_offline(document)
    assert document.figures == {}
    assert document.count("script") == 0
    for part in (
        "running or killed",
        "No iteration was logged yet",
        "There is no result.json",
        "Held-out success – → –",
    ):
        assert part in document.text


def test_only_some_names_logged(make_run):
    folder = make_run(iterations=1, extras=False)
    lines = [{"iteration": i, "rollout/score": i / 2} for i in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    document = Document(write_report(folder))
    assert list(document.figures) == ["plot1"]
    assert document.trace("training")[0]["x"] == [1, 2, 3]
    assert document.figures["plot1"]["layout"]["xaxis"]["title"]["text"] == "iteration"
    assert "Nothing was logged for it." in document.text


def test_a_torn_line_is_told_on_the_page(make_run):
    folder = make_run(iterations=5)
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"iteration": 6, "rol')
    assert "The last line of metrics.jsonl was cut off" in Document(write_report(folder)).text


def test_episodes_are_text(make_run):
    folder = make_run(iterations=30)
    turns = [{"observation": ATTACK, "reply": f"<answer>{ATTACK}", "reward": -0.15, "valid": False}]
    sample = {
        "iteration": 31,
        "source": ATTACK,
        "return": -0.1,
        "success": False,
        "stop_reason": ATTACK,
        "turns": turns,
    }
    with (folder / "samples.jsonl").open("a") as stream:
        stream.write(json.dumps(sample) + "\n")
    document = Document(write_report(folder))
    check_offline(document)
    assert document.count("b") == document.count("answer") == 0
    assert len(document.scripts) == 3
    assert document.text.count(ATTACK) == 4
    assert f"iteration 31 · {ATTACK} · no success · return −0.1 · 1 turn · {ATTACK}" in document.text
    assert "−0.15 invalid" in document.text
    assert "# _ P X _ #" in document.text


def test_pictures_stand_inside_the_page(make_run):
    folder = make_run(iterations=5)
    (folder / "images").mkdir()
    (folder / "images" / "seen.png").write_bytes(b"picture")
    (folder / "secret.png").write_bytes(b"outside")
    names = ["images/seen.png", "images/lost.png", "../secret.png", ATTACK]
    turn = {"observation": "look", "reply": "Up", "reward": 0.0, "images": names}
    sample = {"iteration": 1, "source": "fresh", "turns": [turn], "final_images": ["images/seen.png"]}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    page = write_report(folder)
    document = Document(page)
    check_offline(document)
    assert document.count("img") == page.read_text().count("data:image/png;base64,cGljdHVyZQ==") == 2
    assert document.text.count("is not there") == 3


def test_long_samples_are_cut_and_said_so(make_run):
    folder = make_run(iterations=5)
    turns = [{"observation": "o" * 5_000, "reply": None, "reward": None}]
    samples = [{"iteration": i, "source": "fresh", "turns": turns} for i in range(1, 31)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    document = Document(write_report(folder))
    assert "12 of 30 kept episodes are shown" in document.text
    assert document.count("details") == 13
    assert "(1,000 more characters)" in document.text
    assert "o" * 4_001 not in document.text


def test_names_and_config_are_text(make_run):
    folder = make_run(iterations=3)
    config = f"[run]\ntask = '{ATTACK}'\narm = '<i>arm'\nseed = 1\n# {ATTACK}\n"
    (folder / "config.toml").write_text(config)
    document = Document(write_report(folder))
    check_offline(document)
    assert document.count("i") == document.count("b") == 0
    assert document.text.count(ATTACK) == 4  # in the title twice, in the config twice


def test_json_cannot_end_its_script():
    hostile = {"a": "</script><!--<script>&\u2028"}
    text = safe_json(hostile)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == hostile


def test_a_comparison_page_tells_the_numbers(make_compare):
    folder = make_compare(iterations=30, seeds=(0, 1, 2))
    document = Document(write_report(folder))
    summary = summarize_compare(read_compare(folder))
    check_offline(document)
    assert figures_are_valid(document)
    assert len(document.figures) == 8
    for arm in summary.arms:
        for interval in arm.intervals.values():
            assert f"{number(interval.mean)} [{number(interval.low)}, {number(interval.high)}]" in document.text
    difference = summary.difference("freshper", "auc_score")
    assert number(difference.interval.mean, sign=True) in document.text
    assert f"ahead on {difference.in_favor} of 3" in document.text
    for part in ("9 of 9 runs finished", "freshper − on-policy", "960", "freshper compare sokoban --arms"):
        assert part in document.text
    assert document.count("table") == 2


def test_comparison_curves_are_means_over_seeds(make_compare):
    folder = make_compare(iterations=15, seeds=(0, 1, 2))
    document = Document(write_report(folder))
    runs = read_compare(folder).runs
    scores = [runs["per", seed].column("rollout/score") for seed in (0, 1, 2)]
    high, low, mean = None, None, None
    for trace in document.figures["plot1"]["data"]:
        if trace["name"] == "per":
            low, high, mean = high, mean, trace
    assert mean["x"] == runs["per", 0].column("episodes").tolist()
    assert mean["y"] == pytest.approx((sum(scores) / 3).tolist(), rel=1e-5, abs=1e-6)
    assert all(a <= b <= c for a, b, c in zip(low["y"], mean["y"], high["y"], strict=True))
    assert high["fill"] == "tonexty"
    updates = [trace for trace in document.figures["plot3"]["data"] if trace["name"] == "per"][-1]
    assert updates["x"] == runs["per", 0].column("policy_version").tolist()


def test_dots_and_intervals_by_arm(make_compare):
    folder = make_compare(iterations=15, seeds=(0, 1, 2))
    document = Document(write_report(folder))
    summary = summarize_compare(read_compare(folder))
    dots, mean = document.figures["plot5"]["data"][-2:]  # the first arm is drawn last, at the top
    interval = summary.arms[0].intervals["final_score"]
    values = [run.values["final_score"] for run in summary.arms[0].runs.values()]
    assert dots["x"] == pytest.approx(values, rel=1e-5)
    assert mean["x"] == [interval.mean]
    assert mean["error_x"]["array"] == [pytest.approx(interval.high - interval.mean)]
    assert document.figures["plot5"]["layout"]["yaxis"]["ticktext"] == ["freshper", "per", "on-policy"]
    assert document.figures["plot7"]["layout"]["yaxis"]["ticktext"] == ["freshper", "per"]


def test_an_unfinished_comparison_lists_and_dots_what_is_not_counted(make_compare):
    folder = make_compare(iterations=15, seeds=(0, 1, 2), skip=[("on-policy", 0)])
    (folder / "freshper" / "seed1" / "result.json").unlink()
    document = Document(write_report(folder))
    assert "7 of 9 runs finished" in document.text
    assert "on-policy seed 0 (missing, iteration 0), freshper seed 1 (running, iteration 15)" in document.text
    dotted = [t for t in document.figures["plot1"]["data"] if t["line"].get("dash") == "dot"]
    assert [trace["name"] for trace in dotted] == ["freshper"]
    scores = read_compare(folder).runs["freshper", 1].column("rollout/score")
    assert dotted[0]["y"] == pytest.approx(scores.tolist(), rel=1e-5)


def test_a_comparison_with_one_seed_has_no_bands(make_compare):
    document = Document(write_report(make_compare(iterations=15, seeds=(4,))))
    check_offline(document)
    assert figures_are_valid(document)
    assert [trace["name"] for trace in document.figures["plot1"]["data"]] == ["on-policy", "per", "freshper"]
    assert "One seed only, hence no interval: on-policy, per, freshper." in document.text
    assert document.figures["plot5"]["data"][-1]["error_x"] == {"visible": False}


def test_a_comparison_before_any_run_has_ended(make_compare):
    document = Document(write_report(make_compare(iterations=4, seeds=(0, 1), status=None)))
    assert "No run is finished yet" in document.text
    assert document.count("table") == 0
    assert len(document.figures) == 4
    nothing = Document(
        write_report(make_compare(name="empty", seeds=(0,), skip=[("per", 0), ("freshper", 0), ("on-policy", 0)]))
    )
    assert "0 of 3 runs finished" in nothing.text
    assert nothing.figures == {}


def test_arm_names_and_the_command_are_text(make_compare):
    arm = "<b>x<img src=y>"
    folder = make_compare(iterations=5, arms=("on-policy", arm), seeds=(0, 1))
    plan = json.loads((folder / "compare.json").read_text())
    (folder / "compare.json").write_text(json.dumps({**plan, "command": ATTACK}))
    document = Document(write_report(folder))
    check_offline(document)
    assert document.count("b") == 0
    assert ATTACK in document.text
    names = {trace.get("name") for figure in document.figures.values() for trace in figure["data"]}
    assert "&lt;b&gt;x&lt;img src=y&gt;" in names  # plotly reads labels as markup
    assert arm not in names


def test_a_page_is_replaced_as_a_whole_or_not_at_all(make_run, monkeypatch):
    folder = make_run(iterations=3)
    target = write_report(folder)
    assert target == folder / "report.html"
    target.write_text("before")

    def fail(source, destination):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RunFolderError, match=r"cannot write .*report\.html \(disk full\)"):
        write_report(folder)
    assert target.read_text() == "before"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    monkeypatch.undo()
    write_report(folder)
    assert target.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_the_same_folder_gives_the_same_page(make_compare):
    folder = make_compare(iterations=10, seeds=(0, 1))
    assert write_report(folder).read_bytes() == write_report(folder).read_bytes()


def test_no_folder_no_page(tmp_path):
    with pytest.raises(RunFolderError, match=r"no config\.toml"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
