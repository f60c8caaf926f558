"""The facts of `freshper doctor`: what a machine has, what a config needs, and how long an iteration takes here."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from freshper.cache_folder import cache_folder
from freshper.errors import ConfigError
from freshper.policies.loading import find_device
from freshper.policies.tiny import build_model
from freshper.training.config import TrainConfig
from freshper.training.config_file import make_config, merged
from freshper.training.policy import TINY, find, memory_of

__all__ = [
    "cache_folder",
    "folder_facts",
    "hardware",
    "memory_facts",
    "missing_libraries",
    "needed_libraries",
    "time_iterations",
]

Note = Callable[[str], None]

_TINY_VOCABULARY = 4096  # the most that the embedded policy's tokenizer learns
_MARGIN = 0.9  # of what is free: libraries, allocators and other processes need the rest
_ITERATIONS = 2  # the first one pays for what is built once; the second is like the others


def hardware() -> dict[str, Any]:
    """The machine: CPUs that this process may use, memory and its free part in bytes, and every GPU."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append({"name": facts.name, "memory": total, "free": free, "bfloat16": torch.cuda.is_bf16_supported()})
    total, free = _memory()
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": total,
        "free": free,
        "gpus": gpus,
        "mps": bool(torch.backends.mps.is_available()),
    }


def _memory() -> tuple[int, int]:
    """Bytes of memory and those that are free, within the bounds of a container where there is one."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    except (OSError, StopIteration):  # not Linux; what caches hold is missing from this number
        free = page * os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else total
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no container, or one without a bound ("max")
        return total, free
    return min(total, limit), max(0, min(free, limit - used))


def needed_libraries(config: TrainConfig) -> list[tuple[str, str, str]]:
    """(library, extra, setting) of everything optional that ``config`` asks for."""
    model, log = config.policy.model, config.log
    wanted = (
        ("peft", "lora", "lora.rank", config.lora.rank > 0),
        ("bitsandbytes", "qlora", "lora.quantize", config.lora.quantize != "none"),
        ("gguf", "gguf", "policy.model", model == "smollm2" or model.endswith(".gguf")),
        ("tensorboard", "train", "log.tensorboard", log.tensorboard),
        ("wandb", "wandb", "log.wandb", bool(log.wandb)),
        ("trackio", "trackio", "log.trackio", bool(log.trackio)),
        ("mlflow", "mlflow", "log.mlflow", bool(log.mlflow)),
    )
    return [(library, extra, setting) for library, extra, setting, asked in wanted if asked]


def missing_libraries(config: TrainConfig) -> list[str]:
    """A sentence for each library that ``config`` needs and nobody installed; none is imported."""
    return [
        f"{setting} needs {library}: pip install 'freshper[{extra}]'"
        for library, extra, setting in needed_libraries(config)
        if find_spec(library) is None
    ]


def folder_facts(path: Path) -> dict[str, Any]:
    """Whether something can be written where ``path`` is or would be made, and the bytes that are free there."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"freshper")
        problem = ""
    except OSError as error:
        problem = error.strerror or str(error)
    return {"path": str(path), "writable": not problem, "problem": problem, "free": shutil.disk_usage(there).free}


def memory_facts(config: TrainConfig) -> dict[str, Any]:
    """The estimate for ``config`` against what is free on its device, all in bytes.

    ``changes`` are settings that would lower the peak, and the peak then; only where it does not fit. Raises
    :class:`ConfigError` and :class:`MissingExtraError` for a model, a device or a dtype that cannot be had.
    """
    device = find_device("cpu" if config.policy.model == TINY else config.policy.device)
    model = _model_config(config)
    whole = memory_of(config, model)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _memory()[1]
    peak, table = whole.peak, whole.table()
    fits = peak <= _MARGIN * free
    return {
        "device": str(device),
        "peak": peak,
        "free": free,
        "fits": fits,
        "table": table,
        "changes": {} if fits else _changes(config, model, peak),
    }


def _model_config(config: TrainConfig) -> Any:
    """The transformers config of the model; no weight is read."""
    if config.policy.model == TINY:
        with torch.device("meta"):
            return build_model(_TINY_VOCABULARY, seed=0, **config.tiny.model_dump()).config
    return find(config).config


