"""What the package offers, and what importing it loads."""

import json
import subprocess
import sys

import pytest

import freshper
from freshper import errors, training

PUBLIC = [
    "AutoTau",
    "Columns",
    "Exponential",
    "Floored",
    "NoDecay",
    "PowerLaw",
    "PriorityUpdate",
    "ReplayBuffer",
    "SampledBatch",
    "SamplingParams",
    "StopReason",
    "TaskReplay",
    "TauChange",
    "Trajectory",
    "Turn",
    "read_trajectories",
    "write_trajectories",
]


def test_the_public_names_are_these_and_sorted():
    assert freshper.__all__ == PUBLIC == sorted(PUBLIC)
    assert all(hasattr(freshper, name) for name in PUBLIC)
    assert freshper.__version__.count(".") == 2


def test_everything_else_in_the_package_is_a_room_or_its_own_affair():
    others = {name for name in vars(freshper) if not name.startswith("_")} - set(PUBLIC)
    modules = {name for name in others if f"freshper.{name}" in sys.modules}
    assert others == modules


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_explained(name):
    assert getattr(freshper, name).__doc__


def test_training_is_used_from_python_as_the_command_uses_it():
    assert (
        training.__all__
        == sorted(training.__all__)
        == [
            "ARMS",
            "TrainConfig",
            "apply_arm",
            "load_config",
            "make_config",
            "train",
        ]
    )
    assert all(getattr(training, name) is not None for name in training.__all__)


def test_every_error_is_in_the_tree_of_the_docstring_and_has_a_standard_parent():
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.FreshPERError) and kind is not errors.FreshPERError:
            standard = [base for base in kind.__mro__[1:] if base.__module__ == "builtins" and base is not Exception]
            assert standard[0] not in (BaseException, object), name
            assert f" {name} ({standard[0].__name__})" in errors.__doc__ or f" {name} " in errors.__doc__


LOADED = """
import json, sys
before = set(sys.modules)
import freshper
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def _loaded(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_the_package_loads_numpy_and_nothing_else():
    loaded = _loaded(LOADED)
    heavy = {"torch", "transformers", "pydantic", "tyro", "rich", "scipy", "pyarrow", "numba", "tokenizers", "plotly"}
    assert not loaded & heavy
    assert loaded - sys.stdlib_module_names == {"freshper", "numpy"}


def test_the_rooms_of_the_heart_are_as_light():
    rooms = (
        "replay.disk.journal",
        "replay.diagnostics",
        "envs",
        "rollout.collect",
        "policies.core",
        "policies.scripted",
    )
    names = ", ".join(f"freshper.{room}" for room in rooms)
    assert _loaded(LOADED.replace("import freshper", f"import {names}")) - sys.stdlib_module_names == {
        "freshper",
        "numpy",
    }


def test_the_command_line_loads_no_torch_before_it_is_needed():
    loaded = _loaded(LOADED.replace("import freshper\n", "import freshper.cli, freshper.reports\n"))
    assert not loaded & {"torch", "transformers", "pydantic", "plotly", "scipy", "gymnasium"}
