"""The parts of a buffer working together: what its verbs do, without locks, checks of arguments or disks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.errors import SamplingError
from freshper.replay.auto_tau import AutoTau, TauChange
from freshper.replay.batch import SampledBatch
from freshper.replay.diagnostics import DriftMonitor, check_drift
from freshper.replay.draw.keying import Keying
from freshper.replay.draw.sampler import Method, Normalization, PrioritySampler, Toward
from freshper.replay.freshness import Exponential, Freshness, describe_freshness, freshness_from
from freshper.replay.settings import BufferSettings, as_auto, starting_decay
from freshper.replay.store.arena import Arena
from freshper.replay.store.arrivals import Arrivals
from freshper.replay.store.columns import Columns, ColumnsBuffer
from freshper.replay.store.eviction import Evictor
from freshper.replay.store.items import ItemStore

Done = Mapping[str, NDArray[np.int64]]  # the keys of new items, and those of items that were evicted for them
Writer = Callable[[Done], None]


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
            quotas=np.array([_quota(task.quota, settings.capacity) for task in tasks] or [settings.capacity]),
            max_bytes=settings.max_bytes,
            max_age=settings.max_age,
            refresh=settings.refresh == "sync",
        )
        self.monitor = DriftMonitor()
        self.tau_changes: list[TauChange] = []
        self.counters = dict.fromkeys(("added", "drawn", "evicted", "expired", "used_up", "removed"), 0)

    @property
    def clock(self) -> int:
        """The newest policy version that anybody has told."""
        return self.sampler.now

    def check_possible(self, count: int, method: Method, version: int) -> None:
        """Raise :class:`SamplingError` for a draw that time cannot make possible, or has made impossible."""
        least = count if method == "without_replacement" else 1
        fixed = all(index.keying.rate is not None for index in self.sampler.indexes)
        if (self.sampler.drawable if fixed else len(self.store)) < least:
            self.sampler.draw(count, method)  # raises, and says what there is
        leaving = self.evictor.expiring(version)
        left = self.sampler.drawable - int(np.count_nonzero(self.sampler.table.alive[leaving]))
        if fixed and left < least:
            raise SamplingError(
                f"a draw of {count} at policy version {version} was asked for, but {len(leaving)} items are older than "
                f"max_age {self.settings.max_age} then, and only {left} could be drawn; nothing has left yet"
            )

    def refresh(self, version: int) -> None:
        """Recompute every freshness that is no common factor for ``version``."""
        for index in self.sampler.indexes:
            index.refresh(version)

    def advance(self, version: int) -> None:
        """Let the clock show ``version``; what is too old leaves."""
        self.sampler.advance(version)
        self.counters["expired"] += self.evictor.expire(version)

    def add(self, arrivals: Arrivals, version: int, write: Writer | None = None) -> NDArray[np.int64]:
        """Store items that fit (:meth:`Evictor.check_fits`); returns their keys (n,).

        ``write`` is told the keys and what leaves for them before anything is final. When it raises, or the
        spill to disk or the freshness does, everything is as it was.
        """
        with ExitStack() as undo:
            records = self.store.arena.add(arrivals.columns)
            undo.callback(self.store.arena.free, records)
            self.sampler.check_arrivals(arrivals.versions, arrivals.owners)
            undo.callback(self._turn_back, self.clock, [index.keying.horizon for index in self.sampler.indexes])
            self.sampler.advance(version)
            leaving = self.evictor.choose(arrivals.owners, version)
            undo.callback(self.evictor.keep, leaving)
            keys = self.store.next_keys(len(arrivals), leaving.slots)
            if write is not None:
                write({"keys": keys, "evicted": self.store.keys[np.array(leaving.evicted, dtype=np.int64)]})
            undo.pop_all()
        self.evictor.dismiss(leaving)
        self.counters["expired"] += len(leaving.expired)
        self.counters["evicted"] += len(leaving.evicted)
        self._put(arrivals, keys, records)
        return keys

    def _put(self, arrivals: Arrivals, keys: NDArray[np.int64], records: NDArray[np.int64]) -> None:
        slots = self.store.add(keys, records, arrivals.members, arrivals.offsets, arrivals.owners, turns=arrivals.turns)
        ranks = self.store.ranks[slots]
        self.sampler.put(slots, arrivals.bases, arrivals.versions, owners=arrivals.owners, ranks=ranks)
        self.evictor.admit(slots)
        self.counters["added"] += len(slots)

    def _turn_back(self, version: int, horizons: list[int]) -> None:
        """Undo an advance of the clock, as long as nothing has left for good."""
        self.sampler.now = version
        for index, horizon in zip(self.sampler.indexes, horizons, strict=True):
            if index.keying.horizon != horizon:
                index.change(index.keying.freshness, index.keying.alpha, version)

    def add_again(self, arrivals: Arrivals, version: int, serials: NDArray[np.int64], done: Done) -> None:
        """What :meth:`add` did when ``write`` was told ``done``: the same items leave, the same keys come back.

        Where other calls before it were lost, an item may still sit in a slot that is needed: it leaves too.
        """
        self.advance(version)
        evicted = self.store.find(done["evicted"])
        tenants = done["keys"] % self.store.capacity
        in_the_way = np.union1d(evicted[evicted >= 0], tenants[self.store.keys[tenants] >= 0])
        self.remove(in_the_way, "evicted")
        records = self.store.arena.add(arrivals.columns)
        if len(serials):
            self.store.serials_given = int(serials[0])
        self._put(arrivals, done["keys"], records)

    def draw(
        self,
        count: int,
        method: Method,
        beta: float,
        *,
        toward: Toward,
        normalization: Normalization,
        out: ColumnsBuffer | None,
        write: Callable[[NDArray[np.int64]], None] | None = None,
    ) -> SampledBatch:
        """A draw at the present clock; items that it uses up leave.

        ``write`` is told their keys before anything but the random generator has changed; when it raises, that
        is as it was.
        """
        rng_state = None if write is None else self.sampler.rng.bit_generator.state
        with ExitStack() as undo:
            if rng_state is not None:
                undo.callback(setattr, self.sampler.rng.bit_generator, "state", rng_state)
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
            spent = self._used_up(slots)
            if write is not None and len(spent):
                write(self.store.keys[spent])
            undo.pop_all()
        np.add.at(self.store.uses, slots, 1)
        self.counters["drawn"] += count
        self.remove(spent, "used_up")
        return batch

    def _used_up(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the drawn ``slots`` (n,) whose items will have been drawn as often as they may, each once."""
        if self.settings.max_uses is None:
            return np.empty(0, dtype=np.int64)
        unique, counts = np.unique(slots, return_counts=True)
        return unique[self.store.uses[unique] + counts >= self.settings.max_uses]

    @property
    def index_version(self) -> int:
        """The policy version that the freshness of every draw is exact for; the clock, but for a background refresh."""
        lagging = [index.keying.epoch for index in self.sampler.indexes if index.keying.rate is None]
        return min([self.clock, *lagging])

    def remove(self, slots: NDArray[np.int64], reason: str) -> None:
        """Take distinct occupied ``slots`` (n,) out, for a ``reason`` that has a counter."""
        self.evictor.remove(slots)
        self.counters[reason] += len(slots)

    def change(self, number: int, freshness: Freshness, write: Callable[[int, Freshness], None] | None = None) -> None:
        """Give an index another decay for good: what fitted its tau ends. ``write`` is told before it is done."""
        index = self.sampler.indexes[number]
        index.compute(Keying(freshness, index.keying.alpha, epoch=self.clock))  # raises what the decay raises
        if write is not None:
            write(number, freshness)
        self._rekey(number, freshness)
        self.settings = self.settings.with_decay(number, freshness)
        self.autos.pop(number, None)

    def follow(self, number: int, auto: AutoTau) -> None:
        """Give an index the tau that has been fitted for it."""
        self._rekey(number, Exponential(auto.tau))
        self.autos[number] = auto

    def _rekey(self, number: int, freshness: Freshness) -> None:
        index = self.sampler.indexes[number]
        index.change(freshness, index.keying.alpha, self.clock)

    def change_alpha(self, alpha: float) -> None:
        """Give all indexes another alpha."""
        for index in self.sampler.indexes:  # what a decay of the user's raises comes before anything has changed
            index.compute(replace(index.keying, alpha=alpha, epoch=self.clock))
        for index in self.sampler.indexes:
            index.change(index.keying.freshness, alpha, self.clock)

    def observe(
        self,
        owners: NDArray[np.int64],
        ages: NDArray[np.int64],
        log_ratios: NDArray[np.float64],
        probabilities: NDArray[np.float64],
        clip_fractions: NDArray[np.float64] | None,
        *,
        write: Callable[[int, AutoTau], None] | None = None,
    ) -> tuple[TauChange, ...]:
        """Remember what a replay update measured, all (n,), and change tau where that is due.

        ``write`` is told of every change before anything is final; when it raises, nothing has changed.
        """
        check_drift(log_ratios, ages, probabilities, clip_fractions)
        changes, autos = [], {}
        for number, auto in self.autos.items():
            here = owners == number
            if here.any():
                autos[number] = trial = AutoTau.restore(auto.state())
                change = trial.observe(
                    log_ratios[here],
                    ages[here],
                    probabilities[here],
                    alpha=self.sampler.alpha,
                    policy_version=self.clock,
                )
                if change is not None:
                    changes.append((number, change))
        if write is not None:
            for number, _ in changes:
                write(number, autos[number])
        self.monitor.observe(ages, log_ratios, probabilities, clip_fractions)
        self.autos |= autos
        for number, change in changes:
            self.follow(number, autos[number])
            self.tau_changes.append(change)
        return tuple(change for _, change in changes)

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
            "counters": dict(self.counters),
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


def _quota(part: float, capacity: int) -> int:
    """The most items of a task, at least one. 0.29 of 100 is 29, although the product is a hair below."""
    return max(1, int(part * capacity * (1 + 1e-12)))


def _part(arrays: Mapping[str, NDArray[Any]], name: str) -> dict[str, NDArray[Any]]:
    prefix = f"{name}/"
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
