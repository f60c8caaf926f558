"""Assembling a training batch of ragged trajectories: the buffer's packed batch, padding, and a plain copy of memory.

    python benchmarks/batches.py --json batches.json

A batch holds 1,024 of 2,048 stored trajectories of 200 to 4,000 tokens, drawn with replacement: token ids (int32),
response mask (bool) and behavior log-probs (float32), 9 bytes a token. freshper's time is that of a whole
``ReplayBuffer.sample`` into memory that is used again: the draw and its weights included. The others get their items
for nothing: objects whose columns are joined by numpy, or padded to the longest by torch's ``pad_sequence``. The plain
copy moves the same bytes in one piece, from a random place of a block as large as all that is stored.

All take turns in every round, so that a busy machine disturbs all alike; reported are medians. Exit status 1 when the
buffer is slower than the required part of the plain copy, or when a batch holds something else than it should.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper import ReplayBuffer, StopReason, Trajectory, Turn
from freshper.replay.store.columns import ColumnsBuffer

STORED, BATCH, SHORTEST, LONGEST = 2048, 1024, 200, 4000
COLUMNS = ("tokens", "response_mask", "behavior_logprobs")
BYTES_PER_TOKEN = 9
REQUIRED = 0.3  # of the speed of a plain copy
FRESHPER, COPY, JOINED, PADDED = "freshper", "plain copy", "objects, joined by numpy", "objects, pad_sequence"


def make_trajectories(rng: np.random.Generator, lengths: NDArray[np.int64]) -> list[Trajectory]:
    """One turn each: a tenth is prompt, the rest reply."""
    made = []
    for number, length in enumerate(lengths.tolist()):
        prompt = length // 10
        mask = np.arange(length) >= prompt
        logprobs = np.where(mask, -rng.exponential(size=length), 0.0)
        turns = (Turn(0, prompt, length, 1.0),)
        tokens = rng.integers(0, 150_000, length)
        end = StopReason.TERMINATED
        made.append(Trajectory(tokens, mask, logprobs, turns, end, True, 0, "bench", f"bench/{number}", number))
    return made


class Contest:
    """All systems over the same trajectories. A system is a function that makes a batch and returns its tokens."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        lengths = self.rng.integers(SHORTEST, LONGEST + 1, STORED)
        self.trajectories = make_trajectories(self.rng, lengths)
        self.lengths = lengths
        self.buffer = ReplayBuffer(STORED, priority="uniform", seed=0)
        self.buffer.add(self.trajectories, policy_version=0)
        self.room = ColumnsBuffer()
        self.block = np.ones(int(lengths.sum()) * BYTES_PER_TOKEN, dtype=np.uint8)
        self.copied = np.ones_like(self.block)
        self.systems: dict[str, Callable[[NDArray[np.int64]], int]] = {
            FRESHPER: self.freshper,
            COPY: self.copy,
            JOINED: self.joined,
        }
        try:
            import torch
        except ImportError:
            return
        torch.set_num_threads(1)
        self.pad = torch.nn.utils.rnn.pad_sequence
        self.tensors: dict[str, list[Any]] = {
            name: [torch.tensor(getattr(item, name)) for item in self.trajectories] for name in COLUMNS
        }
        self.systems[PADDED] = self.padded

    def freshper(self, items: NDArray[np.int64]) -> int:
        columns = self.buffer.sample(len(items), policy_version=0, out=self.room).columns
        return len(columns.tokens)

    def copy(self, items: NDArray[np.int64]) -> int:
        tokens = int(self.lengths[items].sum())
        size = tokens * BYTES_PER_TOKEN
        start = int(items[0]) * (len(self.block) - size) // STORED
        np.copyto(self.copied[:size], self.block[start : start + size])
        return tokens

    def joined(self, items: NDArray[np.int64]) -> int:
        chosen = [self.trajectories[item] for item in items.tolist()]
        batch = {name: np.concatenate([getattr(item, name) for item in chosen]) for name in COLUMNS}
        np.cumsum([len(item) for item in chosen])
        return len(batch["tokens"])

    def padded(self, items: NDArray[np.int64]) -> int:
        for tensors in self.tensors.values():
            self.pad([tensors[item] for item in items.tolist()], batch_first=True)
        return int(self.lengths[items].sum())

    def check(self) -> None:
        """A batch of the buffer holds, item by item, what was stored under its key."""
        batch = self.buffer.sample(BATCH, policy_version=0, out=self.room)
        for number, key in enumerate(batch.keys.tolist()):  # the key of an item that nothing evicts is its number
            span = slice(int(batch.columns.offsets[number]), int(batch.columns.offsets[number + 1]))
            for name in COLUMNS:
                np.testing.assert_array_equal(getattr(batch.columns, name)[span], getattr(self.trajectories[key], name))

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Useful bytes per second, by system and round. A first round warms up."""
        speeds: dict[str, list[float]] = {name: [] for name in self.systems}
        for number in range(-1, rounds):
            items = self.rng.integers(0, STORED, BATCH)
            for name, system in self.systems.items():
                start = time.perf_counter()
                tokens = system(items)
                seconds = time.perf_counter() - start
                if number >= 0:
                    speeds[name].append(tokens * BYTES_PER_TOKEN / seconds)
        return speeds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    contest = Contest()
    contest.check()
    medians = {name: statistics.median(values) for name, values in contest.measure(arguments.rounds).items()}
    size = BATCH * (SHORTEST + LONGEST) / 2 * BYTES_PER_TOKEN
    print(f"batches of {BATCH:,} x {SHORTEST}-{LONGEST:,} tokens, {size / 1e6:.0f} MB, median of {arguments.rounds}")
    print(f"{'system':<28}{'ms per batch':>14}{'GB/s':>8}{'of a plain copy':>18}")
    for name, speed in medians.items():
        print(f"{name:<28}{size / speed * 1e3:>14.1f}{speed / 1e9:>8.2f}{speed / medians[COPY]:>18.2f}")
    if PADDED not in medians:
        print(f"{PADDED:<28}{'not run':>14}  torch is not installed")
    ratio = medians[FRESHPER] / medians[COPY]
    print(f"at least {REQUIRED} of a plain copy: {ratio >= REQUIRED}")
    if arguments.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__}
        result = {"bytes_per_second": medians, "part_of_copy": ratio, "required": REQUIRED, "machine": machine}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(ratio < REQUIRED)


if __name__ == "__main__":
    raise SystemExit(main())
