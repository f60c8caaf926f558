"""Arms x seeds: every run in a process of its own with one thread, a few at a time; what is done is kept."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing as mp
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from freshper.errors import ConfigError, RunFolderError
from freshper.training.arms import apply_arm
from freshper.training.checkpoint import has_checkpoint
from freshper.training.config import TrainConfig
from freshper.training.config_file import make_config, merged, read_toml
from freshper.training.interrupt import StopRequest, termination_interrupts
from freshper.training.run_folder import check_resumable, differences, is_in_use
from freshper.training.warm_start import Note, warm_started_policy

_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class CompareResult:
    """Where a comparison lies, and the names (arm/seedN) of the runs that are not finished, with the reason.

    ``interrupted`` tells whether a signal ended it.
    """

    folder: Path
    unfinished: dict[str, str]
    interrupted: bool


def plan_runs(config: TrainConfig, arms: Sequence[str], seeds: Sequence[int], folder: Path) -> dict[str, TrainConfig]:
    """The config of every run by name, seed by seed, so that all arms have the same seeds early on."""
    if not arms or not seeds:
        raise ConfigError(f"{len(arms)} arms and {len(seeds)} seeds: at least one of each is needed")
    if len(set(arms)) != len(arms):
        raise ConfigError(f"an arm is named twice in {', '.join(arms)}")
    runs = {}
    for seed in seeds:
        for arm in arms:
            name = f"{arm}/seed{seed}"
            own = {"run": {"seed": seed, "folder": str(folder / name)}}
            runs[name] = make_config(merged(apply_arm(config, arm).model_dump(), own))
    return runs


def compare(
    config: TrainConfig,
    arms: Sequence[str],
    seeds: Sequence[int],
    *,
    folder: Path,
    jobs: int,
    command: str = "",
    note: Note | None = None,
    poll: Callable[[], object] | None = None,
) -> CompareResult:
    """Run every arm on every seed, ``jobs`` at a time. Called again, it goes on with what is not finished.

    ``poll`` is called about twice a second while runs go on. SIGINT ends the running ones after their present
    iteration. Raises :class:`RunFolderError` when another comparison writes to ``folder``, when a run in it, also
    one that is not asked for now, was made with other settings, or when a run is still being written.
    """
    if jobs < 1:
        raise ConfigError(f"jobs {jobs} must be >= 1")
    runs = plan_runs(config, arms, seeds, folder)
    with termination_interrupts(), _owned(folder):
        all_arms, all_seeds = _with_earlier(folder, arms, seeds)
        planned = plan_runs(config, all_arms, all_seeds, folder)
        finished = {name for name, run in planned.items() if _is_finished(run)}
        waiting = {name: run for name, run in runs.items() if name not in finished}
        _check_free(waiting)
        _describe(folder, config.run.task, all_arms, all_seeds, command)
        if waiting:
            warm_started_policy(config, note)  # once, before many processes want it
        failures, interrupted = _run_all(waiting, jobs, poll)
        left = {name: failures.get(name, "interrupted") for name, run in waiting.items() if not _is_finished(run)}
        return CompareResult(folder, left, interrupted)


def _run_all(
    waiting: dict[str, TrainConfig], jobs: int, poll: Callable[[], object] | None
) -> tuple[dict[str, str], bool]:
    """Work through ``waiting``; returns what went wrong, by name, and whether a signal asked to stop."""
    queue = list(waiting.items())
    running: dict[str, BaseProcess] = {}
    failures: dict[str, str] = {}
    told = False
    with StopRequest() as stop:
        try:
            while (queue and not stop.asked) or running:
                while queue and len(running) < jobs and not stop.asked:
                    name, run = queue.pop(0)
                    running[name] = _start(run)
                if stop.asked and not told:
                    told = True
                    for process in running.values():
                        process.terminate()  # SIGTERM, once: the loop ends after its present iteration
                ending = wait([process.sentinel for process in running.values()], timeout=_POLL_SECONDS)
                for name in [name for name, process in running.items() if process.sentinel in ending]:
                    process = running.pop(name)
                    process.join()  # its files are closed, but it may still be giving its memory back
                    if process.exitcode != 0 and not stop.asked:
                        log = Path(waiting[name].run.folder) / "log.txt"
                        failures[name] = f"exit code {process.exitcode}, see {log}"
                if poll is not None:
                    poll()
        finally:
            for process in running.values():  # some are left only after a second signal, or when poll failed
                process.kill()
    return failures, stop.asked


def _start(config: TrainConfig) -> BaseProcess:
    folder = Path(config.run.folder)
    resume = _is_resumable(config)
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run left behind
        folder.mkdir(parents=True)
    process = mp.get_context("spawn").Process(target=_child, args=(config.model_dump_json(), resume))
    with _one_thread(), _deaf_to_interrupts():
        process.start()
    return process


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Children read these when their libraries load; two threads each on a busy machine are many times slower."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Ctrl-C reaches all processes of a terminal; those started here leave it to the parent, who sends SIGTERM."""
    resource_tracker.ensure_running()  # the first start would launch it, and that unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_resumable(run: TrainConfig) -> bool:
    """Whether the run's folder holds a checkpoint of a run with the same settings."""
    folder = Path(run.run.folder)
    try:
        check_resumable(folder, run)
    except (ConfigError, RunFolderError):  # no config there, or another one
        return False
    return has_checkpoint(folder)


