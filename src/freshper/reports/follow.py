"""Follows a metrics.jsonl that another process is writing; every poll reads only what was appended."""

from __future__ import annotations

import json
from pathlib import Path


class Follower:
    """Reads a growing file of JSON lines in steps.

    A last line without its line end is kept for the next poll: its writer is not done with it. When the file
    gets shorter (a resumed run discards what lies beyond its checkpoint), reading starts again at the top.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self.restarted = False
        self.broken = 0

    def poll(self) -> list[dict[str, float]]:
        """The numbers of every line completed since the last poll; nothing when the file is not there yet.

        ``restarted`` tells whether this poll began at the top again; ``broken`` counts lines that are no JSON
        object: a display goes on, the report names file and line.
        """
        self.restarted = False
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset, self._rest, self.broken, self.restarted = 0, b"", 0, True
                file.seek(self._offset)
                appended = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(appended)
        *complete, self._rest = (self._rest + appended).split(b"\n")
        return [numbers for line in complete if line.strip() and (numbers := self._numbers(line)) is not None]

    def _numbers(self, line: bytes) -> dict[str, float] | None:
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            self.broken += 1
            return None
        return {name: float(number) for name, number in value.items() if isinstance(number, int | float)}
