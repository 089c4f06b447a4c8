"""One process fails: all stop, and the cause leads."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from evenstep.record.uncaught import error_path
from tests.launch.launching import eventually, launched, run, write_script

WAIT = "import signal, time; time.sleep(600)"


def test_first_failure_stops_all_within_a_second_and_leads(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, pathlib, signal, subprocess, sys, time
        rank = int(os.environ["RANK"])
        def fail():
            raise ValueError("rank one is bad")
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # does not go by itself
        if rank == 2:
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
        pathlib.Path(f"up-{rank}").touch()
        if rank == 1:
            while not all(os.path.exists(f"up-{other}") for other in range(3)):
                time.sleep(0.01)
            pathlib.Path("failed").write_text(str(time.time()))
            fail()
        time.sleep(600)
        """,
    )
    with launched(tmp_path, "--processes", 3, script) as launch:
        result = launch.wait()
        took = time.time() - float((tmp_path / "failed").read_text())
        assert launch.alive() == []
    assert result.code == 1
    assert took < 1.5  # one second, and the launcher's own end
    lines = result.err.splitlines()
    assert lines[1].startswith("Traceback")  # right after the word on the script's not using evenstep
    text = "\n".join(lines[1:])
    assert text.startswith(
        "Traceback (most recent call last):\n"
        f'  File "{script}", line 16, in <module>\n'
        "    fail()\n"
        f'  File "{script}", line 5, in fail\n'
        '    raise ValueError("rank one is bad")\n'
        "ValueError: rank one is bad\n"
        "evenstep: rank 1 failed: ValueError: rank one is bad\n"
    )
    assert "the other processes were stopped" in text
    assert "logs of every process: run/logs/" in text
    assert "to go on" not in text
    assert "rank one is bad" in launch.log(1)


def test_rank_0s_own_traceback_is_shown_once(tmp_path: Path) -> None:
    script = write_script(tmp_path, f"import os\nif os.environ['RANK'] == '0': 1 / 0\n{WAIT}")
    result = run(tmp_path, "--processes", 2, script)
    assert result.code == 1
    assert result.err.count("Traceback") == 1
    assert "rank 0 failed: ZeroDivisionError: division by zero" in result.err


def test_consequences_of_a_failure_do_not_lead(tmp_path: Path) -> None:
    """Rank 0 sees its peer's end and fails first; rank 1, which caused it, is slow on its way out."""
    script = write_script(
        tmp_path,
        """
        import atexit, os, pathlib, time
        if os.environ["RANK"] == "0":
            while not os.path.exists("closing"):
                time.sleep(0.001)
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
        def slow():
            pathlib.Path("closing").touch()
            time.sleep(0.1)
        atexit.register(slow)
        raise LookupError("the cause")
        """,
    )
    with launched(tmp_path, "--processes", 2, script) as launch:
        result = launch.wait()
    assert result.code == 1
    assert "Connection closed" not in result.err
    assert "LookupError: the cause" in result.err
    assert "rank 1 failed: LookupError: the cause" in result.err
    assert "Connection closed by peer" in launch.log(0)


def test_a_consequence_alone_is_still_told(tmp_path: Path) -> None:
    text = "raise RuntimeError('Connection closed by peer')"
    script = write_script(tmp_path, f"import os\nif os.environ['RANK'] == '1': {text}\n{WAIT}")
    result = run(tmp_path, "--processes", 2, script)
    assert result.code == 1
    assert "rank 1 failed: RuntimeError: Connection closed by peer" in result.err
    assert "Traceback" in result.err


