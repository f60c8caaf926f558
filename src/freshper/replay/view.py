"""What can be seen of a buffer: settings, sizes, probabilities, drift. Changes nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ConfigError, SnapshotError
from freshper.replay.auto_tau import TauChange
from freshper.replay.checks import checked_keys
from freshper.replay.core import BufferCore
from freshper.replay.diagnostics import DriftBin
from freshper.replay.draw.refresh import BackgroundRefresh
from freshper.replay.freshness import Freshness
from freshper.replay.priority import Priority
from freshper.replay.store.arena import Arena
from freshper.replay.store.arrivals import Unit
from freshper.replay.summary import summarize
from freshper.trajectory import Trajectory

_PORTION = 1024  # trajectories that are copied at once


class BufferView:
    """The part of a :class:`~freshper.replay.buffer.ReplayBuffer` that only looks."""

    _core: BufferCore
    _arena: Arena
    _lock: threading.RLock
    _closed: bool
    _interrupted: str
    _background: BackgroundRefresh | None

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Holds the lock of a buffer that has not been closed."""
        with self._lock:
            if self._closed:
                raise ConfigError("this buffer was closed: nothing can be done with it any more; load it again")
            if self._interrupted:
                raise SnapshotError(
                    f"{self._interrupted} arrived in the middle of a change of this buffer, which may be half done: "
                    "nothing more is read from it or written of it. Load what was saved"
                )
            yield

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """As :meth:`_open`, for what changes the buffer.

        An error leaves everything as it was. An interruption (Ctrl-C) may come between any two steps, and a buffer
        that is half changed must not be saved over a whole one.
        """
        with self._open():
            try:
                yield
            finally:
                kind = sys.exc_info()[0]
                if kind is not None and not issubclass(kind, Exception):
                    self._interrupted = kind.__name__

    def _refresh(self) -> None:
        """Bring a freshness that is no common factor up to date, unless a background pass sees to it."""
        if self._background is None:
            with self._changing():
                self._core.sampler.refresh()

    def __reduce__(self) -> NoReturn:
        """A copy would share nothing and know nothing of the directory."""
        raise TypeError("a ReplayBuffer cannot be pickled or copied: save it, and load the file")

    def __len__(self) -> int:
        """Number of stored items."""
        return len(self._core.store)

    def __repr__(self) -> str:
        """Size and settings in a line."""
        decays = [
            f"auto, now {index.keying.freshness}" if number in self._core.autos else f"{index.keying.freshness}"
            for number, index in enumerate(self._core.sampler.indexes)
        ]
        freshness = (
            decays[0]
            if self._core.settings.tasks is None
            else dict(zip(self._core.settings.tasks, decays, strict=True))
        )
        return (
            f"ReplayBuffer({len(self)} of {self.capacity}, priority={self.priority!r}, "
            f"freshness={freshness}, alpha={self.alpha})"
        )

    @property
    def capacity(self) -> int:
        """The most items that are kept."""
        return self._core.settings.capacity

    @property
    def unit(self) -> Unit:
        """What an item is."""
        return self._core.settings.unit

    @property
    def priority(self) -> Priority:
        """What base priorities are made of."""
        return self._core.settings.priority

    @property
    def eps(self) -> float:
        """What is added to a named measure."""
        return self._core.settings.eps

    @property
    def drawable(self) -> int:
        """Number of stored items with a positive priority."""
        return self._core.sampler.drawable

    @property
    def nbytes(self) -> int:
        """Bytes that the stored data are charged, images included: what ``max_bytes`` bounds."""
        return self._arena.live_bytes

    @property
    def freshness(self) -> Freshness:
        """The decay of priorities with age; :meth:`freshness_of` with several tasks."""
        return self.freshness_of(None)

    @property
    def alpha(self) -> float:
        """The exponent on priorities."""
        return self._core.sampler.alpha

    @property
    def policy_version(self) -> int:
        """The newest policy version that :meth:`add` or :meth:`sample` was told."""
        return self._core.clock

    @property
    def tau_changes(self) -> Sequence[TauChange]:
        """Every change that "auto" made since this object was made or loaded, with its evidence."""
        return tuple(self._core.tau_changes)

    def freshness_of(self, task: str | None) -> Freshness:
        """The present decay of one task; None in a buffer that does not tell tasks apart."""
        return self._core.sampler.indexes[self._index_of(task)].keying.freshness

    def _index_of(self, task: str | None) -> int:
        owners = self._core.owners
        if (task is None) != (owners is None) or (owners is not None and task not in owners):
            known = "no tasks: leave it out" if owners is None else f"the tasks {', '.join(sorted(owners))}: name one"
            raise ConfigError(f"task {task!r} was asked for; this buffer has {known}")
        return 0 if owners is None or task is None else owners[task]

    def keys(self) -> NDArray[np.int64]:
        """Keys of all stored items, oldest first."""
        with self._open():
            return self._core.store.keys[self._core.store.occupied()]

    def probabilities(self) -> NDArray[np.float64]:
        """P(i) of all stored items, in the order of :meth:`keys`."""
        with self._open():
            self._refresh()
            return self._core.sampler.probabilities(self._core.store.occupied())

    def item(self, key: int) -> tuple[dict[str, Any], tuple[Trajectory, ...]]:
        """What is known of the item with ``key``, ready for JSON, and its trajectories; nothing counts as a use.

        Raises KeyError when it is gone or never was, TypeError when it is no integer.
        """
        asked = checked_keys([key])
        with self._open():
            slots = self._core.store.find(asked)
            if slots[0] < 0:
                raise KeyError(f"no item has the key {key}: it has left, or never was")
            sampler = self._core.sampler
            self._refresh()
            facts = {
                "key": int(key),
                "probability": float(sampler.probabilities(slots)[0]),
                "base_priority": float(sampler.bases[slots[0]]),
                "age": int(self._core.clock - sampler.versions[slots[0]]),
                "uses": int(self._core.store.uses[slots[0]]),
            }
            columns, _ = self._core.store.read(slots)
        return facts, columns.trajectories()

    def trajectories(self) -> Iterator[Trajectory]:
        """All stored trajectories, each once, in the order of arrival; those that leave meanwhile are left out."""
        store = self._core.store
        with self._open():
            records, serials = store.in_order()
        for start in range(0, len(records), _PORTION):
            portion = slice(start, start + _PORTION)
            with self._open():
                columns = self._arena.read(store.still_there(records[portion], serials[portion]))
            yield from columns.trajectories()

    def drift_by_age(self) -> list[DriftBin]:
        """ESS and KL by age over what :meth:`observe` was told lately; empty before."""
        with self._open():
            return self._core.monitor.by_age()

    def summary(self) -> dict[str, Any]:
        """What is in the buffer and what the next draw would be, ready for JSON."""
        with self._open():
            self._refresh()
            return summarize(self._core)
