"""The page of one run."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from freshper.reports.page import Page
from freshper.reports.run_figures import Series, drift_lines, drift_map, run_lines
from freshper.reports.run_folder import CONFIG_FILE, RUNNING, RunRecord
from freshper.reports.statistics import RunSummary, final_window, summarize_run
from freshper.reports.style import BLUE, GREEN, ORANGE, PINK, SKY, VERMILLION
from freshper.reports.text import NOTHING, count, duration, number, plural, short_count, significant

FRESH, REPLAY = BLUE, VERMILLION
FIRST_EPISODES, LAST_EPISODES = 2, 10  # shown of samples.jsonl: how it began and how it ends
LONGEST_TEXT = 4_000  # characters of one observation or reply
_NO_REPLAY = "No replay in this run: nothing was drawn from a buffer (on-policy, or replay has not begun)."


def run_page(run: RunRecord) -> str:
    """The report of one run as HTML. What the run did not log is said on the page."""
    page = Page(
        kind="freshper training run",
        title=f"{run.task} · {run.arm}",
        facts=[f"seed {run.seed}", f"{plural(len(run), 'iteration')} logged", str(run.path)],
        badge="running or killed" if run.status == RUNNING else run.status,
    )
    page.tiles(_headline(run, summarize_run(run)))
    if run.status != "finished":
        page.note(_status_note(run))
    if run.torn:
        page.note(f"The last line of {' and '.join(run.torn)} was cut off (a killed process) and is left out.")
    if len(run):
        _learning(page, run)
        _replay(page, run)
        _drift(page, run)
        _updates(page, run)
        _speed(page, run)
    else:
        page.absent("No iteration was logged yet, so there are no curves.")
    _episodes(page, run.samples, run.path)
    page.section("Configuration", f"{CONFIG_FILE} as it was resolved; enough to run again.")
    text = (run.path / CONFIG_FILE).read_text(encoding="utf-8")
    page.folded(CONFIG_FILE, f"<pre>{escape(text)}</pre>")
    return page.render()


def _headline(run: RunRecord, summary: RunSummary) -> list[tuple[str, str, str]]:
    values = summary.values
    before = run.outcome("warm_start", "sampled_success")
    window = final_window(len(run))
    last = "last iteration" if window == 1 else f"last {window} iterations"
    replayed = "replay included" if run.has("replay/") else "no replay"
    tokens = run.column("tokens")[-1] if len(run) else math.nan
    return [
        ("Success", number(values["final_success"]), f"in training, {last}"),
        (
            "Held-out success",
            f"{number(before)} → {number(values['heldout_success'])}",
            f"before RL → at the end; greedy {number(run.outcome('warm_start', 'greedy_success'))} → "
            f"{number(values['heldout_greedy'])}",
        ),
        ("Score", number(values["final_score"], 2), f"{last}; area under curve {number(values['auc_score'], 2)}"),
        ("Episodes", count(summary.episodes), f"in {plural(summary.iterations, 'iteration')}"),
        ("Updates", count(summary.policy_version), f"policy version, {replayed}"),
        ("Time", duration(summary.seconds), f"{short_count(tokens)} sampled tokens"),
    ]


def _status_note(run: RunRecord) -> str:
    if run.status == RUNNING:
        return "There is no result.json: the run is going on, or it was killed. The numbers are those of so far."
    return f"The run is {run.status} after iteration {run.iterations}: its final values are those of where it stopped."


def _learning(page: Page, run: RunRecord) -> None:
    page.section("Learning", "Faint: one batch of episodes. Bold: the mean over the last batches, a twentieth of all.")
    evaluated = (
        Series("eval/sampled_score", "held-out, sampled", GREEN),
        Series("eval/greedy_score", "held-out, greedy", PINK),
    )
    page.plot(
        "Score",
        run_lines(run, [Series("rollout/score", "training", BLUE)], "mean return", x="episodes", points=evaluated),
        "Should rise and level off. A fall after a rise means that updates do harm: look at drift and ratios below.",
    )
    evaluated = (
        Series("eval/sampled_success", "held-out, sampled", GREEN),
        Series("eval/greedy_success", "held-out, greedy", PINK),
    )
    page.plot(
        "Success",
        run_lines(
            run, [Series("rollout/success", "training", BLUE)], "share", x="episodes", points=evaluated, from_zero=True
        ),
        "Held-out success should follow training; a gap that widens means that levels are learned by heart.",
    )
    page.plot(
        "Invalid replies and failed episodes",
        run_lines(
            run,
            [
                Series("rollout/invalid", "invalid replies (share)", ORANGE),
                Series("rollout/errors", "failed episodes (count)", VERMILLION),
            ],
            "per iteration",
            x="episodes",
            from_zero=True,
        ),
        "Both should be near zero. Invalid replies that rise again are an early sign of a policy coming apart.",
    )
    page.plot(
        "Turns per episode",
        run_lines(run, [Series("rollout/turns", "turns", BLUE)], "mean turns", x="episodes"),
        "Fewer turns with rising success is a policy that got faster; fewer with falling success one that gives up.",
    )


def _replay(page: Page, run: RunRecord) -> None:
    page.section("Replay", "What was drawn from the buffer, in optimizer updates since it was written.")
    if not run.has("replay/"):
        page.absent(_NO_REPLAY)
        return
    page.plot(
        "Age of what was replayed",
        run_lines(
            run,
            [Series("replay/age_mean", "mean", BLUE), Series("replay/age_max", "oldest in the batch", SKY)],
            "age, in updates",
            smoothed=False,
            from_zero=True,
        ),
        "With freshness the mean age levels off, near tau / alpha; without, it grows until the buffer is full.",
    )
    page.plot(
        "Trajectories in the buffer",
        run_lines(run, [Series("replay/size", "stored", BLUE)], "trajectories", smoothed=False, from_zero=True),
        "Grows until the buffer is full; from then on every new trajectory pushes one out.",
    )
    page.plot(
        "Sampling weights",
        run_lines(
            run,
            [Series("replay/weight_mean", "mean", BLUE), Series("replay/weight_max", "largest", SKY)],
            "weight",
            from_zero=True,
        ),
        "Both are 1 without a sampling correction. A mean far below 1 shrinks every replay update.",
    )
    page.plot(
        "Effective sample size and drift",
        run_lines(
            run,
            [Series("replay/ess_fraction", "ESS fraction", BLUE), Series("replay/kl", "KL, nats", VERMILLION)],
            "replayed batch",
            from_zero=True,
        ),
        "A low ESS fraction means that few replayed trajectories carry the update: replay fresher ones (smaller tau).",
    )


def _drift(page: Page, run: RunRecord) -> None:
    page.section(
        "Drift by age",
        "Importance ratios of whole trajectories, by their age: how fast stored experience loses its use.",
    )
    if not any(record.bins for record in run.drift):
        page.absent("No drift was measured: there is no drift.jsonl, or nothing was replayed in it.")
        return
    page.plot(
        "ESS fraction by age",
        drift_lines(run.drift, "ess_fraction", "ESS / n"),
        "Falls with age, and stays below the dotted bound exp(−KL) up to noise. Where it is near 0, replay is wasted.",
    )
    page.plot(
        "KL by age",
        drift_lines(run.drift, "kl", "KL(current ‖ behavior), nats"),
        "About a straight line: its slope is the drift per update. A steep one asks for a smaller tau.",
    )
    few = "Fewer than two records: nothing to show over time yet."
    page.plot(
        "ESS fraction over the run",
        drift_map(run.drift, "ess_fraction", "ESS / n"),
        "Dark cells that reach down to small ages mark the times when the policy moved fast.",
        absent=few,
    )
    page.plot(
        "KL over the run",
        drift_map(run.drift, "kl", "KL, nats"),
        "Bright cells are far from the current policy. Drift usually slows down as training settles.",
        absent=few,
    )


def _updates(page: Page, run: RunRecord) -> None:
    page.section(
        "Updates",
        "The same quantities on fresh batches and on replayed ones (means are geometric on logarithmic axes).",
    )

    def both(name: str) -> list[Series]:
        return [Series(f"fresh/{name}", "fresh", FRESH), Series(f"replay/{name}", "replay", REPLAY)]

    for heading, name, y_title, log, caption in (
        ("Largest importance ratio", "ratio_max", "current / behavior", True,
         "Fresh batches stay near 1. Replayed ones may reach hundreds: then only the clip holds the update."),
        ("Clipped tokens", "clip_fraction", "share", False,
         "A share above about 0.3 on replay means that much of the batch teaches nothing."),
        ("Entropy", "entropy", "nats per token", False,
         "A slow decline is learning. A drop to 0 is a policy that has stopped exploring."),
        ("Gradient norm", "grad_norm", "norm before clipping", True,
         "Should stay in one band. Spikes that recur call for a smaller learning rate or a fresher buffer."),
        ("Loss", "loss", "surrogate loss", False,
         "Near 0 on fresh batches by construction; only jumps say something."),
        ("Sampler against learner", "logprob_gap", "mean |Δ log-prob|", True,
         "On fresh batches this compares the two engines on one policy: it should be tiny and flat."),
    ):  # fmt: skip
        page.plot(heading, run_lines(run, both(name), y_title, log=log), caption)


def _speed(page: Page, run: RunRecord) -> None:
    page.section("Speed")
    page.plot(
        "Time per iteration",
        run_lines(
            run,
            [
                Series("time/iteration_s", "whole iteration", BLUE),
                Series("time/rollout_s", "rollout", ORANGE),
                Series("time/update_s", "updates", GREEN),
            ],
            "seconds",
            from_zero=True,
        ),
        "Whatever is left between the whole and the two parts is logging, evaluation and checkpoints.",
    )
    page.plot(
        "Sampling speed",
        run_lines(run, [Series("time/tokens_per_s", "tokens", BLUE)], "sampled tokens per second"),
        "A steady decline usually means longer episodes or a busy machine.",
    )


def _episodes(page: Page, samples: Sequence[dict[str, Any]], folder: Path) -> None:
    page.section("Episodes", "Observation, pictures and reply of every turn. The first and the latest that were kept.")
    if not samples:
        page.absent("No episode was kept: there is no samples.jsonl, or it is empty.")
        return
    chosen = list(samples)
    if len(samples) > FIRST_EPISODES + LAST_EPISODES:
        chosen = [*samples[:FIRST_EPISODES], *samples[-LAST_EPISODES:]]
        page.note(f"{len(chosen)} of {len(samples)} kept episodes are shown: the first and the latest.")
    for place, sample in enumerate(chosen):
        success = "success" if sample.get("success") else "no success"
        gained = sample.get("return")
        summary = (
            f"iteration {sample.get('iteration', NOTHING)} · {sample.get('source', NOTHING)} · {success} · "
            f"return {_reward(gained)} · {plural(len(sample['turns']), 'turn')} · {sample.get('stop_reason', NOTHING)}"
        )
        page.folded(summary, _turns(sample, folder), is_open=place == len(chosen) - 1)


def _turns(sample: Mapping[str, Any], folder: Path) -> str:
    rows = [
        '<div class="turn head"><div></div><div>observation</div><div>reply</div><div class="reward">reward</div></div>'
    ]
    for place, turn in enumerate(sample["turns"], 1):
        invalid = "<br>invalid" if turn.get("valid") is False else ""
        rows.append(
            f'<div class="turn"><div>{place}</div>'
            f"<div>{_pictures(turn.get('images'), folder)}<pre>{_text(turn.get('observation'))}</pre></div>"
            f'<pre class="reply">{_text(turn.get("reply"))}</pre>'
            f'<div class="reward">{escape(_reward(turn.get("reward")))}{invalid}</div></div>'
        )
    rows.append(_pictures(sample.get("final_images"), folder))
    return "".join(rows)


def _pictures(names: object, folder: Path) -> str:
    """The pictures inside the page, which stays one file. Only files of the run's own folder of pictures are read."""
    shown = []
    for name in names if isinstance(names, list) else ():
        file = folder / "images" / Path(str(name)).name
        try:
            content = base64.b64encode(file.read_bytes()).decode()
        except OSError:
            shown.append(f"<p>the picture {escape(str(name))} is not there</p>")
            continue
        shown.append(f'<img alt="what the policy saw" src="data:image/png;base64,{content}" style="max-width:14em">')
    return "".join(shown)


def _text(value: object) -> str:
    text = NOTHING if value is None else str(value)
    cut = len(text) - LONGEST_TEXT
    return escape(text if cut <= 0 else f"{text[:LONGEST_TEXT]}… ({cut:,} more characters)")


def _reward(value: object) -> str:
    return significant(float(value)) if isinstance(value, int | float) else NOTHING
