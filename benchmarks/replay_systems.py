"""The systems that benchmarks/replay_index.py compares: freshper, the floor, plain Python, and the peers.

Every system offers one call, ``step``: draw a batch, compute its sampling weights, update the priorities of what was
drawn, and do whatever it needs so that freshness is exact after the policy version has advanced by one.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from freshper import Exponential, ReplayBuffer, StopReason, Trajectory, Turn
from freshper.replay.draw.compiled import SWITCH
from freshper.replay.draw.sampler import PrioritySampler

TAU, ALPHA, BETA = 500.0, 0.6, 0.4
NEWEST = 2000  # the items were written by policy versions 0 to this one

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """What is stored. An update writes the base priority that an item has, so the distribution stays known."""

    items: int
    bases: Floats
    versions: Ints

    @classmethod
    def make(cls, items: int) -> Problem:
        rng = np.random.default_rng(0)
        return cls(items, rng.uniform(0.1, 2.0, items), rng.integers(0, NEWEST + 1, items))

    def priorities(self, now: int) -> Floats:
        """b_i exp(-age_i / tau) of all items."""
        return self.bases * np.exp((self.versions - now) / TAU)

    def distribution(self) -> Floats:
        powered = self.priorities(NEWEST) ** ALPHA
        return powered / powered.sum()


class System(Protocol):
    def step(self, now: int, batch: int) -> Ints:
        """One training step with ``batch`` items at policy version ``now``; returns the items that were drawn."""
        ...


class Floor:
    """What no index can do without, as two compiled loops: a step of uniform replay that ignores the priorities.

    A draw: one random number, one random access and pow for every item, the division by the largest weight. An update,
    which comes after the learner's: for every item its base priority, looked up like everybody's, one pow, one write.
    """

    def __init__(self, problem: Problem) -> None:
        import numba

        @numba.njit  # type: ignore[untyped-decorator]
        def draw(values: Floats, places: Floats, items: Ints, weights: Floats) -> None:
            largest = 0.0
            for number in range(len(places)):
                items[number] = int(places[number] * len(values))
                weights[number] = values[items[number]] ** BETA
                largest = max(largest, weights[number])
            for number in range(len(places)):
                weights[number] /= largest

        @numba.njit  # type: ignore[untyped-decorator]
        def update(values: Floats, bases: Floats, items: Ints) -> None:
            for number in range(len(items)):
                values[items[number]] = bases[items[number]] ** ALPHA

        self.draw, self.update = draw, update
        self.values = problem.bases**ALPHA
        self.bases = problem.bases
        self.rng = np.random.default_rng(0)

    def step(self, now: int, batch: int) -> Ints:  # noqa: ARG002 - nothing ages
        items = np.empty(batch, dtype=np.int64)
        self.draw(self.values, self.rng.random(batch), items, np.empty(batch))
        self.update(self.values, self.bases, items)
        return items


class FreshperIndex:
    """freshper: the sampler alone, its trees compiled or on numpy."""

    def __init__(self, problem: Problem, *, compiled: bool) -> None:
        self.problem = problem
        os.environ[SWITCH] = str(int(compiled))
        self.sampler = PrioritySampler(problem.items, Exponential(TAU), ALPHA, seed=0)
        self.sampler.put(np.arange(problem.items), problem.bases, problem.versions)

    def step(self, now: int, batch: int) -> Ints:  # noqa: ARG002 - the index needs no clock
        slots, probabilities = self.sampler.draw(batch)
        self.sampler.sampling_weights(slots, probabilities, BETA, "uniform", "batch_max")
        self.sampler.set_bases(slots, self.sampler.bases[slots])
        return slots  # nothing to refresh


class FreshperBuffer:
    """freshper: the whole buffer, with its checks, its keys and the trajectories themselves."""

    def __init__(self, problem: Problem) -> None:
        bases = iter(problem.bases.tolist())
        os.environ[SWITCH] = ""
        self.buffer = ReplayBuffer(
            problem.items, priority=lambda _: next(bases), freshness=Exponential(TAU), alpha=ALPHA, seed=0
        )
        turns, end = (Turn(0, 1, 2, 0.0),), StopReason.TERMINATED
        items = [
            Trajectory([0, 1], [False, True], [0.0, -1.0], turns, end, False, written, "bench", "bench", 0)
            for written in problem.versions.tolist()
        ]
        self.buffer.add(items, policy_version=NEWEST)

    def step(self, now: int, batch: int) -> Ints:
        drawn = self.buffer.sample(batch, policy_version=now, beta=BETA)
        self.buffer.update_priorities(drawn.keys, drawn.base_priorities)
        return drawn.keys  # the key of an item that nothing evicts is its number


class PlainTree:
    """The usual segment tree: a list, one item at a time."""

    def __init__(self, capacity: int) -> None:
        self.first_leaf = 1 << (capacity - 1).bit_length()
        self.nodes = [0.0] * (2 * self.first_leaf)

    def __setitem__(self, item: int, value: float) -> None:
        at = item + self.first_leaf
        self.nodes[at] = value
        at //= 2
        while at >= 1:
            self.nodes[at] = self.nodes[2 * at] + self.nodes[2 * at + 1]
            at //= 2

    def find(self, mass: float) -> int:
        at = 1
        while at < self.first_leaf:
            at *= 2
            if mass >= self.nodes[at] and self.nodes[at + 1] > 0:
                mass -= self.nodes[at]
                at += 1
        return at - self.first_leaf

    def rebuild(self, values: list[float]) -> None:
        nodes = self.nodes
        nodes[self.first_leaf : self.first_leaf + len(values)] = values
        for at in range(self.first_leaf - 1, 0, -1):
            nodes[at] = nodes[2 * at] + nodes[2 * at + 1]


class PlainPython:
    """Plain-Python segment tree, refreshed item by item: the usual implementation."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.bases, self.versions = problem.bases.tolist(), problem.versions.tolist()
        self.tree = PlainTree(problem.items)
        self.random = random.Random(0)
        self.refresh(NEWEST)

    def weight(self, item: int, now: int) -> float:
        return (self.bases[item] * math.exp((self.versions[item] - now) / TAU)) ** ALPHA

    def refresh(self, now: int) -> None:
        for item in range(self.problem.items):
            self.tree[item] = self.weight(item, now)

    def step(self, now: int, batch: int) -> Ints:
        total, leaves = self.tree.nodes[1], self.tree.first_leaf
        drawn = [self.tree.find((number + self.random.random()) / batch * total) for number in range(batch)]
        weights = [(self.problem.items * self.tree.nodes[leaves + item] / total) ** -BETA for item in drawn]
        largest = max(weights)
        weights = [weight / largest for weight in weights]
        for item in drawn:
            self.tree[item] = self.weight(item, now)
        self.refresh(now + 1)
        return np.array(drawn)


