"""Adding ragged trajectories of about 1,000 tokens, 64 at a time, to a buffer that is full: trajectories per second.

    python benchmarks/adds.py --json adds.json

Every trajectory has token ids, response mask and behavior log-probs; lengths run from 500 to 1,500. Each system
gets them in the form that it takes, ready made, keeps a copy, gives each its priority, and evicts the oldest:

- freshper: ``ReplayBuffer.add``, trajectories checked when they were made;
- torchrl: ``PrioritizedReplayBuffer`` of TensorDicts over a ``ListStorage``, its storage for items of different
  lengths: ``extend`` and ``update_priority``;
- a plain Python list of objects with a copy of the arrays, and no index at all.

cpprb is not among them: its items have one shape. All take turns in every round; reported are medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from batches import COLUMNS, make_trajectories

from freshper import Exponential, ReplayBuffer, Trajectory

BATCH, CAPACITY, SHORTEST, LONGEST = 64, 4096, 500, 1500
PREPARED = 32  # batches, used in turn
# What a peer that is missing, broken or of another release raises.
NOT_LOADED = (ImportError, OSError, RuntimeError, AttributeError, TypeError)
FRESHPER, OBJECTS, TORCHRL = "freshper", "Python list of objects", "torchrl, ListStorage"
Add = Callable[[int], None]  # adds the prepared batch of that number


def freshper(batches: list[list[Trajectory]]) -> Add:
    buffer = ReplayBuffer(CAPACITY, priority="reward", freshness=Exponential(500), seed=0)

    def add(number: int) -> None:
        buffer.add(batches[number], policy_version=0)

    return add


def objects(batches: list[list[Trajectory]]) -> Add:
    stored: list[dict[str, object]] = [{}] * CAPACITY
    arrived = itertools.count()

    def add(number: int) -> None:
        for item in batches[number]:
            copies: dict[str, object] = {name: getattr(item, name).copy() for name in COLUMNS}
            copies["priority"] = abs(item.episode_return) + 0.1
            stored[next(arrived) % CAPACITY] = copies

    return add


def torchrl(batches: list[list[Trajectory]]) -> Add:
    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # its notes would stand between our lines
    import torch
    from tensordict import TensorDict
    from torchrl.data import ListStorage, PrioritizedReplayBuffer

    torch.set_num_threads(1)
    buffer = PrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=ListStorage(CAPACITY), batch_size=BATCH)
    prepared = [
        [TensorDict({name: torch.tensor(getattr(item, name)) for name in COLUMNS}) for item in batch]
        for batch in batches
    ]
    priorities = [torch.tensor([abs(item.episode_return) + 0.1 for item in batch]) for batch in batches]

    def add(number: int) -> None:
        index = buffer.extend([item.clone() for item in prepared[number]])
        buffer.update_priority(index, priorities[number])

    return add


SYSTEMS: dict[str, Callable[[list[list[Trajectory]]], Add]] = {
    FRESHPER: freshper,
    OBJECTS: objects,
    TORCHRL: torchrl,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    items = make_trajectories(rng, rng.integers(SHORTEST, LONGEST + 1, PREPARED * BATCH))
    batches = [items[start : start + BATCH] for start in range(0, len(items), BATCH)]
    running: dict[str, Add] = {}
    print(f"trajectories of {SHORTEST} to {LONGEST:,} tokens, {BATCH} an add, {CAPACITY:,} kept")
    print(f"{'system':<28}{'added per second':>18}{'x freshper':>12}")
    for name, make in SYSTEMS.items():
        try:
            running[name] = make(batches)
            for number in range(CAPACITY // BATCH):  # fills it
                running[name](number % PREPARED)
        except NOT_LOADED as error:
            running.pop(name, None)
            print(f"{name:<28}{'not run':>18}  {type(error).__name__}: {error}".splitlines()[0])
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(arguments.rounds):
        for name, add in running.items():
            start = time.perf_counter()
            for number in range(PREPARED):
                add(number)
            seconds[name].append(time.perf_counter() - start)
    speeds = {name: PREPARED * BATCH / statistics.median(times) for name, times in seconds.items()}
    for name, speed in speeds.items():
        print(f"{name:<28}{speed:>18,.0f}{speed / speeds[FRESHPER]:>12.2f}")
    if arguments.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__}
        arguments.json.write_text(json.dumps({"added_per_second": speeds, "machine": machine}, indent=2) + "\n")


if __name__ == "__main__":
    main()
