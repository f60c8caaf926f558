"""Arms are values: each is a handful of settings laid over a config, and there is no code path behind any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from freshper.errors import ConfigError, UnknownNameError
from freshper.training.config import TrainConfig
from freshper.training.config_file import make_config, merged

_NO_DECAY = {"kind": "none"}
_DECAY = {"kind": "exponential"}
_AUTO = {"kind": "auto"}
_NO_CORRECTION = {"beta_start": 0.0, "beta_end": 0.0}
# The paper's sampling correction (after Schaul et al. 2016).
_CORRECTION = {"beta_start": 0.4, "beta_end": 1.0, "toward": "uniform", "normalization": "batch_max"}

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "on-policy": ("every trajectory is used once", {"replay": {"ratio": 0}}),
    # As many updates as the replay arms: extra_epochs takes the value of replay.ratio, see apply_arm.
    "epochs": ("K extra updates on the fresh batch instead of replay", {"replay": {"ratio": 0}}),
    "uniform": (
        "uniform replay",
        {"replay": {"priority": "uniform", "freshness": _NO_DECAY, "correction": _NO_CORRECTION}},
    ),
    "recency": (
        "replay by freshness alone",
        {"replay": {"priority": "uniform", "freshness": _DECAY, "correction": _NO_CORRECTION}},
    ),
    "success-only": (
        "uniform replay of successful trajectories",
        {"replay": {"priority": "success", "freshness": _NO_DECAY, "correction": _NO_CORRECTION}},
    ),
    "per": ("standard PER", {"replay": {"freshness": _NO_DECAY, "correction": _NO_CORRECTION}}),
    "per-is": (
        "standard PER with the sampling correction",
        {"replay": {"freshness": _NO_DECAY, "correction": _CORRECTION}},
    ),
    "freshper": ("PER x freshness", {"replay": {"freshness": _DECAY, "correction": _NO_CORRECTION}}),
    "freshper-auto": (
        "PER x freshness with a tau that follows the measured drift",
        {"replay": {"freshness": _AUTO, "correction": _NO_CORRECTION}},
    ),
    "freshper-is": (
        "PER x freshness with the sampling correction",
        {"replay": {"freshness": _DECAY, "correction": _CORRECTION}},
    ),
}


def apply_arm(config: TrainConfig, arm: str) -> TrainConfig:
    """``config`` with the values of ``arm``; everything else stays.

    Raises :class:`UnknownNameError`, and :class:`ConfigError` where ``config`` is that of another arm already.
    """
    if arm not in ARMS:
        raise UnknownNameError("arm", arm, ARMS)
    if config.algorithm.extra_epochs:
        raise ConfigError(
            f"arm {arm} starts from algorithm.extra_epochs 0, not {config.algorithm.extra_epochs}: the arm epochs "
            "takes its own from replay.ratio"
        )
    if config.replay.ratio == 0 and arm != "on-policy":
        raise ConfigError(f"arm {arm} needs replay.ratio above 0: the updates that it makes beside the fresh one")
    _, changes = ARMS[arm]
    values = merged(merged(config.model_dump(), changes), {"run": {"arm": arm}})
    if arm == "epochs":
        values["algorithm"]["extra_epochs"] = config.replay.ratio
    return make_config(values)


def check_arm(config: TrainConfig, arm: str) -> None:
    """Raise :class:`ConfigError` where ``config`` has another value than its ``arm`` gives: the label would lie."""
    _, changes = ARMS[arm]
    values = config.model_dump()
    for path, meant in _leaves(changes):
        value: Any = values
        for name in path.split("."):
            value = value[name]
        if value != meant:
            raise ConfigError(f"arm {arm} means {path} = {meant}, not {value}: leave out that setting, or the arm")


def _leaves(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in changes.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
