"""One training step with exact freshness, index only, against the usual implementations.

A step draws a batch, computes its sampling weights (beta 0.4, toward uniform), updates the priorities of what
was drawn, and does whatever the system needs so that freshness is exact after the policy version has advanced
by one. Systems without freshness of their own get it as a competent user would add it: all priorities
recomputed in one vectorized pass and handed to the system's own public update. The update of the batch is part
of that pass, so it costs them nothing extra.

Every system runs a while in every round, so that a busy machine disturbs all alike; reported is the median time
of a step. The mean policy version of all that a system drew is compared with the exact expectation: a fast
index that draws something else is marked.

`make bench` runs it in an environment with all peers (benchmarks/requirements.txt). In any other environment the
peers that are missing are listed with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from freshper import Exponential, ReplayBuffer, StopReason, Trajectory, Turn
from freshper.replay.sampler import PrioritySampler

TAU, ALPHA, BETA = 500.0, 0.6, 0.4
NEWEST = 2000  # the items were written by policy versions 0 to this one
REQUIRED_RATIO = 200.0  # against the plain-Python tree
SIGMAS = 5.0  # of the check of what was drawn
# What a peer that is missing, broken or of another release raises.
NOT_LOADED = (ImportError, OSError, RuntimeError, AttributeError, TypeError)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """What is stored. An update writes the base priority that an item has, so the distribution stays known."""

    items: int
    batch: int
    bases: Floats
    versions: Ints

    @classmethod
    def make(cls, items: int, batch: int) -> Problem:
        rng = np.random.default_rng(0)
        return cls(items, batch, rng.uniform(0.1, 2.0, items), rng.integers(0, NEWEST + 1, items))

    def priorities(self, now: int) -> Floats:
        """b_i exp(-age_i / tau) of all items."""
        return self.bases * np.exp((self.versions - now) / TAU)

    def distribution(self) -> Floats:
        powered = self.priorities(NEWEST) ** ALPHA
        return powered / powered.sum()


class System(Protocol):
    def step(self, now: int) -> Ints:
        """One training step at policy version ``now``; returns the items that were drawn."""
        ...


class FreshperIndex:
    """freshper: the sampler alone."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sampler = PrioritySampler(problem.items, Exponential(TAU), ALPHA, seed=0)
        self.sampler.put(np.arange(problem.items), problem.bases, problem.versions)

    def step(self, now: int) -> Ints:  # noqa: ARG002 - the index needs no clock
        slots, probabilities = self.sampler.draw(self.problem.batch)
        self.sampler.sampling_weights(slots, probabilities, BETA, "uniform", "batch_max")
        distinct = np.unique(slots)
        self.sampler.set_bases(distinct, self.problem.bases[distinct])
        return slots  # nothing to refresh


class FreshperBuffer:
    """freshper: the whole buffer, with its checks, its keys and the trajectories themselves."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        bases = iter(problem.bases.tolist())
        self.buffer = ReplayBuffer(
            problem.items, priority=lambda _: next(bases), freshness=Exponential(TAU), alpha=ALPHA, seed=0
        )
        turns, end = (Turn(0, 1, 2, 0.0),), StopReason.TERMINATED
        items = [
            Trajectory([0, 1], [False, True], [0.0, -1.0], turns, end, False, written, "bench", "bench", 0)
            for written in problem.versions.tolist()
        ]
        self.buffer.add(items, policy_version=NEWEST)

    def step(self, now: int) -> Ints:
        batch = self.buffer.sample(self.problem.batch, policy_version=now, beta=BETA)
        self.buffer.update_priorities(batch.keys, batch.base_priorities)
        return batch.keys  # the key of an item that nothing evicts is its number


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

    def step(self, now: int) -> Ints:
        batch, total, leaves = self.problem.batch, self.tree.nodes[1], self.tree.first_leaf
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

    def step(self, now: int) -> Ints:
        total = self.sums[-1]
        drawn = np.searchsorted(self.sums, self.rng.random(self.problem.batch) * total, side="right")
        weights = (self.problem.items * self.weights[drawn] / total) ** -BETA
        weights /= weights.max()
        self.refresh(now + 1)
        return drawn


class Torchrl:
    """torchrl's PrioritizedSampler (C++ trees)."""

    def __init__(self, problem: Problem) -> None:
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

    def step(self, now: int) -> Ints:
        index, _ = self.sampler.sample(self.storage, self.problem.batch)
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
        for _ in range(problem.items):
            self.buffer.add(step)
        self.all = np.arange(problem.items)
        np.random.seed(0)  # noqa: NPY002 - the generator that it draws from
        self.refresh(NEWEST)

    def refresh(self, now: int) -> None:
        self.buffer.update_weight(self.all, self.problem.priorities(now))

    def step(self, now: int) -> Ints:
        drawn: Ints = self.buffer.sample_indices(self.problem.batch)
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

    def step(self, now: int) -> Ints:
        drawn: Ints = self.buffer.sample(self.problem.batch, beta=BETA)["indexes"]
        self.buffer.update_priorities(self.all, self.problem.priorities(now + 1))
        return drawn


