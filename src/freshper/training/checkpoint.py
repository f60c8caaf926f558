"""Checkpoints of a whole run: one folder each, checked when read, the last few kept.

``checkpoints/000050/`` holds the state of the run after iteration 50: ``manifest.json`` with everything plain, and
the tensors in safetensors files. The trajectories are in the durable directory ``buffer/`` of the run, which is
written as the run goes on; the manifest names the mark to go back to. Format: see :mod:`state_files`.
"""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from freshper.errors import BufferLockedError, RunFolderError, SnapshotError
from freshper.replay.buffer import ReplayBuffer
from freshper.training.build import make_buffer
from freshper.training.config import TrainConfig
from freshper.training.folders import sync
from freshper.training.state_files import read_json, read_tensors, write_json, write_tensors

FORMAT = "freshper-checkpoint"
FORMAT_VERSION = 1
_LIBRARIES = ("freshper", "numpy", "torch", "transformers", "tokenizers", "peft")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run after ``iteration``, as it was given to :meth:`Checkpoints.save`."""

    path: Path
    iteration: int
    state: dict[str, Any]
    libraries: dict[str, str]


@dataclass(slots=True)
class _Unnamed:
    """A checkpoint that is written but not in its place yet, because the disk was full at that moment."""

    temporary: Path
    final: Path
    manifest: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run folder, and the buffer that belongs to them.

    A process may be killed at any moment: what is there afterwards is a whole checkpoint or none of that name. The
    newest ``checkpoint.keep`` stay.
    """

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        self.path = folder / "checkpoints"
        self.failures = 0
        self._buffer_path = folder / "buffer"
        self._config = config
        self._unnamed: _Unnamed | None = None

    def due(self, iteration: int, *, last: bool) -> bool:
        """Whether the settings ask for one after ``iteration``: every so often and after the last, or never."""
        every = self._config.checkpoint.every
        return every > 0 and (last or iteration % every == 0)

    def new_buffer(self) -> ReplayBuffer:
        """The empty buffer of a new run: on disk where there will be checkpoints and something is drawn from it.

        Raises :class:`MissingExtraError` where the libraries for that are not installed.
        """
        replay, mix = self._config.replay, self._config.mix
        durable = self._config.checkpoint.every > 0 and (replay.ratio > 0 or mix.share > 0 or mix.backfill)
        return make_buffer(self._config, self._buffer_path if durable else None)

    def save(self, iteration: int, state: dict[str, Any], buffer: ReplayBuffer) -> bool:
        """Keep ``state`` (tensors and plain values) and ``buffer``; returns whether that went well.

        A failure of the disk is told by a warning, each time, and counted in ``failures``: the last good checkpoint
        stays, and the run can go on.
        """
        try:
            self._save(iteration, state, buffer)
        except OSError as error:
            self.failures += 1
            newest = max(self._found(), default=None)
            left = "there is none to go back to" if newest is None else f"the one of iteration {newest} stays"
            warnings.warn(
                f"the checkpoint of iteration {iteration} could not be written to {self.path} "
                f"({error.strerror or error}), {left}; the run goes on, but what follows would be lost",
                stacklevel=2,
            )
            return False
        return True

    def newest(self) -> tuple[Checkpoint, ReplayBuffer]:
        """The newest whole checkpoint and its buffer; the buffer's directory goes back to that moment for good.

        A damaged one is named in a warning, and the one before it is taken. Raises :class:`RunFolderError` where
        there is none at all, :class:`SnapshotError` where all are damaged.
        """
        damage: list[str] = []
        for iteration in sorted(self._found(), reverse=True):
            try:
                found, mark = self._read(iteration)
                buffer = self._load_buffer(mark)
            except SnapshotError as error:
                damage.append(str(error))
                continue
            for what in damage:
                warnings.warn(f"{what}; going back to the checkpoint of iteration {iteration}", stacklevel=2)
            for leftover in self.path.glob(".*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            self._let_old_go(iteration)  # a run that is killed between two renames leaves one too many
            return found, buffer
        if damage:
            raise SnapshotError(f"no checkpoint in {self.path} is whole: {'; '.join(damage)}")
        raise RunFolderError(
            f"{self.path.parent} holds no checkpoint to resume from: none was written before the run ended "
            f"(checkpoint.every is {self._config.checkpoint.every}). Start it anew in another folder"
        )

    def _found(self) -> list[int]:
        """The iterations of all checkpoints that are in their place."""
        return [int(path.name) for path in self.path.glob("[0-9]*") if path.name.isdecimal()]

    def _place(self, iteration: int) -> Path:
        return self.path / f"{iteration:06d}"

    def _save(self, iteration: int, state: dict[str, Any], buffer: ReplayBuffer) -> None:
        if self._unnamed is not None:
            # Its mark is the buffer's newest. Another one on top, and the marks of the good checkpoints would go.
            self._publish(self._unnamed)
        final = self._place(iteration)
        temporary = final.with_name(f".{final.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        done = False
        try:
            temporary.mkdir(parents=True)
            tree, files = write_tensors(temporary, state)
            mark = buffer.checkpoint() if self._buffer_path.exists() else None
            done = True
        finally:
            if not done:
                shutil.rmtree(temporary, ignore_errors=True)  # gives the space back to the run
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "iteration": iteration,
            "buffer_mark": mark,
            "libraries": installed_libraries(),
            "files": files,
            "state": tree,
        }
        self._unnamed = _Unnamed(temporary, final, manifest)
        self._publish(self._unnamed)

    def _publish(self, written: _Unnamed) -> None:
        """Give a written checkpoint its manifest and its name, and let the oldest go."""
        write_json(written.temporary / "manifest.json", written.manifest)
        sync(written.temporary)
        if written.final.exists():
            shutil.rmtree(written.final)  # a damaged one, which this run has gone back behind
        written.temporary.rename(written.final)
        self._unnamed = None
        sync(self.path)
        newest = written.manifest["iteration"]
        for iteration in [other for other in self._found() if other > newest]:  # damaged ones
            shutil.rmtree(self._place(iteration), ignore_errors=True)
        self._let_old_go(newest)

    def _let_old_go(self, newest: int) -> None:
        """Keep the last checkpoints up to ``newest``, as many as are asked for."""
        old = sorted(iteration for iteration in self._found() if iteration <= newest)[: -self._config.checkpoint.keep]
        for iteration in old:
            shutil.rmtree(self._place(iteration), ignore_errors=True)

    def _read(self, iteration: int) -> tuple[Checkpoint, str | None]:
        """A checkpoint and the mark of its buffer. Raises :class:`SnapshotError` when anything is wrong with it."""
        path = self._place(iteration)
        manifest = read_json(path / "manifest.json")
        if (manifest.get("format"), manifest.get("format_version")) != (FORMAT, FORMAT_VERSION):
            raise SnapshotError(
                f"{path} has format {manifest.get('format')} {manifest.get('format_version')}; this version reads "
                f"{FORMAT} {FORMAT_VERSION}"
            )
        state = read_tensors(path, manifest["state"], manifest["files"])
        return Checkpoint(path, iteration, state, manifest["libraries"]), manifest["buffer_mark"]

    def _load_buffer(self, mark: str | None) -> ReplayBuffer:
        if mark is None:
            return make_buffer(self._config)
        storage = self._config.storage
        spill = self._buffer_path.with_name("spilled") if storage.ram_bytes else None
        try:
            return ReplayBuffer.load(
                self._buffer_path,
                mark=mark,
                fsync="checkpoint",
                ram_bytes=storage.ram_bytes or None,
                spill_directory=spill,
            )
        except BufferLockedError:
            raise
        except OSError as error:
            raise SnapshotError(f"cannot read the buffer in {self._buffer_path} ({error.strerror or error})") from None


def has_checkpoint(folder: Path) -> bool:
    """Whether a run folder holds anything to resume from, whole or not."""
    return any(path.name.isdecimal() for path in (folder / "checkpoints").glob("[0-9]*"))


def installed_libraries() -> dict[str, str]:
    """The versions of what decides the numbers of a run, as far as they are installed."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
