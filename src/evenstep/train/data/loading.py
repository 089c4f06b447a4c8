"""Loader processes: torch's DataLoader, and what it leaves open when one of them dies, or when we do.

torch raises from a SIGCHLD handler when a loader process is killed: a RuntimeError with a process id, wherever the
main thread stands, be it in the middle of an optimizer step; it is silent for 5 s if the process ends with exit code 0.
Here a death is raised where data is asked for, with the sample that was being read. One that gets no further is named
while it is waited for, and given up in the end; torch would wait for ever. And loader processes hold copies of our
sockets, so if this process is killed they die with it: else its peers would not notice.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from evenstep.errors import DataError
from evenstep.train.batch import pinned
from evenstep.train.data.samples import Failure
from evenstep.train.randomness import key

_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_DYING = 1.0  # seconds
_LOOK = 5.0  # seconds between two looks at loader processes that are waited for
_SAY = 30.0  # seconds of waiting until it is said; then at twice that, and so on
_GIVE_UP = 600.0  # seconds in which the loader process has not come to another sample
_open: set[Loading] = set()  # whose loader processes are looked at when a child process ends
_handling = False  # whether our handler of SIGCHLD is in place


class Task(Protocol):
    """What a loader process is given to read."""

    def name(self, offset: int) -> str:
        """Its sample number `offset`, for people."""
        ...


class Reads(Protocol):
    """What reads a task in a loader process. `at[0]` is the offset of the sample that is being read; `data` is what
    torch's get_worker_info shows as the data set."""

    data: Any
    at: MutableSequence[int]

    def __call__(self, task: Any) -> Any: ...


class LoaderGone(Exception):
    """A loader process has ended, or is `stuck`. `how` names it and says how it is; `doing` says what it was at."""

    def __init__(self, how: str, doing: str, stuck: bool = False) -> None:
        super().__init__(f"{how} {doing}")
        self.how, self.doing, self.stuck = how, doing, stuck

    def told(self, rank: int, leave_out: str) -> DataError:
        """The error for the user; `leave_out` says how to do without a sample."""
        do = (
            "if it was killed, look for too little memory (SIGBUS: in /dev/shm) and give fewer loaders=; "
            "else try loaders=0"
        )
        if self.stuck:
            do = (
                "look at this sample: a file that cannot be reached, a lock, a library that does not bear a fork; "
                f"{leave_out}, or try loaders=0, which waits for as long as it takes"
            )
        return DataError(f"{self.how} on rank {rank}, {self.doing}", do=do)


class _Waiting:
    """How long a loader process has been waited for, and at which place it stands since when."""

    def __init__(self) -> None:
        self.began = self.moved = time.monotonic()
        self.say_at = _SAY
        self.place: list[int] | None = None