class PlainPythonRebuilt(PlainPython):
    """The same tree, refreshed in one pass from the leaves up: kinder than the usual implementation."""

    def refresh(self, now: int) -> None:
        self.tree.rebuild([self.weight(item, now) for item in range(self.problem.items)])


class NumpyScan:
    """No tree: cumulative sums of all weights and a binary search, numpy only."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.rng = np.random.default_rng(0)
        self.refresh(NEWEST)

    def refresh(self, now: int) -> None:
        self.weights = self.problem.priorities(now) ** ALPHA
        self.sums = self.weights.cumsum()

    def step(self, now: int, batch: int) -> Ints:
        total = self.sums[-1]
        drawn = np.searchsorted(self.sums, self.rng.random(batch) * total, side="right")
        weights = (self.problem.items * self.weights[drawn] / total) ** -BETA
        weights /= weights.max()
        self.refresh(now + 1)
        return drawn


class Torchrl:
    """torchrl's PrioritizedSampler (C++ trees)."""

    def __init__(self, problem: Problem) -> None:
        os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # its notes would stand between our lines
        import torch
        from torchrl.data import LazyTensorStorage, PrioritizedSampler

        torch.set_num_threads(1)
        self.torch, self.problem = torch, problem
        self.sampler = PrioritizedSampler(problem.items, alpha=ALPHA, beta=BETA)
        self.storage = LazyTensorStorage(problem.items)
        self.all = torch.arange(problem.items)
        self.storage.set(self.all, torch.zeros(problem.items))
        self.sampler.extend(self.all)
        self.refresh(NEWEST)

    def refresh(self, now: int) -> None:
        self.sampler.update_priority(self.all, self.torch.from_numpy(self.problem.priorities(now)).float())

    def step(self, now: int, batch: int) -> Ints:
        index, _ = self.sampler.sample(self.storage, batch)
        self.refresh(now + 1)
        drawn: Ints = index.numpy()
        return drawn


