"""A buffer in numbers: what is in it, and what the next draw would be. Ready for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.replay.core import BufferCore

_LARGEST = 5  # items named one by one


def summarize(core: BufferCore) -> dict[str, Any]:
    """Size, bytes, ages, priorities, uses, tasks, drift by age, and the distribution of the next draw."""
    settings, store, sampler = core.settings, core.store, core.sampler
    slots = store.occupied()
    ages = core.clock - sampler.versions[slots]
    probabilities = sampler.probabilities(slots)
    arena = store.arena
    return {
        "items": len(slots),
        "capacity": settings.capacity,
        "unit": settings.unit,
        "drawable": sampler.drawable,
        "policy_version": core.clock,
        "index_version": core.index_version,
        "alpha": sampler.alpha,
        "priority": settings.priority if isinstance(settings.priority, str) else "a function",
        "bytes": {
            "stored": arena.live_bytes,
            "images": arena.image_bytes,
            "allocated": arena.allocated_bytes,
            "spilled": arena.spilled_bytes,
            "limit": settings.max_bytes,
        },
        "counters": dict(core.counters),
        "ages": _spread(ages),
        "base_priorities": _spread(sampler.bases[slots]),
        "uses": _spread(store.uses[slots]),
        "tasks": _tasks(core, slots, probabilities),
        "next_draw": _next_draw(core, slots, ages, probabilities),
        "drift": [asdict(one) for one in core.monitor.by_age()],
    }


def _spread(values: NDArray[Any]) -> dict[str, float] | None:
    """A few quantiles and the mean; None of nothing."""
    if len(values) == 0:
        return None
    names, at = ("min", "p10", "median", "p90", "max"), (0, 0.1, 0.5, 0.9, 1)
    spread = dict(zip(names, np.quantile(values, at).tolist(), strict=True))
    return spread | {"mean": float((values / len(values)).sum())}  # the sum alone may overflow


def _tasks(core: BufferCore, slots: NDArray[np.int64], probabilities: NDArray[np.float64]) -> dict[str, Any]:
    """By index: with tasks told apart their names, otherwise one that is called "all"."""
    names = ["all"] if core.owners is None else list(core.owners)
    parts: dict[str, Any] = {}
    for number, (name, index) in enumerate(zip(names, core.sampler.indexes, strict=True)):
        here = index.holds(slots)
        freshness = index.keying.freshness
        parts[name] = {
            "items": int(here.sum()),
            "drawable": index.drawable,
            "part_of_draw": float(probabilities[here].sum()),
            "freshness": repr(freshness),
            "tau": getattr(freshness, "tau", None),
            "auto": number in core.autos,
        }
    return parts


def _next_draw(
    core: BufferCore, slots: NDArray[np.int64], ages: NDArray[np.int64], probabilities: NDArray[np.float64]
) -> dict[str, Any] | None:
    """How even the next draw is, how old its items are, and which are the likeliest; None when none can be made.

    ``effective_items`` is 1 / sum P^2, the number of equally likely items that would be as uneven.
    """
    if core.sampler.drawable == 0:
        return None
    order = np.argsort(-probabilities, kind="stable")
    ranked = probabilities[order]
    by_age = np.argsort(ages, kind="stable")
    reached = np.cumsum(probabilities[by_age])
    places = np.minimum(np.searchsorted(reached, (0.1, 0.5, 0.9)), len(ages) - 1)
    quantiles = ages[by_age][places].tolist()
    largest = [
        {
            "key": int(core.store.keys[slots[at]]),
            "probability": float(probabilities[at]),
            "age": int(ages[at]),
            "base_priority": float(core.sampler.bases[slots[at]]),
        }
        for at in order[:_LARGEST].tolist()
    ]
    return {
        "effective_items": float(1 / (probabilities**2).sum()),
        "top_1_percent": float(ranked[: max(1, len(ranked) // 100)].sum()),
        "age_mean": float(ages @ probabilities),
        "ages": dict(zip(("p10", "median", "p90"), quantiles, strict=True)),
        "largest": largest,
    }
