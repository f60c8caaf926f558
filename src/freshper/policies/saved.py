"""The facts of a saved folder: what made it, and checksums of its files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freshper.errors import SnapshotError

FACTS = "freshper.json"


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write freshper.json: ``facts``, and the SHA-256 of every other file in ``folder``, each flushed to the disk."""
    checksums = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file != folder / FACTS:
            with file.open("rb") as content:
                checksums[file.relative_to(folder).as_posix()] = hashlib.file_digest(content, "sha256").hexdigest()
                os.fsync(content.fileno())
    with (folder / FACTS).open("w", encoding="utf-8") as own:
        json.dump({**facts, "sha256": checksums}, own, indent=2)
        own.flush()
        os.fsync(own.fileno())


def read_facts(folder: Path) -> dict[str, Any]:
    """What :func:`write_facts` wrote, checksums included.

    Raises :class:`SnapshotError` where the facts cannot be read, or a file is gone or changed since.
    """
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        checksums = dict(facts["sha256"])
        damaged = [name for name, known in checksums.items() if sha256(folder / name) != known]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"{folder} holds no whole policy ({error!r})") from error
    if damaged:
        raise SnapshotError(f"{folder} is damaged: {', '.join(damaged)} changed since it was saved")
    return dict(facts)


def sha256(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
