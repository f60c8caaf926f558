"""ReplayBuffer: what a trainer talks to. Verbs: add, sample, update_priorities, observe, save."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freshper.errors import ConfigError, FreshPERError, SnapshotError
from freshper.replay.auto_tau import TauChange
from freshper.replay.batch import PriorityUpdate, SampledBatch
from freshper.replay.checks import check_ages, checked_count, checked_keys, checked_values, checked_version
from freshper.replay.core import BufferCore
from freshper.replay.disk import journal
from freshper.replay.disk.durability import Durability, Fsync
from freshper.replay.disk.journal import Snapshot
from freshper.replay.draw.item_table import last_of_each
from freshper.replay.draw.refresh import BackgroundRefresh
from freshper.replay.draw.sampler import Method, Normalization, Toward, check_alpha, check_correction
from freshper.replay.draw.tasks import TaskReplay
from freshper.replay.forks import guarded_lock
from freshper.replay.freshness import Freshness, NoDecay, check_freshness
from freshper.replay.priority import Priority, checked_priorities
from freshper.replay.settings import BufferSettings, Decay, Refresh
from freshper.replay.store.arena import Arena
from freshper.replay.store.arrivals import Unit, arrive, as_groups, group_priorities, owners_of
from freshper.replay.store.columns import ColumnsBuffer
from freshper.replay.store.eviction import Evict
from freshper.replay.view import BufferView
from freshper.trajectory import Trajectory

PathLike = str | os.PathLike[str]


class ReplayBuffer(BufferView):
    """Prioritized experience replay of trajectories, with freshness.

    The chance of item i per draw is proportional to (b_i f(age_i))^alpha (Freshness-Aware PER,
    arXiv 2604.16918), with b_i the base priority, f the freshness, and age_i the given policy version minus the
    one that wrote the item. All methods may be called from several threads.

    Args:
        capacity: items kept.
        priority: "reward", "advantage", "td_error", "uniform", "success", or a function of a trajectory.
        freshness: decay of priorities with age: :class:`Exponential`, :class:`NoDecay` (the default, standard PER),
            :class:`PowerLaw`, :class:`Floored`, a function of ages, or "auto", which fits tau to the drift that
            :meth:`observe` is told (:class:`AutoTau`).
        alpha: how strongly priorities matter; 0 is uniform replay.
        eps: added to the named measures so that a measure of zero stays drawable.
        unit: what an item is: a "trajectory", a single "turn" with its context, or a whole "group".
        evict: what leaves when there is no room: the oldest ("fifo"), the "lowest" present priority, or the oldest
            "group" with all its members.
        max_bytes: budget of the stored data: tokens, columns, facts and images.
        max_uses: an item leaves when it has been drawn so often; repeats within a batch may exceed it.
        max_age: an item older than that, in policy versions, leaves.
        tasks: settings by task, for a buffer of several; then every trajectory's task must be named.
        refresh: how a freshness that is no common factor is kept up to date: before a draw ("sync"), or by a
            thread while training goes on ("background").
        ram_bytes, spill_directory: memory for token data; older data beyond it live in mapped files there.
        directory: where to keep the buffer durably (extra ``disk``): every add is on disk when it returns.
        fsync: "always" survives a power cut, "checkpoint" only the death of the process.
        keep_marks: how many of the last checkpoints stay loadable; as many as the trainer keeps of its own.
        seed: of the buffer's own random generator; the global ones are never touched.
    """

    _disk: Durability | None

    def __init__(
        self,
        capacity: int,
        *,
        priority: Priority = "reward",
        freshness: Decay | None = None,
        alpha: float = 0.6,
        eps: float = 0.1,
        unit: Unit = "trajectory",
        evict: Evict = "fifo",
        max_bytes: int | None = None,
        max_uses: int | None = None,
        max_age: int | None = None,
        tasks: Mapping[str, TaskReplay] | None = None,
        refresh: Refresh = "sync",
        ram_bytes: int | None = None,
        spill_directory: PathLike | None = None,
        directory: PathLike | None = None,
        fsync: Fsync = "always",
        keep_marks: int = 3,
        seed: int = 0,
    ) -> None:
        settings = BufferSettings(
            capacity=capacity,
            priority=priority,
            freshness=NoDecay() if freshness is None else freshness,
            alpha=alpha,
            eps=eps,
            unit=unit,
            evict=evict,
            max_bytes=max_bytes,
            max_uses=max_uses,
            max_age=max_age,
            tasks=tasks,
            refresh=refresh,
            seed=seed,
        )
        self._begin(settings, _arena(ram_bytes, spill_directory))
        if directory is not None:
            if not os.fspath(directory):
                raise ConfigError("directory is empty: name one, '.' for the current directory")
            self._disk = Durability.create(Path(directory), self._core, fsync=fsync, keep=keep_marks)

    def _begin(self, settings: BufferSettings, arena: Arena) -> None:
        self._arena = arena
        self._core = BufferCore(settings, arena)
        self._lock = guarded_lock(self)
        self._disk = None
        self._closed = False
        self._interrupted = ""
        self._background = (
            BackgroundRefresh(self._core.sampler.indexes, self._lock) if settings.refresh == "background" else None
        )

    def __enter__(self) -> Self:
        """For ``with``: closed at its end."""
        return self

    def __exit__(self, *_: object) -> None:
        """As :meth:`close`."""
        self.close()

    def base_priorities(self, items: Iterable[Any]) -> NDArray[np.float64]:
        """The base priorities (n,) that this buffer gives to trajectories, or to groups where it keeps groups."""
        groups = as_groups(items, "group" if self.unit == "group" else "trajectory")
        return group_priorities(groups, self.priority, self.eps)

    def add(
        self, trajectories: Iterable[Trajectory] | Iterable[Sequence[Trajectory]], *, policy_version: int
    ) -> NDArray[np.int64]:
        """Store finished trajectories, each with its own base priority; returns the keys of the items (n,).

        With unit "group" it takes groups, each a sequence of trajectories of one start; with unit "turn" every
        turn becomes an item. All or nothing. Raises :class:`ClockError` for a trajectory newer than
        ``policy_version`` or a version older than an earlier call's, :class:`TrajectoryError` for an episode
        that ended in an error, :class:`PriorityError` for a priority that is no finite number >= 0,
        :class:`CapacityError` for more than fit, OSError when the directory cannot be written.
        """
        settings = self._core.settings
        version = checked_version(policy_version, 0)
        # Before the lock: a generator or a priority function of the user's may take its time.
        arrivals = arrive(
            trajectories,
            version,
            unit=settings.unit,
            priority=settings.priority,
            eps=settings.eps,
            owners=self._core.owners,
        )
        with self._changing():
            checked_version(version, self.policy_version)
            check_ages(arrivals.versions, version, settings.max_age)
            self._core.evictor.check_fits(arrivals)
            write = None if self._disk is None else partial(self._disk.add, self._core, arrivals, version)
            return self._core.add(arrivals, version, write)

    def sample(
        self,
        batch_size: int,
        *,
        policy_version: int,
        beta: float = 0.0,
        toward: Toward = "uniform",
        normalization: Normalization = "batch_max",
        method: Method = "stratified",
        out: ColumnsBuffer | None = None,
    ) -> SampledBatch:
        """Draw ``batch_size`` items. O(B log N).

        ``method``: "stratified" (one per equal part of the priority mass) and "systematic" (the same offset in
        all parts) draw with replacement, "without_replacement" draws distinct items.
        ``beta`` > 0 weighs item i by (Q_i / P_i)^beta; ``toward`` chooses Q. Toward "uniform" undoes the
        freshness as well as the priority; toward "freshness" corrects the priority only. ``normalization``
        divides by the batch's largest weight, by its mean, by the largest of the whole buffer (which with
        decayed priorities makes all of them tiny), or not at all.
        ``out``: memory for the data that is used again; they hold until its next use.

        Raises :class:`ClockError` when ``policy_version`` is older than an earlier call's,
        :class:`SamplingError` when too little is drawable, :class:`RefreshError` when a background refresh failed.
        """
        count = checked_count(batch_size)
        if out is not None and not isinstance(out, ColumnsBuffer):
            raise TypeError(f"out is a {type(out).__name__}: it must be a ColumnsBuffer")
        check_correction(beta, toward, normalization, method)  # before the draw: a refused call leaves no trace
        with self._changing():
            version = checked_version(policy_version, self.policy_version)
            self._core.check_possible(count, method, version)
            if self._background is None:
                self._core.refresh(version)
            else:
                self._background.request(version)
            self._core.advance(version)
            return self._core.draw(
                count,
                method,
                beta,
                toward=toward,
                normalization=normalization,
                out=out,
                write=None if self._disk is None else partial(self._disk.remove, self._core, "used_up"),
            )

    def wait_for_refresh(self) -> None:
        """Return when no background refresh runs. Raises :class:`RefreshError` when it failed."""
        if self._background is not None:
            self._background.wait()

    def update_priorities(self, keys: ArrayLike, base_priorities: ArrayLike) -> PriorityUpdate:
        """Set the base priorities of ``keys`` (n,) to ``base_priorities`` (n,): final values, no eps is added.

        Of a key that occurs twice the last value wins. Keys of evicted or unknown items are refused one by one
        and returned. Raises :class:`TypeError` for keys that are no integers and :class:`PriorityError` for
        a bad value or a length mismatch; then nothing has changed.
        """
        asked = checked_keys(keys)
        values = checked_priorities(base_priorities, len(asked), lambda at: f"key {asked[at]}")
        with self._changing():
            slots = self._core.store.find(asked.astype(np.int64))
            live = slots >= 0
            unique, chosen = last_of_each(slots[live], values[live])
            if self._disk is not None and len(unique):
                self._disk.update(self._core, self._core.store.keys[unique], chosen)
            self._core.sampler.set_bases(unique, chosen)
            return PriorityUpdate(updated=len(unique), refused=asked[~live])

    def remove(self, keys: ArrayLike) -> PriorityUpdate:
        """Take items out; keys that are gone or unknown are refused one by one and returned."""
        asked = checked_keys(keys)
        with self._changing():
            slots = self._core.store.find(asked.astype(np.int64))
            unique = np.unique(slots[slots >= 0])
            if self._disk is not None and len(unique):
                self._disk.remove(self._core, "removed", self._core.store.keys[unique])
            self._core.remove(unique, "removed")
            return PriorityUpdate(updated=len(unique), refused=asked[slots < 0])

    def set_freshness(self, freshness: Freshness, *, task: str | None = None) -> None:
        """Change the decay, of one task where there are several: one rebuild from the raw values. Ends "auto"."""
        check_freshness(freshness)
        with self._changing():
            write = None if self._disk is None else partial(self._disk.change_decay, self._core)
            self._core.change(self._index_of(task), freshness, write)

    def set_alpha(self, alpha: float) -> None:
        """Change alpha: one rebuild from the raw values."""
        alpha = check_alpha(alpha)
        with self._changing():
            if self._disk is not None:
                self._disk.change_alpha(self._core, alpha)
            self._core.change_alpha(alpha)

    def observe(
        self, batch: SampledBatch, log_ratios: ArrayLike, clip_fractions: ArrayLike | None = None
    ) -> tuple[TauChange, ...]:
        """Tell what a replay update on ``batch`` measured: log(pi/mu) of each of its n trajectories, (n,).

        Each is the **sum** over the trajectory's response tokens, in nats, with pi as it was at the draw, before the
        update; of a batch that was learned in portions, tell all n together. Demonstrations without log-probs have
        none and are left out, whatever stands in their place. ``clip_fractions`` (n,) are the parts of their
        response tokens whose ratio was clipped. All of it feeds :meth:`drift_by_age`, and "auto", whose changes of
        tau are returned. Raises :class:`ConfigError` for values that are not finite or of another shape; then
        nothing has changed.
        """
        if not isinstance(batch, SampledBatch):
            raise TypeError(f"batch is a {type(batch).__name__}: pass what sample returned")
        count = len(batch.columns)
        ratios = checked_values("log_ratios", log_ratios, count)
        clips = None if clip_fractions is None else checked_values("clip_fractions", clip_fractions, count)
        ages, probabilities = batch.per_trajectory(batch.ages), batch.per_trajectory(batch.probabilities)
        owners = owners_of(batch.columns.tasks, self._core.owners).astype(np.int64)
        known = batch.columns.logprobs_known
        with self._changing():
            write = None if self._disk is None else partial(self._disk.follow, self._core)
            return self._core.observe(
                owners[known],
                ages[known].astype(np.int64),
                ratios[known],
                probabilities[known],
                None if clips is None else clips[known],
                write=write,
            )

    def save(self, path: PathLike) -> None:
        """Write everything to one file, atomically: after a crash the old file or the new one is there, whole.

        A priority or a decay that is a function is not written: pass it to :meth:`load` again.
        """
        with self._open():
            slots = self._core.store.occupied()
            facts, arrays = self._core.state(slots)
            serials, columns = self._core.store.trajectories(slots)
        journal.write_snapshot(Path(path), Snapshot(facts, arrays, serials, columns))

    def checkpoint(self) -> str:
        """Make the present state durable in the buffer's directory, writing what is new; returns its mark.

        ``ReplayBuffer.load(directory, mark=...)`` gives exactly this state again: keep the mark in the trainer's
        own checkpoint. The last ``keep_marks`` marks stay loadable, 3 if nothing else was asked for.
        """
        with self._open():
            if self._disk is None:
                raise ConfigError(
                    "this buffer writes to no directory: make it with directory=..., load a directory without "
                    "read_only, or use save(path)"
                )
            return self._disk.checkpoint(self._core)

    @classmethod
    def load(
        cls,
        path: PathLike,
        *,
        priority: Priority | None = None,
        freshness: Decay | Mapping[str, Decay] | None = None,
        mark: str | None = None,
        read_only: bool = False,
        repair: bool = False,
        fsync: Fsync = "always",
        ram_bytes: int | None = None,
        spill_directory: PathLike | None = None,
    ) -> Self:
        """The buffer of a file that :meth:`save` wrote, or of a directory: bit for bit the same next draws.

        A directory gives everything that was acknowledged and is written on, unless ``read_only``, which works
        beside a writer and keeps what is done then in memory. With ``mark`` the state is that of the checkpoint,
        and what lies beyond it is discarded; otherwise how often items were drawn since the last checkpoint is
        forgotten, and the random generator is that of the checkpoint. ``repair`` goes on without damaged parts and
        warns of each. ``priority`` and ``freshness`` (by task where there are several) must be given when the saved
        ones were functions, and only then; not to look only (``read_only``).

        Raises :class:`SnapshotError` for damage or an unknown format, :class:`BufferLockedError` when another
        buffer writes to the directory.
        """
        path, arena = Path(path), _arena(ram_bytes, spill_directory)
        if not path.is_dir():
            if mark is not None or repair:
                raise ConfigError(f"{path} is a single file: it has no marks and nothing to repair it with")
            snapshot = journal.read_snapshot(path)
            described = snapshot.facts.get("settings", {})
            settings = BufferSettings.from_description(described, priority, freshness, look_only=read_only)
            return cls._from(settings, arena, snapshot)
        recovery = Durability.open(path, mark=mark, read_only=read_only, repair=repair, fsync=fsync)
        with ExitStack() as undo:
            if recovery.disk is not None:
                undo.callback(recovery.disk.close)
            described = recovery.settings()
            settings = BufferSettings.from_description(described, priority, freshness, look_only=read_only)
            buffer = cls._from(settings, arena, recovery.snapshot)
            recovery.replay(buffer._core)
            buffer._disk = recovery.disk
            undo.pop_all()
        return buffer

    @classmethod
    def _from(cls, settings: BufferSettings, arena: Arena, snapshot: Snapshot | None) -> Self:
        buffer = cls.__new__(cls)
        buffer._begin(settings, arena)
        if snapshot is not None:
            try:
                buffer._core.restore(snapshot.facts, snapshot.arrays, snapshot.serials, snapshot.columns)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                if isinstance(error, FreshPERError):
                    raise
                raise SnapshotError(f"the snapshot's parts do not belong together ({error!r})") from error
        return buffer

    def close(self) -> None:
        """Stop the background refresh, give files and memory back. Every later call but this one is refused."""
        if self._background is not None:
            self._background.close()
        with self._lock:
            if self._disk is not None:
                self._disk.close()
                self._disk = None
            if not self._closed:
                self._closed = True
                self._arena.close()


def _arena(ram_bytes: int | None, spill_directory: PathLike | None) -> Arena:
    return Arena(
        ram_bytes=ram_bytes, spill_directory=None if spill_directory is None else Path(spill_directory).absolute()
    )
