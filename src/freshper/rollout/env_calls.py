"""Calls of environments: at once or in threads, each within a time limit. Whatever goes wrong in one is data."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, Self, TypeVar

from freshper.errors import ConfigError, EnvError

Answer = TypeVar("Answer")

_Task = tuple[int, Callable[[], Answer]]  # the row that is called, and the call


class EnvCalls(Generic[Answer]):
    """Calls environments, one call a row at a time, and keeps the answers until they are asked for.

    Args:
        threads: that many calls run beside the caller; 0 makes every call answer before :meth:`call` returns.
        time_limit: seconds that one call may take, None for no limit. A call that takes longer is answered by an
            :class:`EnvError`, its thread is left behind, and its row is in :attr:`hung`: the environment may still be
            at work, so that it must not be used again. Code that holds Python's global lock cannot be left behind.

    With threads or a time limit, environments are called in another thread than the caller's.
    """

    def __init__(self, threads: int = 0, time_limit: float | None = None) -> None:
        if threads < 0:
            raise ConfigError(f"env_threads {threads} must be at least 0 (0: no threads)")
        if time_limit is not None and time_limit <= 0:
            raise ConfigError(f"env_timeout {time_limit} must be above 0 seconds, or None for no limit")
        self._beside = threads > 0
        self._time_limit = time_limit
        self._tasks: SimpleQueue[_Task[Answer] | None] = SimpleQueue()
        self._news: SimpleQueue[_Worker[Answer]] = SimpleQueue()  # workers that have an answer
        self._workers = [self._worker() for _ in range(threads or (0 if time_limit is None else 1))]
        self._answers: list[tuple[int, Answer | Exception]] = []
        self._pending = 0
        self.hung: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _worker in self._workers:
            self._tasks.put(None)

    def call(self, row: int, function: Callable[[], Answer]) -> None:
        """Make the call of ``row``'s environment. A request to stop, as Ctrl-C is, comes through."""
        if not self._workers:
            self._answers.append((row, attempt(function)))
            return
        self._pending += 1
        self._tasks.put((row, function))
        while self._pending and not self._beside:
            self._listen(wait=True)

    def answers(self, *, wait: bool) -> list[tuple[int, Answer | Exception]]:
        """Answers that have come since, with their rows, lowest first; ``wait`` for one if there are none."""
        while self._pending:
            if not self._listen(wait=wait and not self._answers):
                break
        answers, self._answers = sorted(self._answers, key=lambda answer: answer[0]), []
        return answers

    def _listen(self, *, wait: bool) -> bool:
        """Take one answer, or leave a call behind that has run out of time; whether there was either."""
        hung = [worker for worker in self._workers if worker.left(self._time_limit) <= 0]
        if hung:
            self._leave_behind(hung[0])
            return True
        left = min(worker.left(self._time_limit) for worker in self._workers)
        try:
            worker = self._news.get(block=wait, timeout=min(left, threading.TIMEOUT_MAX) if wait else None)
        except Empty:
            return wait  # time to look again for calls that hang
        if not worker.left_behind:
            row, answer = worker.take()
            if isinstance(answer, BaseException) and not isinstance(answer, Exception):
                raise answer  # a request to stop that was raised in the thread
            self._answer(row, answer)
        return True

    def _answer(self, row: int, answer: Answer | Exception) -> None:
        self._pending -= 1
        self._answers.append((row, answer))

    def _leave_behind(self, worker: _Worker[Answer]) -> None:
        row = worker.leave()
        if row is None:  # it answered in this very moment
            return
        self._workers[self._workers.index(worker)] = self._worker()
        self.hung.add(row)
        self._answer(row, EnvError(f"the environment did not answer within {self._time_limit:g} s, and was given up"))

    def _worker(self) -> _Worker[Answer]:
        worker = _Worker(self._tasks, self._news)
        worker.start()
        return worker


class _Worker(threading.Thread, Generic[Answer]):
    """Runs calls until it is told to stop. A daemon: one that hangs does not keep the program alive."""

    def __init__(self, tasks: SimpleQueue[_Task[Answer] | None], news: SimpleQueue[_Worker[Answer]]) -> None:
        super().__init__(name="freshper-env", daemon=True)
        self._tasks = tasks
        self._news = news
        self._lock = threading.Lock()
        self._row: int | None = None  # under way
        self._since = 0.0
        self._said: SimpleQueue[tuple[int, Answer | BaseException]] = SimpleQueue()
        self.left_behind = False

    def run(self) -> None:
        while not self.left_behind and (task := self._tasks.get()) is not None:
            row, function = task
            with self._lock:
                self._row, self._since = row, time.monotonic()
            answer: Answer | BaseException
            try:
                answer = attempt(function)
            except BaseException as stop:  # noqa: BLE001 - raised again in the caller's thread
                answer = stop
            with self._lock:
                self._row = None
                if self.left_behind:
                    return
                self._said.put((row, answer))
            self._news.put(self)

    def left(self, limit: float | None) -> float:
        """Seconds that the call under way has left; the limit itself when there is none."""
        if limit is None:
            return threading.TIMEOUT_MAX
        with self._lock:
            return limit if self._row is None else limit - (time.monotonic() - self._since)

    def take(self) -> tuple[int, Answer | BaseException]:
        """The row and the answer that it has told of."""
        return self._said.get()

    def leave(self) -> int | None:
        """Expect nothing of it any more; the row whose call is under way, None where that has just ended."""
        with self._lock:
            if self._row is not None:
                self.left_behind = True
            return self._row


def attempt(function: Callable[[], Answer]) -> Answer | Exception:
    """What ``function`` returns or raises; a request to stop, a KeyboardInterrupt, comes through."""
    try:
        return function()
    except SystemExit as error:  # a library's way of failing; whoever wants the program to stop interrupts it
        return EnvError(f"the environment asked the program to exit with {error.code!r}")
    except Exception as error:  # noqa: BLE001 - whatever an environment raises is data, never the end of the run
        return error