@pytest.mark.parametrize(
    ("line", "says", "code"),
    [
        ("os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL (by `kill -9`, or by the kernel's", 1),
        ("os.kill(os.getpid(), 11)", "rank 1 was killed by SIGSEGV", 1),
        ("os.abort()", "rank 1 was killed by SIGABRT", 1),
        ("os._exit(7)", "rank 1 exited with code 7", 1),
        ("sys.exit(3)", "rank 1 called sys.exit(3)", 1),
        ("sys.exit('no data')", "rank 1 called sys.exit(no data)", 1),
        ("raise errors.UsageError('global batch 3', do='use 4')", "UsageError: global batch 3", 2),
        ("raise errors.MachineError('disk')", "rank 1 failed: evenstep.errors.MachineError: disk", 4),
        ("raise errors.DataError('sample 3')", "rank 1 failed: evenstep.errors.DataError: sample 3", 1),
    ],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_every_kind_of_end_is_named(tmp_path: Path, line: str, says: str, code: int, processes: int) -> None:
    last = processes - 1
    script = write_script(
        tmp_path,
        f"""
        import importlib, os, sys, time
        errors = importlib.import_module("evenstep.errors")  # the fork server need not know, and load torch for it
        print("some last words", flush=True)
        if os.environ["RANK"] == "{last}":
            {line}
        time.sleep(600)
        """,
    )
    with launched(tmp_path, "--processes", processes, script) as launch:
        result = launch.wait()
    assert result.code == code
    assert says.replace("rank 1", f"rank {last}") in result.err
    if ("kill" in line or "exit" in line) and last == 1:
        assert "the end of run/logs/rank-1.log:\n" in result.err
        assert "  some last words" in result.err
    if "os.kill(os.getpid(), 11)" in line:
        assert "Segmentation fault" in launch.log(last)  # the Python stack, by faulthandler


@pytest.mark.parametrize("last_words", ["", "print('of this launch', flush=True)"])
def test_only_this_launchs_end_of_the_log_is_shown(tmp_path: Path, last_words: str) -> None:
    fail = "if os.environ['RANK'] == '1': "
    first = write_script(tmp_path, f"import os\n{fail}raise ValueError('of the first launch')\n{WAIT}", "first.py")
    assert "of the first launch" in run(tmp_path, "--processes", 2, first).err
    text = f"import os\n{last_words}\n{fail}os.kill(os.getpid(), 9)\n{WAIT}"
    second = write_script(tmp_path, text, "second.py")
    with launched(tmp_path, "--processes", 2, second) as launch:
        result = launch.wait()
    assert "rank 1 was killed by SIGKILL" in result.err
    assert "of the first launch" not in result.err
    assert ("the end of run/logs/rank-1.log:\n  of this launch\nevenstep: " in result.err) == bool(last_words)
    assert ("the end of" in result.err) == bool(last_words)
    assert "of the first launch" in launch.log(1)


def test_exit_number_and_exception_are_recorded(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import sys; sys.exit(3)")
    with launched(tmp_path, script) as launch:
        assert launch.wait().code == 1
    record = json.loads(error_path(launch.paths.log(0)).read_text())
    assert (record["rank"], record["type"], record["message"], record["exit_code"]) == (0, "SystemExit", "3", 1)
    assert '"code":3' in launch.paths.launcher_events.read_text()
    with launched(tmp_path, write_script(tmp_path, "print('better')")) as launch:
        assert launch.wait().code == 0
    assert not error_path(launch.paths.log(0)).exists()  # an earlier start's failure is not this one's


def test_our_frames_between_the_script_and_its_functions_are_peeled_off(tmp_path: Path) -> None:
    """RunPaths stands for any evenstep function that calls the user's code, or raises on purpose."""
    script = write_script(
        tmp_path,
        """
        import sys
        from evenstep.environment import read_world
        class Environ(dict):
            def __contains__(self, name): return name == "RANK"
            def get(self, name):
                if sys.argv[1] == "theirs": raise OSError("my own")
                return "x"
        read_world(Environ())
        """,
    )
    theirs = run(tmp_path, script, "theirs")
    assert theirs.code == 1
    assert theirs.err.count("  File ") == theirs.err.count(f'  File "{script}"') == 2
    ours = run(tmp_path, script, "ours")
    assert ours.code == 2
    assert ours.err.count("  File ") == ours.err.count(f'  File "{script}"') == 1
    assert "evenstep.errors.UsageError: WORLD_SIZE='x' is not a whole number" in ours.err


def test_resume_command_when_there_are_checkpoints(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, pathlib, sys
        folder = pathlib.Path(os.environ["EVENSTEP_RUN"], "checkpoints")
        for step in (30, 200):
            (folder / f"step-{step:010d}").mkdir(parents=True)
        raise SystemExit(1)
        """,
    )
    result = run(tmp_path, "--seed", 1, script, "--epochs", "3 4")
    assert f"to go on from step 200: evenstep run --run {tmp_path}/run --seed 1 {script} --epochs '3 4'" in result.err


def test_a_failed_process_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers would wait for it for ever: here it hangs in an exit function."""
    script = write_script(
        tmp_path,
        """
        import atexit, os, time
        if os.environ["RANK"] == "1":
            atexit.register(time.sleep, 600)
            raise ValueError("first")
        time.sleep(600)
        """,
    )
    with launched(tmp_path, "--processes", 2, script) as launch:
        result = launch.wait()
        assert result.code == 1
        assert "rank 1 failed: ValueError: first" in result.err
        assert eventually(lambda: launch.alive() == [], 2)


def test_a_rank_that_ends_well_does_not_stop_the_others(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, time
        if os.environ["RANK"] == "0":
            open("went", "w").close()
        else:
            while not os.path.exists("went"):
                time.sleep(0.01)
            time.sleep(0.5)
            print("also done")
        """,
    )
    with launched(tmp_path, "--processes", 2, script) as launch:
        assert launch.wait().code == 0
    assert launch.log(1) == "also done\n"


@pytest.mark.parametrize(("error", "again"), [("IdentityError", False), ("UsageError", False), ("MachineError", True)])
def test_no_resume_command_where_it_would_meet_the_same_error(tmp_path: Path, error: str, again: bool) -> None:
    script = write_script(
        tmp_path,
        f"""
        import os, pathlib
        from evenstep.errors import {error}
        pathlib.Path(os.environ["EVENSTEP_RUN"], "checkpoints", "step-0000000004").mkdir(parents=True, exist_ok=True)
        raise {error}("it is so:" + chr(10) + "    and so", do="something else")
        """,
    )
    result = run(tmp_path, "--processes", 2, script)
    assert f"failed: evenstep.errors.{error}: it is so\n" in result.err
    assert ("to go on from step 4" in result.err) == again


def test_an_end_by_evenstep_itself_keeps_its_exit_code_and_every_process_has_a_log(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import os; os._exit(4 if os.environ['RANK'] == '1' else 0)")
    with launched(tmp_path, "--processes", 2, script) as launch:
        assert launch.wait().code == 4
        assert launch.paths.log(0).exists()
        assert launch.paths.log(1).exists()
