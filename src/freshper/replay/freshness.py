"""How a priority decays with age. Age is counted in policy versions (optimizer updates), never in time.

A decay that is a common factor, f(age) = exp(-rate * age), says so by its ``rate``: as time passes it multiplies
every priority by the same number, so the probabilities of a draw never change and nothing is ever refreshed.
Every other decay is recomputed for all items when the policy version has advanced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freshper.errors import ConfigError, UnknownNameError
from freshper.replay.checks import checked_number, real_array, shown

# The largest rate that is taken. It keeps rate * version * alpha finite for every version and alpha.
MAX_RATE = 1e6
MIN_TAU = 1 / MAX_RATE
_MAX_AGE = 2**63 - 1  # ages are int64
# Where a decay is tried when it is set; each later value is checked when it is used.
_TRIED_AGES = np.array([0, 1, 2, 5, 10, 100, 1_000, 1_000_000], dtype=np.int64)


@runtime_checkable
class Freshness(Protocol):
    """A decay: any callable of ages. ``f(0)`` is positive and every value lies in [0, 1]; 0 is never drawn.

    It may have the attributes ``rate`` (the decay is the common factor exp(-rate * age)) and ``max_age`` (0 beyond
    that age): then the index stays exact without recomputing anything.
    """

    def __call__(self, ages: NDArray[np.int64], /) -> ArrayLike:
        """Freshness in [0, 1] of the given ages, same shape."""
        ...


@dataclass(frozen=True, slots=True)
class Exponential:
    """f(age) = exp(-age / tau), Freshness-Aware PER (arXiv 2604.16918); 0 beyond ``max_age``, if there is one.

    ``tau`` is meant inside the exponent alpha: the sampling weight is (b f)^alpha, so it falls to 1/e after
    tau / alpha policy versions, and the priority after tau.
    """

    tau: float
    max_age: int | None = None

    def __post_init__(self) -> None:
        tau = checked_number("tau", self.tau)
        if not (np.isfinite(tau) and tau >= MIN_TAU):
            raise ConfigError(
                f"tau {self.tau} must be finite and >= {MIN_TAU:g} policy versions; for standard PER without "
                "decay use NoDecay()"
            )
        object.__setattr__(self, "tau", tau)  # a numpy scalar could not be saved
        if self.max_age is not None:
            if not _is_age(self.max_age):
                raise ConfigError(
                    f"max_age {shown(self.max_age)} must be an int >= 0 and < 2^63 (policy versions), or None"
                )
            object.__setattr__(self, "max_age", int(self.max_age))

    @property
    def rate(self) -> float:
        """1 / tau."""
        return 1.0 / self.tau

    def __call__(self, ages: ArrayLike) -> NDArray[np.float64]:
        """Freshness of the given ages, same shape."""
        ages = np.asarray(ages, dtype=np.float64)
        fresh: NDArray[np.float64] = np.exp(-ages / self.tau)
        return fresh if self.max_age is None else np.where(ages <= self.max_age, fresh, 0.0)


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


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """f(age) = (1 + age / tau)^-power: fast at first, with a long tail. Not a common factor: recomputed."""

    tau: float
    power: float = 1.0

    def __post_init__(self) -> None:
        tau, power = checked_number("tau", self.tau), checked_number("power", self.power)
        if not (np.isfinite(tau) and tau >= MIN_TAU):  # of a smaller one age / tau could overflow
            raise ConfigError(f"tau {tau} of a power law must be finite and >= {MIN_TAU:g} policy versions")
        if not (np.isfinite(power) and power > 0):
            raise ConfigError(f"power {power} of a power law must be finite and > 0")
        object.__setattr__(self, "tau", tau)
        object.__setattr__(self, "power", power)

    def __call__(self, ages: ArrayLike) -> NDArray[np.float64]:
        """Freshness of the given ages, same shape."""
        fresh: NDArray[np.float64] = (1.0 + np.asarray(ages, dtype=np.float64) / self.tau) ** -self.power
        return fresh


@dataclass(frozen=True, slots=True)
class Floored:
    """f(age) = max(inner(age), floor): an old item is never worth less than ``floor``. Recomputed.

    A floor that shall not depend on age belongs into the base priority (``eps``), where it costs nothing.
    """

    inner: Freshness
    floor: float

    def __post_init__(self) -> None:
        floor = checked_number("floor", self.floor)
        if not 0 < floor <= 1:
            raise ConfigError(f"floor {self.floor} must lie in (0, 1]")
        object.__setattr__(self, "floor", floor)
        check_freshness(self.inner)

    def __call__(self, ages: ArrayLike) -> NDArray[np.float64]:
        """Freshness of the given ages, same shape."""
        return np.maximum(_values(self.inner, np.asarray(ages)), self.floor)


def _is_age(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, np.integer)) and 0 <= int(value) <= _MAX_AGE


def _values(freshness: Freshness, ages: NDArray[np.int64]) -> NDArray[np.float64]:
    """What ``freshness`` says of ``ages``. A function of the user's may work in place: it gets a copy."""
    return real_array(f"the values of freshness {freshness!r}", freshness(ages.copy()), kinds="biuf")


def static_rate(freshness: Freshness) -> float | None:
    """The rate of a common-factor decay; None where freshness has to be recomputed."""
    rate = getattr(freshness, "rate", None)
    return None if rate is None else float(rate)


