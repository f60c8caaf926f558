"""Writes report.html into a run folder or a compare folder: one file, offline, replaced atomically."""

from __future__ import annotations

import os
from pathlib import Path

from freshper.errors import RunFolderError
from freshper.reports.compare_report import compare_page
from freshper.reports.run_folder import is_compare, read_compare, read_run
from freshper.reports.run_report import run_page

REPORT_FILE = "report.html"


def write_report(path: Path) -> Path:
    """Write the report of a run or of a comparison and return its path.

    Works while runs go on. A report that was there before is replaced as a whole or not at all.

    Raises :class:`RunFolderError` when the folder is neither, holds a broken file, or cannot be written.
    """
    path = Path(path)
    text = compare_page(read_compare(path)) if is_compare(path) else run_page(read_run(path))
    target = path / REPORT_FILE
    unfinished = path / f".{REPORT_FILE}.{os.getpid()}"
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, target)
    except OSError as error:
        raise RunFolderError(f"cannot write {target} ({error}); the report is lost, the run is not") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return target
