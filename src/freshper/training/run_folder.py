"""A run's folder: who owns it, and everything that is written into it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from freshper.errors import RunFolderError, SnapshotError
from freshper.replay.diagnostics import DriftBin
from freshper.rollout.collect import Transcript
from freshper.training.config import TrainConfig
from freshper.training.config_file import make_config, merged, read_toml, write_toml
from freshper.training.folders import make_whole, mend, slug, sync
from freshper.training.loggers import Loggers, open_loggers

CONFIG, METRICS, RESULT, BUFFER = "config.toml", "metrics.jsonl", "result.json", "buffer"
GROWING = (METRICS, "samples.jsonl", "drift.jsonl")
FREE_TO_CHANGE = (
    "run.iterations",
    "run.folder",
    "env.timeout",
    "checkpoint.every",
    "eval.patience",
    "log.",
    "guard.",
    "optimizer.learning_rate",
)
"""Settings that a resumed run may have changed: what does not decide an iteration, and what an ill run is helped by."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Where a run was written, how it ended ("finished" or "interrupted"), and what result.json holds."""

    folder: Path
    status: str
    facts: dict[str, Any]


def choose_folder(config: TrainConfig, base: Path = Path("runs")) -> Path:
    """The folder of a new run: the one that is set, or the first free runs/TASK-ARM-sSEED.

    Free is also what was left by a run that failed before its first iteration.
    """
    if config.run.folder:
        return Path(config.run.folder)
    name = f"{slug(config.run.task)}-{config.run.arm}-s{config.run.seed}"
    folder, number = base / name, 2
    while folder.exists() and not _is_left_over(folder):
        folder, number = base / f"{name}-{number}", number + 1
    return folder


def _is_left_over(path: Path) -> bool:
    """Whether a run has begun here, has ended, and has not come to a first iteration."""
    try:
        began = (path / CONFIG).exists() and (path / METRICS).stat().st_size == 0
    except OSError:
        return False
    return began and (path / RESULT).exists() and not is_in_use(path)


