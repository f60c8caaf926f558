"""Run and compare folders, read from disk: files in, plain frozen records out."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.errors import RunFolderError

CONFIG_FILE = "config.toml"
METRICS_FILE = "metrics.jsonl"
DRIFT_FILE = "drift.jsonl"
SAMPLES_FILE = "samples.jsonl"
RESULT_FILE = "result.json"
COMPARE_FILE = "compare.json"
FINISHED, RUNNING, MISSING = "finished", "running", "missing"
STATUSES = (FINISHED, "interrupted", "failed")


@dataclass(frozen=True, slots=True)
class DriftBin:
    """What replay updates measured for one range of ages, in updates; nan where nothing was logged.

    ``kl`` is KL(current policy || behavior policy) per trajectory in nats, ``kl_reverse`` the other
    direction; ``ess_fraction`` lies in [0, 1]; ``n`` counts trajectories.
    """

    age_low: float
    age_high: float
    n: float
    ess_fraction: float
    kl: float
    kl_reverse: float
    clip_fraction: float
    ratio_max: float


@dataclass(frozen=True, slots=True)
class DriftRecord:
    """The drift of one logged iteration, bins ordered by age."""

    iteration: int
    bins: tuple[DriftBin, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RunRecord:
    """One training run as its folder tells it.

    ``metrics`` maps every logged name to a float64 array (N,), one value per logged iteration, nan where the
    name was absent. ``result`` is None while the run goes on (or when it was killed). ``torn`` names the
    files whose last line was cut off by a killed process and is left out.
    """

    path: Path
    config: dict[str, Any]
    metrics: dict[str, NDArray[np.float64]]
    drift: tuple[DriftRecord, ...]
    samples: tuple[dict[str, Any], ...]
    result: dict[str, Any] | None
    torn: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number N of logged iterations."""
        return len(self.metrics["iteration"])

    @property
    def task(self) -> str:
        """The task's name, "unknown" when the config does not say."""
        return self._setting("task")

    @property
    def arm(self) -> str:
        """The arm's name, "unknown" when the config does not say."""
        return self._setting("arm")

    @property
    def seed(self) -> str:
        """The seed as text, "unknown" when the config does not say."""
        return self._setting("seed")

    @property
    def status(self) -> str:
        """One of finished, interrupted, failed; running when there is no result yet."""
        return RUNNING if self.result is None else str(self.result["status"])

    @property
    def iterations(self) -> int:
        """The last logged iteration, 0 when there is none."""
        return int(self.metrics["iteration"][-1]) if len(self) else 0

    def column(self, name: str) -> NDArray[np.float64]:
        """One metric (N,), all nan when it was never logged."""
        found = self.metrics.get(name)
        return np.full(len(self), np.nan) if found is None else found

    def has(self, prefix: str) -> bool:
        """Whether any metric whose name starts so holds a finite value."""
        return any(name.startswith(prefix) and np.isfinite(v).any() for name, v in self.metrics.items())

    def outcome(self, group: str, name: str) -> float:
        """A number of result.json, such as ``outcome("warm_start", "sampled_success")``; nan when absent."""
        table = (self.result or {}).get(group)
        value = table.get(name) if isinstance(table, dict) else None
        return float(value) if isinstance(value, int | float) else math.nan

    def _setting(self, name: str) -> str:
        table = self.config.get("run")
        return str(table.get(name, "unknown")) if isinstance(table, dict) else "unknown"


@dataclass(frozen=True, slots=True, eq=False)
class CompareRecord:
    """A comparison: the runs that exist by (arm, seed), and the pairs that have no run folder yet."""

    path: Path
    task: str
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    command: str
    runs: dict[tuple[str, int], RunRecord]
    missing: tuple[tuple[str, int], ...]


def is_compare(path: Path) -> bool:
    """Whether the folder holds a comparison (it has a compare.json)."""
    return (path / COMPARE_FILE).is_file()


def read_run(path: Path) -> RunRecord:
    """Read a run folder, also while its run is going on.

    Raises :class:`RunFolderError` when the folder is no run folder or a file in it is broken. Only a torn
    last line is left out: a killed process leaves one.
    """
    path = Path(path)
    if not path.is_dir():
        raise RunFolderError(f"{path} is not a folder, so there is no run to report")
    if not (path / CONFIG_FILE).is_file():
        raise RunFolderError(f"{path} has no {CONFIG_FILE}, so it is not a run folder")
    torn: list[str] = []
    lines = _read_jsonl(path / METRICS_FILE, torn)
    return RunRecord(
        path=path,
        config=_read_config(path / CONFIG_FILE),
        metrics=_columns(path / METRICS_FILE, lines),
        drift=tuple(_drift(path / DRIFT_FILE, n, line) for n, line in _read_jsonl(path / DRIFT_FILE, torn)),
        samples=tuple(_sample(path / SAMPLES_FILE, n, s) for n, s in _read_jsonl(path / SAMPLES_FILE, torn)),
        result=_read_result(path / RESULT_FILE),
        torn=tuple(torn),
    )


