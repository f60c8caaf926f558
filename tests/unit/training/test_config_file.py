"""Settings in files and on the command line."""

import tomllib

import pytest
from pydantic import BaseModel

from freshper.envs import task_names
from freshper.errors import ConfigError, UnknownNameError
from freshper.training.arms import ARMS, apply_arm
from freshper.training.config import TrainConfig
from freshper.training.config_file import (
    field_paths,
    make_config,
    merged,
    read_toml,
    split_flags,
    unknown_setting,
    with_flags,
    write_toml,
)
from freshper.training.presets import load_config

UNUSUAL = {
    "run": {"task": "frozenlake", "arm": 'a "quoted" \\ arm — ü', "folder": "runs/[x] 'y'\ttab", "seed": 2**63 - 1},
    "optimizer": {"learning_rate": 1.234567890123456e-300, "beta2": 0.1 + 0.2},
    "replay": {"alpha": 1e6, "freshness": {"tau": 1e22}, "correction": {"toward": "freshness", "beta_end": 1.0}},
}


@pytest.mark.parametrize(
    "values", [{}, UNUSUAL, *({"run": {"arm": arm}} for arm in ARMS)], ids=lambda values: str(values)[:30]
)
def test_what_is_written_is_read_back(values, tmp_path):
    config = make_config(values)
    config = apply_arm(config, config.run.arm) if config.run.arm in ARMS else config
    path = tmp_path / "config.toml"
    write_toml(config, path)
    assert make_config(read_toml(path)) == config
    assert load_config(str(path)) == config
    assert [child.name for child in tmp_path.iterdir()] == ["config.toml"], "no half-written file is left behind"


def test_every_setting_is_written_below_its_sentence(tmp_path):
    path = tmp_path / "config.toml"
    write_toml(TrainConfig(), path)
    lines = path.read_text().splitlines()
    written = _paths(tomllib.loads(path.read_text()))
    assert [path for path in field_paths() if path != "env.options"] == written
    for path_of_setting in field_paths():
        section = TrainConfig
        *parents, name = path_of_setting.split(".")
        for parent in parents:
            section = section.model_fields[parent].annotation
        sentence = f"# {section.model_fields[name].description}"
        assert sentence in lines
        assert lines[lines.index(sentence) + 1].startswith(f"{name} = ")


