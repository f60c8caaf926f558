"""One writer per directory: a lock that the operating system releases when its holder dies."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from freshper.errors import BufferLockedError

LOCK = "LOCK"
_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class DirectoryLock:
    """Holds ``directory/LOCK`` from construction to :meth:`release` or the end of the process.

    Raises :class:`BufferLockedError` when somebody holds it, in this process or in another one. A forked child does
    not inherit it: were it kept there, the lock would outlive its holder.
    """

    def __init__(self, directory: Path) -> None:
        import fcntl  # not on Windows, where only the rest of the package is of use

        self.held = False
        self._path = directory / LOCK
        self._file = self._path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read(20).decode("ascii", "replace").strip() or "unknown"
            self._file.close()
            raise BufferLockedError(
                f"{directory} is open for writing in process {holder} (this is process {os.getpid()}): two writers "
                "would damage it. Close the other one, or open the directory read-only"
            ) from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n".encode())
        self.held = True
        _held.add(self)

    def in_place(self) -> bool:
        """Whether the locked file still is the one at its path: the directory was not moved or replaced."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        """Let others in. Does nothing the second time."""
        self.held = False
        self._file.close()


def _forget() -> None:
    for lock in list(_held):
        lock.release()  # closes the child's copy only: the parent goes on holding the lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
