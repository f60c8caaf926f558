"""The policy of a run as a plain Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from freshper.errors import RunFolderError
from freshper.policies.export import export
from freshper.training.run_folder import CONFIG


def export_run(
    folder: Path, out: Path, which: str, *, merge: bool, note: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Export the policy ``which`` ("best" or "last") of a run; see :func:`freshper.policies.export.export`.

    Raises :class:`RunFolderError` where the folder holds no run or no such policy.
    """
    if not (folder / CONFIG).exists():
        raise RunFolderError(f"{folder} is no run folder: it holds no {CONFIG}")
    saved = folder / "model" / which
    if not saved.exists():
        raise RunFolderError(f"{folder} holds no {which} policy yet: one is saved at every evaluation and at the end")
    return export(saved, out, merge=merge, note=note)
