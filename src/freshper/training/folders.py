"""Folders that appear whole or not at all, and stay through a power cut once they are there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path


def slug(name: str) -> str:
    """A name as a part of a path: what separates folders, or means something to a shell, becomes a hyphen."""
    return re.sub(r"[^\w.+=-]+", "-", name)


def make_whole(final: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` fill the folder ``final``; one that stands there is replaced when everything went well.

    Raises OSError when the disk is full; then ``final`` is what it was. A process that is killed in between leaves
    the old folder, the new one, or for a moment neither: :func:`mend` puts the old one back.
    """
    temporary, old = _beside(final)
    shutil.rmtree(temporary, ignore_errors=True)
    done = False
    try:
        temporary.mkdir(parents=True)
        fill(temporary)
        for path in sorted(temporary.rglob("*")):
            sync(path)
        sync(temporary)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        temporary.rename(final)
        done = True
    finally:
        if not done:
            shutil.rmtree(temporary, ignore_errors=True)  # gives the space back to those who go on
            mend(final)
    try:
        sync(final.parent)
    finally:
        shutil.rmtree(old, ignore_errors=True)


def mend(final: Path) -> None:
    """Put the folder back that :func:`make_whole` had moved out of the way for one that never came."""
    _, old = _beside(final)
    if old.exists() and not final.exists():
        old.rename(final)


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(final: Path) -> tuple[Path, Path]:
    return final.with_name(f".{final.name}.tmp"), final.with_name(f".{final.name}.old")
