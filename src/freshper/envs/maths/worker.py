"""The process that asks math-verify: a question a line, a verdict a line.

It runs alone (``python -P worker.py``), may be killed at any moment, and imports nothing of ours.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable
from typing import Any

MEMORY = 4 << 30  # bytes of address space: towers of powers want more than there is


def _parser() -> Callable[[str], Any]:
    from math_verify import LatexExtractionConfig, parse

    boxed = [LatexExtractionConfig(boxed_match_priority=0)]
    # No time limit of its own: that one needs signals, and cannot interrupt a long computation in C.
    return lambda answer: parse(f"\\boxed{{{answer}}}", boxed, parsing_timeout=None)


def main() -> None:
    """Answer until the input ends. A computation that takes longer than the line allows kills this process."""
    from math_verify import verify

    # What libraries print must not stand among the verdicts.
    verdicts, sys.stdout = sys.stdout, sys.stderr
    logging.disable(logging.CRITICAL)
    _limit_memory()
    parse = _parser()
    ready = verify(parse("1/2"), parse("0.5"), timeout_seconds=None)  # the first call of each takes longest
    print(json.dumps(bool(ready)), file=verdicts, flush=True)
    for line in sys.stdin:
        reference, answer, seconds = json.loads(line)
        _allow(seconds)
        try:
            right = bool(verify(parse(reference), parse(answer), timeout_seconds=None))
        except (MemoryError, RecursionError):
            right = False
        _allow(0)
        print(json.dumps(right), file=verdicts, flush=True)


def _allow(seconds: float) -> None:
    """Die after so many seconds of computing; 0 for ever. The kernel sees to it, whatever Python is busy with."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        return  # a system without such limits; the time limit holds there too


if __name__ == "__main__":
    main()
