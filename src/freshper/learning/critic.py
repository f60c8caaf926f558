"""The critic: values of the states in which tokens are sampled, learned by regression on GAE's targets.

The value V_t of a sampled token is that of the prefix before it: read, like its log-prob, from the hidden state of the
token in front of it. Either a linear head reads the policy's own states, detached, so that the value loss cannot move
the policy; or a network of its own is trained whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from freshper.errors import ConfigError, TrajectoryError
from freshper.learning.batching import MicroBatch, micro_batches
from freshper.learning.optimization import Optimization, Schedule
from freshper.trajectory import Trajectory

Floats = NDArray[np.float64]
States = Callable[[MicroBatch], Tensor]
"""From a micro-batch to the hidden states (n, width) that its n sampled tokens were predicted from, row by row."""


class ValueHead(nn.Module):
    """A linear layer from hidden states (..., width) to values (...), float32. It starts at zero: every value is 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values of the given states."""
        return hidden.float() @ self.weight + self.bias


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """Squared error of every value, halved, and where the bound took hold; all of one shape.

    ``clip`` c > 0 takes the worse of v and clip(v, v_old - c, v_old + c), as PPO's first implementation did: a value
    that has moved by c towards its target earns no further gradient. v_old are the values that the targets were made
    from, so the bound is felt only where values have moved since: through another update on the same targets, or
    because the policy's states did. 0 switches it off.
    """
    loss = (values - targets).square()
    if clip == 0:
        return loss / 2, torch.zeros_like(values, dtype=torch.bool)
    bounded = values.clamp(old_values - clip, old_values + clip)
    worse = (bounded - targets).square()
    return torch.maximum(loss, worse) / 2, (worse > loss).detach()


def explained_variance(
    values: Sequence[Floats], targets: Sequence[Floats], masks: Sequence[NDArray[np.bool_]]
) -> float:
    """1 - Var(target - value) / Var(target) over sampled tokens: 1 is perfect, 0 no better than a constant.

    Where all targets are equal there is nothing to explain: 0.
    """
    wanted, found = (
        np.concatenate([column[mask] for column, mask in zip(columns, masks, strict=True)])
        for columns in (targets, values)
    )
    variance = float(wanted.var())
    return 0.0 if variance == 0 else 1 - float((wanted - found).var()) / variance


@dataclass(frozen=True, slots=True)
class CriticUpdate:
    """What one update did. ``applied`` is false when it was skipped because a number was not finite."""

    applied: bool
    metrics: dict[str, float]


class Critic:
    """Values of trajectories, and one optimizer update at a time on them.

    Args:
        states: where the hidden states come from.
        width: their last dimension.
        network: the critic's own network, whose parameters ``states`` uses: trained with the head. None: the states
            are the policy's and are detached.
        value_clip: see :func:`value_loss`.
        token_budget: rows x longest row of one forward pass; the gradient does not depend on it.
        device: where head and batches live.
        learning_rate, total_updates, schedule, warmup_updates, betas, weight_decay, max_grad_norm: see
            :class:`~freshper.learning.optimization.Optimization`.
    """

    def __init__(
        self,
        states: States,
        width: int,
        *,
        learning_rate: float,
        total_updates: int,
        network: nn.Module | None = None,
        value_clip: float = 0.2,
        schedule: Schedule = "constant",
        warmup_updates: int = 0,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        token_budget: int = 16_384,
        device: torch.device | str = "cpu",
    ) -> None:
        if not (value_clip >= 0 and math.isfinite(value_clip)):
            raise ConfigError(f"value_clip {value_clip} must be finite and >= 0 (0 switches it off)")
        self._device = torch.device(device)
        self.head = ValueHead(width).to(self._device)
        self.network = network
        self.value_clip, self.token_budget = value_clip, token_budget
        self._states = states
        self._optimization = Optimization(
            [*self.head.parameters(), *(() if network is None else network.parameters())],
            learning_rate=learning_rate,
            total_updates=total_updates,
            schedule=schedule,
            warmup_updates=warmup_updates,
            betas=betas,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
        )

    @torch.no_grad()
    def values(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """V (T,) of every trajectory at its sampled tokens, 0 elsewhere."""
        results: list[Floats] = [np.empty(0)] * len(trajectories)
        if self.network is not None:
            self.network.eval()
        columns = [np.zeros(len(trajectory)) for trajectory in trajectories]
        for batch in self._batches(trajectories, columns, np.ones(len(trajectories))):
            values = _spread(self.head(self._states(batch)), batch.response_mask)
            for row, line in zip(batch.rows.tolist(), values.double().cpu().numpy(), strict=True):
                results[row] = line[: len(trajectories[row])]
        return results

    def update(
        self,
        trajectories: Sequence[Trajectory],
        targets: Sequence[Floats],
        old_values: Sequence[Floats],
        sampling_weights: Floats | None = None,
    ) -> CriticUpdate:
        """One optimizer update towards ``targets`` (T,) from the values (T,) that they were made from.

        The loss is the sum over sampled tokens, weighted by sampling weights (B,), divided by their number. Metrics
        are those before the update. Raises :class:`TrajectoryError` where a column does not fit or is not finite.
        """
        weights = np.ones(len(trajectories)) if sampling_weights is None else sampling_weights
        masks = [trajectory.response_mask for trajectory in trajectories]
        for name, columns in (("targets", targets), ("old_values", old_values)):
            for place, (column, mask) in enumerate(zip(columns, masks, strict=True)):
                if column.shape != mask.shape or not np.isfinite(column).all():
                    raise TrajectoryError(f"{name}[{place}]: one finite number per token of {mask.shape} is needed")
        if self.network is not None:
            self.network.train()
        self._optimization.clear()
        count = sum(trajectory.response_length for trajectory in trajectories)
        totals = np.zeros(2)
        found = [np.zeros(len(trajectory)) for trajectory in trajectories]
        for batch in self._batches(trajectories, targets, weights):
            loss, clipped, values = self._loss(batch, old_values)
            (loss / count).backward()  # type: ignore[no-untyped-call]
            totals += float(loss.detach()), float(clipped)
            for row, line in zip(batch.rows.tolist(), values.double().cpu().numpy(), strict=True):
                found[row] = line[: len(found[row])]
        norm = self._optimization.clip()
        metrics = {
            "value_loss": totals[0] / count,
            "value_clip_fraction": totals[1] / count,
            "explained_variance": explained_variance(found, targets, masks),
            "value_mean": sum(float(column.sum()) for column in found) / count,
            "value_grad_norm": norm,
        }
        applied = math.isfinite(metrics["value_loss"]) and math.isfinite(norm)
        if applied:
            self._optimization.apply()
        return CriticUpdate(applied, metrics)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on: weights of head and network, and the optimizer's state."""
        network = {} if self.network is None else self.network.state_dict()
        return {"head": self.head.state_dict(), "network": network, "optimization": self._optimization.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the one that gave ``state`` would have."""
        self.head.load_state_dict(state["head"])
        if self.network is not None:
            self.network.load_state_dict(state["network"])
        self._optimization.load_state_dict(state["optimization"])

    def _batches(
        self, trajectories: Sequence[Trajectory], columns: Sequence[Floats], weights: Floats
    ) -> Iterator[MicroBatch]:
        """Micro-batches that carry ``columns`` (T,) where those of a policy carry advantages."""
        carriers = [
            trajectory.with_columns(advantages=np.where(trajectory.response_mask, column, 0.0))
            for trajectory, column in zip(trajectories, columns, strict=True)
        ]
        return micro_batches(carriers, weights, self.token_budget, self._device)

    def _loss(self, batch: MicroBatch, old_values: Sequence[Floats]) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted sum over a micro-batch, number of clipped tokens, and values (b, T) without gradient."""
        mask = batch.response_mask
        with torch.set_grad_enabled(self.network is not None):
            hidden = self._states(batch)
        now = self.head(hidden)
        old = torch.from_numpy(_padded(old_values, batch)).to(now)[mask]
        losses, clipped = value_loss(now, old, batch.advantages[mask], clip=self.value_clip)
        weights = batch.weights.expand(mask.shape)[mask]
        values = _spread(now.detach(), mask)
        return (weights * losses).sum(), clipped.sum(), values


def _padded(columns: Sequence[Floats], batch: MicroBatch) -> Floats:
    """Columns (T,) of the rows of a micro-batch, (b, T)."""
    padded = np.zeros(batch.tokens.shape)
    for index, row in enumerate(batch.rows.tolist()):
        padded[index, : len(columns[row])] = columns[row]
    return padded


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """Values of the n sampled tokens, row by row, at their places in (b, T); 0 elsewhere."""
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values)