def read_compare(path: Path) -> CompareRecord:
    """Read a compare folder and every run in it; pairs without a run folder are listed in ``missing``.

    Raises :class:`RunFolderError` when compare.json is absent or broken, or a run in it is.
    """
    path = Path(path)
    if not is_compare(path):
        raise RunFolderError(f"{path} has no {COMPARE_FILE}, so it is not a compare folder")
    file = path / COMPARE_FILE
    plan = _read_json(file)
    arms, seeds = plan.get("arms"), plan.get("seeds")
    if not (isinstance(arms, list) and arms and all(isinstance(arm, str) for arm in arms)):
        raise RunFolderError(f"{file}: arms is {arms!r}, expected a list of names; nothing can be compared")
    if not (isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds)):
        raise RunFolderError(f"{file}: seeds is {seeds!r}, expected a list of integers; nothing can be compared")
    runs: dict[tuple[str, int], RunRecord] = {}
    missing: list[tuple[str, int]] = []
    for pair in [(arm, seed) for arm in arms for seed in seeds]:
        folder = path / pair[0] / f"seed{pair[1]}"
        if (folder / CONFIG_FILE).is_file():
            runs[pair] = read_run(folder)
        else:
            missing.append(pair)
    return CompareRecord(
        path=path,
        task=str(plan.get("task", "unknown")),
        arms=tuple(arms),
        seeds=tuple(seeds),
        command=str(plan.get("command", "")),
        runs=runs,
        missing=tuple(missing),
    )


def read_status(file: Path) -> str | None:
    """The status in a result.json, None while there is no such file.

    Raises :class:`RunFolderError` when the file is broken or its status is none of the known ones.
    """
    result = _read_result(file)
    return None if result is None else str(result["status"])


def _read_config(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # both a TOML error and a decoding error are ValueErrors
        raise RunFolderError(f"{file} is not valid TOML ({error}); the run cannot be named") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise RunFolderError(f"{file} is not valid JSON ({error}); it cannot be reported") from error
    if not isinstance(value, dict):
        raise RunFolderError(f"{file} holds {type(value).__name__}, expected an object; it cannot be reported")
    return value


def _read_result(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    result = _read_json(file)
    if result.get("status") not in STATUSES:
        known = ", ".join(STATUSES)
        raise RunFolderError(f"{file}: status {result.get('status')!r} is none of {known}; is the run complete?")
    return result


def _read_jsonl(file: Path, torn: list[str]) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line; a torn last line is left out and the file's name noted in torn."""
    if not file.is_file():
        return []
    numbered = [(n, line) for n, line in enumerate(file.read_bytes().split(b"\n"), 1) if line.strip()]
    objects: list[tuple[int, dict[str, Any]]] = []
    for number, line in numbered:
        try:
            value = json.loads(line)
        except ValueError as error:
            if number == numbered[-1][0]:
                torn.append(file.name)
                break
            raise RunFolderError(f"{file}:{number}: broken line ({error}); only the last may be torn") from error
        if not isinstance(value, dict):
            raise RunFolderError(f"{file}:{number}: {type(value).__name__} where an object is expected")
        objects.append((number, value))
    return objects


def _number(value: object, where: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, int | float):
        return float(value)
    raise RunFolderError(f"{where} is {value!r}, expected a number; the column cannot be read")


def _columns(file: Path, lines: list[tuple[int, dict[str, Any]]]) -> dict[str, NDArray[np.float64]]:
    columns: dict[str, NDArray[np.float64]] = {"iteration": np.full(len(lines), np.nan)}
    before = 0.0
    for row, (number, line) in enumerate(lines):
        for name, value in line.items():
            column = columns.setdefault(name, np.full(len(lines), np.nan))
            column[row] = _number(value, f"{file}:{number}: {name}")
        now = columns["iteration"][row]
        if not now > before:  # also catches nan, an absent iteration
            raise RunFolderError(f"{file}:{number}: iteration {now:g} does not follow {before:g}; curves would fold")
        before = now
    for column in columns.values():
        column.flags.writeable = False
    return columns


def _drift(file: Path, number: int, line: Mapping[str, Any]) -> DriftRecord:
    where = f"{file}:{number}"
    iteration, bins = line.get("iteration"), line.get("bins")
    if type(iteration) is not int or not isinstance(bins, list) or not all(isinstance(b, dict) for b in bins):
        raise RunFolderError(f"{where}: expected an integer iteration and a list of bins")
    fields = DriftBin.__dataclass_fields__
    read = [DriftBin(**{f: _number(b.get(f), f"{where}: bin {f}") for f in fields}) for b in bins]
    if any(math.isnan(b.age_low) or math.isnan(b.age_high) for b in read):
        raise RunFolderError(f"{where}: a bin has no age_low or age_high; it cannot be placed")
    return DriftRecord(iteration, tuple(sorted(read, key=lambda b: b.age_low)))


def _sample(file: Path, number: int, line: dict[str, Any]) -> dict[str, Any]:
    turns = line.get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise RunFolderError(f"{file}:{number}: turns is {type(turns).__name__}, expected a list of objects")
    return line
