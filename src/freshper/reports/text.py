"""Numbers as people read them: rounded values, intervals, durations, and a line of small bars."""

from __future__ import annotations

import math
from collections.abc import Sequence

from freshper.reports.statistics import Interval

NOTHING = "–"
_BARS = "▁▂▃▄▅▆▇█"


def number(value: float, digits: int = 3, *, sign: bool = False) -> str:
    """A rounded number, with a true minus sign; a dash for nan."""
    if not math.isfinite(value):
        return NOTHING if math.isnan(value) else ("∞" if value > 0 else "−∞")
    return f"{value:{'+' if sign else ''},.{digits}f}".replace("-", "−")


def significant(value: float) -> str:
    """A number of unknown size to three significant digits; a dash for nan."""
    if not math.isfinite(value):
        return number(value)
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}".replace("-", "−")
    return f"{value:.2e}".replace("-", "−") if abs(value) < 1e-3 else number(value, 0)


def count(value: float) -> str:
    """A whole number with thousands separators; a dash for nan."""
    return number(value, 0)


def plural(number_of: int, thing: str) -> str:
    """A count and its noun: 1 turn, 1,200 turns."""
    return f"{number_of:,} {thing}{'' if number_of == 1 else 's'}"


def short_count(value: float) -> str:
    """A large count in at most five characters: 950, 12.3k, 4.6M."""
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (math.inf, 1e9, "G")):
        if value < limit:
            return (
                f"{value / divisor:.0f}{unit}" if value / divisor >= 100 or not unit else f"{value / divisor:.1f}{unit}"
            )
    return number(value)


def bounds(interval: Interval, digits: int = 3, *, sign: bool = False) -> str:
    """The interval in brackets, or why there is none."""
    if interval.n == 0:
        return ""
    if interval.n == 1:
        return "one seed"
    return f"[{number(interval.low, digits, sign=sign)}, {number(interval.high, digits, sign=sign)}]"


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss; a dash for nan."""
    if not math.isfinite(seconds):
        return NOTHING
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float], width: int = 30, low: float = 0.0, high: float = 1.0) -> str:
    """All finite values as at most ``width`` bars between low and high; neighbors are averaged to fit."""
    known = [value for value in values if math.isfinite(value)]
    columns = min(width, len(known))
    bars = []
    for column in range(columns):
        part = known[column * len(known) // columns : (column + 1) * len(known) // columns]
        share = (sum(part) / len(part) - low) / (high - low)
        bars.append(_BARS[min(len(_BARS) - 1, max(0, int(share * len(_BARS))))])
    return "".join(bars)