def max_age_of(freshness: Freshness) -> int | None:
    """The age beyond which a decay is 0, where it names one."""
    max_age: int | None = getattr(freshness, "max_age", None)
    return max_age


def log_freshness(freshness: Freshness, ages: NDArray[np.int64]) -> NDArray[np.float64]:
    """log f of ``ages`` (n,); -inf where f is 0. Raises :class:`ConfigError` for a value outside [0, 1]."""
    values = _values(freshness, ages)
    if values.shape != ages.shape:
        raise ConfigError(f"freshness {freshness!r} returned shape {values.shape} for ages of shape {ages.shape}")
    bad = ~((values >= 0) & (values <= 1))
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise ConfigError(f"freshness {freshness!r} is {values[at]} at age {ages[at]}: it must lie in [0, 1]")
    with np.errstate(divide="ignore"):
        logs: NDArray[np.float64] = np.log(values)
    return logs


def check_freshness(freshness: object) -> None:
    """Raise :class:`ConfigError` unless ``freshness`` is a decay, tried at a few ages; what it raises there itself.

    A ``rate`` must lie in [0, 1e6], a ``max_age`` beside it be an int >= 0, and both must say what the call does.
    """
    if isinstance(freshness, Real) and not isinstance(freshness, bool):
        tau = shown(freshness)
        raise ConfigError(f"freshness {tau} must be a decay: did you mean Exponential(tau={tau})?")
    if isinstance(freshness, type):
        raise ConfigError(f"freshness {freshness.__name__} must be a decay, not its class: Exponential(tau=500)")
    rate = getattr(freshness, "rate", None)
    number = isinstance(rate, Real) and not isinstance(rate, bool)
    if not callable(freshness) or not (rate is None or (number and 0 <= rate <= MAX_RATE)):
        raise ConfigError(
            f"freshness {shown(freshness)} must be a decay: Exponential(tau=500), NoDecay(), PowerLaw(...), "
            f"Floored(...), or a function of ages; a rate, where it has one, lies in [0, {MAX_RATE:g}]"
        )
    logs = log_freshness(freshness, _TRIED_AGES)
    if logs[0] == -np.inf:
        raise ConfigError(f"freshness {freshness!r} is 0 at age 0: nothing could ever be drawn")
    if rate is not None:
        _check_promise(freshness, float(rate), max_age_of(freshness))


def _check_promise(freshness: Freshness, rate: float, max_age: int | None) -> None:
    """That the values are exp(-rate * age), and 0 beyond ``max_age``: the index relies on it and never asks again."""
    if max_age is not None and not _is_age(max_age):
        raise ConfigError(f"freshness {freshness!r} has max_age {shown(max_age)}: it must be an int >= 0, or None")
    scale = 1 / rate if rate > 0 else 1.0
    ages = np.append(_TRIED_AGES, [int(min(scale * times, 2.0**40)) for times in (1, 30, 600)])
    if max_age is not None:
        ages = np.append(ages, min(max_age, 2**62) + np.arange(2))
    logs, expected = log_freshness(freshness, ages), -rate * ages
    certain = expected > -700  # beyond that floats end, and a 0 says nothing
    if max_age is not None:
        expected = np.where(ages > max_age, -np.inf, expected)
    if not np.allclose(logs[certain], expected[certain], rtol=1e-9, atol=1e-9):
        raise ConfigError(
            f"freshness {freshness!r} has rate {rate} and max_age {max_age}, but its values are not exp(-rate * age) "
            "up to there and 0 beyond: leave the rate out, and it is recomputed"
        )


def make_freshness(kind: str, tau: float | None = None, max_age: int | None = None) -> Freshness:
    """The common-factor decay named ``kind``: "exponential", which needs a ``tau`` in policy versions, or "none".

    Raises :class:`UnknownNameError` for a name nobody knows, :class:`ConfigError` for a missing tau.
    """
    if kind == "none":
        return NoDecay()
    if kind != "exponential":
        raise UnknownNameError("freshness", kind, ("exponential", "none"))
    if tau is None:
        raise ConfigError(f"freshness {kind!r} needs a tau in policy versions")
    return Exponential(tau, max_age)


def describe_freshness(freshness: Freshness) -> dict[str, Any] | None:
    """A JSON-ready description that :func:`freshness_from` turns back into the same decay; None for a user's own."""
    # Exact types: a subclass may decay in another way, and would come back as its parent.
    if type(freshness) is Exponential:
        return {"kind": "exponential", "tau": freshness.tau, "max_age": freshness.max_age}
    if type(freshness) is NoDecay:
        return {"kind": "none"}
    if type(freshness) is PowerLaw:
        return {"kind": "power", "tau": freshness.tau, "power": freshness.power}
    if type(freshness) is Floored and (inner := describe_freshness(freshness.inner)) is not None:
        return {"kind": "floor", "inner": inner, "floor": freshness.floor}
    return None


def freshness_from(description: Mapping[str, Any]) -> Freshness:
    """The decay that :func:`describe_freshness` described."""
    makers: dict[str, Callable[[], Freshness]] = {
        "exponential": lambda: Exponential(description["tau"], description.get("max_age")),
        "none": NoDecay,
        "power": lambda: PowerLaw(description["tau"], description["power"]),
        "floor": lambda: Floored(freshness_from(description["inner"]), description["floor"]),
    }
    if description["kind"] not in makers:
        raise UnknownNameError("freshness", str(description["kind"]), makers)
    return makers[description["kind"]]()
