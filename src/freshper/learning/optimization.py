"""How a gradient moves the weights: AdamW, a schedule over all optimizer updates, a bound on the gradient's norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from freshper.errors import ConfigError, UnknownNameError

Schedule = Literal["constant", "linear", "cosine"]
_NARROW = (torch.bfloat16, torch.float16)


class Optimization:
    """AdamW over the parameters that are trained, with float32 copies of those that are narrower.

    A step of 1e-6 is lost in the rounding of a bfloat16 weight of 0.02; in a copy it adds up until it shows.

    Args:
        parameters: of the model; those that need no gradient are left alone.
        learning_rate: peak rate.
        total_updates: length of the schedule in optimizer updates, replay updates included.
        schedule: how the rate falls to 0 over ``total_updates``; "constant" never does.
        warmup_updates: updates over which the rate rises linearly from 0.
        max_grad_norm: gradients are scaled down to this norm.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        learning_rate: float,
        total_updates: int,
        schedule: Schedule = "constant",
        warmup_updates: int = 0,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        if not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm {max_grad_norm} must be above 0: nothing could be learned")
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self._parameters:
            raise ConfigError("no parameter of the model needs a gradient: there is nothing to train")
        self._max_grad_norm = max_grad_norm
        self._exact = [
            parameter.detach().float().requires_grad_() if parameter.dtype in _NARROW else parameter
            for parameter in self._parameters
        ]
        self._optimizer = torch.optim.AdamW(
            self._exact, lr=learning_rate, betas=betas, weight_decay=weight_decay, foreach=True
        )
        factor = _schedule_factor(schedule, warmup_updates, total_updates)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, factor)

    @property
    def learning_rate(self) -> float:
        """The rate of the next update."""
        return float(self._scheduler.get_last_lr()[0])

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in (*self._parameters, *self._exact):
            parameter.grad = None

    def clip(self) -> float:
        """Scale the gradients down to the norm that is allowed; returns the norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm))

    def apply(self, scale: float = 1.0) -> None:
        """Move the weights, this once with the rate times ``scale``, and go on in the schedule."""
        copies = [pair for pair in zip(self._parameters, self._exact, strict=True) if pair[0] is not pair[1]]
        for parameter, exact in copies:
            exact.grad = None if parameter.grad is None else parameter.grad.float()
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * scale
        self._optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        with torch.no_grad():
            for parameter, exact in copies:
                parameter.copy_(exact)
        self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on but the weights: tensors and plain values."""
        copies = {str(place): exact.detach() for place, exact in self._copies()}
        scheduler = {"updates": self._scheduler.last_epoch}
        return {"optimizer": self._optimizer.state_dict(), "scheduler": scheduler, "exact": copies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the one that gave ``state`` would have."""
        self._optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for place, exact in self._copies():
                exact.copy_(state["exact"][str(place)])
        updates = int(state["scheduler"]["updates"])
        self._scheduler.last_epoch = updates
        factors = [factor(updates) for factor in self._scheduler.lr_lambdas]
        rates = [base * factor for base, factor in zip(self._scheduler.base_lrs, factors, strict=True)]
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._scheduler._last_lr = rates  # what get_last_lr reads; the scheduler's own state holds functions

    def _copies(self) -> Iterator[tuple[int, torch.Tensor]]:
        pairs = enumerate(zip(self._parameters, self._exact, strict=True))
        return ((place, exact) for place, (parameter, exact) in pairs if exact is not parameter)


def _schedule_factor(schedule: Schedule, warmup: int, total: int) -> _Factor:
    if schedule not in get_args(Schedule):
        raise UnknownNameError("schedule", schedule, get_args(Schedule))
    if total < 1 or not 0 <= warmup < total:
        raise ConfigError(f"a schedule of {total} updates with {warmup} of warm-up: warm-up must be in [0, total)")
    return _Factor(schedule, warmup, total)


@dataclass(frozen=True, slots=True)
class _Factor:
    """Learning-rate factor after n optimizer updates."""

    schedule: Schedule
    warmup: int
    total: int

    def __call__(self, updates: int) -> float:
        if updates < self.warmup:
            return (updates + 1) / self.warmup
        done = min(1.0, (updates - self.warmup) / (self.total - self.warmup))
        if self.schedule == "constant":
            return 1.0
        return 1.0 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
