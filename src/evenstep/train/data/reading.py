"""Reading a data set: the same samples with the same random numbers, whoever reads them.

A sample's randomness is keyed by its position in the epoch, a collate call's by its micro-batch. So neither the layout
nor the number of loader processes shows in what comes out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from evenstep.plan.grid import Grid
from evenstep.plan.order import Order
from evenstep.plan.schedule import Schedule
from evenstep.train.batch import pinned
from evenstep.train.data.loading import LoaderGone, Loading
from evenstep.train.data.samples import (
    Collate,
    Failure,
    MicroBatch,
    Samples,
    Task,
    check_reading,
    data_error,
    epoch_error,
)
from evenstep.train.randomness import kept_generators

_WINDOW = 2048  # positions whose indices are computed at a time: most of the cost of a few of them is the call


def shares(schedule: Schedule, grid: Grid, rank: int, first_step: int = 0) -> Iterator[MicroBatch]:
    """The micro-batches that `rank` reads, from step `first_step` to the end."""
    for number in range(first_step, len(schedule)):
        step = schedule.step(number)
        for index in grid.leaves(step.micro_batches, rank):
            yield MicroBatch(number, step.epoch, index, *step.micro(index))


class Reader:
    """An iterator of (micro-batch, what collate made of its samples), in the order of `micro_batches`.

    With `loaders` processes reading `prefetch` micro-batches ahead each; with 0 it reads when asked, and the
    generators of torch, numpy and random do not show it. It goes on across epochs. Close it when leaving early.
    What goes wrong is raised again at every later read.

    A data set with a method `set_epoch(epoch)` is told each epoch before a sample of it is read, in the training
    process and in each loader process, whose copies see no other change that the script makes in its loop. With
    `set_epoch=False` (an evaluation amid the training) it stays at the epoch at which the training process has it.

    A loader process that is waited for is named to `say` (by default on standard error) after 30 s, 60 s, 120 s, and so
    on, with the sample that it reads. DataError if it has come no further for 10 minutes.
    """

    def __init__(
        self,
        data: Any,
        order: Order,
        micro_batches: Iterable[MicroBatch],
        *,
        seed: int,
        rank: int = 0,
        collate: Collate | None = None,
        loaders: int = 0,
        pin: bool = False,
        prefetch: int = 2,
        set_epoch: bool = True,
        say: Callable[[str], None] | None = None,
    ) -> None:
        check_reading(collate, loaders)
        self._samples = Samples(data, collate, seed, set_epoch=set_epoch)
        self._tasks: Iterator[Task] = _tasks(order, micro_batches)
        self._rank, self._seed, self._pin = rank, seed, pin
        self._count, self._prefetch = loaders, prefetch
        self._loading: Loading | None = None
        self._say = say or say_on_stderr
        self._error: Exception | None = None  # what ended the reading

    def __iter__(self) -> Iterator[tuple[MicroBatch, Any]]:
        return self

    def __next__(self) -> tuple[MicroBatch, Any]:
        if self._error is not None:  # a script that caught it, and reads on, must not take it for the end of the data
            raise self._error.with_traceback(None)
        try:
            return self._next()
        except StopIteration:
            raise
        except Exception as error:
            self._error = error
            self.close()
            raise

    def begin_epoch(self, epoch: int) -> None:
        """Tell the data set in this process that `epoch` begins, if it has a `set_epoch` and has not been told.

        Reading does it by itself; this is for a process that reads nothing at the beginning of an epoch.
        """
        try:
            self._samples.begin_epoch(epoch)
        except Exception as error:
            where = f"on rank {self._rank}, in the training process"
            raise epoch_error(epoch, where, f"{type(error).__name__}: {error}") from error

    def _next(self) -> tuple[MicroBatch, Any]:
        task, read, where = self._read_here() if self._count == 0 else self._read_ahead()
        if isinstance(read, Failure):
            raise data_error(read, task, f"on rank {self._rank}, {where}") from read.error
        if self._count:  # the loop's body, and an evaluation in it, find the data set as without loader processes
            self.begin_epoch(task.micro_batch.epoch)
        return task.micro_batch, read

    def _read_here(self) -> tuple[Task, Any, str]:
        task = next(self._tasks)
        if self._samples.draws_nothing:
            read = self._samples(task, keep_error=True)
        else:
            with kept_generators():
                read = self._samples(task, keep_error=True)
        return task, pinned(read) if self._pin else read, "in the training process"

    def _read_ahead(self) -> tuple[Task, Any, str]:
        try:
            if self._loading is None:
                self._loading = Loading(
                    self._samples,
                    self._tasks,
                    count=self._count,
                    prefetch=self._prefetch,
                    pin=self._pin,
                    seed=self._seed,
                    say=partial(say_of_rank, self._say, self._rank),  # not this object: it would keep itself alive
                )
            task, loader, read = next(self._loading)
        except StopIteration:
            self.close()
            raise
        except LoaderGone as gone:
            raise gone.told(self._rank, "leave it out with order=") from None
        return task, read, f"in loader process {loader}"

    def close(self) -> None:
        """End and join the loader processes. Nothing more can be read."""
        self._tasks = iter(())
        if self._loading is not None:
            loading, self._loading = self._loading, None
            loading.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_loading", None) is not None:
            self.close()


def say_on_stderr(line: str) -> None:
    print(f"evenstep: {line}", file=sys.stderr, flush=True)


def say_of_rank(say: Callable[[str], None], rank: int, line: str) -> None:
    """`line` of process `rank`."""
    say(f"rank {rank} {line}")


def _tasks(order: Order, micro_batches: Iterable[MicroBatch]) -> Iterator[Task]:
    epoch, start, indices = -1, 0, np.empty(0, np.int64)  # a window of the order
    for m in micro_batches:
        if m.epoch != epoch or m.start < start or m.stop > start + len(indices):
            epoch, start = m.epoch, m.start
            indices = order.indices(epoch, start, min(max(m.stop, start + _WINDOW), order.length))
        yield Task(m, indices[m.start - start : m.stop - start].tolist())
