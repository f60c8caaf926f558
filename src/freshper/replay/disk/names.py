"""Which files of a directory are a replay buffer's. Whatever else lies there belongs to somebody else."""

from __future__ import annotations

import re
from pathlib import Path

from freshper.errors import SnapshotError
from freshper.replay.disk.manifest import COPY, MANIFEST

_LOG = re.compile(r"log-\d{6,}")
_STATE = r"state-[0-9a-f]{8}-\d{6,}\.safetensors"
_OURS = re.compile(rf"{_LOG.pattern}|{_STATE}|\.({_STATE}|manifest(\.copy)?\.json)\.tmp")


def is_ours(name: str) -> bool:
    """Whether a file of this name is a log, a state, or half of something that was being written."""
    return _OURS.fullmatch(name) is not None


def refuse_another(directory: Path) -> None:
    """Raise :class:`SnapshotError` where there is a buffer already, or the log of one whose manifest is gone."""
    for path in sorted(directory.iterdir()):
        if path.name in (MANIFEST, COPY) or (_LOG.fullmatch(path.name) and path.stat().st_size):
            raise SnapshotError(
                f"{directory} already holds a replay buffer ({path.name}): open it with ReplayBuffer.load, or choose "
                "another"
            )
