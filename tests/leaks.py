"""Fails a test that leaves something behind: an environment variable, a thread, a child process, an initialised
process group, an open file descriptor, or a file in the working directory.

Both fixtures are in force for every test (see conftest.py). What a test left is removed as far as possible, so
that only the test at fault fails.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# How long what was told to end may take to end, in seconds.
GRACE = 5.0


@pytest.fixture(scope="session", autouse=True)
def empty_cwd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests run in an empty directory, where a file that a test writes by a relative path shows."""
    before = os.getcwd()
    cwd = tmp_path_factory.mktemp("cwd")
    os.chdir(cwd)
    yield cwd
    os.chdir(before)


@pytest.fixture(autouse=True)
def nothing_left_behind(empty_cwd: Path) -> Iterator[None]:
    before = Standing.now(empty_cwd)
    yield
    left = [*_left_group(), *_left_variables(before), *_left_cwd(before, empty_cwd), *_left_files(before, empty_cwd)]
    left += _left_children(before)
    left += _left_threads(before)
    left += _left_descriptors(before)
    if left:
        pytest.fail("the test left behind:\n" + "\n".join(f"  {line}" for line in left), pytrace=False)


@dataclass(frozen=True)
class Standing:
    """What there is before a test."""

    environ: dict[str, str]
    threads: frozenset[threading.Thread]
    children: frozenset[int]
    descriptors: dict[int, str]
    files: frozenset[str]

    @staticmethod
    def now(cwd: Path) -> Standing:
        return Standing(
            environ=_environ(),
            threads=frozenset(threading.enumerate()),
            children=frozenset(_children()),
            descriptors=_descriptors(),
            files=frozenset(os.listdir(cwd)),
        )


def _left_group() -> Iterator[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        yield "an initialised process group"
        distributed.destroy_process_group()


def _left_variables(before: Standing) -> Iterator[str]:
    now = _environ()
    for name in sorted(now.keys() | before.environ.keys()):
        if name not in before.environ:
            yield f"environment variable {name}={now[name]!r}"
            del os.environ[name]
        elif now.get(name) != before.environ[name]:
            yield f"environment variable {name}: {before.environ[name]!r} became {now.get(name)!r}"
            os.environ[name] = before.environ[name]


def _left_cwd(before: Standing, cwd: Path) -> Iterator[str]:
    if Path.cwd() != cwd:
        yield f"another working directory: {Path.cwd()}"
        os.chdir(cwd)


def _left_files(before: Standing, cwd: Path) -> Iterator[str]:
    # What is left stays there, and so is part of the next test's standing.
    for name in sorted(set(os.listdir(cwd)) - before.files):
        yield f"file {name} in the working directory (write to tmp_path)"


def _left_children(before: Standing) -> Iterator[str]:
    def left() -> list[int]:
        return [pid for pid in _children() if pid not in before.children]

    if _soon(lambda: not left()):
        return
    for pid in left():
        yield f"child process {pid}: {_command(pid)}"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _left_threads(before: Standing) -> Iterator[str]:
    until = time.monotonic() + GRACE
    for thread in threading.enumerate():
        if thread in before.threads or thread.name.startswith("pytest_timeout"):
            continue
        thread.join(max(until - time.monotonic(), 0))
        if thread.is_alive():
            yield f"thread {thread.name}"


def _left_descriptors(before: Standing) -> Iterator[str]:
    def left() -> dict[int, str]:
        return {number: to for number, to in _descriptors().items() if before.descriptors.get(number) != to}

    if not left():
        return
    gc.collect()  # what is only waiting for the collector is no leak
    for number, to in sorted(left().items()):
        yield f"open file descriptor {number} -> {to}"


def _environ() -> dict[str, str]:
    # torch's compiler names its cache in the environment when it is first imported, which an optimizer does.
    ours = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
    return {name: value for name, value in os.environ.items() if name not in ours}


def _children() -> list[int]:
    """The living child processes of this one; those that are dead are reaped."""
    keep = _resource_tracker()[0]
    pids = []
    for pid in _child_pids(os.getpid()):
        if pid == keep:
            continue
        if _state(pid) == "Z":
            with contextlib.suppress(ChildProcessError):  # reaped meanwhile
                os.waitpid(pid, os.WNOHANG)
            continue
        pids.append(pid)
    return pids


def _child_pids(parent: int) -> list[int]:
    pids = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and int(fields[1]) == parent:
                pids.append(int(entry.name))
    return pids


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else "Z"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if the process has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"


def _descriptors() -> dict[int, str]:
    keep = _resource_tracker()[1]
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            to = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        if int(name) != keep and not to.startswith("/dev/urandom"):
            found[int(name)] = to
    return found


def _resource_tracker() -> tuple[int | None, int | None]:
    """Process id and descriptor of multiprocessing's resource tracker, which lives as long as this process."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    return getattr(tracker, "_pid", None), getattr(tracker, "_fd", None)


def _soon(done: Callable[[], bool]) -> bool:
    until = time.monotonic() + GRACE
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)  # nothing else tells when a process that may be anybody's child has gone
    return True
