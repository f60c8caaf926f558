"""The table of commands: what each is called, its arguments, and what it does.

A new command is one file beside this one, with a frozen dataclass of its arguments and a function that runs it, and one
line in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from freshper.cli.compare import CompareCommand, run_compare
from freshper.cli.doctor import DoctorCommand, run_doctor
from freshper.cli.envs import EnvsCommand, run_envs
from freshper.cli.eval import EvalCommand, run_eval
from freshper.cli.export import ExportCommand, run_export
from freshper.cli.inspect import InspectCommand, run_inspect
from freshper.cli.play import PlayCommand, run_play
from freshper.cli.report import ReportCommand, run_report
from freshper.cli.serve import ServeRetrieverCommand, run_serve_retriever
from freshper.cli.train import TrainCommand, run_train

if TYPE_CHECKING:
    from rich.console import Console

COMMANDS: dict[str, tuple[type[Any], Callable[[Sequence[str], Console], int]]] = {
    "train": (TrainCommand, run_train),
    "compare": (CompareCommand, run_compare),
    "report": (ReportCommand, run_report),
    "eval": (EvalCommand, run_eval),
    "play": (PlayCommand, run_play),
    "export": (ExportCommand, run_export),
    "inspect": (InspectCommand, run_inspect),
    "envs": (EnvsCommand, run_envs),
    "serve-retriever": (ServeRetrieverCommand, run_serve_retriever),
    "doctor": (DoctorCommand, run_doctor),
}
"""Name -> (arguments, run), in the order of the overview. Run takes the words behind the name, returns an exit code."""
