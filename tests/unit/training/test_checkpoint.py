"""Checkpoints: the newest whole one is found with its buffer, whatever happened while others were written."""

import json
import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from freshper.errors import BufferLockedError, RunFolderError, SnapshotError
from freshper.training import checkpoint
from freshper.training.checkpoint import Checkpoints, has_checkpoint, installed_libraries
from freshper.training.config_file import make_config
from freshper.training.state_files import read_json, write_json

CONFIG = make_config({"checkpoint": {"every": 3, "keep": 2}, "replay": {"capacity": 100}})


def _state(iteration):
    return {"iteration": iteration, "weights": torch.full((50,), float(iteration)), "nested": [(1, None), 0.1]}


class World:
    """A run that adds, draws and saves; what it would do next is known of every iteration."""

    def __init__(self, path, make_trajectory, config=CONFIG):
        self.path, self.make_trajectory, self.config = path, make_trajectory, config
        self.checkpoints = Checkpoints(path, config)
        self.buffer = self.checkpoints.new_buffer()
        self.iteration = 0

    def step(self):
        self.iteration += 1
        fresh = [self.make_trajectory(policy_version=self.iteration, reward=0.1 * n) for n in range(4)]
        self.buffer.add(fresh, policy_version=self.iteration)
        batch = self.buffer.sample(4, policy_version=self.iteration)
        self.buffer.update_priorities(batch.keys, np.linspace(0.1, self.iteration, 4))

    def save(self):
        return self.checkpoints.save(self.iteration, _state(self.iteration), self.buffer)

    def to(self, iteration):
        """Go on to an iteration, with the checkpoints that are due; returns whether the last one was written."""
        written = None
        while self.iteration < iteration:
            self.step()
            if self.checkpoints.due(self.iteration, last=False):
                written = self.save()
        return written


def _draws(buffer):
    batch = buffer.sample(16, policy_version=buffer.policy_version)
    return len(buffer), buffer.policy_version, batch.keys.tolist(), batch.probabilities.tolist()


@pytest.fixture
def make_world(tmp_path_factory, make_trajectory):
    """Makes runs in folders of their own, and closes their buffers at the end."""
    made = []

    def make(config=CONFIG):
        made.append(World(tmp_path_factory.mktemp("world") / "run", make_trajectory, config))
        return made[-1]

    yield make
    for world in made:
        world.buffer.close()


@pytest.fixture
def world(make_world):
    return make_world()


@pytest.fixture
def expected(make_world):
    """What is drawn next after an iteration, of a run that nothing has happened to."""

    def draws(iteration):
        other = make_world()
        other.to(iteration)
        return _draws(other.buffer)

    return draws


def _newest(path, config=CONFIG):
    """Iteration, whether the state is that of it, and the next draws."""
    found, buffer = Checkpoints(path, config).newest()
    with buffer:
        state = _state(found.iteration)
        assert torch.equal(found.state.pop("weights"), state.pop("weights"))
        assert found.state == state
        return found.iteration, _draws(buffer)


def _names(path):
    return sorted(child.name for child in (path / "checkpoints").iterdir())


def test_when_they_are_due():
    checkpoints = Checkpoints(Path("nowhere"), CONFIG)
    assert [n for n in range(1, 10) if checkpoints.due(n, last=False)] == [3, 6, 9]
    assert checkpoints.due(4, last=True)
    never = Checkpoints(Path("nowhere"), make_config({"checkpoint": {"every": 0}}))
    assert not any(never.due(n, last=last) for n in range(1, 100) for last in (False, True))


def test_the_newest_comes_back_with_its_buffer_and_the_last_two_stay(world, expected):
    world.to(11)
    assert _names(world.path) == ["000006", "000009"]
    world.buffer.close()
    assert _newest(world.path) == (9, expected(9))
    assert _newest(world.path) == (9, expected(9))  # looking changes nothing


