"""Plots of one run: logged lines, and drift by age as lines and heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freshper.reports.page import Figure
from freshper.reports.run_folder import DriftRecord, RunRecord
from freshper.reports.style import BLUE, SKY, layout, line, plain, smooth, smoothing_window, with_alpha


class Series(NamedTuple):
    """One line of a plot: the logged name, what the legend calls it, its color."""

    name: str
    label: str
    color: str


def horizontal(run: RunRecord, axis: str) -> tuple[NDArray[np.float64], str]:
    """The x values of a run's plots and their title; iterations stand in when ``axis`` was not logged."""
    values = run.column(axis)
    return (values, axis.replace("_", " ")) if np.isfinite(values).all() else (run.column("iteration"), "iteration")


def run_lines(
    run: RunRecord,
    series: Sequence[Series],
    y_title: str,
    *,
    x: str = "iteration",
    points: Sequence[Series] = (),
    smoothed: bool = True,
    log: bool = False,
    from_zero: bool = False,
) -> Figure | None:
    """Logged values as faint lines with their smoothed course, sparse ones (``points``) with markers.

    ``smoothed=False`` is for what does not scatter: a trailing mean would only lag behind it.

    None when the run logged none of them.
    """
    across, x_title = horizontal(run, x)
    window = smoothing_window(len(run)) if smoothed else 1
    traces = []
    for name, label, color in series:
        values = run.column(name)
        if not np.isfinite(values).any():
            continue
        if window > 1:
            faint = {"showlegend": False, "hoverinfo": "skip", "line": {"color": with_alpha(color, 0.25), "width": 1}}
            traces.append(line(across, values, label, color, **faint))
        traces.append(line(across, _course(values, window, log=log), label, color))
    for name, label, color in points:
        values = run.column(name)
        known = np.isfinite(values)
        if known.any():
            style = {"mode": "lines+markers", "line": {"color": color, "width": 1, "dash": "dot"}}
            traces.append(line(across[known], values[known], label, color, **style))
    if not traces:
        return None
    figure_layout = layout(x_title, y_title, log=log, from_zero=from_zero)
    figure_layout["showlegend"] = len(traces) > 1
    return {"data": traces, "layout": figure_layout}


def _course(values: NDArray[np.float64], window: int, *, log: bool) -> NDArray[np.float64]:
    """Smoothed values; on a logarithmic axis the geometric mean, or single spikes would hide the rest."""
    if not log:
        return smooth(values, window)
    known = np.log(values, out=np.full(len(values), np.nan), where=values > 0)
    return np.exp(smooth(known, window))


def drift_lines(drift: Sequence[DriftRecord], name: str, y_title: str) -> Figure | None:
    """ESS fraction or KL against age in the latest record, with an earlier one for comparison."""
    latest = [record for record in drift if record.bins]
    if not latest:
        return None
    traces = []
    chosen = {latest[len(latest) // 2].iteration: SKY, latest[-1].iteration: BLUE}
    for record in latest:
        if record.iteration not in chosen:
            continue
        color = chosen.pop(record.iteration)
        age = np.array([(b.age_low + b.age_high) / 2 for b in record.bins])
        values = np.array([getattr(b, name) for b in record.bins])
        told = [f"age {b.age_low:g} to {b.age_high:g}, n = {b.n:g}" for b in record.bins]
        style = {"mode": "lines+markers", "text": told, "hovertemplate": "%{y:.3f} (%{text})"}
        traces.append(line(age, values, f"iteration {record.iteration}", color, **style))
        if name == "ess_fraction":
            bound = np.exp(-np.array([b.kl for b in record.bins]))
            dotted: dict[str, Any] = {"mode": "lines", "line": {"color": color, "width": 1, "dash": "dot"}}
            dotted["showlegend"] = not chosen  # once, for the latest
            traces.append(line(age, bound, "bound exp(−KL)", color, **dotted))
    figure_layout = layout("age of the trajectory, in updates", y_title, from_zero=name == "ess_fraction")
    figure_layout["hovermode"] = "closest"
    return {"data": traces, "layout": figure_layout}


def drift_map(drift: Sequence[DriftRecord], name: str, title: str) -> Figure | None:
    """A measured quantity over iterations (across) and age (up), as a heat map; None for fewer than two records."""
    known = [record for record in drift if record.bins]
    if len(known) < 2:
        return None
    edges = _age_edges(known)
    centers = (edges[1:] + edges[:-1]) / 2
    cells = np.full((len(centers), len(known)), np.nan)
    for column, record in enumerate(known):
        low = np.array([b.age_low for b in record.bins])
        values = np.array([getattr(b, name) for b in record.bins])
        # A bin reaches to the next one: ages are whole numbers, so [1, 3] and [4, 7] leave no gap.
        inside = (centers >= low[0]) & (centers <= record.bins[-1].age_high + 1)
        cells[inside, column] = values[np.searchsorted(low, centers[inside], side="right") - 1]
    trace = {
        "type": "heatmap",
        "x": [record.iteration for record in known],
        "y": plain(edges),
        "z": [plain(row) for row in cells],
        "colorscale": "Cividis",
        "zmin": 0,
        "colorbar": {"title": {"text": title, "side": "right"}, "thickness": 12, "outlinewidth": 0},
        "hovertemplate": f"iteration %{{x}}, age %{{y}}: {title} %{{z:.3f}}<extra></extra>",
    }
    if name == "ess_fraction":
        trace["zmax"] = 1
    figure_layout = layout("iteration", "age, in updates", log=True)
    figure_layout |= {"hovermode": "closest", "showlegend": False}
    return {"data": [trace], "layout": figure_layout}


def _age_edges(records: Sequence[DriftRecord], most: int = 40) -> NDArray[np.float64]:
    """Rising cell edges > 0 over all ages seen: the bins' own, or steps of one ratio when there are too many."""
    lows = sorted({max(b.age_low, 0.5) for record in records for b in record.bins})
    top = max(lows[-1] + 1, *(b.age_high for record in records for b in record.bins))
    if len(lows) > most:
        return np.geomspace(lows[0], top, most + 1)
    return np.array([*lows, top], dtype=np.float64)