def _paths(table, prefix=""):
    return [
        path
        for name, value in table.items()
        for path in (_paths(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"])
    ]


def test_the_paths_of_settings_lead_somewhere():
    assert len(field_paths()) == len(set(field_paths()))
    dumped = TrainConfig().model_dump()
    for path in field_paths():
        value = dumped
        for name in path.split("."):
            value = value[name]
        assert path == "env.options" or not isinstance(value, dict | BaseModel), path


@pytest.mark.parametrize("task", task_names())
def test_every_task_has_a_starting_point(task):
    assert load_config(task).run.task == task


@pytest.mark.parametrize("task", ["sokoban", "frozenlake"])
def test_presets_are_configs_that_can_be_named_too(task):
    from importlib.resources import files

    path = str(files("freshper") / "configs" / f"{task}.toml")
    assert load_config(path) == load_config(task)


def test_what_is_neither_a_file_nor_a_task_is_an_error():
    with pytest.raises(UnknownNameError, match="Did you mean 'sokoban'"):
        load_config("sokban")
    with pytest.raises(ConfigError, match="cannot read the config nowhere"):
        load_config("nowhere.toml")


@pytest.mark.parametrize(
    "flags",
    [
        ["--replay.freshness.tau", "300", "--rollout.max_turns", "4", "--run.arm", "x"],
        ["--replay.freshness.tau=300", "--rollout.max_turns=4", "--run.arm=x"],
        ["--replay.freshness.tau=3e2", "--rollout.max-turns", "4", "--run.arm=x"],
        ["--rollout.max-turns=9", "--run.arm=x", "--replay.freshness.tau", "300", "--rollout.max_turns=4"],
    ],
)
def test_flags_are_laid_over_in_every_form(flags):
    config = with_flags(make_config({"replay": {"ratio": 3}}), flags)
    assert config.replay.freshness.tau == 300.0
    assert config.rollout.max_turns == 4
    assert config.run.arm == "x"
    assert config.replay.ratio == 3


def test_settings_of_the_task_are_free_and_typed_as_toml_types_them():
    flags = ["--env.options.max-turns", "4", "--env.options.weights.frozenlake-image=2.5", "--env.options.name", "a b"]
    options = with_flags(TrainConfig(), [*flags, "--env.options.slippery=true"]).env.options
    assert options == {"max_turns": 4, "weights": {"frozenlake-image": 2.5}, "name": "a b", "slippery": True}


def test_values_may_look_like_flags_or_hold_equals_signs():
    config = with_flags(TrainConfig(), ["--run.folder=a=b", "--run.arm", "--odd"])
    assert (config.run.folder, config.run.arm) == ("a=b", "--odd")
    assert with_flags(TrainConfig(), ["--run.folder="]).run.folder == ""


def test_no_flags_leave_the_config_as_it_is():
    config = TrainConfig()
    assert with_flags(config, []) is config


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--replay.ratoi", "3"], "unknown setting replay.ratoi. Did you mean replay.ratio?"),
        (["--replay.batch-sise=3"], "unknown setting replay.batch_sise. Did you mean replay.batch_size?"),
        (["--replay.freshness", "none"], "unknown setting replay.freshness. Did you mean replay.freshness.kind?"),
        (["--replay.ratio"], "--replay.ratio needs a value"),
        (["--replay.ratio", "many"], "replay.ratio = 'many': input should be a valid integer"),
        (["--replay.ratio="], "replay.ratio = '': input should be a valid integer"),
        (["3"], "unexpected argument '3': settings are given as --section.name value"),
        (["--replay.ratio", "3", "4"], "unexpected argument '4'"),
        (["--replay.capacity", "8"], "replay.batch_size 32 exceeds replay.capacity 8"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(flags, complaint):
    with pytest.raises(ConfigError) as caught:
        with_flags(TrainConfig(), flags)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_flags_with_dots_are_split_off():
    words = ["sokoban", "--arm", "per", "--run.seed", "3", "--json", "--replay.ratio=4", "x.toml", "--run.arm"]
    own, flags = split_flags(words)
    assert own == ["sokoban", "--arm", "per", "--json", "x.toml"]
    assert flags == ["--run.seed", "3", "--replay.ratio=4", "--run.arm"]


def test_merging_lays_nested_values_over_and_changes_neither():
    base = {"a": 1, "b": {"c": 2, "d": {"e": 3}}}
    changes = {"b": {"c": 4, "d": {"f": 5}}, "g": {"h": 6}}
    assert merged(base, changes) == {"a": 1, "b": {"c": 4, "d": {"e": 3, "f": 5}}, "g": {"h": 6}}
    assert base == {"a": 1, "b": {"c": 2, "d": {"e": 3}}}
    assert changes == {"b": {"c": 4, "d": {"f": 5}}, "g": {"h": 6}}


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("replay.tau", "replay.freshness.tau"),
        ("freshness.tau", "replay.freshness.tau"),
        ("replay.beta_start", "replay.correction.beta_start"),
        ("runn.seed", "run.seed"),
        ("tau", "replay.freshness.tau"),
        ("warm-start.update", "warm_start.updates"),
        ("replay", "replay.ratio"),
        ("optimizer.lr", None),
        ("run.", None),
        ("x", None),
    ],
)
def test_the_nearest_setting_is_offered_where_one_is_near(path, nearest):
    said = unknown_setting(path)
    assert said.startswith(f"unknown setting {path}.")
    assert ("Did you mean" in said) == (nearest is not None)
    assert nearest is None or f"Did you mean {nearest}?" in said
