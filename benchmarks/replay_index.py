"""One training step with exact freshness, index only, against the usual implementations and against a floor.

    python benchmarks/replay_index.py --quick
    python benchmarks/replay_index.py --json replay_index.json

A step draws a batch, computes its sampling weights (beta 0.4, toward uniform), updates the priorities of what
was drawn, and does whatever the system needs so that freshness is exact after the policy version has advanced
by one. Systems without freshness of their own get it as a competent user would add it: all priorities
recomputed in one vectorized pass and handed to the system's own public update. The update of the batch is part
of that pass, so it costs them nothing extra.

Every system runs a while in every round, so that a busy machine disturbs all alike; reported is the median time
of a step. A step that takes more than a second is timed twice and no more. The mean policy version of all that a
system drew is compared with the exact expectation: a fast index that draws something else is marked.

`make bench` runs it in an environment with all peers (benchmarks/requirements.txt). In any other environment the
peers that are missing are listed with the reason. Exit status 1 when a requirement is not met.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from replay_systems import (
    ALPHA,
    COMPILED,
    FLOOR,
    LIMITS,
    NEWEST,
    NUMPY,
    PEERS,
    PLAIN,
    SYSTEMS,
    TAU,
    Problem,
    System,
)

ITEMS, BATCHES = (10_000, 100_000, 1_000_000), (64, 256, 1024)
QUICK_ITEMS, QUICK_BATCHES = (10_000, 100_000), (256,)
SLOW = 1.0  # seconds a step, from which on two steps are enough
FASTER_THAN_PEERS, FASTER_THAN_PYTHON, SLOWER_THAN_FLOOR = 5.0, 200.0, 2.0  # required ratios
LARGE, LARGEST = 100_000, 1_000_000  # items, from which on they are
SIGMAS = 5.0  # of the check of what was drawn
# What a peer that is missing, broken or of another release raises.
NOT_LOADED = (ImportError, OSError, RuntimeError, AttributeError, TypeError)


@dataclass
class Result:
    """Times of one system with one batch size."""

    name: str
    batch: int
    reason: str = ""  # why it did not run
    times: list[float] = field(default_factory=list, repr=False)
    version_sum: float = 0.0
    drawn: int = 0

    @property
    def median(self) -> float:
        """Seconds a step."""
        return float(np.median(self.times)) if self.times else math.nan

    def run(self, system: System, problem: Problem, now: int) -> float:
        """One step; returns its seconds."""
        start = time.perf_counter()
        drawn = system.step(now, self.batch)
        self.times.append(time.perf_counter() - start)
        self.version_sum += float(problem.versions[drawn].sum())
        self.drawn += len(drawn)
        return self.times[-1]

    def deviation(self, problem: Problem) -> float:
        """How many standard errors the mean version of the drawn items lies from the exact expectation."""
        distribution = problem.distribution()
        mean = float(distribution @ problem.versions)
        spread = math.sqrt(float(distribution @ (problem.versions - mean) ** 2) / max(self.drawn, 1))
        return abs(self.version_sum / max(self.drawn, 1) - mean) / spread


class Course:
    """All systems over one problem. They are built once and run with every batch size."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.systems: dict[str, System] = {}
        self.reasons: dict[str, str] = {}
        self.now: dict[str, int] = {}
        for name, make in SYSTEMS.items():
            if problem.items > LIMITS.get(name, problem.items):
                self.reasons[name] = "left out at this size"
                continue
            try:
                self.systems[name] = make(problem)
            except NOT_LOADED as error:
                self.reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            self.now[name] = NEWEST

    def measure(self, batch: int, rounds: int, seconds: float) -> list[Result]:
        """Run every system for about ``seconds``, at least one step, in each of ``rounds`` rounds."""
        results = {name: Result(name, batch, self.reasons.get(name, "")) for name in SYSTEMS}
        quick = []
        for name in self.systems:
            first = self._step(results[name])
            if first < SLOW or self._step(results[name]) < SLOW:  # the first one may have compiled
                results[name] = Result(name, batch)
                quick.append(name)
        for _ in range(rounds):
            for name in quick:
                until = time.perf_counter() + seconds
                self._step(results[name])
                while time.perf_counter() < until:
                    self._step(results[name])
        return list(results.values())

    def _step(self, result: Result) -> float:
        self.now[result.name] += 1
        return result.run(self.systems[result.name], self.problem, self.now[result.name] - 1)


