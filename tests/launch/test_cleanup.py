"""No process is left, whatever ends a launch: counted by the tag in their environment, not by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.launch.launching import Launch, children, eventually, is_alive, launched, run, state, write_script

# Loader processes, and subprocesses of the user's that have left the process group; one without our tag.
BUSY = """
    import multiprocessing, os, pathlib, signal, subprocess, sys, time
    def load():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if "stubborn" in sys.argv:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    rank = os.environ["RANK"]
    loaders = [multiprocessing.get_context("fork").Process(target=load) for _ in range(2)]
    for loader in loaders:
        loader.start()
    subprocess.Popen(["sh", "-c", "sleep 600; true"], start_new_session=True)
    hidden = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
    aside = pathlib.Path(f"hidden-{rank}.tmp")
    aside.write_text(str(hidden.pid))
    aside.rename(f"hidden-{rank}")
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        print("saving", flush=True)
        raise
"""


def start_busy(launch: Launch, folder: Path, processes: int) -> list[int]:
    """Wait until all run; the pids of the processes that no tag would find."""
    hidden = [folder / f"hidden-{rank}" for rank in range(processes)]
    assert eventually(lambda: all(path.exists() for path in hidden)), launch.wait()
    # The fork server, and for each rank itself, two loaders, a shell and its sleep.
    assert eventually(lambda: len(launch.alive()) >= 1 + processes * 5)
    return [int(path.read_text()) for path in hidden]


def nobody(launch: Launch, hidden: list[int]) -> bool:
    return not launch.alive() and not any(is_alive(pid) for pid in hidden)


@pytest.mark.parametrize("processes", [1, 3])
def test_kill_9_of_the_launcher(tmp_path: Path, processes: int) -> None:
    script = write_script(tmp_path, BUSY)
    with launched(tmp_path, "--processes", processes, script, "stubborn") as launch:
        hidden = start_busy(launch, tmp_path, processes)
        launch.popen.kill()
        assert eventually(lambda: nobody(launch, hidden), 2)


def test_kill_9_of_the_launcher_while_it_imports(tmp_path: Path) -> None:
    """The fork server is in the middle of `import torch` then, and does not look at its pipe."""
    script = write_script(tmp_path, "import torch")
    with launched(tmp_path, "--processes", 2, script) as launch:
        assert eventually(lambda: launch.paths.launcher_events.exists() and len(launch.alive()) == 1)
        launch.popen.kill()
        assert eventually(lambda: not launch.alive(), 2)


def test_kill_9_of_the_fork_server(tmp_path: Path) -> None:
    script = write_script(tmp_path, BUSY)
    with launched(tmp_path, "--processes", 2, script, "stubborn") as launch:
        hidden = start_busy(launch, tmp_path, 2)
        (server,) = children(launch.popen.pid)
        called = Path(f"/proc/{server}/cmdline").read_bytes().rstrip(b"\0").decode()
        os.kill(server, signal.SIGKILL)
        assert eventually(lambda: nobody(launch, hidden), 2)
        result = launch.wait()
    assert result.code == 4
    assert called == f"evenstep: fork server for {tmp_path}/run"
    said = f"the fork server, the parent of all processes (`{called}` in ps), was killed by SIGKILL (by `kill -9`, or "
    assert said in result.err


def test_kill_9_of_launcher_and_fork_server_at_once(tmp_path: Path) -> None:
    """Nobody is left to sweep; the kernel ends the training processes."""
    script = write_script(tmp_path, "import os, time; print(os.environ['RANK'], flush=True); time.sleep(600)")
    with launched(tmp_path, "--processes", 2, script) as launch:
        assert eventually(lambda: launch.paths.launcher_events.exists() and len(launch.alive()) == 3)
        (server,) = children(launch.popen.pid)
        for pid in (launch.popen.pid, server):
            os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not launch.alive(), 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    script = write_script(tmp_path, BUSY)
    with launched(tmp_path, "--processes", 2, script) as launch:
        hidden = start_busy(launch, tmp_path, 2)
        launch.popen.send_signal(number)
        result = launch.wait()
        assert nobody(launch, hidden)
    assert result.code == 128 + number
    name = "Ctrl-C (SIGINT)" if number == signal.SIGINT else number.name
    assert f"evenstep: stopped by {name}; no process is left" in result.err
    assert "Traceback" not in result.err
    if number == signal.SIGINT:  # the script had its chance, as if alone
        assert result.out == "saving\n"


def test_signal_to_stubborn_processes(tmp_path: Path) -> None:
    script = write_script(tmp_path, BUSY)
    with launched(tmp_path, "--processes", 2, script, "stubborn") as launch:
        hidden = start_busy(launch, tmp_path, 2)
        launch.popen.send_signal(signal.SIGINT)
        assert launch.wait().code == 130
        assert nobody(launch, hidden)


def test_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    script = write_script(tmp_path, BUSY)
    with launched(tmp_path, "--processes", 2, script, "stubborn") as launch:
        hidden = start_busy(launch, tmp_path, 2)
        launch.popen.send_signal(signal.SIGINT)
        assert launch.popen.stderr is not None
        assert any("once more: at once" in line for line in iter(launch.popen.stderr.readline, ""))
        before = time.monotonic()
        launch.popen.send_signal(signal.SIGINT)
        launch.popen.wait(timeout=150)
        assert time.monotonic() - before < 2  # the grace would be three seconds
        assert launch.popen.returncode == 130
        assert nobody(launch, hidden)


def test_ctrl_c_while_importing(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import torch; print('began')")
    with launched(tmp_path, "--processes", 2, script) as launch:
        assert eventually(lambda: launch.paths.launcher_events.exists() and len(launch.alive()) == 1)
        launch.popen.send_signal(signal.SIGINT)
        result = launch.wait()
        assert launch.alive() == []
    assert (result.code, result.out) == (130, "")


def test_ctrl_z_stops_and_fg_goes_on(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, pathlib, time
        pathlib.Path(f"up-{os.environ['RANK']}").write_text(str(os.getpid()))
        while not os.path.exists("go"):
            time.sleep(0.01)
        """,
    )
    with launched(tmp_path, "--processes", 2, script) as launch:
        up = [tmp_path / "up-0", tmp_path / "up-1"]
        assert eventually(lambda: all(path.exists() and path.read_text() for path in up))
        pids = [launch.popen.pid, *(int(path.read_text()) for path in up)]
        launch.popen.send_signal(signal.SIGTSTP)
        assert eventually(lambda: all(state(pid) == "T" for pid in pids))
        launch.popen.send_signal(signal.SIGCONT)
        assert eventually(lambda: all(state(pid) != "T" for pid in pids))
        (tmp_path / "go").touch()
        assert launch.wait().code == 0


def test_nohup_is_respected(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, pathlib, time
        pathlib.Path("up").touch()
        while not os.path.exists("go"):
            time.sleep(0.01)
        print("went on")
        """,
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with launched(tmp_path, "--processes", 2, script) as launch:
            assert eventually((tmp_path / "up").exists)
            launch.popen.send_signal(signal.SIGHUP)
            (tmp_path / "go").touch()
            result = launch.wait()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (result.code, result.out) == (0, "went on\n")


def test_what_a_good_script_leaves_running_is_ended_and_told(tmp_path: Path) -> None:
    script = write_script(
        tmp_path, "import subprocess; print(subprocess.Popen(['sleep', '601'], start_new_session=True).pid)"
    )
    result = run(tmp_path, script)
    assert result.code == 0
    assert not is_alive(int(result.out))
    assert "ended a process that the script left running: sleep 601" in result.err