def _child(config_json: str, resume: bool) -> None:
    """One run. Its output goes to log.txt, and so does the traceback that multiprocessing prints when it fails."""
    from freshper.training.loop import train

    config = make_config(json.loads(config_json))
    with (Path(config.run.folder) / "log.txt").open("a" if resume else "w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    with contextlib.suppress(KeyboardInterrupt):  # result.json says "interrupted"
        train(config, resume=resume, note=lambda text: print(text, flush=True))


def _is_finished(run: TrainConfig) -> bool:
    """Whether the run's folder holds its result. Raises where the result is that of other settings."""
    folder = Path(run.run.folder)
    try:
        status = json.loads((folder / "result.json").read_text(encoding="utf-8"))["status"]
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"cannot read {folder / 'result.json'} ({error}): delete {folder} to run it again"
        ) from None
    if status != "finished":
        return False
    there = make_config(merged(read_toml(folder / "config.toml"), {"run": {"folder": run.run.folder}}))
    if there != run:
        changed = next(differences(there.model_dump(), run.model_dump()))
        raise RunFolderError(f"{folder} holds a run with other settings ({changed}): choose another --folder")
    return True


def _check_free(runs: dict[str, TrainConfig]) -> None:
    for run in runs.values():
        if is_in_use(Path(run.run.folder)):
            raise RunFolderError(
                f"a run is being written to {run.run.folder}, maybe one of a comparison that was killed: "
                "wait until it ends, or end it"
            )


def _with_earlier(folder: Path, arms: Sequence[str], seeds: Sequence[int]) -> tuple[list[str], list[int]]:
    """The arms and seeds of this call and of those before it."""
    path = folder / "compare.json"
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        return list(dict.fromkeys([*before["arms"], *arms])), sorted({*before["seeds"], *seeds})
    except FileNotFoundError:
        return list(arms), sorted(seeds)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"cannot read {path} ({error!r}): delete it, or choose another --folder") from None


def _describe(folder: Path, task: str, arms: Sequence[str], seeds: Sequence[int], command: str) -> None:
    """Write compare.json."""
    facts = {"task": task, "arms": list(arms), "seeds": list(seeds), "command": command}
    temporary = folder / ".compare.json.tmp"
    temporary.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder / "compare.json")


@contextlib.contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Hold the folder of a comparison."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise RunFolderError(f"cannot make the folder {folder}: {error.strerror or error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(f"{folder} is in use by another comparison: choose another with --folder") from None
        yield