def releases() -> dict[str, str]:
    found = {}
    for name in ("freshper", "numba", *PEERS):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def report(results: list[Result], problem: Problem) -> list[dict[str, Any]]:
    """Print the table of one size and batch; returns it for the JSON file."""
    ours = next(result.median for result in results if result.name == NUMPY)
    print(f"\n{problem.items:,} items, batch {results[0].batch}, tau {TAU:g}, alpha {ALPHA}")
    print(f"{'system':<28}{'us per step':>14}{'x numpy':>12}{'steps':>8}  draws")
    rows = []
    for result in results:
        row: dict[str, Any] = {"name": result.name, "reason": result.reason}
        if result.reason:
            print(f"{result.name:<28}{'not run':>14}  {result.reason}")
        else:
            off = 0.0 if result.name == FLOOR else result.deviation(problem)
            draws = "as they should be" if off < SIGMAS else f"{off:.0f} standard errors off"
            print(
                f"{result.name:<28}{result.median * 1e6:>14,.1f}{result.median / ours:>12,.2f}{len(result.times):>8}  "
                f"{draws if result.name != FLOOR else 'uniform'}"
            )
            row |= {"microseconds": result.median * 1e6, "ratio": result.median / ours, "steps": len(result.times)}
            row |= {"standard_errors_off": off}
        rows.append(row)
    return rows


def verdict(results: list[Result], problem: Problem) -> dict[str, dict[str, Any]]:
    """The requirements at this size, each with the value that was found. What did not run proves nothing."""
    seconds = {result.name: result.median for result in results if result.times}
    checks: dict[str, tuple[float, bool]] = {}
    for result in results:
        if result.times and result.name in (NUMPY, COMPILED):
            off = result.deviation(problem)
            checks[f"{result.name}: standard errors off"] = (off, off < SIGMAS)
    if peers := [seconds[name] for name in PEERS if name in seconds]:
        ratio = min(peers) / seconds[NUMPY]
        checks["best peer / numpy"] = (ratio, ratio >= (FASTER_THAN_PEERS if problem.items >= LARGEST else 1))
    if problem.items >= LARGE:
        ratio = seconds[PLAIN] / seconds[NUMPY]
        checks["plain Python tree / numpy"] = (ratio, ratio >= FASTER_THAN_PYTHON)
    if problem.items >= LARGE and COMPILED in seconds and FLOOR in seconds:
        ratio = seconds[COMPILED] / seconds[FLOOR]
        checks["compiled / floor"] = (ratio, ratio <= SLOWER_THAN_FLOOR)
    for name, (value, holds) in checks.items():
        print(f"  {name}: {value:.2f}{'' if holds else '   NOT MET'}")
    return {name: {"value": value, "holds": bool(holds)} for name, (value, holds) in checks.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ITEMS} items and batches of {QUICK_BATCHES}")
    parser.add_argument("--items", type=int, nargs="+", help=f"default {ITEMS}")
    parser.add_argument("--batch", type=int, nargs="+", help=f"default {BATCHES}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.1, help="of every system in every round")
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    items, batches = (QUICK_ITEMS, QUICK_BATCHES) if arguments.quick else (ITEMS, BATCHES)
    courses = []
    for size in arguments.items or items:
        course = Course(Problem.make(size))
        for batch in arguments.batch or batches:
            results = course.measure(batch, arguments.rounds, arguments.seconds)
            rows = report(results, course.problem)
            checks = verdict(results, course.problem)
            courses.append({"items": size, "batch": batch, "systems": rows, "requirements": checks})
    if arguments.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__}
        result = {"machine": machine, "releases": releases(), "rounds": arguments.rounds, "courses": courses}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(not all(check["holds"] for course in courses for check in course["requirements"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
