"""Who dies with whom: Linux process attributes, and the sweep that leaves no process of a launch behind."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from evenstep.environment import LAUNCH

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, which must be `parent`, ends. It holds across exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none can leave the family tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def family(tag: str) -> dict[int, str]:
    """Living processes of a launch: this process's descendants, and whoever has the tag in its environment.

    Either alone would miss some: one that cleared its environment, or one whose ancestors were all killed.
    This process itself is not among them. Values are command lines, for people.
    """
    me, uid = os.getpid(), os.getuid()
    marker = f"{LAUNCH}={tag}".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            state, parent = stat[stat.rindex(")") + 2 :].split()[:2]
            if state in "ZX":
                continue
            parents[pid] = int(parent)
            if entry.stat().st_uid == uid and marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
        except OSError:
            continue  # ended meanwhile, or not ours to look at
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != me:
            ancestor = parents[ancestor]
        if ancestor == me:
            found.add(pid)
    found.discard(me)
    return {pid: _command(pid) for pid in sorted(found)}


def sweep(tag: str, *, spare: frozenset[int] = frozenset(), seconds: float = 1.0) -> dict[int, str]:
    """Kill every process of the launch but this one and `spare`; return what was found alive.

    A process may start another while the list is read, so it is read again until it is empty.
    """
    killed: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    while True:
        alive = {pid: name for pid, name in family(tag).items() if pid not in spare}
        killed.update(alive)
        if not alive or time.monotonic() > deadline:
            return killed
        for pid in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)  # the kernel's time to end them


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "?"
    return b" ".join(words).decode(errors="replace")[:200]


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
