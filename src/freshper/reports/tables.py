"""A comparison as a table for the terminal and as plain data for a JSON file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from freshper.reports.statistics import (
    CONFIDENCE,
    FINAL_SHARE,
    METRICS,
    RESAMPLES,
    ArmSummary,
    CompareSummary,
    Difference,
    Interval,
)
from freshper.reports.text import count, number

if TYPE_CHECKING:
    from rich.table import Table

# What fits into 80 columns, with digits; the rest is in the JSON data and on the page.
_COLUMNS = {"final_score": ("score", 2), "auc_score": ("AUC", 2), "heldout_success": ("held-out", 3)}


def compare_table(summary: CompareSummary) -> Table:
    """The comparison as a rich table: one row per arm, every mean with its interval below it.

    The last columns give the paired score difference against the baseline, and on how many of the common
    seeds the arm is ahead. The caption lists the runs that are not finished and therefore do not count.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(f"{summary.task}: {len(summary.arms)} arms, {len(summary.seeds)} seeds"),
        caption=Text(_caption(summary)),
        caption_justify="left",
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        leading=1,
        pad_edge=False,
    )
    table.add_column("arm\nseeds", no_wrap=True)
    for heading in (*(heading for heading, _ in _COLUMNS.values()), "Δ score\nahead on", "episodes\nupdates"):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm in summary.arms:
        table.add_row(*(Text(cell) for cell in _row(summary, arm)))
    return table


def compare_json(summary: CompareSummary) -> dict[str, Any]:
    """The comparison as JSON-ready data; None stands where a number is not known.

    ``arms[name][metric]`` holds mean, low, high, n and the values by seed; ``paired[name][metric]`` the
    same for the difference against ``baseline``, with ``in_favor``. Score and area are returns, success is a
    share in [0, 1].
    """
    return {
        "task": summary.task,
        "command": summary.command,
        "seeds": list(summary.seeds),
        "baseline": summary.baseline,
        "final_share": FINAL_SHARE,
        "interval": {"method": "percentile bootstrap of the mean", "confidence": CONFIDENCE, "resamples": RESAMPLES},
        "arms": {arm.arm: _arm_json(arm) for arm in summary.arms},
        "paired": {
            arm.arm: {m: _difference_json(d) for m in METRICS if (d := summary.difference(arm.arm, m)) is not None}
            for arm in summary.arms
            if arm.arm != summary.baseline
        },
        "incomplete": [
            {"arm": run.arm, "seed": run.seed, "status": run.status, "iterations": run.iterations}
            for run in summary.incomplete
        ],
        "notes": list(summary.notes),
    }


def _caption(summary: CompareSummary) -> str:
    what = (
        f"score: last {FINAL_SHARE:.0%} of the iterations; AUC: score over all episodes; held-out: sampled success; "
        f"below: {CONFIDENCE:.0%} bootstrap interval over seeds; Δ: paired by seed against {summary.baseline}."
    )
    return "\n".join([what, *summary.notes])


def _row(summary: CompareSummary, arm: ArmSummary) -> list[str]:
    cells = [f"{arm.arm}\n{len(arm.runs)}/{len(summary.seeds)}"]
    cells += [_cell(arm.intervals[metric], digits) for metric, (_, digits) in _COLUMNS.items()]
    difference = summary.difference(arm.arm, "final_score")
    if difference is None:
        cells.append("baseline")
    else:
        ahead = f"{difference.in_favor}/{difference.interval.n}"
        cells.append(f"{_cell(difference.interval, 2, sign=True)}\n{ahead}")
    return [*cells, f"{count(arm.episodes.mean)}\n{count(arm.policy_version.mean)}"]


def _cell(interval: Interval, digits: int, *, sign: bool = False) -> str:
    mean = number(interval.mean, digits, sign=sign)
    if interval.n < 2:
        return mean
    return f"{mean}\n{number(interval.low, digits, sign=sign)}…{number(interval.high, digits, sign=sign)}"


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _interval_json(interval: Interval) -> dict[str, Any]:
    return {
        "mean": _known(interval.mean),
        "low": _known(interval.low),
        "high": _known(interval.high),
        "n": interval.n,
    }


def _arm_json(arm: ArmSummary) -> dict[str, Any]:
    told: dict[str, Any] = {"seeds": list(arm.seeds)}
    for metric, interval in arm.intervals.items():
        values = {str(seed): _known(run.values[metric]) for seed, run in arm.runs.items()}
        told[metric] = {**_interval_json(interval), "values": values}
    for name, interval in (("episodes", arm.episodes), ("policy_version", arm.policy_version)):
        values = {str(seed): _known(getattr(run, name)) for seed, run in arm.runs.items()}
        told[name] = {**_interval_json(interval), "values": values}
    return told


def _difference_json(difference: Difference) -> dict[str, Any]:
    return {
        **_interval_json(difference.interval),
        "in_favor": difference.in_favor,
        "values": {str(seed): value for seed, value in difference.values.items()},
    }
