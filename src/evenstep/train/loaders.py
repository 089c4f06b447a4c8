"""Loader processes: they read micro-batches ahead, in turn, and are gone when they are closed or when we are.

Why not torch's DataLoader: a loader process that dies must be named where its data is asked for, at once, and not by
an exception out of a signal handler in the middle of an optimizer step; and loader processes hold copies of our
sockets, so if this process is killed they must die with it, or its peers would not notice.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import multiprocessing.process
import os
import pickle
import queue
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor  # importing it registers how storages travel, too
from torch.utils.data._utils import worker as torch_worker

SMALL = 1 << 16  # bytes; smaller tensors are sent as they are: shared memory costs a socket and a handshake for each
ORPHANED = 1.0  # seconds after which a loader process looks whether its parent lives
LEAVE = 1.0  # seconds that a loader process has to end what it reads before it is ended
_PR_SET_PDEATHSIG = 1


class LoaderGone(Exception):
    """A loader process ended before it had answered. `how` says how it ended."""

    def __init__(self, loader: int, pid: int | None, how: str) -> None:
        super().__init__(f"loader process {loader} (pid {pid}) {how}")


class CannotSend(Exception):
    """What was read cannot be pickled; the text says why."""


class Loaders:
    """`count` processes that compute `work(task)`; results come in the order of the tasks.

    `work` must not raise (it returns what went wrong). `about` is what the data set sees as torch's worker info.
    """

    def __init__(self, work: Callable[[Any], Any], count: int, about: object) -> None:
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._asked: deque[int] = deque()
        self._next = 0
        fork = sys.platform == "linux"
        context: Any = multiprocessing.get_context("fork" if fork else None)
        # For their sockets, over which shared memory is handed on. Their own ones would be left behind by a signal.
        self._folder = tempfile.mkdtemp(prefix="evenstep-loaders-")
        here = os.getpid()
        dies_with_us = fork and threading.current_thread() is threading.main_thread()
        for number in range(count):
            ours, theirs = context.Pipe()
            arguments = (
                work,
                theirs,
                [*self._pipes, ours] if fork else [],
                number,
                count,
                about,
                self._folder,
                here,
                dies_with_us,
            )
            process = context.Process(target=_serve, args=arguments, name=f"evenstep-loader-{number}", daemon=True)
            with warnings.catch_warnings():
                # Python warns of a fork beside other threads; these processes use neither gloo nor OpenMP's threads.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def waiting(self) -> int:
        """Tasks that were asked for and not yet answered."""
        return len(self._asked)

    def ask(self, task: object) -> None:
        """Give `task` to the next loader process."""
        loader = self._next
        self._next = (loader + 1) % len(self)
        self._asked.append(loader)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is found out when its answer is taken
            self._pipes[loader].send(task)

    def take(self) -> tuple[int, Any]:
        """(number of the loader process, result) of the earliest task.

        LoaderGone if the process has ended, CannotSend if the result does not travel between processes.
        """
        loader = self._asked.popleft()
        process = self._processes[loader]
        try:
            message = self._pipes[loader].recv_bytes()
        except (EOFError, OSError) as error:
            process.join(LEAVE)
            raise LoaderGone(loader, process.pid, _how(process.exitcode)) from error
        try:
            sent, result = pickle.loads(message)
        except (EOFError, OSError) as error:  # shared memory is fetched from the process
            process.join(LEAVE)
            if process.exitcode is None:
                raise
            raise LoaderGone(loader, process.pid, _how(process.exitcode)) from error
        if not sent:
            raise CannotSend(result)
        return loader, result

    def close(self) -> None:
        """End and join all processes. Those that are still reading get a second to end by themselves."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        for end in (lambda _: None, BaseProcess.terminate, BaseProcess.kill):
            for process in self._processes:
                end(process)
            for process in self._processes:
                process.join(LEAVE)
        for process in self._processes:
            process.close()
        self._processes, self._pipes = [], []
        self._asked.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def _how(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its pipe and goes on"
    if exitcode < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"


def _serve(
    work: Callable[[Any], Any],
    pipe: Connection,
    inherited: list[Connection],
    number: int,
    count: int,
    about: Any,
    folder: str,
    parent: int,
    dies_with_parent: bool,
) -> None:
    """A loader process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the training process closes us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if dies_with_parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for other in inherited:
        other.close()
    multiprocessing.process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork: a parallel region would wait for them for ever
    torch_worker._worker_info = torch_worker.WorkerInfo(id=number, num_workers=count, seed=0, dataset=about)

    # A thread of its own sends, so that the next micro-batch is read while this one waits to be taken.
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sender = threading.Thread(target=_send, args=(results, pipe), daemon=True)
    sender.start()
    for task in _tasks(pipe, parent):
        results.put(work(task))
    pipe.close()


def _tasks(pipe: Connection, parent: int) -> Iterator[Any]:
    with contextlib.suppress(EOFError, OSError):
        while True:
            while not pipe.poll(ORPHANED):
                if os.getppid() != parent:
                    return
            task = pipe.recv()
            if task is None:
                return
            yield task


def _send(results: queue.SimpleQueue[Any], pipe: Connection) -> None:
    with contextlib.suppress(OSError):
        while True:
            pipe.send_bytes(_pickled(results.get()))


def _pickled(result: object) -> Any:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump((True, result))
    except Exception as error:
        return pickle.dumps((False, f"{type(error).__name__}: {error}"))
    return buffer.getbuffer()


class _Pickler(ForkingPickler):
    """torch's way of sending tensors through shared memory, for all but small ones."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.dispatch_table: Any = {**self.dispatch_table, torch.Tensor: _reduce_tensor}


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
    if not plain or tensor.nbytes > SMALL or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return reduce_tensor(tensor)
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return _small_tensor, (data, tensor.dtype, tuple(tensor.shape))


def _small_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
