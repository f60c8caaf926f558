"""Folders that take long to make: whole or absent, made by the first who asks; and the checksums of a saved one."""

import threading

import pytest

from freshper.cache_folder import cache_folder, keep
from freshper.errors import ConfigError, SnapshotError
from freshper.policies.saved import FACTS, read_facts, sha256, write_facts


def is_whole(folder):
    return (folder / "done").exists()


def fill(folder):
    (folder / "part").write_text("1")
    (folder / "done").write_text("2")


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("FRESHPER_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("FRESHPER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "freshper"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "freshper"


def test_it_is_made_once(tmp_path):
    made = []

    def make(folder):
        assert list(folder.iterdir()) == []
        made.append(folder)
        fill(folder)

    for _ in range(3):
        keep(tmp_path / "cache" / "thing", make, is_whole)
    assert len(made) == 1
    assert {file.name for file in (tmp_path / "cache" / "thing").iterdir()} == {"part", "done"}
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["thing"]


def test_a_part_is_never_seen(tmp_path):
    thing = tmp_path / "thing"

    def fail(folder):
        (folder / "part").write_text("1")
        assert not thing.exists()
        raise KeyError("power cut")

    with pytest.raises(KeyError):
        keep(thing, fail, is_whole)
    assert list(tmp_path.iterdir()) == []
    keep(thing, fill, is_whole)
    assert is_whole(thing)


def test_a_damaged_one_is_made_anew(tmp_path):
    thing = tmp_path / "thing"
    thing.mkdir()
    (thing / "part").write_text("half")
    keep(thing, fill, is_whole)
    assert is_whole(thing)
    assert (thing / "part").read_text() == "1"
    assert [entry.name for entry in tmp_path.iterdir()] == ["thing"]


def test_many_may_ask_at_once(tmp_path):
    thing, together = tmp_path / "thing", threading.Barrier(4, timeout=30)
    failures = []

    def make(folder):
        together.wait()  # all of them are making it
        fill(folder)

    def ask():
        try:
            keep(thing, make, is_whole)
            assert is_whole(thing)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["thing"]


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="FRESHPER_CACHE"):
        keep(tmp_path / "file" / "cache" / "thing", fill, is_whole)


def test_facts_come_back_with_a_checksum_of_every_file(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"")
    write_facts(tmp_path, {"policy_version": 3})
    facts = read_facts(tmp_path)
    # The digests of "abc" and of nothing are in FIPS 180-2.
    assert facts == {
        "policy_version": 3,
        "sha256": {
            "b": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "inner/a": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        },
    }
    assert sha256(tmp_path / "b") == facts["sha256"]["b"]
    write_facts(tmp_path, {"policy_version": 4})
    assert read_facts(tmp_path)["policy_version"] == 4


def test_every_damage_is_noticed(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    write_facts(tmp_path, {})
    for content in (b"abd", b"ab", b""):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(SnapshotError, match="damaged: a changed"):
            read_facts(tmp_path)
    (tmp_path / "a").unlink()
    with pytest.raises(SnapshotError, match=r"holds no whole policy .*No such file"):
        read_facts(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sha256": 3}', '{"sha256": {"a": ', "7"])
def test_facts_that_are_none(tmp_path, text):
    (tmp_path / FACTS).write_text(text)
    with pytest.raises(SnapshotError, match="holds no whole policy"):
        read_facts(tmp_path)
