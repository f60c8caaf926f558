"""Background refresh: a freshness that is no common factor, recomputed in a thread while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from freshper.errors import RefreshError
from freshper.replay.draw.index import PriorityIndex


class BackgroundRefresh:
    """Recomputes indexes aside, one pass at a time, and swaps the new trees in.

    Nobody waits for longer than a swap: the pass reads the table without the lock, whatever is written meanwhile
    is remembered and written again into the new trees, under the lock, before they are taken. Until then draws
    come from the old trees, whole, and say so.
    """

    def __init__(self, indexes: Sequence[PriorityIndex], lock: threading.RLock) -> None:
        self._indexes, self._lock = indexes, lock
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="freshper-refresh")
        self._pass: Future[None] | None = None
        self._begun = False

    def request(self, now: int) -> None:
        """Start a pass for policy version ``now`` where one is due and none runs. The caller holds the lock.

        The very first one is made at once: before it there is nothing to draw from. Raises
        :class:`RefreshError` when the last pass failed.
        """
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
        running = self._pass
        if running is None:
            return
        running.exception()  # waits
        with self._lock:
            if running is self._pass:  # nobody else has seen to it meanwhile
                self._finish(running)

    def close(self) -> None:
        """Let the running pass end; no other can begin."""
        self._executor.shutdown()

    def _finish(self, done: Future[None]) -> None:
        self._pass = None
        error = done.exception()
        if error is not None:
            raise RefreshError(
                f"the background refresh of the freshness failed ({error!r}): draws still follow an older policy "
                "version; set a decay that works, or use refresh='sync'"
            ) from error

    def _run(self, stale: Sequence[PriorityIndex], now: int) -> None:
        pending = list(stale)
        try:
            while pending:
                trees = pending[0].compute(replace(pending[0].keying, epoch=now))
                with self._lock:
                    pending.pop(0).adopt(trees)
        finally:
            with self._lock:
                for index in pending:
                    index.adopt(None)
