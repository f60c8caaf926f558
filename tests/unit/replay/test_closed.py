"""Buffers that must not be used any more, or not like this: closed, interrupted, copied."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freshper import Exponential, NoDecay, ReplayBuffer, Trajectory
from freshper.errors import ClockError, ConfigError, SnapshotError

CALLS: list[Callable[[ReplayBuffer, Trajectory], Any]] = [
    lambda buffer, item: buffer.add([item], policy_version=3),
    lambda buffer, item: buffer.sample(1, policy_version=3),
    lambda buffer, item: buffer.update_priorities([0], [1.0]),
    lambda buffer, item: buffer.remove([0]),
    lambda buffer, item: buffer.set_freshness(NoDecay()),
    lambda buffer, item: buffer.set_alpha(1.0),
    lambda buffer, item: buffer.save("nowhere"),
    lambda buffer, item: buffer.checkpoint(),
    lambda buffer, item: buffer.summary(),
    lambda buffer, item: buffer.keys(),
    lambda buffer, item: buffer.probabilities(),
    lambda buffer, item: buffer.item(0),
    lambda buffer, item: list(buffer.trajectories()),
    lambda buffer, item: buffer.drift_by_age(),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("durable", [False, True])
def test_after_close_every_call_is_refused(
    call: Callable[[ReplayBuffer, Trajectory], Any],
    durable: bool,
    tmp_path: Path,
    make_trajectory: Callable[..., Trajectory],
) -> None:
    item = make_trajectory()
    with ReplayBuffer(4, freshness=Exponential(2.0), directory=tmp_path / "b" if durable else None) as buffer:
        buffer.add([item], policy_version=1)
        batch = buffer.sample(1, policy_version=1)
    with pytest.raises(ConfigError, match="this buffer was closed"):
        call(buffer, item)
    with pytest.raises(ConfigError, match="this buffer was closed"):
        buffer.observe(batch, [0.0])
    buffer.close()  # once more does no harm
    assert len(batch.trajectories[0]) == len(item)  # what was drawn stays
    if durable:
        with ReplayBuffer.load(tmp_path / "b") as again:
            assert len(again) == 1


def test_an_interruption_in_the_middle_of_a_change_is_not_saved_over_a_whole_buffer(
    tmp_path: Path, make_trajectory: Callable[..., Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = ReplayBuffer(4)
    buffer.add([make_trajectory()], policy_version=1)
    buffer.save(tmp_path / "whole")

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(buffer._core.sampler, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffer.add([make_trajectory()], policy_version=1)
    for call in CALLS:
        with pytest.raises(SnapshotError, match="KeyboardInterrupt arrived in the middle of a change"):
            call(buffer, make_trajectory())
    assert len(ReplayBuffer.load(tmp_path / "whole")) == 1
    buffer.close()


def test_an_interruption_while_only_looking_does_no_harm(make_trajectory: Callable[..., Trajectory]) -> None:
    buffer = ReplayBuffer(4)
    buffer.add([make_trajectory()] * 2, policy_version=1)
    with pytest.raises(KeyboardInterrupt), buffer._open():
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="an error"), buffer._changing():
        raise ValueError("an error")
    assert len(buffer.sample(2, policy_version=1)) == 2


def test_a_generator_that_uses_the_buffer_cannot_turn_the_clock_back(
    make_trajectory: Callable[..., Trajectory],
) -> None:
    buffer = ReplayBuffer(4)
    buffer.add([make_trajectory()], policy_version=1)

    def episodes() -> Any:
        buffer.sample(1, policy_version=50)
        yield make_trajectory()

    with pytest.raises(ClockError, match="policy_version 5 is older than 50"):
        buffer.add(episodes(), policy_version=5)
    assert (len(buffer), buffer.policy_version) == (1, 50)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_buffer_is_saved_and_not_copied(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="save it, and load the file"):
        copied(ReplayBuffer(4))


def test_a_strange_out_or_batch_leaves_no_trace(
    make_trajectory: Callable[..., Trajectory], everything: Callable[[ReplayBuffer], bytes]
) -> None:
    buffer = ReplayBuffer(4)
    buffer.add([make_trajectory()], policy_version=1)
    before = everything(buffer)
    with pytest.raises(TypeError, match="out is a str: it must be a ColumnsBuffer"):
        buffer.sample(1, policy_version=1, out="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="batch is a list: pass what sample returned"):
        buffer.observe([1], [0.0])  # type: ignore[arg-type]
    for key in (1.0, "0", None, 2**70):
        with pytest.raises(TypeError, match="keys"):
            buffer.item(key)  # type: ignore[arg-type]
    assert everything(buffer) == before