class Loading:
    """An iterator of (task, number of the loader process, what `samples` read for it), in the order of `tasks`.

    Each of the `count` processes reads `prefetch` tasks ahead. LoaderGone if one has ended, or gets no further. `say`
    is told, every now and then, which one is waited for.
    """

    def __init__(
        self,
        samples: Reads,
        tasks: Iterable[Task],
        *,
        count: int,
        prefetch: int,
        pin: bool,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._asked: deque[tuple[int, Any]] = deque()
        self._places = torch.full((count, 2), -1, dtype=torch.int64).share_memory_()
        self._in_main = False  # whether the main thread is waiting for them
        self._opening: tuple[int, _Waiting] | None = None  # the loader process from which shared memory is fetched
        self._stuck: LoaderGone | None = None  # the one that was given up meanwhile
        self._closing = threading.Event()
        reading = _Reading(samples)
        dies_with_us = _LINUX and threading.current_thread() is threading.main_thread()  # it is the thread that counts
        with warnings.catch_warnings():
            # Whether more loader processes than processors pay is for the user to find out; disks differ.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            # Python warns of a fork beside threads; these processes use neither gloo's threads nor OpenMP's.
            warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
            loader = DataLoader(
                reading,
                batch_size=None,
                sampler=_noted(tasks, self._asked),
                num_workers=count,
                prefetch_factor=prefetch,
                timeout=_LOOK,
                pin_memory=pin,
                collate_fn=_as_it_is,  # else arrays would become tensors
                worker_init_fn=functools.partial(_begin, reading, self._places, os.getpid(), dies_with_us),
                generator=torch.Generator().manual_seed(key(seed, "loaders")),  # the user's is not to be drawn from
                multiprocessing_context="fork" if _LINUX else None,
            )
            try:
                self._iterator = cast(Any, iter(loader))
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                error.__traceback__ = None  # it keeps the other loader processes
                raise LoaderGone(str(error).strip(), "right after its start") from None
        self._processes: list[Any] = self._iterator._workers
        self._watch = threading.Thread(target=self._watch_opening, name="evenstep loaders", daemon=True)
        self._watch.start()
        _open.add(self)
        _handle_deaths()

    def __next__(self) -> tuple[Any, int, Any]:
        if not self._asked:
            raise StopIteration
        try:
            self._in_main = threading.current_thread() is threading.main_thread()
            self.raise_if_gone()  # before now
            parcel = self._waited_for()
            result = self._opened(parcel)
        except Exception:
            self._in_main = False
            self.raise_if_gone()  # torch has errors of its own for it
            raise
        finally:
            self._in_main = False
        if isinstance(result, _Lost):
            self._wait_for_dying()
            self.raise_if_gone()
            raise result.error
        _, task = self._asked.popleft()
        return task, parcel.loader, result

    def _waited_for(self) -> Any:
        """The next parcel. LoaderGone if the loader process that reads it stays at one place for too long."""
        waiting = _Waiting()
        while True:
            try:
                return next(self._iterator)
            except RuntimeError as error:
                if "DataLoader timed out" not in str(error):
                    raise
            self.raise_if_gone()
            self._look(waiting, self._awaited())

    def _look(self, waiting: _Waiting, loader: int) -> None:
        """Tells of a loader process that has been waited for. LoaderGone if it has stayed at one place for too long."""
        now, place = time.monotonic(), self._places[loader].tolist()
        if place != waiting.place:
            waiting.place, waiting.moved = place, now
        name = f"loader process {loader} (pid {self._processes[loader].pid})"
        if now - waiting.moved >= _GIVE_UP:
            still = f"{name} has come no further for {now - waiting.moved:.0f} s"
            raise LoaderGone(still, self._doing(loader, awaited=True), stuck=True)
        if now - waiting.began >= waiting.say_at:
            waiting.say_at *= 2
            self._say(f"has waited {now - waiting.began:.0f} s for {name} {self._doing(loader, awaited=True)}")

    def _opened(self, parcel: Any) -> Any:
        """What is in it. Its shared memory is fetched from the loader process, and nothing ends that wait if it has
        been stopped, or hangs in a library: a thread watches it."""
        if isinstance(parcel, _Parcel):
            return parcel.result
        self._opening = parcel.loader, _Waiting()
        try:
            return parcel.open()
        finally:
            self._opening = None

    def _watch_opening(self) -> None:
        while not self._closing.wait(_LOOK):
            opening = self._opening
            if opening is None:
                continue
            loader, waiting = opening
            try:
                self._look(waiting, loader)
            except LoaderGone as gone:
                self._stuck = gone
                self._processes[loader].kill()  # so the wait for it ends
                return

    def _awaited(self) -> int:
        """The loader process that reads the next task, or is to read it."""
        number = self._asked[0][0]
        at: list[int] = self._places[:, 1].tolist()
        return at.index(number) if number in at else number % len(at)

    def _wait_for_dying(self) -> None:
        """A process that dies closes its sockets a moment before it is dead."""
        dying = wait([process.sentinel for process in self._processes], _DYING)
        for process in self._processes:
            if process.sentinel in dying:
                process.join()

    def has_gone(self) -> bool:
        """Whether a loader process has ended."""
        return any(process.exitcode is not None for process in self._processes)

    def raise_if_gone(self) -> None:
        """LoaderGone for the first loader process that has ended, or was given up."""
        if self._stuck is not None:
            raise self._stuck
        for number, process in enumerate(self._processes):
            if process.exitcode is not None:
                how = f"loader process {number} (pid {process.pid}) {_how(process.exitcode)}"
                raise LoaderGone(how, self._doing(number))

    def raise_if_asked(self) -> None:
        """LoaderGone, if the main thread is waiting for these loader processes."""
        if self._in_main:
            self.raise_if_gone()

    def _doing(self, loader: int, awaited: bool = False) -> str:
        offset, at = self._places[loader].tolist()
        for number, task in self._asked:
            if number == at:
                return f"while it read {task if offset == -1 else task.name(offset)}"
        if self._opening:
            return "while it handed over what it has read"
        return f"while it was to hand over {self._asked[0][1]}" if awaited else "while it had nothing to read"

    def close(self) -> None:
        """End and join the loader processes. One that is still reading gets 5 s to end by itself."""
        iterator, self._iterator = self._iterator, None
        self._closing.set()
        self._watch.join()
        if self.has_gone() and hasattr(iterator, "_pin_memory_thread"):
            # torch would write to the results' queue, whose lock the dead one may hold, and join the thread, which may
            # wait for ever for the rest of a message. Most often it ends within 5 s, else with this process.
            iterator._pin_memory_thread_done_event.set()
            del iterator._pin_memory_thread
        iterator._shutdown_workers()  # it does so when collected, but an exception's traceback may keep it
        _kill(self._processes)
        _open.discard(self)


def _kill(processes: list[Any]) -> None:
    """Those that are still reading: they take no SIGTERM, which is all that torch and multiprocessing know."""
    for process in processes:
        if process._parent_pid == os.getpid() and process.is_alive():
            process.kill()
            process.join()


@atexit.register
def _kill_all() -> None:
    """Before multiprocessing waits for them."""
    for loading in list(_open):
        _kill(loading._processes)


def _noted(tasks: Iterable[Task], asked: deque[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    for numbered in enumerate(tasks):
        asked.append(numbered)
        yield numbered


def _as_it_is(parcel: Any) -> Any:
    return parcel


def _how(exitcode: int) -> str:
    if exitcode < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"


def _handle_deaths() -> None:
    """Put a SIGCHLD handler around torch's, once: it keeps to itself the errors that are about our loader processes.

    Elsewhere than in the main thread Python allows no handlers, nor does torch have one; it looks every 5 s, then.
    """
    global _handling
    if _handling or not _LINUX or threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGCHLD)

    def handle(number: int, frame: Any) -> None:
        try:
            if callable(before):
                before(number, frame)
        except RuntimeError:  # torch's; it may be about a DataLoader of the user's
            if not any(loading.has_gone() for loading in tuple(_open)):
                raise
        for loading in tuple(_open):
            loading.raise_if_asked()

    signal.signal(signal.SIGCHLD, handle)
    _handling = True


class _Reading(Dataset[Any]):
    """What the DataLoader takes for the data set: sample i is a whole task."""

    def __init__(self, samples: Reads) -> None:
        self.samples = samples
        self.place: Any = [-1, -1]  # offset of the sample being read, number of the task; -1: none
        self.loader = -1

    def __getitem__(self, numbered: tuple[int, Task]) -> _Parcel:
        number, task = numbered
        self.place[1] = number
        parcel = _Parcel(self.loader, self.samples(task))
        self.place[1] = -1
        return parcel


class _Parcel:
    """What a loader process hands over.

    It is pickled here, not by the queue: that one would print an error, and leave the training process waiting.
    """

    def __init__(self, loader: int, result: Any) -> None:
        self.loader, self.result = loader, result

    def __reduce__(self) -> Any:
        try:
            pickled = bytes(ForkingPickler.dumps(self.result))
        except Exception as error:
            pickled = bytes(ForkingPickler.dumps(Failure("send", None, f"{type(error).__name__}: {error}", None)))
        return _Sealed, (self.loader, pickled)


@dataclass(frozen=True)
class _Sealed:
    """A parcel as it arrives."""

    loader: int
    pickled: bytes

    def open(self) -> Any:
        try:
            return ForkingPickler.loads(self.pickled)
        except (OSError, EOFError) as error:  # from torch's thread it would come as another one
            return _Lost(error)

    def pin_memory(self) -> _Parcel:
        result = self.open()
        return _Parcel(self.loader, result if isinstance(result, _Lost) else pinned(result))


@dataclass(frozen=True)
class _Lost:
    """In place of a result that did not arrive: its shared memory is fetched from the loader process."""

    error: Exception


def _begin(reading: _Reading, places: torch.Tensor, parent: int, dies_with_parent: bool, number: int) -> None:
    """The beginning of a loader process."""
    if dies_with_parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before
            os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the training process closes us
    if _LINUX:
        for ignored in (signal.SIGTERM, signal.SIGUSR1):  # so do these, and it finishes its step first
            signal.signal(ignored, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    reading.loader, reading.place = number, places[number].numpy()
    reading.samples.at = reading.place
    object.__setattr__(get_worker_info(), "dataset", reading.samples.data)  # as users know it
