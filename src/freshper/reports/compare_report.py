"""The page of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from freshper.reports.compare_figures import BandCurve, DotRow, align, band_plot, dots_plot
from freshper.reports.page import Figure, Page, cell, dot
from freshper.reports.run_folder import FINISHED, CompareRecord, RunRecord
from freshper.reports.statistics import (
    CONFIDENCE,
    FINAL_SHARE,
    METRICS,
    CompareSummary,
    bootstrap_band,
    summarize_compare,
)
from freshper.reports.style import arm_colors
from freshper.reports.text import bounds, count, number


def compare_page(compare: CompareRecord) -> str:
    """The report of a comparison as HTML. Only finished runs enter means, bands and intervals."""
    summary = summarize_compare(compare)
    finished = sum(len(arm.runs) for arm in summary.arms)
    planned = len(compare.arms) * len(compare.seeds)
    seeds = ", ".join(str(seed) for seed in compare.seeds)
    page = Page(
        kind="freshper comparison",
        title=f"{compare.task}: {' · '.join(compare.arms)}",
        facts=[f"seeds {seeds}", f"{finished} of {planned} runs finished", str(compare.path)],
        badge=FINISHED if finished == planned else "incomplete",
    )
    page.tiles(_headline(summary))
    for note in summary.notes:
        page.note(note)
    colors = arm_colors(compare.arms)
    if finished:
        _tables(page, summary, colors)
    else:
        page.absent("No run is finished yet, so there is nothing to average; unfinished runs are dotted below.")
    _curves(page, compare, colors)
    if finished:
        _finals(page, summary, colors)
    page.section("Command", "Settings and seeds are the same for all arms except for the one that is compared.")
    command = escape(compare.command) if compare.command else "compare.json does not tell the command."
    page.html(f'<div class="card"><pre>{command}</pre></div>')
    return page.render()


def _headline(summary: CompareSummary) -> list[tuple[str, str, str]]:
    tiles = []
    for arm in summary.arms:
        score = arm.intervals["final_score"]
        difference = summary.difference(arm.arm, "final_score")
        if difference is None:
            more = "the baseline"
        elif not difference.interval.n:
            more = f"no common seed with {summary.baseline}"
        else:
            more = (
                f"{number(difference.interval.mean, 2, sign=True)} against {summary.baseline}, "
                f"ahead on {difference.in_favor} of {difference.interval.n}"
            )
        tiles.append((f"{arm.arm}: final score", number(score.mean, 2), more))
    return tiles


def _tables(page: Page, summary: CompareSummary, colors: dict[str, str]) -> None:
    page.section(
        "Results",
        f"Final: mean over the last {FINAL_SHARE:.0%} of the iterations. "
        f"AUC: area under the curve of score over episodes, divided by their span. "
        f"In brackets: {CONFIDENCE:.0%} bootstrap interval of the mean over seeds.",
    )
    rows = []
    for arm in summary.arms:
        row = [dot(colors[arm.arm]) + cell(arm.arm), cell(f"{len(arm.runs)} of {len(summary.seeds)}")]
        for interval in arm.intervals.values():
            row.append(cell(number(interval.mean), bounds(interval)))
        row += [cell(count(arm.episodes.mean)), cell(count(arm.policy_version.mean))]
        rows.append(row)
    page.table(["arm", "seeds", *METRICS.values(), "episodes", "updates"], rows)
    rows = []
    for arm in summary.arms:
        if arm.arm == summary.baseline:
            continue
        row = [dot(colors[arm.arm]) + cell(f"{arm.arm} − {summary.baseline}")]
        for metric in METRICS:
            difference = summary.difference(arm.arm, metric)
            if difference is None or not difference.interval.n:
                row.append(cell("–", "no common seed"))
                continue
            interval = difference.interval
            ahead = f"ahead on {difference.in_favor} of {interval.n}"
            row.append(cell(number(interval.mean, sign=True), bounds(interval, sign=True), ahead))
        rows.append(row)
    if rows:
        page.table(["difference, paired by seed", *METRICS.values()], rows)


def _curves(page: Page, compare: CompareRecord, colors: dict[str, str]) -> None:
    page.section(
        "Learning curves",
        f"Mean over seeds of smoothed curves, band: {CONFIDENCE:.0%} bootstrap interval. "
        "Dotted: a run that is not finished; it is in no mean.",
    )
    for heading, name, x, y_title, from_zero, caption in (
        ("Score by episodes", "rollout/score", "episodes", "mean return", False,
         "The comparison that counts where the environment is expensive: who is higher for the same experience?"),
        ("Success by episodes", "rollout/success", "episodes", "share", True,
         "Bands that do not touch are a difference; bands that overlap ask for the paired differences below."),
        ("Score by updates", "rollout/score", "policy_version", "mean return", False,
         "The same by optimizer updates: an arm that only wins by episodes buys its lead with more updates."),
        ("Held-out success by episodes", "eval/sampled_success", "episodes", "share", True,
         "On levels never trained on: the order of the arms should be that of the training curves."),
    ):  # fmt: skip
        figure = _curve(compare, colors, name, x, y_title, from_zero=from_zero)
        page.plot(heading, figure, caption, absent="No run logged it yet.")


def _curve(
    compare: CompareRecord, colors: dict[str, str], name: str, x: str, y_title: str, *, from_zero: bool
) -> Figure | None:
    curves = []
    for arm in compare.arms:
        runs = [run for (its_arm, _), run in compare.runs.items() if its_arm == arm]
        finished = [run for run in runs if run.status == FINISHED]
        curves += _one_curve(finished, arm, colors[arm], x, name, dotted=False)
        for run in runs:
            if run not in finished:
                curves += _one_curve([run], arm, colors[arm], x, name, dotted=True)
    x_title = "optimizer updates (policy version)" if x == "policy_version" else x
    return band_plot(curves, x_title, y_title, from_zero=from_zero)


def _one_curve(runs: Sequence[RunRecord], arm: str, color: str, x: str, name: str, *, dotted: bool) -> list[BandCurve]:
    aligned = align(runs, x, name)
    if aligned is None:
        return []
    grid, values = aligned
    mean, low, high = bootstrap_band(values)
    return [BandCurve(arm, color, grid, mean, low, high, dotted)]


def _finals(page: Page, summary: CompareSummary, colors: dict[str, str]) -> None:
    page.section(
        "Final values and paired differences",
        f"Diamond: mean with its {CONFIDENCE:.0%} bootstrap interval. Dots: single seeds.",
    )
    for metric, axis in (("final_score", "mean return"), ("heldout_success", "share")):
        page.plot(
            METRICS[metric].capitalize(),
            dots_plot(_value_rows(summary, metric, colors), axis),
            "Look at the dots first: a mean that one seed carries is not a result.",
        )
    for metric in ("final_score", "final_success"):
        page.plot(
            f"{METRICS[metric].capitalize()}: difference against {summary.baseline}",
            dots_plot(_difference_rows(summary, metric, colors), f"arm − {summary.baseline}", zero=True),
            "Right of zero is better than the baseline on the same seed. An interval that crosses zero is a tie.",
            absent=f"No arm has a finished seed in common with {summary.baseline}.",
        )


def _value_rows(summary: CompareSummary, metric: str, colors: dict[str, str]) -> list[DotRow]:
    rows = []
    for arm in summary.arms:
        interval = arm.intervals[metric]
        values = {s: v for s, run in arm.runs.items() if math.isfinite(v := run.values[metric])}
        rows.append(DotRow(arm.arm, colors[arm.arm], values, interval.mean, interval.low, interval.high))
    return rows


def _difference_rows(summary: CompareSummary, metric: str, colors: dict[str, str]) -> list[DotRow]:
    rows = []
    for arm in summary.arms:
        difference = summary.difference(arm.arm, metric)
        if difference is not None:
            interval = difference.interval
            row = DotRow(arm.arm, colors[arm.arm], difference.values, interval.mean, interval.low, interval.high)
            rows.append(row)
    return rows