OURS, PLAIN = "freshper", "plain Python tree"
SYSTEMS: dict[str, Callable[[Problem], System]] = {
    OURS: FreshperIndex,
    "freshper, whole buffer": FreshperBuffer,
    PLAIN: PlainPython,
    "plain Python tree, rebuilt": PlainPythonRebuilt,
    "numpy scan, no tree": NumpyScan,
    "torchrl": Torchrl,
    "tianshou": Tianshou,
    "cpprb": Cpprb,
}
PEERS = ("torchrl", "tianshou", "cpprb")


@dataclass
class Result:
    name: str
    release: str = ""
    times: list[float] = field(default_factory=list, repr=False)
    version_sum: float = 0.0
    drawn: int = 0
    reason: str = ""  # why it did not run

    @property
    def median(self) -> float:
        """Seconds a step."""
        return float(np.median(self.times)) if self.times else math.nan

    def deviation(self, problem: Problem) -> float:
        """How many standard errors the mean version of the drawn items lies from the exact expectation."""
        distribution = problem.distribution()
        mean = float(distribution @ problem.versions)
        spread = math.sqrt(float(distribution @ (problem.versions - mean) ** 2) / max(self.drawn, 1))
        return abs(self.version_sum / max(self.drawn, 1) - mean) / spread


def measure(problem: Problem, rounds: int, seconds: float) -> list[Result]:
    """Run every system for about ``seconds``, at least one step, in each of ``rounds`` rounds."""
    results = {name: Result(name) for name in SYSTEMS}
    for name in (OURS, *PEERS):
        with contextlib.suppress(PackageNotFoundError):
            results[name].release = version(name)
    running: dict[str, System] = {}
    for name, make in SYSTEMS.items():
        try:
            running[name] = make(problem)
            running[name].step(NEWEST)  # compiles and warms
        except NOT_LOADED as error:
            running.pop(name, None)
            results[name].reason = f"{type(error).__name__}: {error}".splitlines()[0]
    now = dict.fromkeys(running, NEWEST + 1)
    for _ in range(rounds):
        for name, system in running.items():
            result, until = results[name], time.perf_counter() + seconds
            end = 0.0
            while end < until:
                start = time.perf_counter()
                drawn = system.step(now[name])
                end = time.perf_counter()
                now[name] += 1
                result.times.append(end - start)
                result.version_sum += float(problem.versions[drawn].sum())
                result.drawn += len(drawn)
    return list(results.values())


def report(results: list[Result], problem: Problem) -> dict[str, object]:
    """Print the table; returns it for the JSON file."""
    medians = {result.name: result.median for result in results}
    ours = medians[OURS]
    print(f"one step with exact freshness: {problem.items:,} items, batch {problem.batch}, tau {TAU:g}, alpha {ALPHA}")
    print(f"{'system':<28}{'us per step':>14}{'x freshper':>12}{'steps':>8}  draws")
    rows = []
    for result in results:
        if result.reason:
            print(f"{result.name:<28}{'not run':>14}  {result.reason}")
        else:
            exact = result.deviation(problem) < SIGMAS
            label = f"{result.name} {result.release}".strip()
            print(
                f"{label:<28}{result.median * 1e6:>14,.1f}{result.median / ours:>12,.1f}{len(result.times):>8}  "
                f"{'as they should be' if exact else f'{result.deviation(problem):.0f} standard errors off'}"
            )
        row: dict[str, object] = {"name": result.name, "release": result.release, "reason": result.reason}
        if result.times:
            row |= {"microseconds": result.median * 1e6, "ratio": result.median / ours, "steps": len(result.times)}
            row |= {"standard_errors_off": result.deviation(problem)}
        rows.append(row)
    ran = [name for name in PEERS if not math.isnan(medians[name])]
    verdict = {
        "at_least_200x_plain_python": medians[PLAIN] / ours >= REQUIRED_RATIO,
        "faster_than_every_peer_that_ran": all(medians[name] > ours for name in ran),
        "peers_that_ran": ran,
    }
    for name, value in verdict.items():
        print(f"{name}: {value}")
    return {"systems": rows, "requirement": verdict}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.2, help="of every system in every round")
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    problem = Problem.make(arguments.items, arguments.batch)
    result = report(measure(problem, arguments.rounds, arguments.seconds), problem)
    if arguments.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__}
        result |= {"machine": machine, "items": arguments.items, "batch": arguments.batch, "rounds": arguments.rounds}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
