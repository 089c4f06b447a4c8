"""Runs a function in several real processes, as a launcher would start them, with a deadline that shows stacks.

The processes are forked from pytest's, where torch is imported already: 2 ranks cost some hundredths of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

import pytest
import torch._inductor  # noqa: F401  # use_deterministic_algorithms imports it, for seconds: once, before the forks

T = TypeVar("T")

# How long, in seconds, the others may go on after the first failure: they often have the better half of the story.
GRACE = 3.0
_LENGTH = struct.Struct("<Q")
_SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


class RanksFailed(AssertionError):
    """Ranks that did not return: by rank, the traceback, the signal that ended it, or the stack at the deadline."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    timeout: float = 150.0,
    env: Mapping[str, str | None] | None = None,
) -> list[T]:
    """`fn(*args)` in `world_size` processes; what each returned (pickled), by rank.

    `fn` may be a closure: nothing is pickled on the way in. Each process has RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (a free one) and `env` (None: unset) in its environment, stdin from
    /dev/null, a process group of its own, and what it prints is shown only if a rank fails.

    Raises the exception of the rank that failed first, with every failing rank's traceback as its cause; RanksFailed
    if a rank ended without one (a signal, os._exit, the deadline) or its exception cannot be pickled. All processes,
    and theirs in turn, are gone when this returns.
    """
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks: list[_Rank] = []
    try:
        for rank in range(world_size):
            variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})}
            ranks.append(_start(fn, args, rank, variables, ranks))
        late = _wait(ranks, time.monotonic() + timeout)
        if late:
            _show_stacks(late)
    finally:
        for rank_ in ranks:
            _end(rank_)
    try:
        return _results(ranks, timeout)
    finally:
        for rank_ in ranks:
            rank_.output.close()


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class _Rank:
    number: int
    pid: int
    process: int  # a descriptor that is readable once the process has ended
    pipe: int  # its result comes here: a length, then a pickle
    output: IO[bytes]  # what it prints
    received: bytearray = field(default_factory=bytearray)
    status: int | None = None  # as from os.waitpid; None while it runs
    order: int | None = None  # the how many-th it was to end
    late: bool = False

    def message(self) -> tuple[Any, ...] | None:
        """("returned", value) or ("raised", error or None, traceback); None if it has not been received whole."""
        if len(self.received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self.received)
        if len(self.received) < _LENGTH.size + length:
            return None
        message: tuple[Any, ...] = pickle.loads(self.received[_LENGTH.size :])
        return message

    def failed(self) -> bool:
        message = self.message()
        return message is None or message[0] != "returned"


def _start(
    fn: Callable[..., object], args: tuple[object, ...], rank: int, env: Mapping[str, str | None], others: list[_Rank]
) -> _Rank:
    output = tempfile.TemporaryFile()
    receive, send = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # The deadline's timer thread is the only other thread, and it holds no lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.close(receive)
            for other in others:
                os.close(other.pipe)
                os.close(other.process)
            code = _child(fn, args, env, send, output.fileno())
        finally:
            os._exit(code)
    os.close(send)
    _own_group(pid)
    return _Rank(rank, pid, os.pidfd_open(pid), receive, output)


def _child(
    fn: Callable[..., object], args: tuple[object, ...], env: Mapping[str, str | None], send: int, out: int
) -> int:
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    gc.freeze()  # what pytest holds need not be looked through at every collection, nor copied for that
    _own_group(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    for name, setting in env.items():
        if setting is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = setting
    try:
        message = pickle.dumps(("returned", fn(*args)))
        code = 0
    except BaseException as error:
        text = "".join(traceback.format_exception(type(error), error, _user_frames(error)))
        message = _pickled_error(error, text)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    view = memoryview(_LENGTH.pack(len(message)) + message)
    while view:
        view = view[os.write(send, view) :]
    return code


def _user_frames(error: BaseException) -> Any:
    """The traceback without this file's frame, unless it is all there is."""
    tb = error.__traceback__
    return tb.tb_next if tb is not None and tb.tb_next is not None else tb


def _pickled_error(error: BaseException, text: str) -> bytes:
    try:
        message = pickle.dumps(("raised", error, text))
        pickle.loads(message)
        return message
    except Exception:
        return pickle.dumps(("raised", None, text))


def _own_group(pid: int) -> None:
    # Both the parent and the child do it: whoever comes first.
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)


