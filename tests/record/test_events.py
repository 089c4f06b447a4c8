from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from evenstep.errors import UsageError
from evenstep.record.events import EventWriter, read_events


def test_events_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-3.jsonl"
    times = iter([1.5, 2.5])
    writer = EventWriter(path, 3, clock=lambda: next(times))
    writer.emit("start", world_size=4, layout=[0, 1], nothing=None)
    writer.emit("step", loss=0.1, number=7)
    assert read_events(path) == [  # there before the writer is closed
        {"v": 1, "time": 1.5, "rank": 3, "kind": "start", "world_size": 4, "layout": [0, 1], "nothing": None},
        {"v": 1, "time": 2.5, "rank": 3, "kind": "step", "loss": 0.1, "number": 7},
    ]
    writer.close()


def test_lines_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    writer = EventWriter(path, 0)
    writer.emit("odd", nan=float("nan"), low=[float("-inf")], where=Path("x"), keys={1: 2}, text='a\n"b"\ud800')
    writer.close()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (line,) = path.read_text().splitlines()
    event = json.loads(line, parse_constant=refuse)
    assert event["nan"] == "NaN"
    assert event["low"] == ["-Infinity"]
    assert event["where"] == "x"
    assert event["keys"] == {"1": 2}


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_torn_last_line_is_skipped_and_the_next_start_goes_on_below(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "e.jsonl"
    for kind in ("one", "two"):
        writer = EventWriter(path, 0)
        writer.emit(kind)
        writer.close()
    os.truncate(path, path.stat().st_size - cut)
    assert [event["kind"] for event in read_events(path)] == ["one"]
    writer = EventWriter(path, 0)
    writer.emit("three")
    writer.emit("four")
    writer.close()
    # Cut 1: the line was whole but for its end, which the next start gave it.
    whole = ["one", "two"] if cut == 1 else ["one"]
    assert [event["kind"] for event in read_events(path)] == [*whole, "three", "four"]


def test_no_file_is_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "none") == []


def test_a_later_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "e").write_text('{"v":2,"kind":"x"}\n')
    with pytest.raises(UsageError, match="schema 2; this evenstep reads 1"):
        read_events(tmp_path / "e")


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "e"
    writer = EventWriter(path, 0)

    def emit(number: int) -> None:
        for i in range(100):
            writer.emit("x", number=number, i=i)

    threads = [threading.Thread(target=emit, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert len(read_events(path)) == 400


def test_a_full_disk_is_told_once_and_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "e"
    told: list[str] = []
    writer = EventWriter(path, 0, on_error=told.append)
    writer.emit("before")
    write = os.write
    room = 5

    def full(descriptor: int, data: memoryview) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        part, room = room, 0
        return write(descriptor, data[:part])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        writer.emit("lost")  # a part of it gets through first
        writer.emit("lost too")
    writer.emit("after")
    writer.close()
    assert told == [f"cannot write {path}: No space left on device; training goes on without it"]
    assert [event["kind"] for event in read_events(path)] == ["before", "after"]
    assert path.read_bytes().count(b"\n") == 2  # nothing torn stays


def test_a_place_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a file where the folder should be")
    told: list[str] = []
    writer = EventWriter(tmp_path / "events" / "rank-0.jsonl", 0, on_error=told.append)
    writer.emit("x")
    writer.close()
    assert len(told) == 1
