"""Folders that appear whole or not at all."""

import os

import pytest

from freshper.training.folders import make_whole, mend, sync


def _fill(content):
    def fill(folder):
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text(content)
        (folder / "other").write_text(content)

    return fill


def _content(folder):
    return (folder / "inner" / "file").read_text()


def test_it_appears_and_replaces_what_stood_there(tmp_path):
    for content in ("first", "second"):
        make_whole(tmp_path / "deep" / "it", _fill(content))
        assert _content(tmp_path / "deep" / "it") == content
        assert [path.name for path in (tmp_path / "deep").iterdir()] == ["it"]


def test_everything_is_durable_before_it_gets_its_name(tmp_path, monkeypatch):
    seen = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(os, "rename", lambda *paths: seen.append("rename") or rename(*paths))
    make_whole(tmp_path / "it", _fill("x"))
    before, after = seen[: seen.index("rename")], seen[seen.index("rename") + 1 :]
    inside = tmp_path / ".it.tmp"
    assert sorted(before) == sorted(
        str(p) for p in (inside, inside / "inner", inside / "inner" / "file", inside / "other")
    )
    assert after == [str(tmp_path)]


@pytest.mark.parametrize("old", [True, False])
def test_whatever_fails_the_old_one_or_the_new_one_is_there(tmp_path, monkeypatch, old):
    """Every call of the operating system fails in turn."""
    calls = [0]

    def failing(function, at):
        def call(*args, **options):
            calls[0] += 1
            if calls[0] == at:
                raise OSError(28, "No space left on device")
            return function(*args, **options)

        return call

    outcomes = []
    for at in range(1, 40):
        folder = tmp_path / str(at) / "it"
        if old:
            make_whole(folder, _fill("old"))
        calls[0] = 0
        with monkeypatch.context() as patch:
            for name in ("fsync", "rename", "mkdir"):
                patch.setattr(os, name, failing(getattr(os, name), at))
            try:
                make_whole(folder, _fill("new"))
            except OSError:
                outcomes.append(_content(folder) if folder.exists() else None)
                assert [path.name for path in folder.parent.glob("*")] in (["it"], [])
            else:
                assert calls[0] < at  # nothing was left to fail
                break
    assert len(outcomes) > 7
    assert set(outcomes[:-1]) == {"old" if old else None}
    assert outcomes[-1] == "new"  # only the folder's name was not durable


def test_a_kill_between_two_names_is_mended(tmp_path):
    make_whole(tmp_path / "it", _fill("old"))
    (tmp_path / "it").rename(tmp_path / ".it.old")
    mend(tmp_path / "it")
    assert _content(tmp_path / "it") == "old"
    mend(tmp_path / "it")
    mend(tmp_path / "nothing")
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_what_a_killed_process_left_is_no_hindrance(tmp_path):
    make_whole(tmp_path / "it", _fill("old"))
    for name in (".it.tmp", ".it.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rubbish").touch()
    make_whole(tmp_path / "it", _fill("new"))
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    assert _content(tmp_path / "it") == "new"


def test_what_is_not_there_cannot_be_durable(tmp_path):
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "nothing")
