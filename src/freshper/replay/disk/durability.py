"""A buffer and its directory: every verb that changes the buffer is written down before it is done."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ConfigError, MissingExtraError, SnapshotError
from freshper.replay.auto_tau import AutoTau
from freshper.replay.core import BufferCore, Done
from freshper.replay.disk.durable import DurableLog, Entry, Fsync, Recovered
from freshper.replay.disk.journal import Snapshot
from freshper.replay.freshness import Freshness, describe_freshness, freshness_from
from freshper.replay.settings import starting_decay
from freshper.replay.store.arrivals import Arrivals

__all__ = ["Durability", "Fsync", "Recovery"]

# Arrays of the state that have one value for each item.
_BY_ITEM = ("sampler/", "store/keys", "store/uses", "store/arrivals", "store/item_owners", "store/turns")


@dataclass(frozen=True, slots=True)
class Recovery:
    """The state of a checkpoint, None before there was one, and what was done after it.

    ``initial`` describes the settings that the buffer was made with; ``disk`` goes on writing, where that was asked
    for.
    """

    initial: dict[str, Any]
    snapshot: Snapshot | None
    entries: list[Entry]
    disk: Durability | None = None
    repaired: bool = False

    def settings(self) -> dict[str, Any]:
        """The settings as they were in the end, described: decays may have changed after the checkpoint."""
        described = dict(self.initial if self.snapshot is None else self.snapshot.facts["settings"])
        tasks = described["tasks"] = described["tasks"] and {name: dict(of) for name, of in described["tasks"].items()}
        for entry in self.entries:
            if entry.kind == "decay" and entry.meta["auto"] is None:
                if tasks is None:
                    described["freshness"] = entry.meta["freshness"]
                else:
                    tasks[list(tasks)[entry.meta["index"]]]["freshness"] = [entry.meta["freshness"]]
        return described

    def replay(self, core: BufferCore) -> None:
        """Do again what was done after the checkpoint, in order."""
        for entry in self.entries:
            _do_again(core, entry)
        if self.repaired and self.disk is not None:
            core.store.skip_generations()
            self.disk.checkpoint(core)


class Durability:
    """Writes what a buffer does into its directory. Everything raises OSError when it cannot be written."""

    def __init__(self, log: DurableLog) -> None:
        self._log = log

    @classmethod
    def create(cls, directory: Path, core: BufferCore, *, fsync: Fsync, keep: int) -> Durability:
        """A new directory for a ``core`` that is still empty. Raises :class:`SnapshotError` where there is a buffer."""
        _check_extra()
        disk = cls(DurableLog.create(directory, meta=core.settings.describe(), fsync=fsync, keep=keep))
        with ExitStack() as undo:
            undo.callback(disk.close)
            disk.checkpoint(core)  # from now on there is always one to begin with
            undo.pop_all()
        return disk

    @classmethod
    def open(cls, directory: Path, *, mark: str | None, read_only: bool, repair: bool, fsync: Fsync) -> Recovery:
        """What a directory holds, and, unless ``read_only``, the means to go on writing there."""
        _check_extra()
        if read_only:
            if repair:
                raise ConfigError("repair changes the directory: it cannot be read_only")
            return _recovery(DurableLog.read(directory, mark=mark))
        log, recovered = DurableLog.open(directory, fsync=fsync, mark=mark, repair=repair)
        repaired = repair and bool(recovered.notes)
        if repaired:
            for note in recovered.notes:
                warnings.warn(f"{directory}: {note}", stacklevel=3)  # the caller of ReplayBuffer.load
        return _recovery(recovered, cls(log), repaired=repaired)

    def add(self, core: BufferCore, arrivals: Arrivals, version: int, done: Done) -> None:
        """Write down that ``arrivals`` are added, which items they are, and which left for them."""
        first = core.store.serials_given
        serials = np.arange(first, first + len(arrivals.columns), dtype=np.int64)
        arrays: dict[str, NDArray[Any]] = {
            "members": arrivals.members,
            "offsets": arrivals.offsets,
            "bases": arrivals.bases,
            "owners": arrivals.owners,
            "keys": done["keys"],
            "evicted": done["evicted"],
        }
        if arrivals.turns is not None:
            arrays["turns"] = arrivals.turns
        self._log.add(serials, arrivals.columns, {"policy_version": version}, arrays)

    def update(self, core: BufferCore, keys: NDArray[np.int64], bases: NDArray[np.float64]) -> None:
        """Write down new base priorities."""
        self._change(core, "priorities", {}, {"keys": keys, "bases": bases})

    def remove(self, core: BufferCore, reason: str, keys: NDArray[np.int64]) -> None:
        """Write down that items leave."""
        self._change(core, "remove", {"reason": reason}, {"keys": keys})

    def change_decay(self, core: BufferCore, number: int, freshness: Freshness) -> None:
        """Write down another decay of one index. A function is only noted: it has to be given again."""
        meta = {"index": number, "freshness": describe_freshness(freshness), "auto": None}
        self._change(core, "decay", meta, {})

    def follow(self, core: BufferCore, number: int, auto: AutoTau) -> None:
        """Write down a tau that was fitted, with what it was fitted to."""
        self._change(core, "decay", {"index": number, "auto": auto.state()}, {})

    def change_alpha(self, core: BufferCore, alpha: float) -> None:
        """Write down another alpha."""
        self._change(core, "alpha", {"alpha": alpha}, {})

    def _change(self, core: BufferCore, kind: str, meta: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        self._log.change(kind, {**meta, "policy_version": core.clock}, arrays)

    def checkpoint(self, core: BufferCore) -> str:
        """Make the state durable; returns its mark."""
        slots = core.store.occupied()
        facts, arrays = core.state(slots)
        return self._log.checkpoint(facts, arrays, core.store.serials(slots))

    def close(self) -> None:
        """Let the directory go."""
        self._log.close()


def _check_extra() -> None:
    """Raise :class:`MissingExtraError` before a file is made that could not be written on."""
    for library in ("pyarrow", "safetensors"):
        if find_spec(library) is None:
            raise MissingExtraError(library, "disk")


def _recovery(recovered: Recovered, disk: Durability | None = None, *, repaired: bool = False) -> Recovery:
    if recovered.mark is None:
        return Recovery(recovered.initial, None, recovered.entries, disk, repaired)
    arrays = recovered.arrays
    if len(recovered.serials) < len(recovered.live):
        arrays = _without_lost(arrays, recovered.serials, recovered.meta["settings"]["capacity"])
    snapshot = Snapshot(recovered.meta, arrays, recovered.serials, recovered.columns)
    return Recovery(recovered.initial, snapshot, recovered.entries, disk, repaired)


def _without_lost(
    arrays: Mapping[str, NDArray[Any]], found: NDArray[np.int64], capacity: int
) -> dict[str, NDArray[Any]]:
    """The state without items whose trajectories could not be read: their slots are free again, for other keys."""
    members, offsets = arrays["store/members"], arrays["store/member_offsets"]
    counts = np.diff(offsets)
    there = np.logical_and.reduceat(np.isin(members, found), offsets[:-1])
    freed = arrays["store/keys"][~there] % capacity
    by_item = {name: array[there] for name, array in arrays.items() if name.startswith(_BY_ITEM)}
    return {
        **arrays,
        **by_item,
        "store/members": members[np.repeat(there, counts)],
        "store/member_offsets": np.cumsum([0, *counts[there]], dtype=np.int64),
        "store/freed": np.append(arrays["store/freed"], freed),
    }


def _do_again(core: BufferCore, entry: Entry) -> None:
    meta, arrays = entry.meta, entry.arrays
    if entry.kind == "add":
        if entry.columns is None or entry.serials is None:
            raise SnapshotError("an add came without its trajectories")
        arrivals = Arrivals(
            columns=entry.columns,
            members=arrays["members"],
            offsets=arrays["offsets"],
            turns=arrays.get("turns"),
            bases=arrays["bases"],
            owners=arrays["owners"],
        )
        core.add_again(arrivals, meta["policy_version"], entry.serials, arrays)
        return
    core.advance(meta["policy_version"])
    if entry.kind == "decay":
        _change_decay_again(core, meta)
    elif entry.kind == "alpha":
        core.change_alpha(meta["alpha"])
    else:
        slots = core.store.find(arrays["keys"])
        there = slots >= 0
        if entry.kind == "remove":
            core.remove(slots[there], meta["reason"])
        elif entry.kind == "priorities":
            core.sampler.set_bases(slots[there], arrays["bases"][there])
        else:
            raise SnapshotError(f"the journal holds an entry of kind {entry.kind!r}, which this version does not know")


def _change_decay_again(core: BufferCore, meta: Mapping[str, Any]) -> None:
    number = meta["index"]
    if meta["auto"] is not None:
        core.follow(number, AutoTau.restore(meta["auto"]))
    elif meta["freshness"] is not None:
        core.change(number, freshness_from(meta["freshness"]))
    else:  # a function, that of the end: it was given again, or another decay has taken its place
        core.change(number, starting_decay(core.settings.decays()[number], None))
