"""Snapshots of format 1, as commit 68f9962 wrote them, load with the same contents and the same next draws.

``tests/data/snapshots_v1`` holds four such files and, beside three of them, what that release had in memory and the
next 1,000 draws that it made: a ring of 11 slots after 40 adds with updates, zeros and a freshness index; a priority
function without decay; advantages in a buffer that is not full.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freshper import Exponential, NoDecay, ReplayBuffer, SampledBatch, Trajectory
from freshper.errors import ConfigError, SnapshotError

DATA = Path(__file__).parents[3] / "data" / "snapshots_v1"
Everything = Callable[[ReplayBuffer], bytes]
Expected = dict[str, NDArray[Any]]
COLUMNS = ("tokens", "response_mask", "behavior_logprobs", "advantages", "td_errors")


def squared_return(trajectory: Trajectory) -> float:
    return trajectory.episode_return**2


FILES: dict[str, dict[str, Any]] = {
    "wrapped_exponential": {"start": 800, "toward": "freshness", "freshness": Exponential(3.5), "alpha": 0.7},
    "function_no_decay": {"start": 12, "toward": "uniform", "freshness": NoDecay(), "alpha": 0.6},
    "advantage_part_full": {"start": 30, "toward": "uniform", "freshness": Exponential(50.0), "alpha": 1.0},
}


def load(name: str) -> ReplayBuffer:
    priority = squared_return if name == "function_no_decay" else None
    return ReplayBuffer.load(DATA / f"{name}.freshper", priority=priority)


def expected(name: str) -> Expected:
    with np.load(DATA / f"{name}.expected.npz") as file:
        return dict(file)


def stored(buffer: ReplayBuffer) -> tuple[Trajectory, ...]:
    """All trajectories, oldest first, read without a draw."""
    store = buffer._core.store
    return store.read(store.occupied())[0].trajectories()


@pytest.mark.parametrize("name", FILES)
def test_contents_keys_and_probabilities_are_the_same_bit_for_bit(name: str) -> None:
    buffer, want = load(name), expected(name)
    np.testing.assert_array_equal(buffer.keys(), want["keys"])
    np.testing.assert_array_equal(buffer.probabilities(), want["probabilities"])
    assert buffer.policy_version == want["policy_version"]
    assert (buffer.freshness, buffer.alpha) == (FILES[name]["freshness"], FILES[name]["alpha"])
    items = stored(buffer)
    assert [len(item) for item in items] == want["item_lengths"].tolist()
    assert [item.seed for item in items] == want["item_seeds"].tolist()
    assert [item.policy_version for item in items] == want["item_versions"].tolist()
    assert [item.episode_return for item in items] == want["item_returns"].tolist()
    for column in COLUMNS:
        parts = [getattr(item, column) for item in items]
        whole = [np.zeros(len(i), np.float32) if p is None else p for i, p in zip(items, parts, strict=True)]
        np.testing.assert_array_equal(np.concatenate(whole), want[f"item_{column}"])
    facts = []
    for item in items:
        names = (item.turns, item.stop_reason.value, item.success, item.task, item.group, item.sampling)
        told = repr((*names, item.advantages is None, item.td_errors is None))
        facts.append(told.replace(", images=0)", ")"))  # a turn did not count its images then
    assert facts == want["item_facts"].tolist()
    assert all(item.logprobs_known and item.images == () for item in items)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_the_next_thousand_draws_are_the_same(name: str, again: bool, tmp_path: Path) -> None:
    """Also when it is saved in the present format. Weights go through exp, which machines round differently."""
    buffer, want = load(name), expected(name)
    if again:
        buffer.save(tmp_path / "again")
        priority = None if isinstance(buffer.priority, str) else buffer.priority
        buffer = ReplayBuffer.load(tmp_path / "again", priority=priority)
    batches: list[SampledBatch] = [
        buffer.sample(8, policy_version=FILES[name]["start"] + round_, beta=0.5, toward=FILES[name]["toward"])
        for round_ in range(125)
    ]
    for column in ("keys", "probabilities", "base_priorities", "ages"):
        got = np.concatenate([getattr(batch, column) for batch in batches])
        np.testing.assert_array_equal(got, want[f"draw_{column}"], err_msg=column)
    weights = np.concatenate([batch.sampling_weights for batch in batches])
    np.testing.assert_allclose(weights, want["draw_sampling_weights"], rtol=1e-12)


def test_a_ring_that_has_turned_goes_on_in_the_same_slots(make_trajectory: Callable[..., Trajectory]) -> None:
    """A key is slot + capacity * generation in both formats: item 40 gets key 40, and evicts the oldest."""
    buffer = load("wrapped_exponential")
    before = buffer.keys().tolist()
    assert before == list(range(29, 40))
    keys = [int(buffer.add([make_trajectory()], policy_version=800)[0]) for _ in range(13)]
    assert keys == list(range(40, 53))
    assert buffer.keys().tolist() == keys[-11:]
    refused = buffer.update_priorities(before, np.ones(11)).refused
    assert refused.tolist() == before
    counters = buffer.summary()["counters"]
    assert (counters["added"], counters["evicted"]) == (53, 42)


def test_a_part_full_ring_goes_on_in_the_slots_that_never_held_an_item(
    make_trajectory: Callable[..., Trajectory], tmp_path: Path
) -> None:
    """And what is added to it is not taken for what was there before when it is saved again."""
    buffer = load("advantage_part_full")
    items = [make_trajectory(advantages=[0, 1, 0, 1], seed=1000 + number) for number in range(8)]
    assert buffer.add(items, policy_version=30).tolist() == list(range(9, 17))
    assert buffer.keys().tolist() == list(range(1, 17))
    buffer.save(tmp_path / "again")
    seeds = [item.seed for item in stored(ReplayBuffer.load(tmp_path / "again"))]
    assert seeds == [*range(3, 27, 3), *range(1000, 1008)]


def test_an_empty_buffer_loads(everything: Everything) -> None:
    buffer = ReplayBuffer.load(DATA / "empty.freshper")
    assert (len(buffer), buffer.capacity, buffer.priority, buffer.alpha) == (0, 4, "reward", 0.6)
    fresh = ReplayBuffer(4, seed=3)
    assert buffer._core.sampler.rng.bit_generator.state == fresh._core.sampler.rng.bit_generator.state


def test_a_priority_function_must_be_given_and_only_then() -> None:
    with pytest.raises(ConfigError, match="was a function: pass it to load"):
        ReplayBuffer.load(DATA / "function_no_decay.freshper")
    with pytest.raises(ConfigError, match="priority was 'advantage'"):
        ReplayBuffer.load(DATA / "advantage_part_full.freshper", priority=squared_return)


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, NDArray[Any]]], None]) -> Path:
    with np.load(DATA / "wrapped_exponential.freshper") as file:
        members = dict(file)
    header = json.loads(members["header"].tobytes())
    change(header, members)
    members["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    with path.open("wb") as target:
        np.savez(target, **members)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header, members: header["facts"].pop(), "the snapshot holds 11 bases of 10 items"),
        (lambda header, members: members.update({"array/leaves": np.ones(3)}), "3 leaves of 11 items"),
        (lambda header, members: members.pop("array/bases"), "array/bases"),
        (lambda header, members: header["meta"].pop("added"), "'added'"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        ReplayBuffer.load(rewritten(tmp_path / "changed", change))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    whole = bytearray((DATA / "wrapped_exponential.freshper").read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    (tmp_path / "damaged").write_bytes(whole)
    with pytest.raises(SnapshotError, match="not a whole freshper snapshot"):
        ReplayBuffer.load(tmp_path / "damaged")
