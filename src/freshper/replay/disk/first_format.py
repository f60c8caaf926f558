"""Reads the first snapshot format (freshper-buffer 1): a ring of trajectories with one common-factor decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.errors import SnapshotError
from freshper.replay.store.columns import Columns, pack
from freshper.trajectory import SamplingParams, Trajectory, Turn

_FACTS = ("stop_reason", "success", "policy_version", "task", "group", "seed")
_OPTIONAL = ("advantages", "td_errors")
_COLUMNS = ("offsets", "tokens", "response_mask", "behavior_logprobs", *_OPTIONAL)
_TREES = {"leaves": "weights", "freshness_leaves": "freshness"}


def read_first_format(
    header: Mapping[str, Any], members: Mapping[str, NDArray[Any]]
) -> tuple[dict[str, Any], dict[str, NDArray[Any]], NDArray[np.int64], Columns]:
    """Facts, arrays, serials and trajectories in the shape of the present format."""
    meta = header["meta"]
    arrays = {name: members[f"array/{name}"] for name in header["arrays"]}
    trajectories = _trajectories(header["facts"], {name: members[f"column/{name}"] for name in _COLUMNS})
    count, added, capacity = len(trajectories), meta["added"], meta["capacity"]
    for name, array in arrays.items():
        if len(array) != count:
            raise SnapshotError(f"the snapshot holds {len(array)} {name} of {count} items")
    serials = np.arange(added - count, added, dtype=np.int64)
    return _facts(meta), _arrays(arrays, serials, capacity, trajectories), serials, pack(trajectories)


def _facts(meta: Mapping[str, Any]) -> dict[str, Any]:
    sampler, none = meta["sampler"], dict.fromkeys(("max_bytes", "max_uses", "max_age", "tasks"))
    settings = {name: meta[name] for name in ("capacity", "priority", "freshness", "alpha", "eps")}
    return {
        "settings": settings | none | {"unit": "trajectory", "evict": "fifo", "refresh": "sync", "seed": 0},
        "alpha": meta["alpha"],
        "decays": [meta["freshness"]],
        "autos": {},
        "counters": dict.fromkeys(("drawn", "expired", "used_up", "removed"), 0)
        | {"added": meta["added"], "evicted": max(0, meta["added"] - meta["capacity"])},
        "store": {
            "arrived": meta["added"],
            "serials_given": meta["added"],
            "untouched": min(meta["added"], meta["capacity"]),
        },
        "sampler": {
            "now": meta["policy_version"],
            "rng": sampler["rng"],
            "indexes": [
                {
                    "epoch": sampler["epoch"],
                    "horizon": -1,
                    "references": {_TREES[name]: value for name, value in sampler["references"].items()},
                }
            ],
        },
    }


def _arrays(
    arrays: Mapping[str, NDArray[Any]], serials: NDArray[np.int64], capacity: int, trajectories: Sequence[Trajectory]
) -> dict[str, NDArray[Any]]:
    """A key was slot + capacity * generation too, and equal to the serial: the ring was filled in order."""
    count = len(serials)
    added = int(serials[-1]) + 1 if count else 0
    slots = np.arange(min(added, capacity))
    generations = (np.maximum(added - 1 - slots, 0)) // capacity
    zeros = np.zeros(count, dtype=np.int64)
    return {
        "store/keys": serials,
        "store/uses": zeros,
        "store/arrivals": serials,
        "store/item_owners": zeros.astype(np.int16),
        "store/turns": np.full(count, -1, dtype=np.int32),
        "store/members": serials,
        "store/member_offsets": np.arange(count + 1),
        "store/generations": generations,
        "store/freed": zeros[:0],
        "sampler/bases": arrays["bases"],
        "sampler/versions": np.array([t.policy_version for t in trajectories], dtype=np.int64),
        "sampler/owners": zeros.astype(np.int16),
        "sampler/ranks": serials,
        "sampler/alive": arrays["bases"] > 0,
        **{f"sampler/leaves/0/{_TREES[name]}": arrays[name] for name in _TREES if name in arrays},
        "drift/lengths": zeros[:0],
        "drift/ages": zeros[:0],
        **dict.fromkeys(("drift/log_ratios", "drift/probabilities", "drift/clip_fractions"), np.empty(0)),
    }


def _trajectories(facts: Sequence[dict[str, Any]], columns: dict[str, NDArray[Any]]) -> list[Trajectory]:
    offsets = columns["offsets"]
    taken = dict.fromkeys(_OPTIONAL, 0)
    trajectories = []
    for number, fact in enumerate(facts):
        span = slice(int(offsets[number]), int(offsets[number + 1]))
        optional: dict[str, Any] = {}
        for name in fact["columns"]:
            start = taken[name]
            taken[name] = start + span.stop - span.start
            optional[name] = columns[name][start : taken[name]]
        trajectories.append(
            Trajectory(
                tokens=columns["tokens"][span],
                response_mask=columns["response_mask"][span],
                behavior_logprobs=columns["behavior_logprobs"][span],
                turns=tuple(Turn(*turn) for turn in fact["turns"]),
                sampling=SamplingParams(**fact["sampling"]),
                **{name: fact[name] for name in _FACTS},
                **optional,
            )
        )
    return trajectories
