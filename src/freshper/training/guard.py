"""The health of a run: which updates are not applied, what is kept of them, and when the run has to end.

An update is ill when its loss or gradient is not finite, when a fresh batch shows that the policy has drifted too
far from its sampler, when a replay batch is worth too few samples, or when the entropy has collapsed. It is skipped,
so the weights stay what they were, and its batch is kept in the run folder. Too many in a row end the run.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ConfigError, DivergedError, SnapshotError
from freshper.replay.diagnostics import drift
from freshper.replay.disk.interchange import write_trajectories
from freshper.trajectory import Trajectory

Kind = Literal["fresh", "replay"]
Accept = Callable[[dict[str, float], NDArray[np.float64]], "str | None"]
"""Asked by the learner between gradient and optimizer step, with the update's metrics and its log-ratios (B,)."""

_ADVICE = {
    "finite": "lower optimizer.learning_rate, optimizer.max_grad_norm, or clip.high",
    "kl": "lower optimizer.learning_rate or algorithm.extra_epochs, or raise guard.max_kl",
    "ess": "lower replay.freshness.tau, replay.ratio or optimizer.learning_rate, or lower guard.min_ess",
    "entropy": "raise algorithm.entropy, lower optimizer.learning_rate, or lower guard.min_entropy",
}


class Verdict(NamedTuple):
    """Why an update should not be applied, and what to change when that goes on."""

    reason: str
    advice: str


