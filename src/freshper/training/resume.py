"""What a checkpoint holds of the parts of a run, and how they go on from there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from freshper.errors import RunFolderError, SnapshotError
from freshper.training.build import Parts
from freshper.training.checkpoint import Checkpoint, installed_libraries
from freshper.training.config import TrainConfig
from freshper.training.config_file import merged
from freshper.training.rng_state import restore_rng, rng_state
from freshper.training.run_folder import RunFolder, check_same
from freshper.training.standing import Standing

_FINGERPRINT_VALUES = 4096  # of every tensor


class Stateful(Protocol):
    """A part of a run with running totals, as plain values."""

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` goes on from."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`."""


def go_back(saved: Checkpoint, standing: Standing, folder: RunFolder, config: TrainConfig) -> None:
    """Let the folder and the counters stand where they stood at a checkpoint.

    Raises :class:`RunFolderError` where nothing is left to do; then nothing has changed. (A run that was killed after
    its last iteration has its last row and its result to write.) Warns where libraries are others than before.
    """
    check_same(folder.path, saved.state["settings"], config)  # config.toml may have been edited since
    standing.restore(saved.state["standing"])
    if standing.over and folder.is_finished:
        setting = "eval.patience" if standing.iteration < config.run.iterations else "run.iterations"
        raise RunFolderError(
            f"the run in {folder.path} is finished after {standing.iteration} iterations: to go on with it, raise "
            f"{setting}"
        )
    folder.go_back(saved.state["positions"], saved.iteration)
    others = [
        f"{name} {saved.libraries.get(name)} is now {now}"
        for name, now in installed_libraries().items()
        if saved.libraries.get(name) != now
    ]
    if others:
        warnings.warn(
            f"{', '.join(others)}: the run goes on, but its numbers may differ from those of one that was never "
            "interrupted",
            stacklevel=2,
        )


def run_state(
    parts: Parts,
    others: Mapping[str, Stateful],
    *,
    origin: list[float],
    folder: RunFolder,
    row: Mapping[str, float],
) -> dict[str, Any]:
    """Everything that the next iteration depends on but the buffer, and the ``row`` that is still to be written."""
    critic = parts.estimator.critic
    return {
        "settings": merged(folder.config.model_dump(mode="json"), {"run": {"folder": ""}}),  # it may be moved
        "learner": parts.learner.state_dict(),
        "critic": {} if critic is None else critic.state_dict(),
        "guard": parts.guard.state(),
        "curriculum": parts.curriculum.state(),
        "rng": rng_state(),
        "origin": origin,
        "positions": folder.positions(),
        "row": dict(row),
    } | {name: other.state() for name, other in others.items()}


def restore_run(saved: Checkpoint, parts: Parts, others: Mapping[str, Stateful], *, origin: list[float]) -> None:
    """Let ``parts``, made as at the start, and ``others`` be what they were when :func:`run_state` was called.

    Warns where the policy at the start was another one. Raises :class:`SnapshotError` where the state does not fit.
    """
    if saved.state["origin"] != origin:
        warnings.warn(
            "the policy that the run began with comes out differently now: other code or another model file has made "
            "it. Its weights are restored, but its tokenizer and what a KL penalty refers to may be others",
            stacklevel=2,
        )
    try:
        parts.learner.load_state_dict(saved.state["learner"])
        if parts.estimator.critic is not None:
            parts.estimator.critic.load_state_dict(saved.state["critic"])
    except (KeyError, RuntimeError, ValueError) as error:
        if isinstance(error, SnapshotError):
            raise
        raise SnapshotError(f"{saved.path} does not fit the model of this run: {error}") from None
    for name, other in {"guard": parts.guard, **others}.items():
        other.restore(saved.state[name])
    parts.curriculum.restore(saved.state.get("curriculum", {}))  # not in checkpoints from before there was one
    parts.policy.publish(parts.learner.model, parts.learner.version)
    restore_rng(saved.state["rng"])  # last: building the parts may have used it


def fingerprint(model: nn.Module) -> list[float]:
    """Two numbers that tell a model from another: of its names and shapes, and of the first values of each tensor."""
    size, total = 0, 0.0
    with torch.no_grad():
        for place, (name, tensor) in enumerate(model.state_dict().items(), start=1):
            size += place * (tensor.numel() + len(name))
            total += place * float(tensor.flatten()[:_FINGERPRINT_VALUES].cpu().to(torch.float64).sum())
    return [float(size), total]