def _changes(config: TrainConfig, model: Any, peak: int) -> dict[str, int]:
    """What lowers the peak, in the order of what it costs, and the peak then: each alone, and all together."""
    found: dict[str, int] = {}
    together = config
    for name, change in _smaller(config).items():
        with contextlib.suppress(ConfigError):  # other settings stand in the way
            size = memory_of(make_config(merged(config.model_dump(), change)), model).peak
            if size < peak:
                together = make_config(merged(together.model_dump(), change))
                found[name] = size
    if len(found) > 1:
        found["all of these"] = memory_of(together, model).peak
    return found


def _smaller(config: TrainConfig) -> dict[str, dict[str, Any]]:
    budget = max(config.rollout.max_episode_tokens, config.optimizer.token_budget // 4)
    fewer = max(config.rollout.group_size, config.rollout.episodes // 4)
    steps: dict[str, dict[str, Any]] = {f"optimizer.token_budget {budget}": {"optimizer": {"token_budget": budget}}}
    if config.policy.model != TINY:
        steps |= {
            "policy.gradient_checkpointing true": {"policy": {"gradient_checkpointing": True}},
            f"policy.parallel {fewer}": {"policy": {"parallel": fewer}},
            "policy.dtype bfloat16": {"policy": {"dtype": "bfloat16"}},
        }
        if not config.lora.rank:
            steps["lora.rank 16"] = {"lora": {"rank": 16}}
    return steps


def time_iterations(config: TrainConfig, note: Note | None = None) -> dict[str, Any]:
    """Run two iterations of ``config`` in a temporary folder, and what they say of the whole run.

    The evaluations play as many episodes as an iteration has, at most, and are scaled up. Seconds are those of the
    second iteration by part; ``replay_updates`` of it had begun, and where that is fewer than replay.ratio, ``update``
    is scaled up too. ``memory`` is the peak of this process in bytes, and of the GPU where there is one. Whatever a
    run raises is raised.
    """
    from freshper.training.loop import train

    rows: list[Mapping[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="freshper-doctor-") as folder:
        train(_trial(config, Path(folder) / "run"), on_iteration=lambda row: rows.append(dict(row)), note=note)
    last = rows[-1]
    seconds = {name[5:-2]: value for name, value in last.items() if name.startswith("time/") and name.endswith("_s")}
    seconds.pop("tokens_per", None)  # a speed, not a time
    played = min(config.eval.episodes, config.rollout.episodes)
    evaluation = seconds.pop("eval", 0.0) * config.eval.episodes / played
    checkpoint = seconds.pop("checkpoint", 0.0)
    done = int(last.get("replay/updates", 0))
    missing = config.replay.ratio - done
    seconds["update"] *= config.updates_per_iteration / (config.updates_per_iteration - missing)
    iteration, iterations = sum(seconds.values()), config.run.iterations
    evaluations = 1 + -(-iterations // config.eval.every)  # one before RL, and one at the end
    checkpoints = -(-iterations // config.checkpoint.every) if config.checkpoint.every else 0
    return {
        "seconds": seconds | {"eval": evaluation, "checkpoint": checkpoint},
        "iteration": iteration,
        "run": iterations * iteration + evaluations * evaluation + checkpoints * checkpoint,
        "tokens_per_s": last.get("time/tokens_per_s", 0.0),
        "replay_updates": done,
        "memory": _peak_of_process(),
    }


def _trial(config: TrainConfig, folder: Path) -> TrainConfig:
    """The same settings for two iterations, heard by nobody."""
    changes = {
        "run": {"iterations": _ITERATIONS, "folder": str(folder)},
        "optimizer": {"warmup_updates": 0},  # they would exceed the updates of two iterations
        "eval": {"episodes": min(config.eval.episodes, config.rollout.episodes), "every": _ITERATIONS},
        "log": {"tensorboard": False, "wandb": "", "trackio": "", "mlflow": ""},
    }
    return make_config(merged(config.model_dump(), changes))


def _peak_of_process() -> dict[str, int]:
    import resource

    # The kernel counts in KiB, that of macOS in bytes.
    unit = 1 if platform.system() == "Darwin" else 1024
    peaks = {"process": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if torch.cuda.is_available():
        peaks["gpu"] = torch.cuda.max_memory_allocated()
    return peaks
