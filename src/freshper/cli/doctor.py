"""``freshper doctor``: what is installed, what the machine has, and whether and how fast a config runs on it."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from freshper.cli.exit_codes import FAILED
from freshper.cli.settings import read_arguments
from freshper.cli.terminal import parse, say
from freshper.errors import ConfigError, FreshPERError, MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console

    from freshper.training.config import TrainConfig

_TOLD = ("numpy", "torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numba", "peft")


@dataclass(frozen=True)
class DoctorCommand:
    """Look at the installation and the machine; with TARGET, whether and how fast that config runs here.

    TARGET is a task or a TOML file, and every setting is a dotted flag, as for `freshper train`. Two iterations are
    really run, in a temporary folder. The exit code is 1 when something is missing that the config needs.
    """

    target: tyro.conf.Positional[str] = ""
    """Task or config file; without one, nothing is run."""
    model: str | None = None
    """Another model than the embedded one: smollm2, or a Hugging Face name, folder or GGUF file."""
    run: bool = True
    """Run two iterations to time them; without, the memory is still estimated."""
    json: bool = False
    """Print the findings as JSON."""


def run_doctor(words: Sequence[str], console: Console) -> int:
    """Run the command; returns the exit code."""
    report: dict[str, Any] = {"versions": versions(), "extras": extras()}
    problems: list[str] = []
    try:
        import freshper.training.doctor
    except MissingExtraError as error:  # the rest is still worth telling
        arguments = parse(DoctorCommand, "doctor", words)
        if arguments.target:
            problems.append(str(error))
    else:
        given = read_arguments(words, DoctorCommand, "doctor")
        if given is None:
            return 0
        arguments, flags = given
        if flags and not arguments.target:
            raise ConfigError(f"{flags[0]} is a setting of a config, and no TARGET was given: nothing would read it")
        config = _configured(arguments.target, arguments.model, flags) if arguments.target else None
        report |= {"machine": freshper.training.doctor.hardware(), "folders": _folders(config)}
        problems += [
            f"the {name} folder {facts['path']} cannot be written ({facts['problem']})"
            for name, facts in report["folders"].items()
            if not facts["writable"]
        ]
        if config is not None:
            note = None if arguments.json else lambda text: say(console, text, style="dim")
            _examine(config, report, problems, run=arguments.run, note=note)
    report["problems"] = problems
    if arguments.json:
        console.print_json(data=report)
    else:
        for line in _lines(report):
            say(console, line)
    return FAILED if problems else 0


def versions() -> dict[str, str | None]:
    """Of Python, of freshper and of the libraries that matter most; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "freshper": _version("freshper")}
    return found | {name: _version(name) for name in _TOLD}


def extras() -> dict[str, list[str]]:
    """Extra -> what of it is not installed or too old, as requirements; nothing is imported for it."""
    lacking: dict[str, list[str]] = {}
    for line in metadata.requires("freshper") or []:
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", line)
        if extra is None:
            continue
        requirement = line.partition(";")[0].strip()
        missing = lacking.setdefault(extra[1], [])
        if not _is_met(requirement):
            missing.append(requirement)
    return lacking


def _is_met(requirement: str) -> bool:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    installed = _version(name[0]) if name else None
    if installed is None:
        return False
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:  # it comes with transformers; without it, being there is all that can be told
        return True
    return Requirement(requirement).specifier.contains(installed, prereleases=True)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _configured(target: str, model: str | None, flags: list[str]) -> TrainConfig:
    from freshper.training.config_file import with_flags
    from freshper.training.presets import load_config

    return with_flags(load_config(target, model), flags)


def _folders(config: TrainConfig | None) -> dict[str, dict[str, Any]]:
    from freshper.training.doctor import cache_folder, folder_facts

    runs = Path(config.run.folder) if config is not None and config.run.folder else Path("runs")
    return {"cache": folder_facts(cache_folder()), "runs": folder_facts(runs)}


def _examine(
    config: TrainConfig,
    report: dict[str, Any],
    problems: list[str],
    *,
    run: bool,
    note: Callable[[str], None] | None,
) -> None:
    """Add what can be said of ``config`` to the report, and what stands in its way to the problems."""
    from freshper.training.doctor import memory_facts, missing_libraries, time_iterations

    problems += missing_libraries(config)
    try:
        memory = memory_facts(config)
        report["memory"] = memory
        if not memory["fits"]:
            problems.append(
                f"about {_size(memory['peak'])} are needed on {memory['device']}, and {_size(memory['free'])} are free"
            )
        if run and not problems:
            report["time"] = time_iterations(config, note)
    except FreshPERError as error:
        problems.append(str(error))


def _lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    installed = {name: version for name, version in report["versions"].items() if version}
    lines = ["versions   " + ", ".join(f"{name} {version}" for name, version in installed.items())]
    if machine := report.get("machine"):
        gpus = ", ".join(
            f"{gpu['name']} ({_size(gpu['free'])} of {_size(gpu['memory'])} free)" for gpu in machine["gpus"]
        )
        lines.append(
            f"machine    {machine['system']}, {machine['cpus']} CPUs, {_size(machine['free'])} of "
            f"{_size(machine['memory'])} memory free, {gpus or 'no GPU'}"
        )
    for name, facts in report.get("folders", {}).items():
        state = f"{_size(facts['free'])} free" if facts["writable"] else f"cannot be written: {facts['problem']}"
        lines.append(f"{name:10} {facts['path']}, {state}")
    for extra, missing in report["extras"].items():
        state = f"not complete, pip install 'freshper[{extra}]' adds {', '.join(missing)}" if missing else "installed"
        lines.append(f"extra      {extra}: {state}")
    return lines + _config_lines(report) + [f"problem    {problem}" for problem in report["problems"]]


def _config_lines(report: dict[str, Any]) -> list[str]:
    """What is told of a config: memory and time."""
    lines = []
    if memory := report.get("memory"):
        lines += ["", f"memory on {memory['device']}, estimated; {_size(memory['free'])} are free"]
        lines += [f"  {line}" for line in memory["table"].splitlines()]
        if memory["changes"]:
            lines += ["  it would take less with"]
            lines += [f"    --{name}: {_size(peak)}" for name, peak in memory["changes"].items()]
    if timed := report.get("time"):
        rare = ("eval", "checkpoint")
        parts = ", ".join(f"{name} {value:.2f} s" for name, value in timed["seconds"].items() if name not in rare)
        lines += [
            "",
            f"time       an iteration takes {timed['iteration']:.2f} s here ({parts}; {timed['tokens_per_s']:.0f} "
            f"sampled tokens/s), an evaluation {timed['seconds']['eval']:.1f} s, "
            f"a checkpoint {timed['seconds']['checkpoint']:.1f} s",
            f"           the whole run about {_duration(timed['run'])}, with a peak of "
            + ", ".join(f"{_size(size)} ({name})" for name, size in timed["memory"].items()),
        ]
    return lines


def _size(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
