"""Environments: multi-turn text tasks, their registry, and the contract that every one of them keeps."""

from functools import partial

from freshper.envs.contract import check_env
from freshper.envs.core import (
    EVAL_SHARE,
    INVALID_REWARD,
    Env,
    Outcome,
    Split,
    Teachable,
    describe,
    draw_level,
    level_split,
    make_env,
    read_action,
    register,
    task_names,
    with_options,
    write_action,
)
from freshper.envs.frozenlake import PRESETS as _FROZENLAKE
from freshper.envs.frozenlake import FrozenLakeEnv, FrozenLakeSpec, make_frozenlake
from freshper.envs.sokoban import PRESETS as _SOKOBAN
from freshper.envs.sokoban import SokobanEnv, SokobanSpec, make_sokoban

__all__ = [
    "EVAL_SHARE",
    "INVALID_REWARD",
    "Env",
    "FrozenLakeEnv",
    "FrozenLakeSpec",
    "Outcome",
    "SokobanEnv",
    "SokobanSpec",
    "Split",
    "Teachable",
    "check_env",
    "describe",
    "draw_level",
    "level_split",
    "make_env",
    "read_action",
    "register",
    "task_names",
    "with_options",
    "write_action",
]

for _task, (_sokoban, _summary) in _SOKOBAN.items():
    register(_task, partial(make_sokoban, _sokoban), _summary)
for _task, (_frozenlake, _summary) in _FROZENLAKE.items():
    register(_task, partial(make_frozenlake, _frozenlake), _summary)
