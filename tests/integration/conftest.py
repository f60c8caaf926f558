"""Whole runs of a really small language model on FrozenLake: a second each, from one cached warm start."""

import contextlib
import copy
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from freshper.training.config import TrainConfig
from freshper.training.config_file import make_config, merged

SMALL: dict[str, Any] = {
    "run": {"task": "frozenlake", "iterations": 3, "sample_every": 2},
    "rollout": {"episodes": 4, "max_episode_tokens": 256},
    "tiny": {"hidden_size": 16, "layers": 1, "heads": 2, "context": 256},
    "warm_start": {"updates": 60, "learning_rate": 1e-2},
    "eval": {"every": 2, "episodes": 4},
    "replay": {"batch_size": 4},
}


def _flags(values: Mapping[str, Any], prefix: str = "--") -> list[str]:
    """Nested settings as the words of a command line."""
    words: list[str] = []
    for name, value in values.items():
        words += _flags(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [f"{prefix}{name}", str(value)]
    return words


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache of warm starts for the session, also for the processes that the tests start."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FRESHPER_CACHE", str(folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder


@pytest.fixture(scope="session")
def small() -> Callable[..., TrainConfig]:
    """The small settings, with those of the keywords laid over: ``small(run={"seed": 1})``."""
    return lambda **changes: make_config(merged(copy.deepcopy(SMALL), changes))


@pytest.fixture(scope="session")
def small_flags() -> list[str]:
    """The small settings as flags, the task left out."""
    values = copy.deepcopy(SMALL)
    del values["run"]["task"]
    return _flags(values)


@pytest.fixture(scope="session")
def rows() -> Callable[..., list[dict[str, float]]]:
    """The lines of a run's metrics.jsonl; ``without`` names prefixes to leave out."""

    def read(folder: Path, without: Sequence[str] = ("time/",)) -> list[dict[str, float]]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{name: value for name, value in line.items() if not name.startswith(tuple(without))} for line in lines]

    return read


@pytest.fixture(scope="session")
def weights() -> Callable[[Path], dict[str, bytes]]:
    """The weights of a saved policy as bytes."""
    from safetensors.torch import load_file

    def read(folder: Path) -> dict[str, bytes]:
        return {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}

    return read


@pytest.fixture(scope="session")
def result() -> Callable[[Path], dict[str, Any]]:
    """What result.json holds."""
    return lambda folder: json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="session")
def minimal_on_policy() -> ModuleType:
    """The independent on-policy loop next to this file."""
    spec = importlib.util.spec_from_file_location("minimal_on_policy", Path(__file__).with_name("minimal_on_policy.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, small: Callable[..., TrainConfig]) -> Path:
    """A finished run of the freshper arm with seed 0."""
    from freshper.training import train

    folder = tmp_path_factory.mktemp("trained") / "run"
    train(small(run={"folder": str(folder)}))
    return folder


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    """Return when ``holds()``; fail when the process ends before, or time is up."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "time is up"
        try:
            code = process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            continue
        assert holds(), f"the process ended with {code}: {process.communicate()}"


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Polls a condition while a process runs, see :func:`wait_until`."""
    return wait_until


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``python ARGS`` in the test's folder, in a process group of its own; what is left over is killed."""
    processes: list[subprocess.Popen[str]] = []

    def run(*args: str, **options: Any) -> subprocess.Popen[str]:
        whole = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
        process = subprocess.Popen([sys.executable, *args], start_new_session=True, **(whole | options))
        processes.append(process)
        return process

    yield run
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
