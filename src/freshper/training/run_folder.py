"""A run's folder: who owns it, and everything that is written into it."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from freshper.errors import RunFolderError
from freshper.replay.diagnostics import DriftBin
from freshper.rollout.collect import Transcript
from freshper.training.config import TrainConfig
from freshper.training.config_file import write_toml


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Where a run was written, how it ended ("finished" or "interrupted"), and what result.json holds."""

    folder: Path
    status: str
    facts: dict[str, Any]


def choose_folder(config: TrainConfig, base: Path = Path("runs")) -> Path:
    """The folder of a new run: the one that is set, or the first free runs/TASK-ARM-sSEED."""
    if config.run.folder:
        return Path(config.run.folder)
    name = f"{config.run.task}-{config.run.arm}-s{config.run.seed}"
    folder, number = base / name, 2
    while folder.exists():
        folder, number = base / f"{name}-{number}", number + 1
    return folder


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

    Raises :class:`RunFolderError` when another process writes to it, or when a run is in it already.
    """

    def __init__(self, path: Path, config: TrainConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise RunFolderError(f"{path} is in use by another run: choose another with --run.folder") from None
        except OSError as error:
            raise RunFolderError(f"cannot make the run folder {path}: {error.strerror or error}") from None
        if (path / "metrics.jsonl").exists():
            self._lock.close()
            raise RunFolderError(f"{path} holds a run already: choose another with --run.folder, or delete it")
        write_toml(config, path / "config.toml")
        self._metrics: IO[str] = (path / "metrics.jsonl").open("w", encoding="utf-8")
        self._tensorboard: Any = SummaryWriter(str(path / "tb"))

    def log(self, metrics: Mapping[str, float]) -> None:
        """Append one iteration to metrics.jsonl and TensorBoard. A number that is not finite is written as null."""
        self._metrics.write(json.dumps(_finite(metrics)) + "\n")
        self._metrics.flush()
        for name, value in metrics.items():
            if name != "iteration":
                self._tensorboard.add_scalar(name, value, int(metrics["iteration"]))

    def log_drift(self, iteration: int, bins: Sequence[DriftBin]) -> None:
        """Append the ESS and KL by age to drift.jsonl, with null likewise."""
        self._append("drift.jsonl", {"iteration": iteration, "bins": [_finite(asdict(one)) for one in bins]})

    def log_sample(self, iteration: int, source: str, transcript: Transcript) -> None:
        """Append one episode as text to samples.jsonl."""
        facts = asdict(transcript) | {"return": transcript.episode_return}
        self._append("samples.jsonl", {"iteration": iteration, "source": source} | facts)

    def save_model(self, name: str, save: Callable[[Path], None]) -> None:
        """Let ``save`` fill the folder model/``name``, whole or not at all."""
        final = self.path / "model" / name
        temporary, old = final.with_name(f".{name}.tmp"), final.with_name(f".{name}.old")
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        save(temporary)
        if final.exists():
            final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old, ignore_errors=True)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write result.json and close everything; the run is over."""
        temporary = self.path / ".result.json.tmp"
        temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self.path / "result.json")
        self.close()

    def close(self) -> None:
        """Close the files and let go of the folder."""
        self._metrics.close()
        self._tensorboard.close()
        self._lock.close()

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
