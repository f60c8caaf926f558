"""``freshper envs``: the tasks, the page of one, and the contract of an environment of one's own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import tyro

from freshper.cli.exit_codes import FAILED
from freshper.cli.play import read_options
from freshper.cli.terminal import parse, say
from freshper.cli.visible_text import visible
from freshper.errors import ConfigError, EnvError

if TYPE_CHECKING:
    from rich.console import Console

_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")
"""A reference in a docstring: its last name is what a reader of the terminal needs."""


@dataclass(frozen=True)
class EnvsCommand:
    """List the tasks, show the page of one, or check an environment of your own.

    `freshper envs` lists; `freshper envs show sokoban` prints a task's page and parameters; `freshper envs check
    mymodule:MyEnv` plays it through the contract and says what is wrong (exit code 1).
    """

    action: tyro.conf.Positional[Literal["list", "show", "check"]] = "list"
    """What to do."""
    task: tyro.conf.Positional[str] = ""
    """Task, or MODULE:CLASS, gymnasium:ENV_ID, openenv:URL, trl:MODULE:CLASS."""
    options: tuple[str, ...] = ()
    """Settings of the task that is checked, as size=8 slippery=true."""
    replies: tuple[str, ...] = ()
    """Replies that the environment can read, to check it with."""
    json: bool = False
    """Print as JSON."""


def run_envs(words: Sequence[str], console: Console) -> int:
    """Run the command; returns the exit code."""
    arguments = parse(EnvsCommand, "envs", words)
    if arguments.action == "list" and arguments.task:
        raise ConfigError(f"`freshper envs list` takes no task; `freshper envs show {arguments.task}` shows one")
    if arguments.action != "list" and not arguments.task:
        raise ConfigError(f"`freshper envs {arguments.action}` needs a task, as in `envs {arguments.action} sokoban`")
    return {"list": _list, "show": _show, "check": _check}[arguments.action](arguments, console)


def _list(arguments: EnvsCommand, console: Console) -> int:
    from freshper.envs import describe, task_names

    if arguments.json:
        console.print_json(data={task: describe(task) for task in task_names()})
        return 0
    width = max(len(task) for task in task_names())
    for task in task_names():
        say(console, f"{task:{width}} {describe(task)}")
    return 0


def _show(arguments: EnvsCommand, console: Console) -> int:
    from freshper.envs import describe

    summary, page, parameters = describe(arguments.task), *_page(arguments.task)
    if arguments.json:
        shown = {name: value if isinstance(value, int | float | str) else repr(value) for name, value in parameters}
        console.print_json(data={"task": arguments.task, "summary": summary, "page": page, "parameters": shown})
        return 0
    say(console, visible(summary), "bold")
    say(console, f"\n{visible(page)}")
    if parameters:
        say(console, "\nSettings, as --env.options.NAME VALUE:")
        width = max(len(name) for name, _ in parameters)
        for name, value in parameters:
            say(console, f"  {name:{width}}  {dict(value) if isinstance(value, Mapping) else value!r}")
    return 0


def _check(arguments: EnvsCommand, console: Console) -> int:
    from freshper.envs import faults_of, make_env
    from freshper.envs.contract import check_env, check_splits

    options = read_options(arguments.options)
    problem = None
    try:
        with faults_of(arguments.task):
            for split in ("train", "eval"):
                check_env(partial(make_env, arguments.task, split, **options), arguments.replies)
            check_splits(*(make_env(arguments.task, split, **options) for split in ("train", "eval")))
    except EnvError as error:
        if not arguments.json:
            raise
        problem = str(error)
    if arguments.json:
        console.print_json(data={"task": arguments.task, "ok": problem is None, "problem": problem})
    else:
        say(console, f"{arguments.task} keeps the contract, on both splits")
    return 0 if problem is None else FAILED


def _page(task: str) -> tuple[str, list[tuple[str, Any]]]:
    """The docstrings of a task's environment and settings (one's own class before its adapter), and the defaults."""
    from freshper.envs.own import is_own, own_class
    from freshper.envs.registry import find_task

    factory: Callable[..., Any] = find_task(task).factory
    spec = None
    while isinstance(factory, partial):  # the settings that its factory begins with; others take them as arguments
        spec = next((given for given in factory.args if is_dataclass(given)), spec)
        factory = factory.func
    made = get_type_hints(factory)["return"]
    if spec is not None:
        parameters = [(field.name, getattr(spec, field.name)) for field in fields(spec)]
    else:
        parameters = [*_defaults(factory), *_defaults(made)]
    bases = [base for base in made.__mro__ if base.__module__.startswith("freshper.envs") and base.__doc__]
    pages = [inspect.getdoc(base) or "" for base in bases]  # a page may refer to those of its bases
    if spec is not None:
        pages.append(inspect.getdoc(type(spec)) or "")  # what the settings mean
    own = own_class(task) if is_own(task) else None
    if own is not None:
        pages.insert(0, (own.__doc__ and inspect.getdoc(own)) or f"{own.__name__} has no docstring.")
        parameters = [*_defaults(own), *parameters]
    return _ROLE.sub(r"\1", "\n\n".join(pages)), parameters


def _defaults(call: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Arguments that have one."""
    given = inspect.signature(call).parameters.values()
    return [(p.name, p.default) for p in given if p.default is not p.empty]
