"""Every error that freshper raises on purpose.

FreshPERError
├── ConfigError (ValueError)          a setting is unknown, out of range, or contradicts another
│   └── UnknownNameError              no task, priority, arm, ... of that name; the nearest one is offered
├── TrajectoryError (ValueError)      a record that is not a valid trajectory
├── PriorityError (ValueError)        a base priority that is negative, NaN or infinite
├── ClockError (ValueError)           a policy version that runs backwards or lies in the future
├── CapacityError (ValueError)        more trajectories at once than the buffer holds
├── SamplingError (ValueError)        a draw that cannot be made
├── RefreshError (RuntimeError)       a background refresh that failed
├── BufferLockedError (OSError)       a buffer's directory that another process writes to
├── SnapshotError (ValueError)        a saved buffer or checkpoint that is damaged or of an unknown format
├── EnvError (RuntimeError)           an environment that breaks its contract
├── PolicyError (RuntimeError)        a policy engine that breaks its contract
├── DivergedError (ArithmeticError)   too many updates in a row with a non-finite loss or gradient
├── RunFolderError (OSError)          a run folder that is in use, or that holds another run
└── MissingExtraError (ImportError)   an optional dependency is not installed; the extra is named
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FreshPERError(Exception):
    """Base of all errors raised by freshper."""


class ConfigError(FreshPERError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class UnknownNameError(ConfigError):
    """A name that nobody registered. The message lists the known ones and offers the nearest."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(set(known))
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {', '.join(names)}")


class TrajectoryError(FreshPERError, ValueError):
    """A record that is not a valid trajectory."""


class PriorityError(FreshPERError, ValueError):
    """A base priority that is negative, NaN or infinite."""


class ClockError(FreshPERError, ValueError):
    """A policy version that runs backwards, or a trajectory newer than the policy."""


class CapacityError(FreshPERError, ValueError):
    """More trajectories at once than the buffer holds."""


class SamplingError(FreshPERError, ValueError):
    """A draw that cannot be made from what is stored."""


class RefreshError(FreshPERError, RuntimeError):
    """A background refresh of the freshness that failed."""


class BufferLockedError(FreshPERError, OSError):
    """A buffer's directory that another process, or another buffer of this one, writes to."""


class SnapshotError(FreshPERError, ValueError):
    """A saved buffer or checkpoint that is damaged or of an unknown format."""


class EnvError(FreshPERError, RuntimeError):
    """An environment that breaks its contract."""


class PolicyError(FreshPERError, RuntimeError):
    """A policy engine that breaks its contract."""


class DivergedError(FreshPERError, ArithmeticError):
    """Too many updates in a row had a non-finite loss or gradient."""


class RunFolderError(FreshPERError, OSError):
    """A run folder that is in use, or that holds another run."""


class MissingExtraError(FreshPERError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(
            f"{library} is needed here: pip install 'freshper[{extra}]', or in a checkout: pip install -c "
            f"constraints.txt -e '.[{extra}]'"
        )
