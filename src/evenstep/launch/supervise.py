"""Watch the training processes from their parent: reap them, stop all when one fails, leave none behind.

This runs in the fork server, which never touches the terminal; so a terminal that stands still holds nothing up.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from evenstep.environment import LEAVES_SIGNALS, STOPPING, TAKES_SIGNALS
from evenstep.launch.job import Job
from evenstep.launch.kinship import sweep
from evenstep.record.uncaught import error_path, read_uncaught

# From the first failure to the last process's end it takes at most one second: waiting for a likelier cause, then
# for processes to end by themselves.
_AFTER_CAUSE = 0.2  # so that on a mistake that all make, as a wrong argument, rank 0 gets to tell it itself
_AFTER_CONSEQUENCE = 0.3
_GRACE_AFTER_FAILURE = 0.4
_GRACE_AFTER_SIGNAL = 3.0  # Ctrl-C and the like: the script may want to save something
_BY_SIGNAL = tuple(128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
_LOOK = 1.0  # between two looks at whether a process stands still
_FROZEN = 4.0  # seconds after which a process that somebody stopped (SIGSTOP) counts as failed
_WAY_OUT = 10.0  # for a script that has failed and has not ended yet, while its peers wait for it

Emit = Callable[..., None]


def watch(job: Job, pids: Mapping[int, int], *, commands: int, failed: int, woken: int, emit: Emit) -> None:
    """Watch the processes (pid -> rank) until all have ended, then kill whatever else they left.

    `commands` is the launcher's pipe: lines {"stop": signal}, {"fail": true}, {"kill": true} or {"tell": signal}; its
    end means that the launcher is gone. `failed` is where a process says that it has failed; `woken` is readable after
    SIGCHLD. `emit(event, **fields)` reports each end.
    """
    live = dict(pids)
    leaving: set[int] = set()  # ranks that have failed and are on their way out: atexit functions, threads
    deaf: set[int] = set()  # ranks that take a signal as a request to stop after the step
    failing = False  # something has failed: nobody is to finish anything
    stopping = False
    winding_down = False  # a process has said that it ends by itself after a signal, and so will the others
    next_signal = signal.SIGTERM
    deadline: float | None = None
    pending = b""
    frozen = _Frozen()

    while live:
        wait = _LOOK if deadline is None else min(_LOOK, max(0.0, deadline - time.monotonic()))
        readable, _, _ = select.select([commands, failed, woken], [], [], wait)
        now = time.monotonic()

        if woken in readable:
            with suppress(BlockingIOError):
                os.read(woken, 4096)
        for pid, code in _reap():
            if pid not in live:
                continue  # an adopted orphan
            rank = live.pop(pid)
            orderly = winding_down and code in _BY_SIGNAL
            emit("exit", rank=rank, code=code, stopped=stopping, time=time.time(), orderly=orderly)
            if orderly and live:
                deadline = now + _WAY_OUT
            elif code != 0 and not stopping:
                patience = _AFTER_CONSEQUENCE if _looks_secondary(job, rank) else _AFTER_CAUSE
                deadline, failing = min(deadline or now + patience, now + patience), True

        if failed in readable:
            for line in os.read(failed, 4096).split(b"\n"):
                said, _, number = line.decode().rpartition(" ")
                if said == TAKES_SIGNALS:
                    deaf.add(int(number))
                elif said == LEAVES_SIGNALS:
                    deaf.discard(int(number))
                elif said == STOPPING and not failing:  # by itself, once its step is done
                    winding_down = True
                    deadline = None
                elif number.isdigit() and said != STOPPING:
                    leaving.add(int(number))
                    if not stopping and deadline is None and job.part.world_size > 1:
                        deadline = now + _WAY_OUT

        if commands in readable:
            data = os.read(commands, 4096)
            if not data:
                _signal(live, signal.SIGKILL)
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                if "tell" in command:
                    frozen.expected = command["tell"] == signal.SIGSTOP
                    _signal(live, command["tell"])
                elif "fail" in command:  # another host has failed: as if it had been one of ours
                    deadline, failing = now, True
                elif "kill" in command:
                    stopping, deadline, next_signal = True, now, signal.SIGKILL
                elif not stopping:
                    stopping, next_signal = True, signal.SIGKILL
                    deadline = None if winding_down else now + _GRACE_AFTER_SIGNAL
                    _signal(live, command["stop"])

        # A launcher that stands still is lost to those of other hosts, which end the run.
        watched = [*live, job.launcher] if job.part.nodes > 1 else list(live)
        if not stopping and deadline is None and frozen.seen(watched, now):
            for rank in frozen.ranks(live):
                emit("frozen", rank=rank, seconds=_FROZEN)
            deadline, failing = now, True

        if deadline is not None and now >= deadline and live:
            ask = next_signal == signal.SIGTERM
            _signal({pid: rank for pid, rank in live.items() if not (ask and rank in leaving | deaf)}, next_signal)
            if ask:  # they would first finish a step that cannot be finished any more
                _signal({pid: rank for pid, rank in live.items() if rank in deaf - leaving}, signal.SIGKILL)
            stopping = True
            deadline = now + (_GRACE_AFTER_FAILURE if ask else 0.1)
            next_signal = signal.SIGKILL

    found = sweep(job.part.tag)
    _reap()
    emit("done", left=list(found.values()))


class _Frozen:
    """Processes that were stopped by a signal, other than by Ctrl-Z in the launcher's terminal."""

    def __init__(self) -> None:
        self.expected = False
        self._since: dict[int, float] = {}

    def seen(self, pids: Collection[int], now: float) -> bool:
        """Whether one has stood still too long."""
        still = {pid for pid in pids if not self.expected and _is_stopped(pid)}
        self._since = {pid: self._since.get(pid, now) for pid in still}
        return any(now - since >= _FROZEN - _LOOK / 2 for since in self._since.values())

    def ranks(self, live: Mapping[int, int]) -> list[int]:
        """Which ranks stand still."""
        return sorted(live[pid] for pid in self._since if pid in live)


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] == "T"


def _reap() -> list[tuple[int, int]]:
    """Every child that has ended: its pid, and its exit code or minus its signal."""
    ends: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ends
        if pid == 0:
            return ends
        ends.append((pid, os.waitstatus_to_exitcode(status)))


def _signal(live: Mapping[int, int], number: int) -> None:
    """Signal the processes' groups: loader processes and subprocesses too, as a terminal would."""
    for pid in live:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def _looks_secondary(job: Job, rank: int) -> bool:
    uncaught = read_uncaught(error_path(job.paths().log(rank)))
    return uncaught is not None and uncaught.secondary
