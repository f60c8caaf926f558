"""Plots of a comparison: mean curves with a band per arm, and dots per seed with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freshper.reports.page import Figure
from freshper.reports.run_folder import RunRecord
from freshper.reports.style import layout, line, plain, smooth, smoothing_window, with_alpha


class BandCurve(NamedTuple):
    """One line of a comparison: x and mean (G,), the band's edges or None, and whether it is a side note."""

    label: str
    color: str
    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64] | None
    high: NDArray[np.float64] | None
    dotted: bool


class DotRow(NamedTuple):
    """One arm in a dot plot: its values by seed, their mean and interval (nan for one seed)."""

    label: str
    color: str
    values: dict[int, float]
    mean: float
    low: float
    high: float


def align(runs: Sequence[RunRecord], x: str, name: str, points: int = 200) -> tuple[NDArray[np.float64], ...] | None:
    """The smoothed curves of several runs on one grid: x (G,) and values (S, G).

    The grid covers the range that all of them have; None when a run has nothing there.
    """
    curves = []
    for run in runs:
        across = run.column(x)
        known = np.isfinite(run.column(name)) & np.isfinite(across)
        if not known.any():
            return None
        values = run.column(name)[known]
        dense = not name.startswith("eval/")  # held-out values are few and already averages
        curves.append((across[known], smooth(values, smoothing_window(len(values))) if dense else values))
    if not curves:
        return None
    low, high = max(c[0][0] for c in curves), min(c[0][-1] for c in curves)
    if low > high:
        return None
    longest = max((c[0] for c in curves), key=len)
    grid = longest[(longest >= low) & (longest <= high)]
    if len(grid) > points or not len(grid):
        grid = np.linspace(low, high, points if high > low else 1)
    return grid, np.stack([np.interp(grid, *curve) for curve in curves])


def band_plot(curves: Sequence[BandCurve], x_title: str, y_title: str, *, from_zero: bool = False) -> Figure | None:
    """Mean per arm with its bootstrap band; single unfinished runs as thin dotted lines."""
    traces = []
    for curve in curves:
        if curve.low is not None and curve.high is not None:
            edge = {"mode": "lines", "showlegend": False, "hoverinfo": "skip", "legendgroup": escape(curve.label)}
            edge["line"] = {"width": 0, "color": curve.color}
            fill = {**edge, "fill": "tonexty", "fillcolor": with_alpha(curve.color, 0.16)}
            traces.append(line(curve.x, curve.low, curve.label, curve.color, **edge))
            traces.append(line(curve.x, curve.high, curve.label, curve.color, **fill))
        style: dict[str, Any] = {"legendgroup": escape(curve.label), "hovertemplate": "%{y:.3f}"}
        if curve.dotted:
            style |= {"showlegend": False, "line": {"color": curve.color, "width": 1, "dash": "dot"}}
        traces.append(line(curve.x, curve.mean, curve.label, curve.color, **style))
    return {"data": traces, "layout": layout(x_title, y_title, from_zero=from_zero)} if traces else None


def dots_plot(rows: Sequence[DotRow], x_title: str, *, zero: bool = False) -> Figure | None:
    """Per-seed dots with mean and interval, one row per arm, the first arm at the top."""
    rows = [row for row in rows if row.values]
    if not rows:
        return None
    traces: list[dict[str, Any]] = []
    for place, row in enumerate(reversed(rows)):
        seeds = sorted(row.values)
        offsets = [0.22] * len(seeds)  # below the interval, not on it
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": plain(np.array([row.values[s] for s in seeds])),
                "y": [place - o for o in offsets],
                "text": [f"seed {s}" for s in seeds],
                "hovertemplate": f"{escape(row.label)}, %{{text}}: %{{x:.3f}}<extra></extra>",
                "marker": {"color": with_alpha(row.color, 0.55), "size": 8},
            }
        )
        bar = {"color": row.color, "thickness": 2, "width": 6}
        known = math.isfinite(row.low)
        told = f" [{row.low:.3f}, {row.high:.3f}]" if known else " (one seed: no interval)"
        spread = {"array": [row.high - row.mean], "arrayminus": [row.mean - row.low], "symmetric": False, **bar}
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [row.mean],
                "y": [place],
                "hovertemplate": f"{escape(row.label)}: %{{x:.3f}}{told}<extra></extra>",
                "marker": {"color": row.color, "size": 11, "symbol": "diamond"},
                "error_x": spread if known else {"visible": False},
            }
        )
    figure_layout = layout(x_title, "")
    figure_layout |= {"hovermode": "closest", "showlegend": False}
    figure_layout["yaxis"] |= {
        "tickvals": list(range(len(rows))),
        "ticktext": [escape(row.label) for row in reversed(rows)],
        "range": [-0.6, len(rows) - 0.4],
        "zeroline": False,
    }
    figure_layout["xaxis"] |= {"zeroline": zero, "zerolinewidth": 2}
    return {"data": traces, "layout": figure_layout}
