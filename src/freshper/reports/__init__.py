"""Reports: run folders in; tables, an HTML page, and live progress out. Reads files, never live objects."""

from freshper.reports.html import write_report
from freshper.reports.progress import CompareProgress, TrainProgress
from freshper.reports.run_folder import CompareRecord, RunRecord, is_compare, read_compare, read_run
from freshper.reports.statistics import CompareSummary, RunSummary, summarize_compare, summarize_run
from freshper.reports.tables import compare_json, compare_table

__all__ = [
    "CompareProgress",
    "CompareRecord",
    "CompareSummary",
    "RunRecord",
    "RunSummary",
    "TrainProgress",
    "compare_json",
    "compare_table",
    "is_compare",
    "read_compare",
    "read_run",
    "summarize_compare",
    "summarize_run",
    "write_report",
]
