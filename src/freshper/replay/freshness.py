"""How a priority decays with age. Age is counted in policy versions (optimizer updates), never in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freshper.errors import ConfigError, SnapshotError, UnknownNameError

# The largest rate that is taken. It keeps rate * version * alpha finite for every version and alpha.
MAX_RATE = 1e6


@runtime_checkable
class Freshness(Protocol):
    """A decay that is a common factor: f(age) = exp(-rate * age).

    As time passes, such a decay multiplies every priority by the same number, so the probabilities of a
    draw never change and nothing has to be refreshed: ``rate`` is all that the index needs to know.
    """

    @property
    def rate(self) -> float:
        """Loss of log-freshness per policy version, >= 0."""
        ...

    def __call__(self, ages: ArrayLike) -> NDArray[np.float64]:
        """Freshness in (0, 1] of the given ages, same shape."""
        ...


@dataclass(frozen=True, slots=True)
class Exponential:
    """f(age) = exp(-age / tau), Freshness-Aware PER (arXiv 2604.16918).

    ``tau`` is meant inside the exponent alpha: the sampling weight is (b f)^alpha, so it falls to 1/e after
    tau / alpha policy versions, and the priority after tau.
    """

    tau: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.tau) and self.tau >= 1 / MAX_RATE):
            raise ConfigError(
                f"tau {self.tau} must be finite and >= {1 / MAX_RATE:g} policy versions; for standard PER without "
                "decay use NoDecay()"
            )
        object.__setattr__(self, "tau", float(self.tau))  # a numpy scalar could not be saved

    @property
    def rate(self) -> float:
        """1 / tau."""
        return 1.0 / self.tau

    def __call__(self, ages: ArrayLike) -> NDArray[np.float64]:
        """Freshness in (0, 1] of the given ages, same shape."""
        return np.exp(-np.asarray(ages, dtype=np.float64) / self.tau)


@dataclass(frozen=True, slots=True)
class NoDecay:
    """f(age) = 1: standard PER, the limit of :class:`Exponential` for tau to infinity."""

    @property
    def rate(self) -> float:
        """0: nothing is lost."""
        return 0.0

    def __call__(self, ages: ArrayLike) -> NDArray[np.float64]:
        """Ones of the same shape."""
        return np.ones_like(np.asarray(ages, dtype=np.float64))


def check_freshness(freshness: object) -> None:
    """Raise :class:`ConfigError` unless ``freshness`` is a decay with a rate in [0, 1e6]."""
    rate = getattr(freshness, "rate", None)
    if not (callable(freshness) and isinstance(rate, (float, int, np.number)) and 0 <= rate <= MAX_RATE):
        raise ConfigError(
            f"freshness {freshness!r} must be a decay with a rate in [0, {MAX_RATE:g}], such as "
            "Exponential(tau=500) or NoDecay()"
        )


FRESHNESS_KINDS: dict[str, type[Exponential] | type[NoDecay]] = {"exponential": Exponential, "none": NoDecay}


def make_freshness(kind: str, tau: float | None = None) -> Freshness:
    """The decay named ``kind``; ``tau`` in policy versions is needed by "exponential" and by nothing else.

    Raises :class:`UnknownNameError` for a name nobody knows, :class:`ConfigError` for a missing tau.
    """
    if kind not in FRESHNESS_KINDS:
        raise UnknownNameError("freshness", kind, FRESHNESS_KINDS)
    if kind == "none":
        return NoDecay()
    if tau is None:
        raise ConfigError(f"freshness {kind!r} needs a tau in policy versions")
    return Exponential(tau)


def describe_freshness(freshness: Freshness) -> dict[str, Any]:
    """A JSON-ready description that :func:`freshness_from` turns back into the same decay."""
    # Exact types: a subclass may decay in another way, and would come back as its parent.
    if type(freshness) is Exponential:
        return {"kind": "exponential", "tau": freshness.tau}
    if type(freshness) is NoDecay:
        return {"kind": "none"}
    raise SnapshotError(f"{type(freshness).__name__} is not a decay of freshper: it cannot be saved")


def freshness_from(description: Mapping[str, Any]) -> Freshness:
    """The decay that :func:`describe_freshness` described."""
    return make_freshness(description["kind"], description.get("tau"))
