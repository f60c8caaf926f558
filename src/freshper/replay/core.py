"""The parts of a buffer working together: what its verbs do, without locks, checks of arguments or disks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.replay.arena import Arena
from freshper.replay.arrivals import Arrivals
from freshper.replay.auto_tau import TauChange
from freshper.replay.batch import SampledBatch
from freshper.replay.columns import Columns, ColumnsBuffer
from freshper.replay.diagnostics import DriftMonitor
from freshper.replay.eviction import Evictor
from freshper.replay.freshness import Freshness, describe_freshness, freshness_from
from freshper.replay.sampler import Method, Normalization, PrioritySampler, Toward
from freshper.replay.settings import BufferSettings, as_auto, starting_decay
from freshper.replay.store import ItemStore


class BufferCore:
    """Store, sampler and evictor of one buffer, its clock and its counters."""

    def __init__(self, settings: BufferSettings, arena: Arena) -> None:
        self.settings = settings
        tasks = list((settings.tasks or {}).values())
        decays = settings.decays()
        self.owners = None if settings.tasks is None else {name: at for at, name in enumerate(settings.tasks)}
        self.autos = {at: auto for at, decay in enumerate(decays) if (auto := as_auto(decay)) is not None}
        self.sampler = PrioritySampler(
            settings.capacity,
            [starting_decay(decay, self.autos.get(at)) for at, decay in enumerate(decays)],
            settings.alpha,
            settings.seed,
            shares=[np.nan if task.share is None else task.share for task in tasks] or [np.nan],
            caps=[task.max_share for task in tasks] or [1.0],
        )
        self.store = ItemStore(settings.capacity, arena, owners=len(decays))
        self.evictor = Evictor(
            self.store,
            self.sampler,
            settings.evict,
            quotas=np.array([max(1, int(task.quota * settings.capacity)) for task in tasks] or [settings.capacity]),
            max_bytes=settings.max_bytes,
            max_age=settings.max_age,
        )
        self.monitor = DriftMonitor()
        self.tau_changes: list[TauChange] = []
        self.counters = dict.fromkeys(("added", "drawn", "evicted", "expired", "used_up", "removed"), 0)

    @property
    def clock(self) -> int:
        """The newest policy version that anybody has told."""
        return self.sampler.now

    def advance(self, version: int) -> None:
        """Let the clock show ``version``; what is too old leaves."""
        self.sampler.advance(version)
        self.counters["expired"] += self.evictor.expire(version)

    def add(self, arrivals: Arrivals, version: int) -> NDArray[np.int64]:
        """Store items that fit (:meth:`Evictor.check_fits`); returns their keys (n,)."""
        self.advance(version)
        self.counters["evicted"] += self.evictor.make_room(arrivals)
        slots = self.store.add(
            arrivals.columns, arrivals.members, arrivals.offsets, arrivals.owners, turns=arrivals.turns
        )
        ranks = self.store.ranks[slots]
        self.sampler.put(slots, arrivals.bases, arrivals.versions, owners=arrivals.owners, ranks=ranks)
        self.evictor.admit(slots)
        self.counters["added"] += len(slots)
        return self.store.keys[slots]

    def draw(
        self,
        count: int,
        method: Method,
        beta: float,
        *,
        toward: Toward,
        normalization: Normalization,
        out: ColumnsBuffer | None,
    ) -> tuple[SampledBatch, NDArray[np.int64]]:
        """A draw at the present clock, and the slots (m,) of items that have now been used up, still there."""
        slots, probabilities = self.sampler.draw(count, method)
        weights = self.sampler.sampling_weights(slots, probabilities, beta, toward, normalization)
        columns, offsets = self.store.read(slots, out)
        batch = SampledBatch(
            keys=self.store.keys[slots],
            probabilities=probabilities,
            base_priorities=self.sampler.bases[slots],
            sampling_weights=weights,
            ages=self.clock - self.sampler.versions[slots],
            uses=self.store.uses[slots],
            index_version=self.index_version,
            columns=columns,
            item_offsets=offsets,
        )
        np.add.at(self.store.uses, slots, 1)
        self.counters["drawn"] += count
        most = self.settings.max_uses
        spent = np.empty(0, dtype=np.int64) if most is None else np.unique(slots[self.store.uses[slots] >= most])
        return batch, spent

    @property
    def index_version(self) -> int:
        """The policy version that the freshness of every draw is exact for; the clock, but for a background refresh."""
        lagging = [index.keying.epoch for index in self.sampler.indexes if index.keying.rate is None]
        return min([self.clock, *lagging])

    def remove(self, slots: NDArray[np.int64], reason: str) -> None:
        """Take distinct occupied ``slots`` (n,) out, for a ``reason`` that has a counter."""
        self.evictor.remove(slots)
        self.counters[reason] += len(slots)

    def change(self, number: int, freshness: Freshness) -> None:
        """Give an index another decay."""
        index = self.sampler.indexes[number]
        index.change(freshness, index.keying.alpha, self.clock)

    def change_alpha(self, alpha: float) -> None:
        """Give all indexes another alpha."""
        for index in self.sampler.indexes:
            index.change(index.keying.freshness, alpha, self.clock)

    def observe(
        self,
        owners: NDArray[np.int64],
        ages: NDArray[np.int64],
        log_ratios: NDArray[np.float64],
        probabilities: NDArray[np.float64],
        clip_fractions: NDArray[np.float64] | None,
    ) -> list[tuple[int, TauChange]]:
        """Remember what a replay update measured, all (n,); returns changes of tau that are due, by index."""
        self.monitor.observe(ages, log_ratios, probabilities, clip_fractions)
        changes = []
        for number, auto in self.autos.items():
            here = owners == number
            if here.any():
                change = auto.observe(
                    log_ratios[here],
                    ages[here],
                    probabilities[here],
                    alpha=self.sampler.alpha,
                    policy_version=self.clock,
                )
                if change is not None:
                    changes.append((number, change))
        self.tau_changes += [change for _, change in changes]
        return changes

    def state(self, slots: NDArray[np.int64]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Facts (ready for JSON) and arrays for :meth:`restore`, without the trajectories themselves.

        ``slots`` are all occupied ones, in order of arrival.
        """
        store_facts, store_arrays = self.store.state(slots)
        sampler_facts, sampler_arrays = self.sampler.state(slots)
        facts = {
            "settings": self.settings.describe(),
            "alpha": self.sampler.alpha,
            "decays": [describe_freshness(index.keying.freshness) for index in self.sampler.indexes],
            "autos": {str(number): auto.state() for number, auto in self.autos.items()},
            "counters": self.counters,
            "store": store_facts,
            "sampler": sampler_facts,
        }
        arrays = {f"store/{name}": array for name, array in store_arrays.items()}
        arrays |= {f"sampler/{name}": array for name, array in sampler_arrays.items()}
        return facts, arrays | {f"drift/{name}": array for name, array in self.monitor.state().items()}

    def restore(
        self, facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], serials: NDArray[np.int64], columns: Columns
    ) -> None:
        """Put back what :meth:`state` gave, into a core of the same settings that is still empty."""
        for number, (index, described) in enumerate(zip(self.sampler.indexes, facts["decays"], strict=True)):
            decay = index.keying.freshness if described is None else freshness_from(described)
            index.change(decay, facts["alpha"], 0)
            if number in self.autos:
                self.autos[number] = type(self.autos[number]).restore(facts["autos"][str(number)])
        slots = self.store.restore(facts["store"], _part(arrays, "store"), serials, columns)
        self.sampler.restore(slots, facts["sampler"], _part(arrays, "sampler"))
        self.evictor.admit(slots)
        self.monitor.restore(_part(arrays, "drift"))
        self.counters = dict(facts["counters"])


def _part(arrays: Mapping[str, NDArray[Any]], name: str) -> dict[str, NDArray[Any]]:
    prefix = f"{name}/"
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
