"""A directory may hold other things than a buffer, and may be moved: nothing of anybody else's is touched."""

from collections.abc import Callable
from pathlib import Path

import pytest

from freshper import ReplayBuffer, Trajectory
from freshper.errors import ConfigError, SnapshotError
from freshper.replay.disk.names import is_ours

pytest.importorskip("pyarrow")
Make = Callable[..., Trajectory]
FOREIGN = ("log-train.txt", "log-1", "state-best.pt", "state-1000.safetensors", ".cfg.tmp", ".log-000001.tmp", "notes")


@pytest.mark.parametrize("name", FOREIGN)
def test_what_the_user_keeps_there_is_not_ours(name: str) -> None:
    assert not is_ours(name)


@pytest.mark.parametrize(
    "name",
    [
        "log-000001",
        "log-1234567",
        "state-0123abcd-000012.safetensors",
        ".state-0123abcd-000012.safetensors.tmp",
        ".manifest.json.tmp",
        ".manifest.copy.json.tmp",
    ],
)
def test_what_is_written_here_is_ours(name: str) -> None:
    assert is_ours(name)


def test_files_of_others_survive_everything_that_a_buffer_does(tmp_path: Path, make_trajectory: Make) -> None:
    for name in FOREIGN:
        (tmp_path / name).write_text("precious")
    for _ in range(3):
        opened = (tmp_path / "manifest.json").exists()
        with ReplayBuffer.load(tmp_path) if opened else ReplayBuffer(4, directory=tmp_path) as buffer:
            buffer.add([make_trajectory()], policy_version=0)
            for _ in range(5):
                buffer.checkpoint()
    assert {name: (tmp_path / name).read_text() for name in FOREIGN} == dict.fromkeys(FOREIGN, "precious")
    names = {path.name for path in tmp_path.iterdir()} - set(FOREIGN)
    assert len([name for name in names if name.startswith("state-")]) == 3, "old states of ours do go"


def test_a_relative_directory_stays_the_one_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trajectory: Make
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "two")
    with ReplayBuffer(4, directory="buffer") as other:
        other.add([make_trajectory()] * 3, policy_version=0)
    monkeypatch.chdir(tmp_path / "one")
    buffer = ReplayBuffer(4, directory="buffer")
    monkeypatch.chdir(tmp_path / "two")
    buffer.add([make_trajectory()], policy_version=0)
    buffer.checkpoint()
    buffer.close()
    for name, size in (("one", 1), ("two", 3)):
        with ReplayBuffer.load(tmp_path / name / "buffer") as again:
            assert len(again) == size


@pytest.mark.parametrize("verb", ["add", "update", "checkpoint"])
def test_a_directory_that_was_moved_away_is_written_no_more(tmp_path: Path, make_trajectory: Make, verb: str) -> None:
    """Another buffer may have taken its place."""
    buffer = ReplayBuffer(4, directory=tmp_path / "b")
    keys = buffer.add([make_trajectory()], policy_version=0)
    (tmp_path / "b").rename(tmp_path / "moved")
    with ReplayBuffer(4, directory=tmp_path / "b") as other:
        other.add([make_trajectory()] * 2, policy_version=0)
        calls = {
            "add": lambda: buffer.add([make_trajectory()], policy_version=0),
            "update": lambda: buffer.update_priorities(keys, [2.0]),
            "checkpoint": buffer.checkpoint,
        }
        with pytest.raises(SnapshotError, match="was moved, deleted or replaced while this buffer wrote to it"):
            calls[verb]()
    buffer.close()
    for name, size in (("b", 2), ("moved", 1)):
        with ReplayBuffer.load(tmp_path / name) as again:
            assert len(again) == size


def test_an_empty_name_is_no_directory() -> None:
    with pytest.raises(ConfigError, match="directory is empty"):
        ReplayBuffer(4, directory="")
