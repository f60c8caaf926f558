"""Trainers to be killed: forks one on request, so that many of them cost one start of the interpreter.

Reads JSON lines {"words": [...], "kill": "POINT:N" or "", "log": PATH}, runs ``freshper WORDS`` in a child, and answers
with its exit code; -9 when it has killed itself at the N-th passage of POINT. What passes which point:

interrupt                 the end of a collection; here it is Ctrl-C that comes
rollout, evaluation       the end of a collection, of an evaluation
optimizer, update         AdamW's step, before the clock has moved; a whole update
add, draw, priorities     the end of such a call of the buffer
journal                   a frame of the buffer's log, written by half
model                     a policy that is being saved, with its weights but without its tokenizer
row                       a line of metrics.jsonl, written by half
fsync, rename             a call of the operating system that makes something durable, before it happens
renamed                   one that replaces a file or a folder, after it has happened
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

import freshper.reports
from freshper import ReplayBuffer, cli
from freshper.policies.tiny import TinyPolicy
from freshper.replay.disk.arrow_columns import arrow
from freshper.replay.disk.log_file import LogWriter
from freshper.training import loop
from freshper.training.run_folder import RunFolder


class Executioner:
    """Kills the process at the N-th passage of a point; with N = 0 it counts, and tells at the end."""

    def __init__(self, point: str, number: int) -> None:
        self.point, self.number, self.passed = point, number, 0

    def pass_by(self) -> None:
        self.passed += 1
        if self.passed == self.number:
            os.kill(os.getpid(), signal.SIGINT if self.point == "interrupt" else signal.SIGKILL)

    def after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def passing(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            self.pass_by()
            return result

        return passing

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def passing(*args: Any, **options: Any) -> Any:
            self.pass_by()
            return function(*args, **options)

        return passing

    def half_a_frame(self, append: Callable[..., Any]) -> Callable[..., Any]:
        def passing(writer: LogWriter, *args: Any, **options: Any) -> Any:
            start = writer.end.size
            result = append(writer, *args, **options)
            if self.passed + 1 == self.number:
                os.truncate(writer.path, (start + writer.end.size) // 2)
            self.pass_by()
            return result

        return passing

    def half_a_row(self, log: Callable[..., Any]) -> Callable[..., Any]:
        def passing(folder: RunFolder, metrics: dict[str, float]) -> Any:
            path = folder.path / "metrics.jsonl"
            start = path.stat().st_size
            log(folder, metrics)
            if self.passed + 1 == self.number:
                os.truncate(path, (start + path.stat().st_size) // 2)
            self.pass_by()

        return passing

    def take_up_position(self) -> None:
        from freshper.training import iteration

        places: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
            "rollout": [(iteration, "play", self.after)],
            "interrupt": [(iteration, "play", self.after)],
            "evaluation": [(loop, "evaluate_both", self.after)],
            "optimizer": [(torch.optim.AdamW, "step", self.after)],
            "update": [(_learner(), "update", self.after)],
            "add": [(ReplayBuffer, "add", self.after)],
            "draw": [(ReplayBuffer, "sample", self.after)],
            "priorities": [(ReplayBuffer, "update_priorities", self.after)],
            "journal": [(LogWriter, "append", self.half_a_frame)],
            "model": [(_saved_model(), "save_pretrained", self.after)],
            "row": [(RunFolder, "log", self.half_a_row)],
            "fsync": [(os, "fsync", self.before)],
            "rename": [(os, "rename", self.before), (os, "replace", self.before)],
            "renamed": [(os, "rename", self.after), (os, "replace", self.after)],
        }
        for owner, name, wrap in places[self.point]:
            setattr(owner, name, wrap(getattr(owner, name)))


def _learner() -> type:
    from freshper.learning.learner import Learner

    return Learner


def _saved_model() -> type:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM


def run(words: list[str], kill: str, log: str) -> int:
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    freshper.reports.write_report = lambda folder: folder / "report.html"  # a second each, after everything is over
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - the parent's has been read from
    if kill:
        point, _, number = kill.partition(":")
        executioner = Executioner(point, int(number))
        executioner.take_up_position()
    code = cli.main(words)
    if kill:
        print(f"passed {executioner.passed}", flush=True)
    return code


def main() -> None:
    arrow()
    _ = TinyPolicy, _learner(), _saved_model()
    # What a killed process wrote is safe without it, and the time goes into kills instead of a busy disk.
    os.fsync = lambda _: None  # type: ignore[assignment]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 70
            try:
                status = run(**json.loads(line))
            finally:
                if status == 70:
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    main()
