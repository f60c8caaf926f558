"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, trackio, MLflow.

None of them may harm a run. Each works in a thread of its own, so a slow network delays no iteration, and what fails
there is counted: the first failure is a warning, and at the end every logger says how many rows it lost. Only a
logger that cannot even start is an error, at once, before anything long has begun.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from freshper.errors import ConfigError, FreshPERError, MissingExtraError, SnapshotError
from freshper.training.sections import LogConfig

IDENTITY_FILE = "loggers.json"
"""In the run folder: the names by which loggers know the run, so that a resumed run is continued there."""
_PATIENCE_SECONDS = 60.0  # at the end, for rows that are still under way
_BACKLOG = 10_000  # rows that may wait for a logger; a run is never held up, and memory stays bounded


class Logger(Protocol):
    """One destination of metrics. What its methods raise is counted as lost, and never ends the run."""

    where: str
    """Where people find the run, in a few words."""

    def log(self, row: Mapping[str, float]) -> None:
        """Take the numbers of one iteration; ``row["iteration"]`` tells which."""

    def close(self, status: str) -> None:
        """Deliver what is left; the run is "finished", "interrupted" or "failed"."""


class Loggers:
    """All loggers of a run. :func:`open_loggers` makes it."""

    def __init__(self, lines: Mapping[str, _Line]) -> None:
        self._lines = lines

    @property
    def places(self) -> list[str]:
        """Where people find the run, one entry a logger."""
        return [f"{name}: {line.logger.where}" for name, line in self._lines.items()]

    def log(self, row: Mapping[str, float]) -> None:
        """Hand one iteration to every logger; returns at once. Warns at the first failure of each."""
        for line in self._lines.values():
            line.send(dict(row))

    def close(self, status: str) -> list[str]:
        """Wait for what is under way, a minute at most, and close all; returns a sentence for each loss."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        return [loss for line in self._lines.values() for loss in line.close(status, deadline)]


class _Line:
    """A logger and the thread that it works in."""

    def __init__(self, name: str, start: Callable[[], Logger]) -> None:
        self.name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"freshper-{name}")
        self._waiting: deque[Future[None]] = deque()
        self._sent, self._lost, self._first = 0, 0, ""
        starting = self._thread.submit(start)
        error = starting.exception()
        if error is not None:
            self._thread.shutdown()
            if isinstance(error, FreshPERError):
                raise error
            raise ConfigError(
                f"log.{name} cannot start ({_told(error)}): leave log.{name} empty, or its metrics would be missing "
                "in silence"
            ) from error
        self.logger = starting.result()

    def send(self, row: Mapping[str, float]) -> None:
        self._sent += 1
        if len(self._waiting) < _BACKLOG:
            self._waiting.append(self._thread.submit(self.logger.log, row))
        else:
            self._lose(f"{_BACKLOG} rows wait for it already")
        self._look()

    def _look(self) -> None:
        """Count what has failed by now."""
        while self._waiting and self._waiting[0].done():
            error = self._waiting.popleft().exception()
            if error is not None:
                self._lose(_told(error))

    def _lose(self, reason: str) -> None:
        self._lost += 1
        if not self._first:
            self._first = reason
            warnings.warn(
                f"{self.name} lost a row of metrics ({reason}); the run goes on, and metrics.jsonl holds everything",
                stacklevel=5,
            )

    def close(self, status: str, deadline: float) -> list[str]:
        """End the thread; the sentences on what was lost."""
        closing = self._thread.submit(self.logger.close, status)
        wait([closing], timeout=max(0.0, deadline - time.monotonic()))
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._look()
        late = len(self._waiting)
        told = []
        if self._lost or late:
            first = f", the first because: {self._first}" if self._first else ""
            told.append(
                f"{self.name} lost {self._lost + late} of {self._sent} rows of metrics ({late} of them too late)"
                f"{first}; metrics.jsonl holds everything"
            )
        if closing.done() and not closing.cancelled() and (error := closing.exception()) is not None:
            told.append(f"{self.name} was not closed properly ({_told(error)}): its last rows may be missing")
        return told


def open_loggers(
    settings: LogConfig, folder: Path, *, name: str, hyperparameters: Mapping[str, Any], resumed_at: int = 0
) -> Loggers:
    """Start the loggers that ``settings`` asks for; libraries of others are not imported.

    Args:
        settings: which ones, and the project or experiment of each.
        folder: the run folder; event files go to its tb/, and loggers.json remembers the run's names.
        name: how people call the run.
        hyperparameters: the resolved settings, nested.
        resumed_at: iterations that a resumed run has behind it; the same run is continued, and a row that was sent
            before is not sent again. 0 is a new run.

    Raises:
        MissingExtraError: a logger's library is not installed; the extra is named.
        ConfigError: one cannot start, e.g. because nobody is logged in; those that had started are closed.
        SnapshotError: loggers.json of a resumed run is damaged.
    """
    check_loggers(settings)
    identity = _identity(folder, resumed=resumed_at > 0)
    starts: dict[str, Callable[[], Logger]] = {}
    if settings.tensorboard:
        starts["tensorboard"] = lambda: _TensorBoard(folder / "tb", resumed_at)
    if settings.wandb:
        starts["wandb"] = lambda: _Wandb(settings.wandb, folder, name, hyperparameters, identity)
    if settings.trackio:
        starts["trackio"] = lambda: _Trackio(settings.trackio, hyperparameters, identity)
    if settings.mlflow:
        starts["mlflow"] = lambda: _Mlflow(settings.mlflow, name, hyperparameters, identity)
    lines: dict[str, _Line] = {}
    try:
        for library, start in starts.items():
            lines[library] = _Line(library, start)
    except FreshPERError:
        Loggers(lines).close("failed")
        raise
    _remember(folder, identity)
    return Loggers(lines)


def check_loggers(settings: LogConfig) -> None:
    """Raise :class:`MissingExtraError` for a logger whose library is not installed; imports none."""
    for library, extra in (("tensorboard", "train"), ("wandb", "wandb"), ("trackio", "trackio"), ("mlflow", "mlflow")):
        if getattr(settings, library) and find_spec(library) is None:
            raise MissingExtraError(library, extra)


class _TensorBoard:
    """Event files in the run folder."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.where = f"tensorboard --logdir {folder}"
        # What an interrupted run wrote beyond its checkpoint is hidden: those iterations come again.
        self._writer: Any = SummaryWriter(str(folder), purge_step=resumed_at + 1 if resumed_at else None)

    def log(self, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name != "iteration":
                self._writer.add_scalar(name, value, int(row["iteration"]))

    def close(self, status: str) -> None:  # noqa: ARG002 - event files know no status
        self._writer.close()


class _Wandb:
    """Weights & Biases. ``WANDB_MODE=offline`` keeps everything in the run folder for `wandb sync`."""

    def __init__(
        self, project: str, folder: Path, name: str, hyperparameters: Mapping[str, Any], identity: Mapping[str, str]
    ) -> None:
        wandb: Any = import_module("wandb")
        self._run: Any = wandb.init(
            project=project,
            id=identity["id"],
            name=name,
            dir=str(folder),
            config=dict(hyperparameters),
            resume="allow",
            # Its own lines would break the live display, and what a terminal shows is nobody else's business.
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.where = f"{Path(self._run.dir).parent}, for `wandb sync`" if self._run.offline else self._run.url

    def log(self, row: Mapping[str, float]) -> None:
        if int(row["iteration"]) >= self._run.starting_step:  # below that, it was sent before the interruption
            self._run.log(dict(row), step=int(row["iteration"]))

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class _Trackio:
    """trackio: a local database, or a Hugging Face Space by ``TRACKIO_SPACE_ID``."""

    def __init__(self, project: str, hyperparameters: Mapping[str, Any], identity: Mapping[str, str]) -> None:
        trackio: Any = import_module("trackio")
        # It knows a run by its name alone, so the name has to be unique.
        self._run: Any = trackio.init(
            project=project,
            name=identity["id"],
            config=dict(hyperparameters),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.where = f"trackio show --project {project!r} (run {identity['id']})"

    def log(self, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=int(row["iteration"]))

    def close(self, status: str) -> None:  # noqa: ARG002 - nor does it
        self._run.finish()


class _Mlflow:
    """MLflow, at ``MLFLOW_TRACKING_URI`` or where the library puts it by default."""

    def __init__(
        self, experiment: str, name: str, hyperparameters: Mapping[str, Any], identity: dict[str, str]
    ) -> None:
        entities: Any = import_module("mlflow.entities")
        self._metric: Callable[..., Any] = entities.Metric
        self._client: Any = import_module("mlflow").MlflowClient()
        self._sent = 0  # the last iteration that arrived before the interruption
        if run_id := identity.get("mlflow"):
            self._run_id = run_id
            self._sent = int(self._client.get_run(run_id).data.metrics.get("iteration", 0))
            self._client.update_run(run_id, status="RUNNING")
        else:
            known = self._client.get_experiment_by_name(experiment)
            place = self._client.create_experiment(experiment) if known is None else known.experiment_id
            self._run_id = self._client.create_run(place, run_name=name).info.run_id
            identity["mlflow"] = self._run_id
            values = [entities.Param(path, str(value)[:6000]) for path, value in _flat(hyperparameters)]
            for first in range(0, len(values), 100):  # its limit
                self._client.log_batch(self._run_id, params=values[first : first + 100])
        self.where = f"run {self._run_id} of experiment {experiment!r} at {self._client.tracking_uri}"

    def log(self, row: Mapping[str, float]) -> None:
        iteration, now = int(row["iteration"]), int(time.time() * 1000)
        if iteration > self._sent:
            # Not every store of it can hold NaN or infinity.
            numbers = [self._metric(name, value, now, iteration) for name, value in row.items() if math.isfinite(value)]
            self._client.log_batch(self._run_id, metrics=numbers)

    def close(self, status: str) -> None:
        ends = {"finished": "FINISHED", "interrupted": "KILLED"}
        self._client.set_terminated(self._run_id, status=ends.get(status, "FAILED"))


def _identity(folder: Path, *, resumed: bool) -> dict[str, str]:
    """The run's names: of a resumed run those that it had, else new ones, unique in all the world."""
    path = folder / IDENTITY_FILE
    if resumed and path.exists():
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            if not all(isinstance(part, str) for part in (known["id"], *known.values())):
                raise TypeError("names are text")
            return dict(known)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SnapshotError(
                f"{path} is damaged ({type(error).__name__}: {error}): delete it, and loggers begin a new run"
            ) from None
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.resolve().name)[:80]
    return {"id": f"{readable}-{uuid.uuid4().hex[:8]}"}


def _remember(folder: Path, identity: Mapping[str, str]) -> None:
    temporary = folder / f".{IDENTITY_FILE}.tmp"
    temporary.write_text(json.dumps(identity) + "\n", encoding="utf-8")
    os.replace(temporary, folder / IDENTITY_FILE)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as dotted paths."""
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        flat += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]
    return flat


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:600]}"
