from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from evenstep.errors import CheckpointError, MachineError, UsageError
from evenstep.record.checkpoints import MANIFEST, Checkpoints
from evenstep.record.paths import RunPaths

FILES = {"tree.json": b'{"step": 1}', "model/tensors.safetensors": bytes(range(256)) * 9, "empty": b""}


def fill(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(RunPaths(tmp_path))


@pytest.fixture
def two(checkpoints: Checkpoints) -> Checkpoints:
    """Checkpoints of steps 5 and 10."""
    for step in (5, 10):
        checkpoints.write(step, fill, {"cursor": step * 256, "note": "ünï", "none": None, "by": {1: 0.1}})
    return checkpoints


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder(0).parent.iterdir())


def test_a_checkpoint_reads_back(two: Checkpoints) -> None:
    assert two.steps() == [5, 10]
    assert two.verify(5) is None
    assert two.newest_whole() == (10, {})
    assert two.about(10) == {"cursor": 2560, "note": "ünï", "none": None, "by": {"1": 0.1}}
    assert {name: (two.folder(10) / name).read_bytes() for name in FILES} == FILES
    assert names(two) == ["step-0000000005", "step-0000000010"]


def test_none_at_first(checkpoints: Checkpoints) -> None:
    checkpoints.clean_up()
    assert checkpoints.steps() == []
    assert checkpoints.newest_whole() == (None, {})


def test_any_flipped_bit_in_any_file_is_found_and_the_one_before_used(two: Checkpoints) -> None:
    for name in (MANIFEST, *FILES):
        path = two.folder(10) / name
        whole = path.read_bytes()
        # Every byte of the manifest, a sample of the others; each with one of its bits, all bits in turn.
        for position in range(0, len(whole), 1 if name == MANIFEST else 37):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << position % 8
            path.write_bytes(flipped)
            step, damaged = two.newest_whole()
            assert step == 5
            assert name in damaged[10]
        path.write_bytes(whole)
    assert two.newest_whole() == (10, {})


@pytest.mark.parametrize("name", [MANIFEST, *(name for name in FILES if FILES[name])])
def test_a_file_cut_short_is_found(two: Checkpoints, name: str) -> None:
    path = two.folder(10) / name
    for size in (path.stat().st_size - 1, path.stat().st_size // 2, 0):
        os.truncate(path, size)
        reason = two.verify(10)
        assert reason is not None
        assert name in reason
        assert "cut short" in reason or reason == f"{MANIFEST} does not match its checksum"
    assert two.newest_whole()[0] == 5


@pytest.mark.parametrize("name", [MANIFEST, *FILES])
def test_a_missing_file_is_found(two: Checkpoints, name: str) -> None:
    (two.folder(10) / name).unlink()
    assert two.newest_whole() == (5, {10: f"{name} is missing"})


def test_a_file_that_is_too_long_is_found(two: Checkpoints) -> None:
    with (two.folder(10) / "empty").open("ab") as file:
        file.write(b"x")
    assert two.verify(10) == "empty is too long: 1 bytes instead of 0"


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"{}", b"[]", b"7", b'{"v": 1}', b'{"v": 1, "body": []}', b"[" * 100_000, b"\xff" * 9]
)
def test_a_manifest_of_garbage_is_found(two: Checkpoints, content: bytes) -> None:
    (two.folder(10) / MANIFEST).write_bytes(content)
    step, damaged = two.newest_whole()
    assert step == 5
    assert MANIFEST in damaged[10]
    with pytest.raises(CheckpointError, match=r"step-0000000010 is damaged: manifest.json"):
        two.about(10)


def test_an_unknown_schema_is_named(two: Checkpoints) -> None:
    path = two.folder(10) / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"v": 1', b'"v": 2', 1))
    assert two.newest_whole() == (5, {10: "manifest.json has schema 2; this evenstep reads 1"})


def test_the_manifest_of_another_step_is_found(two: Checkpoints) -> None:
    (two.folder(10) / MANIFEST).write_bytes((two.folder(5) / MANIFEST).read_bytes())
    assert two.verify(10) == "manifest.json is that of step 5"


def test_all_damaged(two: Checkpoints) -> None:
    for step in two.steps():
        (two.folder(step) / MANIFEST).unlink()
    newest, damaged = two.newest_whole()
    assert newest is None
    assert sorted(damaged) == [5, 10]


def enospc(folder: Path) -> None:
    fill(folder)
    raise OSError(errno.ENOSPC, "No space left on device", str(folder / "model"))


