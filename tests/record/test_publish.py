from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from evenstep.errors import MachineError
from evenstep.record import publish


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def no_space(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_is_published_with_its_folders(tmp_path: Path) -> None:
    publish.write_whole(tmp_path / "a" / "b" / "file", b"one")
    publish.write_whole(tmp_path / "a" / "b" / "file", b"two")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"two"
    assert names(tmp_path / "a" / "b") == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_that_the_disk_refuses_leaves_the_old_one(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    publish.write_whole(path, b"old")
    monkeypatch.setattr(os, call, no_space)
    with pytest.raises(MachineError, match=rf"cannot write {path}: No space left"):
        publish.write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_an_error_of_the_writers_own_comes_out_as_it_is(tmp_path: Path) -> None:
    def fail() -> None:
        with publish.whole_file(tmp_path / "file") as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert names(tmp_path) == []


def test_everything_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def seen_fsync(descriptor: int) -> None:
        calls.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name.split('.')[1:2] or 'folder'}")
        fsync(descriptor)

    def seen_replace(old: Path, new: Path) -> None:
        calls.append("replace")
        replace(old, new)

    def seen_rename(old: Path, new: Path) -> None:
        calls.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    monkeypatch.setattr(os, "rename", seen_rename)
    publish.write_whole(tmp_path / "file", b"data")
    assert calls == ["fsync ['file']", "replace", "fsync folder"]

    calls.clear()
    publish.write_directory(tmp_path / "out", lambda folder: (folder / "x.y").write_bytes(b"data"))
    assert calls == ["fsync ['y']", "fsync ['out']", "rename", "fsync folder"]


def test_a_folder_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "out"
    publish.write_directory(final, lambda folder: (folder / "x").write_bytes(b"old"))

    def fail(folder: Path) -> None:
        (folder / "x").write_bytes(b"new")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        publish.write_directory(final, fail)
    rename = os.rename

    def third_rename_fails(old: Path, new: Path) -> None:
        if Path(new) == final and publish.is_aside(Path(old)):
            no_space()
        rename(old, new)

    monkeypatch.setattr(os, "rename", third_rename_fails)
    with pytest.raises(MachineError):
        publish.write_directory(final, lambda folder: (folder / "x").write_bytes(b"new"))
    assert (final / "x").read_bytes() == b"old"
    assert names(tmp_path) == ["out"]


def test_a_folder_is_replaced(tmp_path: Path) -> None:
    final = tmp_path / "out"
    for content in (b"one", b"two"):
        publish.write_directory(final, lambda folder, content=content: (folder / "x").write_bytes(content))  # type: ignore[misc]
    assert (final / "x").read_bytes() == b"two"
    assert names(tmp_path) == ["out"]


def test_leftovers_of_a_process_that_died_are_cleaned_up(tmp_path: Path) -> None:
    publish.write_directory(tmp_path / "out", lambda folder: (folder / "x").write_bytes(b"whole"))
    publish.aside(tmp_path / "out").mkdir()
    publish.aside(tmp_path / "file").write_bytes(b"half")
    publish.replaced(tmp_path / "out").mkdir()
    lost = publish.replaced(tmp_path / "lost")  # it stepped back, and the process died before the new one came
    lost.mkdir()
    (lost / "x").write_bytes(b"lost")
    publish.clean_up(tmp_path)
    assert names(tmp_path) == ["lost", "out"]
    assert (tmp_path / "lost" / "x").read_bytes() == b"lost"
    publish.clean_up(tmp_path / "nowhere")


def test_a_folder_is_removed(tmp_path: Path) -> None:
    publish.write_directory(tmp_path / "out", lambda folder: (folder / "x").write_bytes(b"whole"))
    publish.remove_directory(tmp_path / "out")
    assert names(tmp_path) == []
    with pytest.raises(MachineError, match="cannot remove"):
        publish.remove_directory(tmp_path / "out")
