"""A buffer and its directory: every verb that changes the buffer is written down before it is done."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.errors import ConfigError, SnapshotError
from freshper.replay.arrivals import Arrivals
from freshper.replay.core import BufferCore
from freshper.replay.durable import DurableLog, Entry, Fsync, Recovered
from freshper.replay.freshness import Freshness, describe_freshness, freshness_from
from freshper.replay.journal import Snapshot

__all__ = ["Durability", "Fsync", "Recovery"]

# Arrays of the state that have one value for each item.
_BY_ITEM = ("sampler/", "store/keys", "store/uses", "store/arrivals", "store/item_owners", "store/turns")


@dataclass(frozen=True, slots=True)
class Recovery:
    """The state of a checkpoint, and what was done after it."""

    snapshot: Snapshot
    entries: list[Entry]

    def replay(self, core: BufferCore) -> None:
        """Do again what was done after the checkpoint, in order."""
        for entry in self.entries:
            _do_again(core, entry)


class Durability:
    """Writes what a buffer does into its directory."""

    def __init__(self, log: DurableLog) -> None:
        self._log = log

    @classmethod
    def create(cls, directory: Path, core: BufferCore, fsync: Fsync) -> Durability:
        """A new directory for a ``core`` that is still empty. Raises :class:`SnapshotError` where there is a buffer."""
        disk = cls(DurableLog.create(directory, meta=core.settings.describe(), fsync=fsync))
        disk.checkpoint(core)  # from now on there is always one to begin with
        return disk

    @classmethod
    def open(
        cls, directory: Path, *, mark: str | None, read_only: bool, repair: bool, fsync: Fsync
    ) -> tuple[Durability | None, Recovery]:
        """What a directory holds, and, unless ``read_only``, the means to go on writing there."""
        if read_only:
            if repair:
                raise ConfigError("repair changes the directory: it cannot be read_only")
            return None, _recovery(directory, DurableLog.read(directory, mark=mark))
        log, recovered = DurableLog.open(directory, fsync=fsync, mark=mark, repair=repair)
        return cls(log), _recovery(directory, recovered)

    def add(self, core: BufferCore, arrivals: Arrivals, version: int) -> None:
        """Write down that ``arrivals`` are added. OSError when it cannot be: then nothing is to happen."""
        first = core.store.serials_given
        serials = np.arange(first, first + len(arrivals.columns), dtype=np.int64)
        arrays: dict[str, NDArray[Any]] = {
            "members": arrivals.members,
            "offsets": arrivals.offsets,
            "bases": arrivals.bases,
            "owners": arrivals.owners,
        }
        if arrivals.turns is not None:
            arrays["turns"] = arrivals.turns
        self._log.add(serials, arrivals.columns, {"policy_version": version}, arrays)

    def update(self, keys: NDArray[np.int64], bases: NDArray[np.float64]) -> None:
        """Write down new base priorities."""
        self._log.change("priorities", {}, {"keys": keys, "bases": bases})

    def remove(self, keys: NDArray[np.int64], reason: str) -> None:
        """Write down that items leave."""
        self._log.change("remove", {"reason": reason}, {"keys": keys})

    def change_decay(self, number: int, freshness: Freshness) -> None:
        """Write down another decay of one index. A function is only noted: it has to be given again."""
        self._log.change("decay", {"index": number, "freshness": describe_freshness(freshness)}, {})

    def change_alpha(self, alpha: float) -> None:
        """Write down another alpha."""
        self._log.change("alpha", {"alpha": alpha}, {})

    def checkpoint(self, core: BufferCore) -> str:
        """Make the state durable; returns its mark."""
        slots = core.store.occupied()
        facts, arrays = core.state(slots)
        return self._log.checkpoint(facts, arrays, core.store.serials(slots))

    def close(self) -> None:
        """Let the directory go."""
        self._log.close()


def _recovery(directory: Path, recovered: Recovered) -> Recovery:
    for note in recovered.notes:
        warnings.warn(f"{directory}: {note}", stacklevel=4)
    if recovered.mark is None:
        raise SnapshotError(f"{directory} has no checkpoint: the buffer was never finished being made")
    arrays = recovered.arrays
    if len(recovered.serials) < len(recovered.live):
        arrays = _without_lost(arrays, recovered.serials, recovered.meta["settings"]["capacity"])
    snapshot = Snapshot(recovered.meta, arrays, recovered.serials, recovered.columns)
    return Recovery(snapshot, recovered.entries)


def _without_lost(
    arrays: Mapping[str, NDArray[Any]], found: NDArray[np.int64], capacity: int
) -> dict[str, NDArray[Any]]:
    """The state without items whose trajectories could not be read: their slots are free again."""
    members, offsets = arrays["store/members"], arrays["store/member_offsets"]
    counts = np.diff(offsets)
    there = np.logical_and.reduceat(np.isin(members, found), offsets[:-1])
    freed = arrays["store/keys"][~there] % capacity
    generations = arrays["store/generations"].copy()
    generations[freed] += 1
    by_item = {name: array[there] for name, array in arrays.items() if name.startswith(_BY_ITEM)}
    return {
        **arrays,
        **by_item,
        "store/members": members[np.repeat(there, counts)],
        "store/member_offsets": np.cumsum([0, *counts[there]], dtype=np.int64),
        "store/generations": generations,
        "store/freed": np.append(arrays["store/freed"], freed),
    }


def _do_again(core: BufferCore, entry: Entry) -> None:
    meta, arrays = entry.meta, entry.arrays
    if entry.kind == "add":
        if entry.columns is None:
            raise SnapshotError("an add came without its trajectories")
        arrivals = Arrivals(
            columns=entry.columns,
            members=arrays["members"],
            offsets=arrays["offsets"],
            turns=arrays.get("turns"),
            bases=arrays["bases"],
            owners=arrays["owners"],
        )
        core.add(arrivals, meta["policy_version"])
    elif entry.kind == "decay":
        if meta["freshness"] is not None:
            core.change(meta["index"], freshness_from(meta["freshness"]))
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
