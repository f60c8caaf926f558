"""A buffer that was closed refuses every call, and says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freshper import Exponential, NoDecay, ReplayBuffer, Trajectory
from freshper.errors import ConfigError

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
