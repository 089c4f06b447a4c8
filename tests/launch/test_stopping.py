"""A request to stop that reaches every process at once, and from the launcher too, as Slurm's do."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from evenstep.launch import taking
from evenstep.record.activity import SCRIPT as OWN_CODE
from evenstep.record.activity import Doing, read_activity
from evenstep.record.events import read_events
from tests.launch.launching import eventually, launched, training, write_script

SCRIPT = training(
    first="""
    class Slow:
        def __len__(self):
            return 400

        def __getitem__(self, index):
            time.sleep(0.02)
            return torch.ones(4), torch.ones(1)
    """,
    start="",
    data="Slow(), loaders=2",
    epochs="30",
    stepped="",
)


def test_the_step_is_finished_and_a_checkpoint_written(tmp_path: Path) -> None:
    write_script(tmp_path, SCRIPT)
    with launched(tmp_path, "--processes", 2, "script.py") as launch:
        events = launch.paths.events(0)
        assert eventually(lambda: events.exists() and any(event["kind"] == "step" for event in read_events(events)))
        everything = launch.alive()
        assert len(everything) == 7  # the fork server, two processes, and two loader processes of each
        for pid in [*everything, launch.popen.pid, *everything]:
            os.kill(pid, signal.SIGTERM)
        done = launch.wait()
        assert done.code == 143, done
        assert "stopped by SIGTERM at the end of step" in done.err
        assert "is written" in done.err
        assert not launch.alive()
        assert len(list(launch.paths.checkpoints.iterdir())) == 1


def test_who_cannot_come_to_the_end_of_its_step_is_named(tmp_path: Path) -> None:
    """A barrier on rank 0 alone, as is left behind in scripts that come from DDP."""
    barrier = "if run.rank == 0: torch.distributed.barrier()"
    write_script(tmp_path, training(start="", epochs="3", stepped=barrier))
    with launched(tmp_path, "--processes", 2, "script.py") as launch:
        stuck = Doing(1, OWN_CODE)
        assert eventually(lambda: read_activity(launch.paths.activity(0)) == stuck)
        assert eventually(lambda: str(read_activity(launch.paths.activity(1))).startswith("in step 2"))
        launch.popen.send_signal(signal.SIGINT)
        assert launch.popen.stderr is not None
        said = next(line for line in launch.popen.stderr if "5 s after SIGINT" in line)
        assert "rank 0 was in step 1, in the script's own code; rank 1 was in step 2, " in said
        assert "once more ends all at once" in said
        launch.popen.send_signal(signal.SIGINT)
        assert launch.wait().code == 130
        assert not launch.alive()


def test_an_echo_is_no_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = taking.Echo()
    assert [echo.is_one(signal.SIGTERM) for _ in range(3)] == [False, True, True]
    assert not echo.is_one(signal.SIGINT)  # Ctrl-C twice
    monkeypatch.setattr(taking, "_ECHO", 0.0)  # later
    assert not echo.is_one(signal.SIGTERM)