def test_a_run_that_goes_on_keeps_the_last_two(world, expected):
    world.to(8)
    world.buffer.close()
    again = Checkpoints(world.path, CONFIG)
    found, buffer = again.newest()
    world.checkpoints, world.buffer, world.iteration = again, buffer, found.iteration
    world.to(13)
    assert _names(world.path) == ["000009", "000012"]
    buffer.close()
    assert _newest(world.path) == (12, expected(12))


def test_no_other_process_writes_meanwhile(world):
    world.to(3)
    with pytest.raises(BufferLockedError):
        Checkpoints(world.path, CONFIG).newest()


@pytest.mark.parametrize(
    ("changes", "durable"),
    [
        ({}, True),
        ({"replay": {"ratio": 0}}, False),
        ({"replay": {"ratio": 0}, "mix": {"share": 0.2}}, True),
        ({"checkpoint": {"every": 0}}, False),
    ],
)
def test_the_buffer_is_on_disk_where_something_is_drawn_from_it(make_world, changes, durable):
    config = make_config(changes)
    world = make_world(config)
    assert (world.path / "buffer").exists() == durable
    if not durable:
        world.step()
        assert world.save()
        found, buffer = Checkpoints(world.path, config).newest()
        assert (found.iteration, len(buffer)) == (1, 0)


def test_where_there_is_none_that_is_said(world):
    for make in (lambda: None, (world.path / "checkpoints" / ".000003.tmp").mkdir):
        (world.path / "checkpoints").mkdir(exist_ok=True)
        make()
        assert not has_checkpoint(world.path)
        with pytest.raises(RunFolderError, match=r"holds no checkpoint to resume from.*checkpoint\.every is 3"):
            Checkpoints(world.path, CONFIG).newest()
    world.to(3)
    assert has_checkpoint(world.path)


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _another_format(folder):
    body = read_json(folder / "manifest.json")
    write_json(folder / "manifest.json", body | {"format_version": 99})


def _no_state_of_the_buffer(folder):
    mark = read_json(folder / "manifest.json")["buffer_mark"]
    (folder.parents[1] / "buffer" / f"state-{mark}.safetensors").unlink()


DAMAGE = [
    (lambda folder: _flip(folder / "tensors-00001.safetensors"), r"tensors-00001\.safetensors is damaged"),
    (lambda folder: (folder / "tensors-00001.safetensors").unlink(), "cannot read"),
    (lambda folder: (folder / "manifest.json").unlink(), "cannot read"),
    (lambda folder: os.truncate(folder / "manifest.json", 100), "cannot read"),
    (_another_format, "has format freshper-checkpoint 99; this version reads freshper-checkpoint 1"),
    (_no_state_of_the_buffer, "state-.*missing|state-.*No such|cannot"),
]


@pytest.mark.parametrize(("damage", "complaint"), DAMAGE)
def test_a_damaged_one_is_named_and_the_one_before_is_taken(world, expected, damage, complaint):
    world.to(7)
    world.buffer.close()
    damage(world.path / "checkpoints" / "000006")
    with pytest.warns(UserWarning, match=rf"(?s){complaint}.*going back to the checkpoint of iteration 3"):
        assert _newest(world.path) == (3, expected(3))


def test_the_run_writes_over_what_is_damaged(world, expected):
    world.to(7)
    world.buffer.close()
    _flip(world.path / "checkpoints" / "000006" / "tensors-00001.safetensors")
    again = Checkpoints(world.path, CONFIG)
    with pytest.warns(UserWarning, match="going back"):
        found, world.buffer = again.newest()
    world.checkpoints, world.iteration = again, found.iteration
    world.step()
    assert world.save()  # asked for by Ctrl-C, at iteration 4
    assert _names(world.path) == ["000003", "000004"]  # the damaged one lies ahead, and is of no use to anybody
    world.to(6)
    world.buffer.close()
    assert _newest(world.path) == (6, expected(6))