class Guard:
    """Judges every update of a run before it is applied.

    Args:
        folder: the run folder; batches go to its folder skipped/.
        patience: so many ill updates of one kind in a row raise :class:`DivergedError`.
        max_kl: limit on the drift of a fresh update from the sampler, in nats per token; 0 is off.
        min_entropy: limit on the entropy of a fresh update, in nats per token; 0 is off.
        min_ess: limit on the ESS fraction of a replay update, in [0, 1); 0 is off.
        keep: so many batches stay, the newest.
    """

    def __init__(
        self,
        folder: Path,
        *,
        patience: int = 5,
        max_kl: float = 0.0,
        min_entropy: float = 0.0,
        min_ess: float = 0.0,
        keep: int = 20,
    ) -> None:
        for name, value, holds in (
            ("patience", patience, patience >= 1),
            ("max_kl", max_kl, max_kl >= 0),
            ("min_entropy", min_entropy, min_entropy >= 0),
            ("min_ess", min_ess, 0 <= min_ess < 1),
            ("keep", keep, keep >= 1),
        ):
            if not holds:
                raise ConfigError(f"guard: {name} {value} is out of range, so no update could be judged by it")
        self.patience, self.max_kl, self.min_entropy, self.min_ess = patience, max_kl, min_entropy, min_ess
        self._folder, self._keep = folder, keep
        self._in_a_row: dict[str, int] = {"fresh": 0, "replay": 0}
        self._place = (0, "", 0)  # iteration, kind, number of the update within both

    def watch(
        self,
        kind: Kind,
        iteration: int,
        trajectories: Sequence[Trajectory],
        sampling_weights: NDArray[np.float64] | None = None,
        *,
        since: int = 0,
    ) -> Accept:
        """What the learner asks about one update on B ``trajectories``: a reason to skip it, or None.

        ``since`` is the policy version that wrote the fresh ones, where replayed ones are mixed in (see verdict).
        The answer has been counted, and the batch of an ill update written, when the learner gets it. Raises
        :class:`DivergedError`, from there, when patience is used up; the update is not applied then either.
        """
        count = self._place[2] if self._place[:2] == (iteration, kind) else 0
        self._place = (iteration, kind, count + 1)
        name = f"{iteration:06}-{kind}-{count + 1}"

        def accept(metrics: dict[str, float], log_ratios: NDArray[np.float64]) -> str | None:
            verdict = self.verdict(kind, metrics, log_ratios, trajectories, since=since)
            if verdict is None:
                self._in_a_row[kind] = 0
                return None
            self._in_a_row[kind] += 1
            weights = np.ones(len(trajectories)) if sampling_weights is None else sampling_weights
            facts = {
                "iteration": iteration,
                "kind": kind,
                "update": count + 1,
                "reason": verdict.reason,
                "in_a_row": self._in_a_row[kind],
                "metrics": {key: _plain(value) for key, value in metrics.items()},
                "sampling_weights": [_plain(value) for value in weights],
                "log_ratios": [_plain(value) for value in log_ratios],
            }
            self._save(name, facts, trajectories)
            if self._in_a_row[kind] >= self.patience:
                raise DivergedError(self._farewell(kind, verdict, metrics))
            return verdict.reason

        return accept

    def verdict(
        self,
        kind: Kind,
        metrics: Mapping[str, float],
        log_ratios: NDArray[np.float64],
        batch: Sequence[Trajectory],
        *,
        since: int = 0,
    ) -> Verdict | None:
        """Why an update should not be applied, or None. Counts nothing, writes nothing.

        Args:
            kind: whether the batch is fresh or drawn from the buffer; each limit belongs to one of both.
            metrics: the update's: ``loss``, ``grad_norm``, ``entropy`` (nats per token), and those of a critic.
            log_ratios: log(pi/mu) of the batch's trajectories (B,), in nats.
            batch: the trajectories.
            since: of a fresh batch, the drift is that of the trajectories of this policy version and newer: replayed
                ones that are mixed in have drifted, and rightly so.
        """
        for name, value in metrics.items():
            if name.endswith(("loss", "grad_norm")) and not math.isfinite(value):
                return Verdict(f"its {name} is {value}", _ADVICE["finite"])
        if not np.isfinite(log_ratios).all():
            return Verdict("a log-ratio is not finite", _ADVICE["finite"])
        if kind == "fresh" and self.max_kl > 0 and (kl := _drift_per_token(log_ratios, batch, since)) > self.max_kl:
            reason = f"the policy has drifted {kl:.3g} nats per token from its sampler (limit {self.max_kl:g})"
            return Verdict(reason, _ADVICE["kl"])
        if kind == "fresh" and (entropy := metrics.get("entropy", math.inf)) < self.min_entropy:
            reason = f"the entropy is {entropy:.3g} nats per token (limit {self.min_entropy:g})"
            return Verdict(reason, _ADVICE["entropy"])
        if kind == "replay" and self.min_ess > 0:
            ess_fraction, _, _ = drift(log_ratios, np.ones_like(log_ratios))
            if ess_fraction < self.min_ess:
                return Verdict(f"its ESS fraction is {ess_fraction:.3g} (limit {self.min_ess:g})", _ADVICE["ess"])
        return None

    def _farewell(self, kind: Kind, verdict: Verdict, metrics: Mapping[str, float]) -> str:
        rate = f", at learning rate {metrics['learning_rate']:g}" if "learning_rate" in metrics else ""
        return (
            f"{self._in_a_row[kind]} {kind} updates in a row were not applied (guard.patience {self.patience}), the "
            f"last one because {verdict.reason}{rate}: {verdict.advice}. The batches lie in "
            f"{self._folder / 'skipped'}. Where a checkpoint was written, `freshper train {self._folder} --resume` "
            "goes on from it, also with another learning rate or other limits"
        )

    def _save(self, name: str, facts: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> None:
        """Write NAME.jsonl (the trajectories) and NAME.json (the facts), and let the oldest batch go."""
        folder = self._folder / "skipped"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_trajectories(folder / f"{name}.jsonl", trajectories)
            temporary = folder / f".{name}.json.tmp"
            temporary.write_text(json.dumps(facts) + "\n", encoding="utf-8")
            os.replace(temporary, folder / f"{name}.json")
            for old in sorted(folder.glob("[0-9]*.json"))[: -self._keep]:
                old.with_suffix(".jsonl").unlink(missing_ok=True)
                old.unlink()
        except OSError as error:  # the run is worth more than the batch
            warnings.warn(f"the batch of a skipped update could not be kept in {folder}: {error}", stacklevel=4)

    def state(self) -> dict[str, Any]:
        """The ill updates in a row, as plain JSON values: what :meth:`restore` goes on from."""
        return {"in_a_row": dict(self._in_a_row)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`. Raises :class:`SnapshotError` where it is none, and changes nothing then."""
        try:
            in_a_row = {kind: int(state["in_a_row"][kind]) for kind in self._in_a_row}
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotError(f"the saved guard is damaged ({type(error).__name__}: {error})") from None
        self._in_a_row = in_a_row


def _drift_per_token(log_ratios: NDArray[np.float64], batch: Sequence[Trajectory], since: int) -> float:
    """KL(mu || pi) in nats per token, of the trajectories of version ``since`` and newer; 0 where there is none.

    They were drawn from mu, so the mean of -log(pi/mu) has no bias (k1 of Schulman, "Approximating KL divergence",
    2020). It is noisy: where nothing has drifted it lies on either side of 0.
    """
    rows = [place for place, trajectory in enumerate(batch) if trajectory.policy_version >= since]
    return -float(log_ratios[rows].sum()) / max(1, sum(batch[place].response_length for place in rows))


def _plain(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return float(value) if math.isfinite(value) else None
