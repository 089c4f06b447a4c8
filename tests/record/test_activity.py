"""What a process is doing: readable from outside at any time, and after its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evenstep.record.activity import COMPUTING, MEETING, SCRIPT, STARTING, Activity, Doing, read_activity


def test_it_is_seen_at_once_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-0.now"
    assert read_activity(path) is None
    activity = Activity(path)
    assert read_activity(path) == Doing(0, STARTING)
    activity.begin_step(12)
    with activity.during(COMPUTING):
        with activity.during(MEETING):
            assert read_activity(path) == Doing(12, MEETING)
        assert read_activity(path) == Doing(12, COMPUTING)
    assert read_activity(path) == Doing(12, SCRIPT)
    with pytest.raises(ValueError, match="x"), activity.during(COMPUTING):
        raise ValueError("x")
    activity.close()
    activity.begin_step(13)
    assert str(read_activity(path)) == "in step 12, computing gradients"


def test_a_killed_process_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.now"
    pid = os.fork()
    if pid == 0:
        Activity(path).begin_step(3)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert read_activity(path) == Doing(3, SCRIPT)


def test_a_folder_that_takes_no_file_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    activity = Activity(tmp_path / "file" / "rank-0.now")
    activity.begin_step(1)
    activity.close()
    assert read_activity(tmp_path / "file" / "rank-0.now") is None
