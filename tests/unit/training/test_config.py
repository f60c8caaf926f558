"""The settings: every limit, every cross-field check, and every name that has to be known."""

import dataclasses

import pytest
from pydantic import BaseModel, ValidationError

from freshper.errors import ConfigError, FreshPERError, UnknownNameError
from freshper.replay.freshness import Exponential, NoDecay
from freshper.training.config import TrainConfig
from freshper.training.config_file import make_config
from freshper.training.presets import load_config
from freshper.training.sections import CorrectionConfig, FreshnessConfig

# Values that no single field or pair of fields allows, and what the complaint says.
WRONG = [
    # Names (T22): the known ones and the nearest are offered.
    ({"run": {"task": "sokban"}}, "unknown task 'sokban'. Did you mean 'sokoban'? Known: aime, "),
    (
        {"replay": {"priority": "rewards"}},
        "unknown priority 'rewards'. Did you mean 'reward'? Known: advantage, reward",
    ),
    ({"algorithm": {"advantage": "reinforce"}}, "Did you mean 'reinforce++'?"),
    ({"replay": {"freshness": {"kind": "exponetial"}}}, "replay.freshness.kind = 'exponetial': input should be 'expo"),
    (
        {"replay": {"correction": {"toward": "fresh"}}},
        "replay.correction.toward = 'fresh': input should be 'uniform' or",
    ),
    ({"replay": {"correction": {"normalization": "max"}}}, "input should be 'batch_max', 'mean' or 'none'"),
    (
        {"optimizer": {"schedule": "poly"}},
        "optimizer.schedule = 'poly': input should be 'constant', 'linear' or 'cosine'",
    ),
    # Two fields that do not fit together.
    ({"rollout": {"episodes": 32, "group_size": 5}}, "rollout.group_size 5 must divide rollout.episodes 32"),
    (
        {"policy": {"share_prompts": True, "model": "smollm2", "compile": True}},
        "policy.share_prompts and policy.compile do not go together",
    ),
    (
        {"policy": {"share_prompts": True, "model": "smollm2", "gradient_checkpointing": True}},
        "policy.share_prompts and policy.gradient_checkpointing do not go together",
    ),
    ({"tiny": {"hidden_size": 64, "heads": 3}}, "tiny.hidden_size 64 must be a multiple of 2 x tiny.heads (3)"),
    ({"tiny": {"hidden_size": 4, "heads": 4}}, "a head's width is even"),
    ({"rollout": {"max_episode_tokens": 513}}, "rollout.max_episode_tokens 513 exceeds tiny.context 512"),
    (
        {"optimizer": {"token_budget": 255}},
        "optimizer.token_budget 255 must hold one episode of rollout.max_episode_tokens",
    ),
    ({"replay": {"batch_size": 33, "capacity": 32}}, "replay.batch_size 33 exceeds replay.capacity 32"),
    ({"rollout": {"episodes": 64}, "replay": {"capacity": 63}}, "rollout.episodes 64 exceeds replay.capacity 63"),
    (
        {"run": {"iterations": 2}, "replay": {"ratio": 2}, "optimizer": {"warmup_updates": 6}},
        "optimizer.warmup_updates 6 must be below the run's 6 updates",
    ),
    ({"clip": {"dual": 1.0}}, "clip.dual 1.0 must be above 1, or 0 to switch it off"),
    ({"storage": {"max_age": 2}}, "storage.max_age 2 is less than the 3 updates of an iteration"),
    ({"storage": {"ram_bytes": 9}, "checkpoint": {"every": 0}}, "storage.ram_bytes 9 puts older data"),
    ({"lora": {"dropout": 0.1}}, "the embedded policy is trained whole"),
    ({"clip": {"high": 1e300}}, "clip.high"),
    ({"run": {"folder": "a\x00b"}}, "run.folder"),
    ({"replay": {"priority": "td_error"}}, "replay.priority td_error needs the critic of algorithm.advantage gae"),
    # Limits of one field.
    ({"replay": {"capacity": 0}}, "replay.capacity = 0: input should be greater than or equal to 1"),
    ({"replay": {"freshness": {"tau": 0}}}, "replay.freshness.tau = 0: input should be greater than or equal to"),
    ({"replay": {"freshness": {"tau": float("inf")}}}, "replay.freshness.tau = inf: input should be a finite number"),
    ({"replay": {"alpha": float("nan")}}, "replay.alpha = nan"),
    ({"replay": {"alpha": -0.1}}, "replay.alpha = -0.1: input should be greater than or equal to 0"),
    ({"replay": {"ratio": -1}}, "replay.ratio = -1"),
    ({"replay": {"ratio": 0.5}}, "replay.ratio = 0.5: input should be a valid integer"),
    ({"replay": {"correction": {"beta_end": 1.5}}}, "replay.correction.beta_end = 1.5"),
    ({"rollout": {"temperature": 0}}, "rollout.temperature = 0: input should be greater than 0"),
    ({"rollout": {"top_p": 0}}, "rollout.top_p = 0"),
    ({"clip": {"low": 1}}, "clip.low = 1: input should be less than 1"),
    ({"algorithm": {"gamma": 1.1}}, "algorithm.gamma = 1.1"),
    ({"optimizer": {"learning_rate": "fast"}}, "optimizer.learning_rate = 'fast': input should be a valid number"),
    ({"run": {"seed": 2**63}}, "run.seed = 9223372036854775808: input should be less than"),
    ({"run": {"arm": "a/../b"}}, "run.arm = 'a/../b': string should match pattern"),
    ({"run": {"arm": ""}}, "run.arm = '': string should match pattern"),
    ({"run": {"arm": "x" * 81}}, "string should have at most 80 characters"),
    ({"eval": {"episodes": None}}, "eval.episodes = None: input should be a valid integer"),
    # Keys that are none.
    ({"replay": {"capcity": 10}}, "unknown setting replay.capcity. Did you mean replay.capacity?"),
    ({"reply": {"capacity": 10}}, "unknown setting reply. Did you mean replay."),
    ({"zzz": 1}, "unknown setting zzz."),
    ({"run": 3}, "run = 3: input should be a valid dictionary"),
]