def wrong(folder: Path) -> None:
    fill(folder)
    raise UsageError("no")


@pytest.mark.parametrize(("fail", "error"), [(enospc, MachineError), (wrong, UsageError)])
def test_a_write_that_fails_leaves_the_older_ones_and_nothing_else(
    two: Checkpoints, fail: Callable[[Path], None], error: type[Exception]
) -> None:
    before = names(two)
    for step in (15, 10):  # a new one, and one that is there already
        with pytest.raises(error) as raised:
            two.write(step, fail, {})
        if error is MachineError:
            assert str(two.folder(step)) in str(raised.value)
            assert "No space left" in str(raised.value)
    assert names(two) == before
    assert two.newest_whole() == (10, {})


@pytest.mark.parametrize("at", range(12))
def test_an_error_of_any_fsync_leaves_the_older_ones(
    two: Checkpoints, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    fsync = os.fsync

    def fail_once(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_once)
    with suppress(MachineError):
        two.write(15, fill, {})
    monkeypatch.undo()
    assert [name for name in names(two) if not name.startswith("step-")] == []
    step, damaged = two.newest_whole()
    assert step in (10, 15)
    assert damaged == {}


def test_a_damaged_one_is_written_again(two: Checkpoints) -> None:
    (two.folder(10) / "empty").unlink()
    assert two.newest_whole()[0] == 5
    two.write(10, fill, {"again": True})
    assert two.newest_whole() == (10, {})
    assert two.about(10) == {"again": True}
    assert len(names(two)) == 2


def test_leftovers_are_no_checkpoints_and_are_cleaned_up(two: Checkpoints) -> None:
    def die(folder: Path) -> None:
        fill(folder)
        os._exit(9)

    pid = os.fork()
    if pid == 0:
        two.write(15, die, {})
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert len(names(two)) == 3
    assert two.steps() == [5, 10]
    assert two.newest_whole() == (10, {})
    two.clean_up()
    assert len(names(two)) == 2


def test_prune_keeps_the_newest(two: Checkpoints) -> None:
    for step in (15, 20):
        two.write(step, fill, {})
    two.prune(3)
    assert two.steps() == [10, 15, 20]
    two.prune(1)
    assert two.steps() == [20]
    assert names(two) == ["step-0000000020"]
    with pytest.raises(UsageError, match="keep is 0"):
        two.prune(0)


@pytest.mark.parametrize("known", [True, False])
def test_prune_never_removes_the_newest_whole_one(two: Checkpoints, tmp_path: Path, known: bool) -> None:
    two.write(15, fill, {})
    for step in (10, 15):
        (two.folder(step) / "empty").unlink()
    other = Checkpoints(RunPaths(tmp_path))  # a process that wrote none of them
    if known:
        assert other.newest_whole()[0] == 5
    other.prune(1)
    assert 5 in other.steps()
    assert other.newest_whole()[0] == 5
    other.write(20, fill, {})
    other.prune(1)
    assert other.steps() == [20]


def test_damaged_ones_do_not_count_as_kept(two: Checkpoints) -> None:
    (two.folder(10) / "empty").unlink()
    assert two.newest_whole()[0] == 5
    two.write(8, fill, {})
    two.prune(2)
    assert two.steps() == [5, 8, 10]


def die_at(call: int, name: str, checkpoints: Checkpoints, step: int) -> bool:
    """Write and prune in a child that dies before its n-th `os.<name>`. False if it came through."""
    pid = os.fork()
    if pid == 0:
        real, calls = getattr(os, name), 0

        def dying(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == call:
                os._exit(9)
            return real(*args, **kwargs)

        setattr(os, name, dying)
        try:
            checkpoints.write(step, fill, {})
            checkpoints.prune(1)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("step", [10, 15], ids=["one that is there", "a new one"])
@pytest.mark.parametrize("name", ["fsync", "rename", "mkdir", "open", "rmdir", "unlink"])
def test_a_process_that_dies_at_any_point_leaves_a_whole_one(two: Checkpoints, name: str, step: int) -> None:
    for call in range(1, 100):
        died = die_at(call, name, two, step)
        two.clean_up()
        assert [one for one in names(two) if not one.startswith("step-")] == []
        newest, damaged = two.newest_whole()
        assert newest in (10, 15)
        assert damaged == {}
        if not died:
            break
        for again in (5, 10):
            if again not in two.steps():
                two.write(again, fill, {})
    else:
        raise AssertionError("it never came through")
    assert two.steps() == [step]
