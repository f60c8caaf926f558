"""How numbers are written, and smoothing against a slow reference."""

import math

import numpy as np
import pytest

from freshper.reports.statistics import Interval
from freshper.reports.style import arm_colors, plain, smooth, with_alpha
from freshper.reports.text import bounds, count, duration, number, plural, short_count, significant, sparkline

NAN = math.nan


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (number(0.4805), "0.480"),
        (number(-2.5, 1), "−2.5"),
        (number(2.5, 1, sign=True), "+2.5"),
        (number(NAN), "–"),
        (number(-math.inf), "−∞"),
        (significant(0.00012), "1.20e−04"),
        (significant(-0.1), "−0.1"),
        (significant(10.9), "10.9"),
        (significant(123456.0), "123,456"),
        (count(4800.0), "4,800"),
        (short_count(950), "950"),
        (short_count(12_340), "12.3k"),
        (short_count(375_000), "375k"),
        (short_count(4.6e6), "4.6M"),
        (short_count(NAN), "–"),
        (plural(1, "turn"), "1 turn"),
        (plural(1200, "turn"), "1,200 turns"),
        (duration(63.4), "1:03"),
        (duration(3725), "1:02:05"),
        (duration(NAN), "–"),
        (bounds(Interval(1, 0.5, 1.5, 4)), "[0.500, 1.500]"),
        (bounds(Interval(1, NAN, NAN, 1)), "one seed"),
        (bounds(Interval(NAN, NAN, NAN, 0)), ""),
        (sparkline([0, 0.5, 1, NAN]), "▁▅█"),
        (sparkline([0, 0, 1, 1, 1, 1], width=3), "▁██"),
        (sparkline([]), ""),
        (sparkline([-1, 9]), "▁█"),
    ],
)
def test_written(written, expected):
    assert written == expected


@pytest.mark.parametrize("window", [1, 3, 50])
def test_smoothing_against_a_loop(window):
    rng = np.random.default_rng(window)
    values = np.where(rng.random(40) < 0.3, np.nan, rng.normal(size=40))
    expected = []
    for place in range(40):
        known = [v for v in values[max(0, place - window + 1) : place + 1].tolist() if math.isfinite(v)]
        expected.append(sum(known) / len(known) if known else math.nan)
    assert smooth(values, window).tolist() == pytest.approx(expected, nan_ok=True)


def test_arms_keep_their_color_in_every_report():
    assert arm_colors(["freshper", "mine"])["freshper"] == arm_colors(["a", "b", "freshper"])["freshper"]
    few = arm_colors(["on-policy", "epochs", "uniform", "per", "freshper", "mine", "yours"])
    assert len(set(few.values())) == 7
    assert with_alpha("#0072b2", 0.5) == "rgba(0,114,178,0.5)"


def test_numbers_for_json():
    assert plain(np.array([1 / 3, NAN, np.inf, 12_345_678.0])) == [0.333333, None, None, 12345700.0]
