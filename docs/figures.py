"""Draw the README's picture from the folder of a comparison: `python docs/figures.py runs/compare-sokoban`."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from freshper.reports import CompareRecord, CompareSummary, read_compare, summarize_compare
from freshper.reports.statistics import bootstrap_interval
from freshper.reports.style import arm_colors

_SMOOTHED = 10  # iterations in the moving mean of a curve


def curves(axes: Axes, record: CompareRecord, summary: CompareSummary, colors: dict[str, str]) -> None:
    """Mean success over episodes with a bootstrap 95 % band over the seeds."""
    for arm in summary.arms:
        runs = [record.runs[arm.arm, seed] for seed in arm.seeds]
        kernel = np.ones(_SMOOTHED) / _SMOOTHED
        lines = np.array([np.convolve(run.column("rollout/success"), kernel, mode="valid") for run in runs])
        episodes = runs[0].column("episodes")[_SMOOTHED - 1 :]
        points = range(0, len(episodes), 3)
        bands = [bootstrap_interval(lines[:, point]) for point in points]
        strong = arm.arm in {"on-policy", "per", "freshper"}
        axes.plot(episodes, lines.mean(0), color=colors[arm.arm], lw=2.2 if strong else 1.0, label=arm.arm)
        if strong:
            low, high = [band.low for band in bands], [band.high for band in bands]
            axes.fill_between(episodes[list(points)], low, high, color=colors[arm.arm], alpha=0.15, lw=0)
    axes.set(xlabel="episodes", ylabel="success rate", title=f"{summary.task}: training success")
    axes.legend(frameon=False, fontsize=8)


def final_scores(axes: Axes, summary: CompareSummary, colors: dict[str, str]) -> None:
    """Final score of every arm: mean, bootstrap 95 % interval, and a dot per seed."""
    for place, arm in enumerate(reversed(summary.arms)):
        interval = arm.intervals["final_score"]
        values = [run.values["final_score"] for run in arm.runs.values()]
        color = colors[arm.arm]
        axes.plot([interval.low, interval.high], [place, place], color=color, lw=5, alpha=0.35, solid_capstyle="butt")
        axes.plot(values, [place] * len(values), "o", color=color, ms=3, alpha=0.7)
        axes.plot([interval.mean], [place], "D", color=color, ms=7)
    axes.set_yticks(range(len(summary.arms)), [arm.arm for arm in reversed(summary.arms)])
    axes.set(xlabel="final score", title=f"{len(summary.seeds)} seeds, bootstrap 95 % intervals")


def main(folder: Path) -> None:
    """Write docs/images/TASK.png."""
    record = read_compare(folder)
    summary = summarize_compare(record)
    colors = arm_colors([arm.arm for arm in summary.arms])
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(1.35, 1))
    curves(left, record, summary, colors)
    final_scores(right, summary, colors)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.tight_layout()
    target = Path(__file__).parent / "images" / f"{summary.task}.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=130)
    print(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