def is_in_use(path: Path) -> bool:
    """Whether a run is being written to the folder at this moment."""
    try:
        with (path / ".lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no folder, no lock, or nothing that we could write to
        return False
    return False


class RunFolder:
    """Opens a folder for one run, and writes its config, metrics, samples, models and result.

    With ``resume`` it opens the folder of a run that has ended or was killed, changes nothing in it, and waits for
    :meth:`go_back`. Raises :class:`RunFolderError` when another process writes to the folder, when a run is in it
    already, and, to resume, when there is none or its settings are others.
    """

    def __init__(self, path: Path, config: TrainConfig, *, resume: bool = False) -> None:
        self.path = path
        self.failures = 0  # models that could not be saved
        self.config = config
        self._lock = _locked(path, make=not resume)
        self._metrics: IO[str] | None = None
        self._loggers: Loggers | None = None
        opened = False
        try:
            if resume:
                check_resumable(path, config)
            elif (path / METRICS).exists() and (path / METRICS).stat().st_size:
                raise RunFolderError(
                    f"{path} holds a run already: choose another with --run.folder, delete it, or go on with --resume"
                )
            else:
                # Of a run that failed before its first iteration.
                shutil.rmtree(path / BUFFER, ignore_errors=True)
                (path / RESULT).unlink(missing_ok=True)
                write_toml(config, path / CONFIG)
                self._begin("w", resumed_at=0)
            opened = True
        finally:
            if not opened:
                self._lock.close()

    def _begin(self, mode: str, *, resumed_at: int) -> None:
        """Open what rows go to."""
        self._loggers = open_loggers(
            self.config.log,
            self.path,
            name=self.path.resolve().name,
            hyperparameters=self.config.model_dump(),
            resumed_at=resumed_at,
        )
        self._metrics = (self.path / METRICS).open(mode, encoding="utf-8")

    @property
    def is_finished(self) -> bool:
        """Whether result.json says that the run has come to its end."""
        try:
            result = json.loads((self.path / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # there is none, or nothing that could be believed
            return False
        return isinstance(result, dict) and result.get("status") == "finished"

    def positions(self) -> dict[str, int]:
        """How many bytes stand in every file that grows, all of them durable: what :meth:`go_back` returns to."""
        if self._metrics is not None:
            self._metrics.flush()
        sizes = {}
        for name in GROWING:
            path = self.path / name
            sizes[name] = path.stat().st_size if path.exists() else 0
            if sizes[name]:
                sync(path)
        return sizes

    def go_back(self, positions: Mapping[str, int], iteration: int) -> None:
        """Cut off what a resumed run will write again after ``iteration``, and begin to write.

        Raises :class:`SnapshotError` when a file is shorter than it was, before anything is cut.
        """
        sizes = {name: path.stat().st_size if (path := self.path / name).exists() else 0 for name in GROWING}
        for name, size in positions.items():
            if sizes[name] < size:
                raise SnapshotError(
                    f"{self.path / name} has {sizes[name]} bytes, {size} stood in it at the checkpoint of iteration "
                    f"{iteration}: its lines are lost, and the run would go on with a gap"
                )
        (self.path / RESULT).unlink(missing_ok=True)  # from now on the run is going on
        write_toml(self.config, self.path / CONFIG)
        for name, size in positions.items():
            if sizes[name] > size:
                os.truncate(self.path / name, size)
        for model in ("best", "last"):
            mend(self.path / "model" / model)
        self._begin("a", resumed_at=max(1, iteration - 1))  # the row of ``iteration`` itself is written again

    def log(self, metrics: Mapping[str, float]) -> None:
        """Append one iteration to metrics.jsonl and the loggers. A number that is not finite is written as null."""
        if self._metrics is None or self._loggers is None:
            raise RunFolderError(f"{self.path} was opened to resume a run: it goes back to a checkpoint first")
        self._metrics.write(json.dumps(_finite(metrics)) + "\n")
        self._metrics.flush()
        self._loggers.log(metrics)

    def log_drift(self, iteration: int, bins: Sequence[DriftBin]) -> None:
        """Append the ESS and KL by age to drift.jsonl, with null likewise."""
        self._append("drift.jsonl", {"iteration": iteration, "bins": [_finite(asdict(one)) for one in bins]})

    def log_sample(self, iteration: int, source: str, transcript: Transcript) -> None:
        """Append one episode as text to samples.jsonl; its pictures become files in images/, named by their content."""
        facts: dict[str, Any] = asdict(transcript) | {"return": transcript.episode_return}
        for turn in facts["turns"]:
            turn["images"] = [self._keep_image(image) for image in turn["images"]]
        facts["final_images"] = [self._keep_image(image) for image in facts["final_images"]]
        self._append("samples.jsonl", {"iteration": iteration, "source": source} | facts)

    def _keep_image(self, image: bytes) -> str:
        """The file in the run folder that holds the picture."""
        name = f"images/{hashlib.sha256(image).hexdigest()[:32]}.png"
        file = self.path / name
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            temporary = file.with_suffix(".tmp")
            temporary.write_bytes(image)
            temporary.replace(file)
        return name

    def save_model(self, name: str, save: Callable[[Path], None]) -> bool:
        """Let ``save`` fill the folder model/``name``, whole or not at all; returns whether that went well.

        When the disk is full a warning says so, each time, and the old one stays.
        """
        try:
            make_whole(self.path / "model" / name, save)
        except (OSError, SafetensorError) as error:  # the second one is what safetensors makes of a full disk
            self.failures += 1
            warnings.warn(
                f"the {name} policy could not be written to {self.path / 'model' / name} ({error}): what stood there "
                "before stays, and the run goes on",
                stacklevel=2,
            )
            return False
        return True

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write result.json and close everything; the run is over."""
        losses = self._close_rows(str(result["status"]))
        for loss in losses:
            warnings.warn(loss, stacklevel=2)
        temporary = self.path / f".{RESULT}.tmp"
        temporary.write_text(
            json.dumps(dict(result) | ({"losses": losses} if losses else {}), indent=2) + "\n", encoding="utf-8"
        )
        os.replace(temporary, self.path / RESULT)
        self.close()

    def close(self) -> None:
        """Close the files and let go of the folder."""
        self._close_rows("failed")
        self._lock.close()

    def _close_rows(self, status: str) -> list[str]:
        """Close what rows go to; sentences on what was lost on the way."""
        metrics, loggers = self._metrics, self._loggers
        self._metrics = self._loggers = None
        if metrics is not None:
            metrics.close()
        return [] if loggers is None else loggers.close(status)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def __enter__(self) -> RunFolder:
        """Nothing to do: the folder is open."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the folder."""
        self.close()


def _finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """JSON knows neither NaN nor infinity."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def _locked(path: Path, *, make: bool) -> IO[str]:
    """The lock of a run folder, which is made when it may be."""
    try:
        if make:
            path.mkdir(parents=True, exist_ok=True)
        elif not (path / CONFIG).exists():
            raise RunFolderError(f"{path} holds no run that could be resumed: there is no {CONFIG} in it")
        lock = (path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise RunFolderError(f"{path} is in use by another run: choose another with --run.folder") from None
        return lock
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(f"cannot make the run folder {path}: {error.strerror or error}") from None


def check_resumable(path: Path, config: TrainConfig) -> None:
    """Raise :class:`RunFolderError` where the run in the folder was made with other settings."""
    check_same(path, read_toml(path / CONFIG), config)


def check_same(path: Path, settings: Mapping[str, Any], config: TrainConfig) -> None:
    """Raise :class:`RunFolderError` where ``config`` differs from ``settings`` in what must not change."""
    there = make_config(merged(settings, {"run": {"folder": config.run.folder}}))
    if config.run.iterations < there.run.iterations:
        raise RunFolderError(
            f"{path} holds a run of {there.run.iterations} iterations: run.iterations can grow, but not become "
            f"{config.run.iterations}"
        )
    for difference in differences(there.model_dump(), config.model_dump()):
        name = difference.partition(" ")[0]
        if not name.startswith(FREE_TO_CHANGE):
            raise RunFolderError(
                f"{path} holds a run with other settings ({difference}): a resumed run keeps them, but for "
                f"{', '.join(FREE_TO_CHANGE)}"
            )


def differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """What differs between two nested settings, in words."""
    for name, value in here.items():
        other = there[name]
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from differences(other, value, f"{prefix}{name}.")
        elif value != other:
            yield f"{prefix}{name} was {other}, now {value}"
