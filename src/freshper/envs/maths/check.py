"""Is an answer right? Equal text and equal numbers are decided here, everything else by math-verify in a process.

That process can be killed: sympy computes for hours on some answers (``9**9**9**9``), and no exception or signal
handler gets through to it in a thread.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from freshper.errors import EnvError, MissingExtraError

CHECK_SECONDS = 3.0  # computing time of one check
MAX_WORKERS = 4  # checks at once, about 150 MB each

_SCRIPT = Path(__file__).with_name("worker.py")
_BACKSTOP = 4  # a check is given up after so many times its computing time by the clock: the machine may be busy
_START_SECONDS = 120  # importing sympy on a busy machine
_LONGEST_NUMBER = 100  # characters; longer ones are left to math-verify
_DECIMAL = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(rf"({_DECIMAL})")
_FRACTION = re.compile(r"([+-]?\d+)/(\d+)|([+-]?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,|\\!)(?=\d{3}(?!\d))")
_CALCULATION = re.compile(
    r"[!|√*]|--|\+\+|-\s*\(|\^(?!\{?\\circ)|\\(?:sqrt|max|min|log|ln|exp|binom|lfloor|lceil|sum|prod|operatorname|gcd|lcm)"
    r"|\b(?:sqrt|cbrt|max|min|log|ln|exp|abs|factorial|gcd|lcm|floor|ceil)\b"
)
_ANY_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class Verdict(enum.Enum):
    """What a check found; UNDECIDED when it took too long, or broke: such an answer counts as wrong."""

    RIGHT = "right"
    WRONG = "wrong"
    UNDECIDED = "undecided"


@lru_cache(maxsize=16_384)
def check_answer(reference: str, answer: str, seconds: float = CHECK_SECONDS) -> Verdict:
    """Whether ``answer`` is the same number or expression as ``reference``.

    A number has to be written out, as an integer, a decimal, or a fraction in lowest terms: where the reference is a
    number, a calculation that comes to it (the question itself, at times) or a list of guesses is wrong.
    May be called from any thread; takes at most a few times ``seconds``.

    Raises :class:`MissingExtraError` without math-verify, :class:`EnvError` when it does not work at all.
    """
    wanted, given = _plain(reference), _plain(answer)
    if wanted == given and given:
        return Verdict.RIGHT
    number, other = _number(wanted), _number(given)
    if number is not None and other is not None:
        if number == other:
            return Verdict.RIGHT
        if number.denominator == 1 and other.denominator == 1:
            return Verdict.WRONG
    if not given or (number is not None and other is None and not _names_one_number(given)):
        return Verdict.WRONG
    return _WORKERS.check(wanted, given, seconds)


def _names_one_number(answer: str) -> bool:
    """Whether it is a number with words, a name or a unit around it, and no calculation that comes to one."""
    return len(_ANY_NUMBER.findall(answer)) == 1 and not _CALCULATION.search(answer)


def _plain(answer: str) -> str:
    """Without what sets a number off: blanks, dollars, commas in thousands, a full stop."""
    bare = answer.strip().replace("\\$", "").replace("$", "").strip().removesuffix(".").strip()
    return bare if bare.startswith(("(", "[")) else _THOUSANDS.sub("", bare)  # commas part the members of a point


def _number(plain: str) -> Fraction | None:
    """The number that is written out, None for anything else."""
    if len(plain) > _LONGEST_NUMBER:
        return None
    if _NUMBER.fullmatch(plain):
        return Fraction(plain)
    match = _FRACTION.fullmatch(plain)
    if match is None:
        return None
    above, below, sign, latex_above, latex_below = match.groups()
    numerator = int(above) if above else int(f"{sign}1") * int(latex_above)
    denominator = int(below or latex_below)
    lowest = denominator > 1 and math.gcd(numerator, denominator) == 1
    return Fraction(numerator, denominator) if lowest else None


class _Dead(Exception):
    """The process ended before it answered."""


class _Worker:
    """One process, and one check at a time."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)],  # -P: the folder of the script holds modules with common names
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        try:
            ready = self._within(_START_SECONDS)
        except _Dead:
            ready = False
        if not ready:
            self._errors.seek(0)
            said = self._errors.read()[-500:].decode(errors="replace").strip()
            self.close()
            raise EnvError(
                f"math-verify does not work here, so no answer can be checked: {said or 'it gives no reason'}"
            )

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def check(self, reference: str, answer: str, seconds: float) -> bool:
        """Raises :class:`_Dead` where that takes too long or breaks; then this object is of no more use."""
        assert self._process.stdin is not None
        line = f"{json.dumps([reference, answer, seconds])}\n".encode()
        return self._within(_BACKSTOP * seconds, line)

    def _within(self, seconds: float, line: bytes = b"") -> bool:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        too_late = threading.Timer(seconds, self._process.kill)
        too_late.daemon = True
        too_late.start()
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            verdict = self._process.stdout.readline()
        except OSError as error:
            raise _Dead from error
        finally:
            too_late.cancel()
        if not verdict.endswith(b"\n"):
            raise _Dead
        return bool(json.loads(verdict))

    def disown(self) -> None:
        """Close this end alone: the process is another one's child."""
        self._process.returncode = 0
        self._close_pipes()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):  # what was not flushed has no reader any more
                pipe.close()  # type: ignore[union-attr]


class _Workers:
    """The processes of this one, started when first needed and used again."""

    def __init__(self) -> None:
        self._begin()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._leave_to_parent)

    def _begin(self) -> None:
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._room = threading.Semaphore(MAX_WORKERS)

    def _leave_to_parent(self) -> None:
        """In a fork: two processes that write to one pipe would get each other's verdicts."""
        for worker in self._idle:
            worker.disown()
        self._begin()

    def check(self, reference: str, answer: str, seconds: float) -> Verdict:
        """Ask a process; one that dies of the question is replaced at the next."""
        with self._room:
            worker = self._take() or self._start()
            try:
                right = worker.check(reference, answer, seconds)
            except _Dead:
                worker.close()
                return Verdict.UNDECIDED
            with self._lock:
                self._idle.append(worker)
        return Verdict.RIGHT if right else Verdict.WRONG

    def _take(self) -> _Worker | None:
        """An idle process, if there is one; those that somebody has killed meanwhile are put away."""
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
                worker.close()
        return None

    @staticmethod
    def _start() -> _Worker:
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtraError("math-verify", "maths")
        return _Worker()

    def close(self) -> None:
        """End all that are idle."""
        with self._lock:
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.close()


_WORKERS = _Workers()
