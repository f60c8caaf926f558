"""What a run and a comparison come to: final values, areas, bootstrap intervals, paired differences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freshper.reports.run_folder import FINISHED, MISSING, CompareRecord, RunRecord

FINAL_SHARE = 0.14  # the last 21 of 150 iterations: long enough to average out a batch, short enough to be "final"
BASELINE = "on-policy"
CONFIDENCE = 0.95
RESAMPLES = 10_000
BOOTSTRAP_SEED = 0  # the same values give the same interval, in every report

METRICS = {
    "final_score": "final score",
    "final_success": "final success",
    "auc_score": "score AUC",
    "heldout_success": "held-out success",
    "heldout_greedy": "held-out success, greedy",
}
"""Every compared quantity and how it is written out; all are better when larger.

AUC: area under the curve of score over episodes, divided by the span of episodes. Held-out success is that of
sampled replies unless it says greedy.
"""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over ``n`` values and its bootstrap interval; ``low`` and ``high`` are nan when n < 2."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The numbers of one run; ``values`` has every name of METRICS, nan where the run did not log it."""

    values: dict[str, float]
    iterations: int
    episodes: float
    policy_version: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """The finished runs of one arm by seed, and the mean and interval of every metric over the seeds."""

    arm: str
    runs: dict[int, RunSummary]
    intervals: dict[str, Interval]
    episodes: Interval
    policy_version: Interval

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the finished runs."""
        return tuple(self.runs)


@dataclass(frozen=True, slots=True)
class Difference:
    """arm − baseline for one metric, paired by seed; ``in_favor`` counts seeds where the arm is larger."""

    arm: str
    metric: str
    values: dict[int, float]
    interval: Interval
    in_favor: int


@dataclass(frozen=True, slots=True)
class IncompleteRun:
    """A run that does not count: it is missing, still running, interrupted or failed."""

    arm: str
    seed: int
    status: str
    iterations: int


@dataclass(frozen=True, slots=True)
class CompareSummary:
    """A comparison in numbers. Only finished runs enter; the others stand in ``incomplete``."""

    task: str
    command: str
    seeds: tuple[int, ...]
    arms: tuple[ArmSummary, ...]
    baseline: str
    differences: tuple[Difference, ...]
    incomplete: tuple[IncompleteRun, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know before trusting the table, one sentence each."""
        notes = []
        if self.incomplete:
            listed = ", ".join(
                f"{run.arm} seed {run.seed} ({run.status}, iteration {run.iterations})" for run in self.incomplete
            )
            notes.append(f"Not finished, hence not counted: {listed}.")
        single = [arm.arm for arm in self.arms if len(arm.runs) == 1]
        if single:
            notes.append(f"One seed only, hence no interval: {', '.join(single)}.")
        spent = {arm.arm: arm.episodes.mean for arm in self.arms if arm.runs}
        if len({round(value) for value in spent.values() if math.isfinite(value)}) > 1:
            each = ", ".join(f"{arm} {value:,.0f}" for arm, value in spent.items())
            notes.append(f"The arms consumed different numbers of episodes: {each}.")
        return tuple(notes)

    def difference(self, arm: str, metric: str) -> Difference | None:
        """The paired difference of an arm, None for the baseline itself."""
        return next((d for d in self.differences if d.arm == arm and d.metric == metric), None)


def final_window(iterations: int) -> int:
    """How many iterations at the end count as final."""
    return max(1, round(FINAL_SHARE * iterations))


def final_mean(values: NDArray[np.float64]) -> float:
    """Mean of the finite values in the final window of (N,) values; nan when there is none."""
    window = values[-final_window(len(values)) :]
    window = window[np.isfinite(window)]
    return float(window.mean()) if window.size else math.nan