@pytest.mark.parametrize(("values", "complaint"), WRONG, ids=lambda value: value[:50] if type(value) is str else "")
def test_wrong_settings_are_refused_in_one_line(values, complaint):
    with pytest.raises(ConfigError) as caught:
        make_config(values)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"rollout": {"episodes": 32, "group_size": 8}},
        {"rollout": {"max_episode_tokens": 512}},
        {"rollout": {"max_episode_tokens": 99}, "optimizer": {"token_budget": 99}},
        {"replay": {"batch_size": 32, "capacity": 32}},
        {"run": {"iterations": 2}, "replay": {"ratio": 2}, "optimizer": {"warmup_updates": 5}},
        {"clip": {"dual": 0}},
        {"clip": {"dual": 1.01}},
        {"replay": {"freshness": {"tau": 1e-6}}},
        {"replay": {"alpha": 1e6}},
        {"run": {"seed": 2**63 - 1}},
    ],
    ids=str,
)
def test_the_limits_themselves_are_allowed(values):
    config = make_config(values)
    for section, fields in values.items():
        for name, value in fields.items():
            told = getattr(getattr(config, section), name)
            assert (told.model_dump(include=set(value)) if isinstance(told, BaseModel) else told) == value


def test_an_unknown_name_is_an_error_of_that_kind_and_of_pydantics_own():
    """From Python the class itself raises; pydantic wraps what a validator raises."""
    with pytest.raises(ValidationError, match="unknown task 'nope'"):
        TrainConfig(run={"task": "nope"})
    with pytest.raises(ConfigError) as caught:
        make_config({"run": {"task": "nope"}})
    assert isinstance(caught.value, FreshPERError)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(UnknownNameError, match="Did you mean 'sokoban'"):
        load_config("sokobann")


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().replay.ratio = 3


def test_every_section_has_few_fields_and_every_field_a_sentence():
    def sections(kind):
        yield kind
        for field in kind.model_fields.values():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from sections(field.annotation)

    for section in sections(TrainConfig):
        assert section.__doc__
        if section is TrainConfig:
            continue
        assert len(section.model_fields) <= 8, section.__name__
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"
            assert field.description.endswith("."), f"{section.__name__}.{name}"


@pytest.mark.parametrize(("extra_epochs", "ratio", "per_iteration"), [(0, 0, 1), (2, 0, 3), (0, 2, 3), (1, 4, 6)])
def test_updates_are_counted_replay_included(extra_epochs, ratio, per_iteration):
    """T4: schedules count optimizer updates."""
    config = make_config(
        {"run": {"iterations": 7}, "algorithm": {"extra_epochs": extra_epochs}, "replay": {"ratio": ratio}}
    )
    assert config.updates_per_iteration == per_iteration
    assert config.total_updates == 7 * per_iteration


def test_the_freshness_is_made_of_its_settings():
    assert FreshnessConfig(kind="exponential", tau=7).make() == Exponential(7.0)
    assert FreshnessConfig(kind="none", tau=7).make() == NoDecay()
    assert dataclasses.is_dataclass(FreshnessConfig().make())


@pytest.mark.parametrize(("progress", "beta"), [(0.0, 0.4), (0.5, 0.7), (1.0, 1.0)])
def test_beta_is_annealed_linearly(progress, beta):
    assert CorrectionConfig(beta_start=0.4, beta_end=1.0).beta(progress) == pytest.approx(beta)
    assert CorrectionConfig().beta(progress) == 0


def test_the_correction_is_off_by_default():
    """The freshness arms run without it: toward uniform at beta 1 it would cancel the freshness."""
    correction = TrainConfig().replay.correction
    assert (correction.beta_start, correction.beta_end) == (0, 0)
