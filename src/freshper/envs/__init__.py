"""Environments: multi-turn text tasks, their registry, and the contract that every one of them keeps."""

from functools import partial

from freshper.envs.cliffwalking import PRESETS as _CLIFFWALKING
from freshper.envs.cliffwalking import CliffWalkingEnv, CliffWalkingSpec, make_cliffwalking
from freshper.envs.contract import check_env
from freshper.envs.core import (
    EVAL_SHARE,
    INVALID_REWARD,
    Env,
    Outcome,
    Pictured,
    Split,
    Teachable,
    draw_level,
    faults_of,
    level_split,
    read_action,
    with_options,
    write_action,
)
from freshper.envs.frozenlake import PRESETS as _FROZENLAKE
from freshper.envs.frozenlake import FrozenLakeEnv, FrozenLakeSpec, make_frozenlake
from freshper.envs.geometry import TASKS as _GEOMETRY
from freshper.envs.maths import TASKS as _MATHS
from freshper.envs.mixture import SUMMARY as _MIXTURE_SUMMARY
from freshper.envs.mixture import TASK as MIXTURE
from freshper.envs.mixture import MixtureEnv, make_mixture
from freshper.envs.pictured import FROZENLAKE_PRESETS as _FROZENLAKE_IMAGE
from freshper.envs.pictured import SOKOBAN_PRESETS as _SOKOBAN_IMAGE
from freshper.envs.pictured import (
    FrozenLakeImageEnv,
    FrozenLakeImageSpec,
    SokobanImageEnv,
    SokobanImageSpec,
    make_frozenlake_image,
    make_sokoban_image,
)
from freshper.envs.registry import check_task, describe, make_env, register, task_names
from freshper.envs.search import TASKS as _SEARCH
from freshper.envs.sokoban import PRESETS as _SOKOBAN
from freshper.envs.sokoban import SokobanEnv, SokobanSpec, make_sokoban

__all__ = [
    "EVAL_SHARE",
    "INVALID_REWARD",
    "MIXTURE",
    "CliffWalkingEnv",
    "CliffWalkingSpec",
    "Env",
    "FrozenLakeEnv",
    "FrozenLakeImageEnv",
    "FrozenLakeImageSpec",
    "FrozenLakeSpec",
    "MixtureEnv",
    "Outcome",
    "Pictured",
    "SokobanEnv",
    "SokobanImageEnv",
    "SokobanImageSpec",
    "SokobanSpec",
    "Split",
    "Teachable",
    "check_env",
    "check_task",
    "describe",
    "draw_level",
    "faults_of",
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
for _task, (_frozenlake_image, _summary) in _FROZENLAKE_IMAGE.items():
    register(_task, partial(make_frozenlake_image, _frozenlake_image), _summary)
for _task, (_sokoban_image, _summary) in _SOKOBAN_IMAGE.items():
    register(_task, partial(make_sokoban_image, _sokoban_image), _summary)
for _task, (_factory, _summary) in _SEARCH.items():
    register(_task, _factory, _summary)
for _task, (_cliffwalking, _summary) in _CLIFFWALKING.items():
    register(_task, partial(make_cliffwalking, _cliffwalking), _summary)
for _task, (_factory, _summary) in _MATHS.items():
    register(_task, _factory, _summary)
for _task, (_factory, _summary) in _GEOMETRY.items():
    register(_task, _factory, _summary)
register(MIXTURE, make_mixture, _MIXTURE_SUMMARY)
