"""Background refresh: a freshness that is no common factor, recomputed in a thread while training goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from freshper.errors import RefreshError
from freshper.replay.draw.index import PriorityIndex
from freshper.replay.draw.keying import Keying


class BackgroundRefresh:
    """Recomputes indexes aside, one pass at a time, and swaps the new trees in.

    Nobody waits for longer than a swap: the pass reads the table without the lock, whatever is written meanwhile
    is remembered and written again into the new trees, under the lock, before they are taken. Until then draws
    come from the old trees, whole, and say so.

    A process that was forked off has its copy of the trees, but neither the thread nor its pass: it begins anew.
    """

    def __init__(self, indexes: Sequence[PriorityIndex], lock: threading.RLock) -> None:
        self._indexes, self._lock = indexes, lock
        self._begun = False
        self._start()

    def _start(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="freshper-refresh")
        self._pass: Future[None] | None = None
        self._computing: tuple[PriorityIndex, Keying] | None = None  # what the pass is at, and its settings
        self._process = os.getpid()

    def _follow_fork(self) -> None:
        if os.getpid() == self._process:
            return
        with self._lock:
            if os.getpid() != self._process:  # no other thread has seen to it meanwhile
                for index in self._indexes:
                    index.adopt(None)
                self._start()

    def request(self, now: int) -> None:
        """Start a pass for policy version ``now`` where one is due and none runs. The caller holds the lock.

        The very first one is made at once: before it there is nothing to draw from. Raises
        :class:`RefreshError` when the last pass failed, unless the decay that failed has been changed since.
        """
        self._follow_fork()
        if not self._begun:
            for index in self._indexes:
                index.refresh(now)
            self._begun = True
            return
        if self._pass is not None:
            if not self._pass.done():
                return
            self._finish(self._pass)
        stale = [index for index in self._indexes if index.keying.rate is None and index.keying.epoch != now]
        if stale:
            for index in stale:
                index.begin()
            self._pass = self._executor.submit(self._run, stale, now)

    def wait(self) -> None:
        """Return when no pass runs. The caller does not hold the lock. Raises as :meth:`request`."""
        self._follow_fork()
        running = self._pass
        if running is None:
            return
        running.exception()  # waits
        with self._lock:
            if running is self._pass:  # nobody else has seen to it meanwhile
                self._finish(running)

    def close(self) -> None:
        """Let the running pass end; no other can begin."""
        self._follow_fork()
        self._executor.shutdown()

    def _finish(self, done: Future[None]) -> None:
        self._pass = None
        error = done.exception()
        if error is not None and not self._was_changed():
            raise RefreshError(
                f"the background refresh of the freshness failed ({error!r}): draws still follow an older policy "
                "version; set a decay that works, or use refresh='sync'"
            ) from error

    def _was_changed(self) -> bool:
        """Whether the index that the pass ended with has got other settings: a failure tells nothing of them.

        A change sets the epoch to the clock, beyond that of a pass that was due, even where the decay is equal.
        """
        if self._computing is None:
            return False
        index, keying = self._computing
        present = index.keying
        return (present.freshness, present.alpha, present.epoch) != (keying.freshness, keying.alpha, keying.epoch)

    def _run(self, stale: Sequence[PriorityIndex], now: int) -> None:
        pending = list(stale)
        try:
            while pending:
                keying = pending[0].keying
                self._computing = pending[0], keying
                trees = pending[0].compute(replace(keying, epoch=now))
                with self._lock:
                    pending.pop(0).adopt(trees)
        finally:
            with self._lock:
                for index in pending:
                    index.adopt(None)