def area_under_curve(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Trapezoid area of y (N,) over x (N,) divided by the span of x, so in units of y.

    One point stands for itself; nan when there is none.
    """
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if not x.size:
        return math.nan
    span = float(x[-1] - x[0])
    if span <= 0:
        return float(y.mean())
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2) / span)


def last_value(values: NDArray[np.float64]) -> float:
    """The last finite value of (N,), nan when there is none."""
    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else math.nan


def bootstrap_interval(values: ArrayLike) -> Interval:
    """Mean of the finite values and the percentile bootstrap interval of that mean (95 %, 10,000 resamples).

    One value has no interval (nan); identical values have one of zero width.
    """
    data = np.asarray(values, dtype=np.float64).ravel()
    data = data[np.isfinite(data)]
    if not data.size:
        return Interval(math.nan, math.nan, math.nan, 0)
    if data.size == 1:
        return Interval(float(data[0]), math.nan, math.nan, 1)
    if data.min() == data.max():  # resampled means would differ by rounding
        return Interval(float(data[0]), float(data[0]), float(data[0]), data.size)
    low, high = _percentiles(data[None, :])
    return Interval(float(data.mean()), float(low[0]), float(high[0]), data.size)


def bootstrap_band(
    curves: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None, NDArray[np.float64] | None]:
    """Mean, low and high (G,) of curves (S, G) over S seeds, resampling whole curves; no band for one seed."""
    mean = curves.mean(axis=0)
    if len(curves) < 2:
        return mean, None, None
    low, high = _percentiles(np.ascontiguousarray(curves.T))
    return mean, low, high


def summarize_run(run: RunRecord) -> RunSummary:
    """The numbers of one run. Held-out values come from metrics.jsonl, else from result.json."""

    def heldout(name: str) -> float:
        logged = last_value(run.column(f"eval/{name}"))
        return logged if math.isfinite(logged) else run.outcome("eval", name)

    episodes = run.column("episodes")
    return RunSummary(
        values={
            "final_score": final_mean(run.column("rollout/score")),
            "final_success": final_mean(run.column("rollout/success")),
            "auc_score": area_under_curve(episodes, run.column("rollout/score")),
            "heldout_success": heldout("sampled_success"),
            "heldout_greedy": heldout("greedy_success"),
        },
        iterations=run.iterations,
        episodes=last_value(episodes),
        policy_version=last_value(run.column("policy_version")),
        seconds=_seconds(run),
    )


def summarize_compare(compare: CompareRecord) -> CompareSummary:
    """Every arm over its finished seeds, and the paired differences against the baseline.

    The baseline is "on-policy", or the first arm when the comparison has no such arm.
    """
    arms = []
    incomplete = []
    for arm in compare.arms:
        finished: dict[int, RunSummary] = {}
        for seed in compare.seeds:
            run = compare.runs.get((arm, seed))
            if run is not None and run.status == FINISHED:
                finished[seed] = summarize_run(run)
            else:
                status, iterations = (MISSING, 0) if run is None else (run.status, run.iterations)
                incomplete.append(IncompleteRun(arm, seed, status, iterations))
        arms.append(_summarize_arm(arm, finished))
    baseline = BASELINE if BASELINE in compare.arms else compare.arms[0]
    base = next(arm for arm in arms if arm.arm == baseline)
    differences = [_difference(a, base, metric) for a in arms if a is not base for metric in METRICS]
    return CompareSummary(
        task=compare.task,
        command=compare.command,
        seeds=compare.seeds,
        arms=tuple(arms),
        baseline=baseline,
        differences=tuple(differences),
        incomplete=tuple(incomplete),
    )


def _summarize_arm(arm: str, runs: dict[int, RunSummary]) -> ArmSummary:
    return ArmSummary(
        arm=arm,
        runs=runs,
        intervals={m: bootstrap_interval([run.values[m] for run in runs.values()]) for m in METRICS},
        episodes=bootstrap_interval([run.episodes for run in runs.values()]),
        policy_version=bootstrap_interval([run.policy_version for run in runs.values()]),
    )


def _difference(arm: ArmSummary, base: ArmSummary, metric: str) -> Difference:
    values = {}
    for seed in arm.runs.keys() & base.runs.keys():
        difference = arm.runs[seed].values[metric] - base.runs[seed].values[metric]
        if math.isfinite(difference):
            values[seed] = difference
    values = dict(sorted(values.items()))
    in_favor = sum(difference > 0 for difference in values.values())
    return Difference(arm.arm, metric, values, bootstrap_interval(list(values.values())), in_favor)


def _percentiles(data: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Low and high (G,) of the mean over the last axis of data (G, S); all rows share their resamples."""
    from scipy.stats import bootstrap

    interval = bootstrap(
        (data,),
        np.mean,
        axis=-1,
        n_resamples=RESAMPLES,
        batch=500,  # bounds memory: 500 resamples at a time
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(BOOTSTRAP_SEED),
    ).confidence_interval
    return np.asarray(interval.low, dtype=np.float64), np.asarray(interval.high, dtype=np.float64)


def _seconds(run: RunRecord) -> float:
    told = (run.result or {}).get("seconds")
    if isinstance(told, int | float):
        return float(told)
    spent = run.column("time/iteration_s")
    return float(np.nansum(spent)) if np.isfinite(spent).any() else math.nan