def _wait(ranks: list[_Rank], deadline: float) -> list[_Rank]:
    """Receives until every rank has ended, or GRACE after the first failure, or the deadline; who was late for it."""
    running = set(range(len(ranks)))
    first_failure: float | None = None
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            os.set_blocking(rank.pipe, False)
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
            selector.register(rank.process, selectors.EVENT_READ, rank)
        while running:
            until = deadline if first_failure is None else min(deadline, first_failure + GRACE)
            events = selector.select(max(until - time.monotonic(), 0))
            for key, _ in events:
                rank = key.data
                open_ = _receive(rank)
                if key.fd == rank.pipe and not open_:
                    selector.unregister(rank.pipe)
                if key.fd == rank.process:
                    selector.unregister(rank.process)
                    _, rank.status = os.waitpid(rank.pid, 0)
                    rank.order = len(ranks) - len(running)
                    running.discard(rank.number)
                    if rank.failed() and first_failure is None:
                        first_failure = time.monotonic()
            if running and time.monotonic() >= until:
                break
    late = [ranks[number] for number in sorted(running)]
    for rank in late:
        rank.late = True
    return late


def _receive(rank: _Rank) -> bool:
    """Reads what there is in the pipe; whether more can come."""
    while True:
        try:
            data = os.read(rank.pipe, 1 << 20)
        except BlockingIOError:
            return True
        if not data:
            return False
        rank.received += data


def _show_stacks(late: list[_Rank]) -> None:
    """Makes each rank print the stack of each of its threads to its output; waits until they are there."""
    sizes = {}
    for rank in late:
        sizes[rank.number] = os.fstat(rank.output.fileno()).st_size
        os.kill(rank.pid, signal.SIGUSR1)
    until = time.monotonic() + 2.0
    last: dict[int, int] = {}
    while time.monotonic() < until:
        now = {rank.number: os.fstat(rank.output.fileno()).st_size for rank in late}
        if now == last and all(now[number] > size for number, size in sizes.items()):
            return
        last = now
        time.sleep(0.02)  # faulthandler tells nobody when it has finished


def _end(rank: _Rank) -> None:
    """Kills the rank and all that it started in its group; closes what belongs to it but its output."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.pid, signal.SIGKILL)
    if rank.status is None:
        _, rank.status = os.waitpid(rank.pid, 0)
    os.close(rank.process)
    os.close(rank.pipe)


def _results(ranks: list[_Rank], timeout: float) -> list[Any]:
    failed = [rank for rank in ranks if rank.failed()]
    if not failed:
        return [(rank.message() or ())[1] for rank in ranks]
    failed.sort(key=lambda rank: (rank.late, rank.order if rank.order is not None else len(ranks)))
    text = "\n\n".join(_story(rank, timeout) for rank in failed)
    outputs = [f"--- rank {rank.number} printed ---\n{out}" for rank in ranks if (out := _printed(rank))]
    cause = RanksFailed("\n\n".join([text, *outputs]), [rank.number for rank in failed])
    first = failed[0].message()
    error = first[1] if first is not None else None
    if isinstance(error, Exception | pytest.skip.Exception | pytest.fail.Exception):
        raise error from cause
    raise cause


def _story(rank: _Rank, timeout: float) -> str:
    message = rank.message()
    if message is not None:
        return f"rank {rank.number} raised:\n{message[2]}"
    if rank.late:
        return f"rank {rank.number} had not ended (deadline {timeout:g} s); its stacks are in what it printed"
    assert rank.status is not None
    if os.WIFSIGNALED(rank.status):
        return f"rank {rank.number} was ended by {signal.Signals(os.WTERMSIG(rank.status)).name}"
    return f"rank {rank.number} left with exit code {os.WEXITSTATUS(rank.status)} before it returned"


def _printed(rank: _Rank) -> str:
    rank.output.seek(0)
    return rank.output.read().decode(errors="replace").strip()
