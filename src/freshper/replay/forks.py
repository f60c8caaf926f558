"""Forks: a child process gets locks that nobody holds, around data that nobody was changing."""

from __future__ import annotations

import os
import threading
import weakref


class _Guard:
    """Knows the lock of every living owner, and holds all of them while the process forks."""

    def __init__(self) -> None:
        self._locks: weakref.WeakKeyDictionary[object, threading.RLock] = weakref.WeakKeyDictionary()
        self._held: list[threading.RLock] = []

    def add(self, owner: object, lock: threading.RLock) -> None:
        self._locks[owner] = lock

    def before(self) -> None:
        self._held = list(self._locks.values())
        for lock in self._held:
            lock.acquire()

    def after(self) -> None:
        for lock in self._held:
            lock.release()
        self._held = []


_guard = _Guard()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_guard.before, after_in_parent=_guard.after, after_in_child=_guard.after)


def guarded_lock(owner: object) -> threading.RLock:
    """A lock for ``owner`` that no other thread holds when the process forks: the fork waits for it."""
    lock = threading.RLock()
    _guard.add(owner, lock)
    return lock
