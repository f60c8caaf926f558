"""What all plots share: colors, layout, smoothing, and one line as plain plotly data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Okabe and Ito's palette: told apart with every common form of color blindness.
BLUE, ORANGE, GREEN, PINK, SKY, VERMILLION = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"
GRAY, BLACK = "#7a828e", "#1d2433"
_ARM_COLORS = {
    "on-policy": GRAY,
    "epochs": ORANGE,
    "uniform": SKY,
    "recency": PINK,
    "per": GREEN,
    "per-is": "#7fb39b",
    "freshper": BLUE,
    "freshper-is": "#5b7fb5",
}
_SPARE_COLORS = (VERMILLION, "#a6761d", "#6a51a3", BLACK, "#b3a100", "#8c2d04")
FEW_POINTS = 12  # below that a line hides how little there is, so the points are drawn


def arm_colors(arms: Sequence[str]) -> dict[str, str]:
    """A color for every arm: the well-known arms have the same one in every report."""
    spare = [arm for arm in arms if arm not in _ARM_COLORS]
    found = {arm: _SPARE_COLORS[i % len(_SPARE_COLORS)] for i, arm in enumerate(spare)}
    return {arm: _ARM_COLORS.get(arm, found.get(arm, GRAY)) for arm in arms}


def with_alpha(color: str, alpha: float) -> str:
    """The color #rrggbb with an opacity."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def smooth(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Mean of the finite values among the last ``window`` of (N,); nan where there is none. Looks back only."""
    known = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    number = np.concatenate([[0], np.cumsum(known)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    n = number[end] - number[start]
    return np.where(n > 0, (total[end] - total[start]) / np.maximum(n, 1), np.nan)


def smoothing_window(n: int) -> int:
    """A twentieth of the curve."""
    return max(1, round(n / 20))


def plain(values: NDArray[np.float64]) -> list[float | None]:
    """Six significant digits, None for what is not finite: what JSON can hold, at a tenth of the size."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def layout(x_title: str, y_title: str, *, log: bool = False, from_zero: bool = False) -> dict[str, Any]:
    """The look that all plots share. ``from_zero`` lets the y axis begin at 0."""
    axis = {"gridcolor": "#eceef2", "zerolinecolor": "#cfd4dc", "linecolor": "#cfd4dc", "ticks": "", "automargin": True}
    y_axis: dict[str, Any] = {**axis, "title": {"text": y_title}}
    if log:
        y_axis |= {"type": "log", "exponentformat": "power"}
    if from_zero:
        y_axis |= {"rangemode": "tozero"}
    return {
        "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, Liberation Sans, Arial", "size": 12},
        "margin": {"l": 52, "r": 14, "t": 26, "b": 42},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "x unified",
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12}},
        "xaxis": {**axis, "title": {"text": x_title}, "zeroline": False},
        "yaxis": y_axis,
    }


def line(x: NDArray[np.float64], y: NDArray[np.float64], label: str, color: str, **more: Any) -> dict[str, Any]:
    """One scatter trace; points are drawn when there are few of them."""
    few = np.isfinite(y).sum() < FEW_POINTS
    return {
        "type": "scatter",
        "mode": "lines+markers" if few else "lines",
        "name": escape(label),
        "x": plain(x),
        "y": plain(y),
        "line": {"color": color, "width": 2},
        "marker": {"size": 6},
        "connectgaps": True,
        **more,
    }
