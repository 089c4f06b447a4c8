"""Rank 0's streams reach the terminal as they are, every rank's reach its log."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from evenstep.launch.output import Log, Stream
from evenstep.record.paths import RunPaths
from tests.launch.launching import PATIENCE, clean_environ, command, eventually, launched, run, write_script


def test_bytes_order_and_streams_are_untouched(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, sys
        for turn in range(300):
            sys.stdout.buffer.write(bytes(range(256)) * 20 + str(turn).encode())
            os.write(2, b"\\xff\\r\\n" + str(turn).encode())
        sys.stdout.flush()
        os.write(1, b"no end of line")
        """,
    )
    done = subprocess.run(
        command("run", "--processes", 2, "--run", tmp_path / "run", script),
        env=clean_environ(),
        cwd=tmp_path,
        capture_output=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0
    assert done.stdout == b"".join(bytes(range(256)) * 20 + str(n).encode() for n in range(300)) + b"no end of line"
    own, _, rest = done.stderr.partition(b"\n")
    assert own.startswith(b"evenstep: ")
    assert rest == b"".join(b"\xff\r\n" + str(n).encode() for n in range(300))
    logged = (tmp_path / "run" / "logs" / "rank-1.log").read_bytes()
    assert len(logged) == len(done.stdout) + len(rest)


def test_other_ranks_are_shown_with_their_rank(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, sys
        print("a\\n\\nb", os.environ["RANK"])
        print("to err", file=sys.stderr)
        print("unfinished", end="" if os.environ["RANK"] != "0" else "\\n")
        """,
    )
    shown = run(tmp_path, "--processes", 3, "--output", "all", script)
    lines = shown.out.splitlines()
    assert [line for line in lines if line.startswith("[1]")] == [
        "[1] a",
        "[1] ",
        "[1] b 1",
        "[1] to err",
        "[1] unfinished",
    ]
    assert [line for line in lines if line.startswith("[2]")] == [
        "[2] a",
        "[2] ",
        "[2] b 2",
        "[2] to err",
        "[2] unfinished",
    ]
    hidden = run(tmp_path, "--processes", 3, script)
    assert hidden.out == "a\n\nb 0\nunfinished\n"


def test_lines_are_seen_while_the_script_runs(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import time; print('early'); time.sleep(600)")
    with launched(tmp_path, "--processes", 2, script) as launch:
        assert launch.popen.stdout is not None
        assert launch.popen.stdout.readline() == "early\n"
        assert eventually(lambda: launch.paths.log(1).exists() and launch.log(1) == "early\n")


def test_reader_that_goes_away_does_not_end_training(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, time
        print("first", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
        for turn in range(20000):
            print("line", turn)
        """,
    )
    with launched(tmp_path, script) as launch:
        assert launch.popen.stdout is not None
        assert launch.popen.stdout.readline() == "first\n"
        launch.popen.stdout.close()
        launch.popen.stdout = None
        (tmp_path / "go").touch()
        assert launch.popen.wait(PATIENCE) == 0
        assert launch.log(0).endswith("line 19999\n")


def test_log_that_the_disk_does_not_take_does_not_end_training(tmp_path: Path) -> None:
    """The limit on the launcher's file sizes stands for a full disk; it comes once all have started."""
    script = write_script(
        tmp_path,
        """
        import os, time
        print("first", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
        for turn in range(20000):
            print("line", turn)
        """,
    )
    with launched(tmp_path, "--processes", 2, script) as launch:
        assert eventually(lambda: launch.paths.log(1).exists() and launch.log(1) == "first\n")
        resource.prlimit(launch.popen.pid, resource.RLIMIT_FSIZE, (10_000, 10_000))
        (tmp_path / "go").touch()
        result = launch.wait()
    assert result.code == 0
    assert result.out.count("\n") == 20001
    assert "cannot write" in result.err
    assert "rank-0.log: File too large; training goes on without it" in result.err


def test_launches_of_one_run_directory_are_told_apart_in_the_logs(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import sys; print('end of', sys.argv[1], end='')")
    for name in ("the first", "the second"):
        with launched(tmp_path, "--processes", 2, script, name) as launch:
            result = launch.wait()
        assert (result.code, result.out) == (0, f"end of {name}")
    for rank in range(2):
        first, line, second = RunPaths(tmp_path / "run").log(rank).read_text().splitlines()
        assert (first, second) == ("end of the first", "end of the second")
        start = r"--- evenstep: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}, "
        assert re.fullmatch(f"{start}rank {rank} of 2: {script} 'the second' ---", line)


def test_refused_launch_leaves_logs_alone(tmp_path: Path) -> None:
    script = write_script(tmp_path, "print('once')")
    with launched(tmp_path, script) as launch:
        assert launch.wait().code == 0
    with launched(tmp_path, "--backend", "mpi", script) as launch:
        assert launch.wait().code == 2
        assert launch.log(0) == "once\n"


@contextmanager
def terminal(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """A pseudo-terminal: (our end, the command's end)."""
    ours, theirs = os.openpty()
    set_size(theirs, rows, columns)
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        with suppress(OSError):
            os.close(theirs)


def set_size(descriptor: int, rows: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def read_to_end(descriptor: int) -> str:
    text = b""
    with suppress(OSError):  # how a pseudo-terminal says that its other end is closed
        while piece := os.read(descriptor, 4096):
            text += piece
    return text.decode()


SHOW_TERMINAL = """
    import os, shutil, sys
    print(*(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)), *shutil.get_terminal_size())
"""


def test_rank_0_sees_the_terminal(tmp_path: Path) -> None:
    script = write_script(tmp_path, SHOW_TERMINAL)
    words = command("run", "--processes", 2, "--run", tmp_path / "run", script)
    with terminal(33, 77) as (ours, theirs):
        popen = subprocess.Popen(words, env=clean_environ(), cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        text = read_to_end(ours)
        assert popen.wait(PATIENCE) == 0
    assert text.endswith("False True True 77 33\r\n")  # one carriage return, the real terminal's
    assert (tmp_path / "run" / "logs" / "rank-0.log").read_bytes() == b"False True True 77 33\n"
    assert (tmp_path / "run" / "logs" / "rank-1.log").read_bytes() == b"False False False 80 24\n"


def test_only_the_stream_that_is_a_terminal_becomes_one(tmp_path: Path) -> None:
    script = write_script(tmp_path, SHOW_TERMINAL + "    print('bar', file=sys.stderr)\n")
    words = command("run", "--run", tmp_path / "run", script)
    with terminal(20, 60) as (ours, theirs):  # evenstep run script.py | tee
        popen = subprocess.Popen(words, env=clean_environ(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs)
        os.close(theirs)
        out, _ = popen.communicate(timeout=PATIENCE)
        assert out == b"False False True 80 24\n"
        assert read_to_end(ours).endswith("bar\r\n")


def test_size_of_the_terminal_is_passed_on(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, pathlib, signal, time
        changed = []
        signal.signal(signal.SIGWINCH, lambda *_: changed.append(1))
        pathlib.Path("up").touch()
        while not changed:
            time.sleep(0.01)
        print("now", *os.get_terminal_size(1))
        """,
    )
    words = command("run", "--run", tmp_path / "run", script)
    with terminal(33, 77) as (ours, theirs):
        popen = subprocess.Popen(words, env=clean_environ(), cwd=tmp_path, stdout=theirs, stderr=theirs)
        os.close(theirs)
        assert eventually((tmp_path / "up").exists)
        set_size(ours, 44, 55)
        popen.send_signal(signal.SIGWINCH)
        assert read_to_end(ours).endswith("now 55 44\r\n")
        assert popen.wait(PATIENCE) == 0


def test_prefix_goes_before_whole_lines_only(tmp_path: Path) -> None:
    source, end = os.pipe()
    out, terminal_end = os.pipe()
    stream = Stream(source, Log(tmp_path / "log", "rank 1"), terminal_end, b"[1] ", by_line=True)
    try:
        for piece in (b"ab", b"c\nd", b"\r50%\re", b"\n\n", b"tail"):
            os.write(end, piece)
            assert stream.carry()
        os.close(end)
        assert not stream.carry()
        os.close(terminal_end)
        assert os.read(out, 1000) == b"[1] abc\n[1] d\r50%\re\n[1] \n[1] tail\n"
        assert (tmp_path / "log").read_bytes() == b"abc\nd\r50%\re\n\ntail"
    finally:
        stream.log.close()
        os.close(source)
        os.close(out)


def test_cursor_that_a_killed_process_has_hidden_is_shown_again(tmp_path: Path) -> None:
    for pieces, end_of_it in (
        ((b"bar \x1b[?2", b"5l half"), b"half\n\x1b[?25h"),
        ((b"\x1b[?25lbar", b"\x1b[?25hdone"), b"done"),
    ):
        source, end = os.pipe()
        out, terminal_end = os.pipe()
        stream = Stream(source, Log(tmp_path / "log", "rank 0"), terminal_end, is_terminal=True)
        try:
            for piece in pieces:
                os.write(end, piece)
                assert stream.carry()
            os.close(end)
            assert not stream.carry()
            assert os.read(out, 1000).endswith(end_of_it)
        finally:
            stream.log.close()
            for descriptor in (source, out, terminal_end):
                os.close(descriptor)