def test_when_all_are_damaged_each_is_named(world):
    world.to(7)
    world.buffer.close()
    for name in ("000003", "000006"):
        _flip(world.path / "checkpoints" / name / "tensors-00001.safetensors")
    with pytest.raises(SnapshotError, match=r"(?s)no checkpoint .* is whole: .*000006.*000003"):
        Checkpoints(world.path, CONFIG).newest()


CALLS = [(os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (Path, "open"), (os, "pwrite"), (os, "pwritev")]


def _fail(patch, at, calls):
    """From now on the ``at``-th of all calls that write finds the disk full."""

    def failing(function):
        def call(*args, **options):
            calls[0] += 1
            if calls[0] == at:
                raise OSError(28, "No space left on device")
            return function(*args, **options)

        return call

    for owner, name in CALLS:
        if hasattr(owner, name):
            patch.setattr(owner, name, failing(getattr(owner, name)))


def _goes_on(world):
    """Whether the buffer can still be written; nobody knows where a folder's names were not made durable."""
    try:
        return world.to(9)
    except SnapshotError as error:
        return "could not be made durable" not in str(error)


def test_whatever_call_finds_the_disk_full_a_good_one_is_there(make_world, monkeypatch, expected):
    """Every call in turn. The run goes on, and the next save is whole; but for one call, where it can be resumed."""
    failed, lost, draws = 0, 0, {iteration: expected(iteration) for iteration in (3, 9)}
    for at in range(1, 100):
        world, calls = make_world(), [0]
        world.to(5)
        world.step()
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _fail(patch, at, calls)
            written = world.save()
        if written:
            assert calls[0] < at
            break
        failed += 1
        (warning,) = said
        assert re.search(r"checkpoint of iteration 6 .*No space left on device.*goes on", str(warning.message), re.S)
        last = 9 if _goes_on(world) else 3
        lost += last == 3
        world.buffer.close()
        assert _newest(world.path) == (last, draws[last])
    assert failed > 15
    assert lost == 1


def test_a_disk_that_stays_full_leaves_the_last_good_one(world, expected, monkeypatch):
    """However often it fails: at the worst place, after the buffer has made its mark."""
    world.to(6)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_json", _no_space)
        with pytest.warns(UserWarning, match="the one of iteration 6 stays") as said:
            world.to(24)
        assert len(said) == world.checkpoints.failures == 6
        assert _names(world.path) == [".000009.tmp", "000003", "000006"]
    world.to(27)  # first the one of 9, which was ready but for its name
    assert _names(world.path) == ["000009", "000027"]
    world.buffer.close()
    assert _newest(world.path) == (27, expected(27))


def test_killed_while_the_disk_is_full_it_goes_back_to_the_last_good_one(world, expected, monkeypatch):
    world.to(6)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_json", _no_space)
        with pytest.warns(UserWarning, match="the run goes on"):
            world.to(24)
    world.buffer.close()
    assert _newest(world.path) == (6, expected(6))
    assert _names(world.path) == ["000003", "000006"]


def _no_space(path, body):
    path.write_text("half of")
    raise OSError(28, "No space left on device")


def test_the_first_one_that_fails_says_that_there_is_none(world, monkeypatch):
    monkeypatch.setattr(checkpoint, "write_tensors", lambda folder, state: _no_space(folder / "x", 0))
    with pytest.warns(UserWarning, match="there is none to go back to"):
        assert world.to(3) is False
    assert _names(world.path) == []  # the space is given back


def test_a_state_that_cannot_be_written_is_no_matter_of_the_disk(world):
    world.step()
    with pytest.raises(SnapshotError, match="x is a set"):
        world.checkpoints.save(1, {"x": {1}}, world.buffer)
    assert _names(world.path) == []


def test_libraries_are_told(world):
    world.to(3)
    told = read_json(world.path / "checkpoints" / "000003" / "manifest.json")["libraries"]
    assert told == installed_libraries()
    # A build may be named in one of both alone: 2.13.0 and 2.13.0+cpu.
    assert told["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert json.dumps(told)