class Tianshou:
    """tianshou's PrioritizedReplayBuffer (numba tree)."""

    def __init__(self, problem: Problem) -> None:
        from tianshou.data import Batch, PrioritizedReplayBuffer

        self.problem = problem
        self.buffer = PrioritizedReplayBuffer(problem.items, alpha=ALPHA, beta=BETA)
        step = Batch(obs=0, act=0, rew=0.0, terminated=False, truncated=False, obs_next=0, info={})
        part = PrioritizedReplayBuffer(min(problem.items, 10_000), alpha=ALPHA, beta=BETA)
        for _ in range(part.maxsize):
            part.add(step)
        while len(self.buffer) < problem.items:
            self.buffer.update(part)  # add takes one item at a time: a minute for a million
        self.all = np.arange(problem.items)
        np.random.seed(0)  # noqa: NPY002 - the generator that it draws from
        self.refresh(NEWEST)

    def refresh(self, now: int) -> None:
        self.buffer.update_weight(self.all, self.problem.priorities(now))

    def step(self, now: int, batch: int) -> Ints:
        drawn: Ints = self.buffer.sample_indices(batch)
        weights = self.buffer.get_weight(drawn)
        weights = weights / np.max(weights)
        self.refresh(now + 1)
        return drawn


class Cpprb:
    """cpprb's PrioritizedReplayBuffer (C++ trees)."""

    def __init__(self, problem: Problem) -> None:
        from cpprb import PrioritizedReplayBuffer

        self.problem = problem
        self.buffer = PrioritizedReplayBuffer(problem.items, {"item": {}}, alpha=ALPHA)
        self.buffer.add(item=np.zeros(problem.items), priorities=problem.priorities(NEWEST))
        self.all = np.arange(problem.items)

    def step(self, now: int, batch: int) -> Ints:
        drawn: Ints = self.buffer.sample(batch, beta=BETA)["indexes"]
        self.buffer.update_priorities(self.all, self.problem.priorities(now + 1))
        return drawn


NUMPY, COMPILED, FLOOR = "freshper, numpy", "freshper, compiled", "floor: uniform draw"
PLAIN, WHOLE = "plain Python tree", "freshper, whole buffer"
PEERS = ("torchrl", "tianshou", "cpprb")
SYSTEMS: dict[str, Callable[[Problem], System]] = {
    FLOOR: Floor,
    COMPILED: lambda problem: FreshperIndex(problem, compiled=True),
    NUMPY: lambda problem: FreshperIndex(problem, compiled=False),
    WHOLE: FreshperBuffer,
    PLAIN: PlainPython,
    "plain Python tree, rebuilt": PlainPythonRebuilt,
    "numpy scan, no tree": NumpyScan,
    "torchrl": Torchrl,
    "tianshou": Tianshou,
    "cpprb": Cpprb,
}
# Beyond this many items a system is left out: objects or seconds a step would take the time of all others.
LIMITS: dict[str, int] = {WHOLE: 100_000}
