"""Arms: values laid over a config, and nothing else."""

import pytest

from freshper.errors import ConfigError, UnknownNameError
from freshper.training.arms import ARMS, apply_arm, check_arm
from freshper.training.config import TrainConfig
from freshper.training.config_file import make_config, with_flags

# What method.md and cpu-scale.md call them by, written down once more. "=" is what the config had.
EXPECTED = {
    "on-policy": {"replay.ratio": 0},
    "epochs": {"replay.ratio": 0, "algorithm.extra_epochs": 4},
    "uniform": {"replay.priority": "uniform", "replay.freshness.kind": "none"},
    "recency": {"replay.priority": "uniform"},
    "success-only": {"replay.priority": "success", "replay.freshness.kind": "none"},
    "per": {"replay.freshness.kind": "none"},
    "per-is": {
        "replay.freshness.kind": "none",
        "replay.correction.beta_start": 0.4,
        "replay.correction.beta_end": 1.0,
    },
    "freshper": {},
    "freshper-auto": {"replay.freshness.kind": "auto"},
    "freshper-is": {"replay.correction.beta_start": 0.4, "replay.correction.beta_end": 1.0},
}


def _flat(values, prefix=""):
    flat = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


@pytest.fixture
def base():
    """A config that has no arm's name and few defaults."""
    return make_config(
        {
            "run": {"arm": "none yet", "seed": 5, "iterations": 9},
            "replay": {"ratio": 4, "alpha": 0.7, "freshness": {"tau": 33}, "batch_size": 16},
            "optimizer": {"schedule": "cosine"},
        }
    )


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_changes_its_own_values_and_nothing_else(base, arm):
    before, after = _flat(base.model_dump()), _flat(apply_arm(base, arm).model_dump())
    changed = {path: value for path, value in after.items() if before[path] != value}
    assert changed == EXPECTED[arm] | {"run.arm": arm}


def test_there_are_ten_and_each_has_a_sentence():
    assert ARMS.keys() == EXPECTED.keys()
    assert all(sentence for sentence, _ in ARMS.values())


def test_all_arms_but_on_policy_make_the_same_number_of_updates(base):
    totals = {arm: apply_arm(base, arm).total_updates for arm in ARMS}
    assert totals.pop("on-policy") == 9
    assert set(totals.values()) == {9 * (1 + 4)}


@pytest.mark.parametrize("arm", [name for name in ARMS if name not in ("on-policy", "epochs")])
def test_an_arm_undoes_the_values_of_another(base, arm):
    expected, after_others = apply_arm(base, arm).replay, apply_arm(apply_arm(base, "freshper-is"), arm).replay
    assert after_others.correction.beta_end == expected.correction.beta_end
    assert after_others.freshness == expected.freshness


@pytest.mark.parametrize(("arm", "nearest"), [("frshper", "freshper"), ("on_policy", "on-policy"), ("PER", None)])
def test_an_unknown_arm_is_an_error_with_the_nearest(arm, nearest):
    with pytest.raises(UnknownNameError) as caught:
        apply_arm(TrainConfig(), arm)
    assert ("Did you mean" in str(caught.value)) == (nearest is not None)
    assert nearest is None or f"Did you mean {nearest!r}?" in str(caught.value)
    assert "success-only" in str(caught.value)


@pytest.mark.parametrize("arm", ARMS)
def test_a_config_of_an_arm_passes_as_that_arm(base, arm):
    config = apply_arm(base, arm)
    check_arm(config, arm)
    check_arm(with_flags(config, ["--replay.alpha", "0.5", "--run.seed", "2"]), arm)
    assert config.run.arm == arm


@pytest.mark.parametrize(
    ("arm", "flag", "complaint"),
    [
        ("on-policy", "--replay.ratio=1", "arm on-policy means replay.ratio = 0, not 1"),
        ("epochs", "--replay.ratio=4", "arm epochs means replay.ratio = 0, not 4"),
        ("uniform", "--replay.priority=reward", "arm uniform means replay.priority = uniform, not reward"),
        (
            "freshper",
            "--replay.freshness.kind=none",
            "arm freshper means replay.freshness.kind = exponential, not none",
        ),
        ("per-is", "--replay.correction.toward=freshness", "arm per-is means replay.correction.toward = uniform"),
    ],
)
def test_a_label_that_would_lie_is_refused(base, arm, flag, complaint):
    config = with_flags(apply_arm(base, arm), [flag])
    with pytest.raises(ConfigError, match=complaint):
        check_arm(config, arm)


@pytest.mark.parametrize("arm", sorted(ARMS))
def test_an_arm_does_not_start_from_extra_epochs(arm):
    with pytest.raises(ConfigError, match=f"arm {arm} starts from algorithm.extra_epochs 0, not 2"):
        apply_arm(make_config({"algorithm": {"extra_epochs": 2}}), arm)


@pytest.mark.parametrize("arm", sorted(ARMS))
def test_only_on_policy_starts_from_no_replay(arm):
    config = make_config({"replay": {"ratio": 0}})
    if arm == "on-policy":
        assert apply_arm(config, arm).replay.ratio == 0
        return
    with pytest.raises(ConfigError, match=f"arm {arm} needs replay.ratio above 0"):
        apply_arm(config, arm)
