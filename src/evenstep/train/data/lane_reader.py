"""Reading the lanes of a stream that are this process's, here or in loader processes, a micro-batch at a time."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info

from evenstep.errors import DataError, EvenstepError, UsageError
from evenstep.plan.lanes import Lanes
from evenstep.train.batch import pinned
from evenstep.train.data.lane import Again, Lane, Mark
from evenstep.train.data.loading import LoaderGone, Loading
from evenstep.train.data.reading import say_of_rank, say_on_stderr
from evenstep.train.data.samples import Collate, Failure, LoaderTraceback, check_reading
from evenstep.train.data.stream import Stream
from evenstep.train.randomness import kept_generators, key, seed_generators


@dataclass(frozen=True, slots=True)
class LaneTask:
    """The samples that a step takes of a lane, from number `start` of the epoch on. `lane` is -1 where there is nothing
    to do: then it keeps the lanes of a loader process with it."""

    lane: int
    epoch: int
    turn: int
    start: int

    def name(self, offset: int) -> str:
        """What is being read, for people: its sample number `offset`; -2, -3, ...: record 0, 1, ... of the lane."""
        if offset < -1:
            return f"record {-2 - offset} of lane {self.lane} (epoch {self.epoch})"
        return str(self) if offset < 0 else f"sample {self.start + offset} of lane {self.lane} (epoch {self.epoch})"

    def __str__(self) -> str:
        return f"lane {self.lane} from sample {self.start} of epoch {self.epoch} on"


@dataclass(frozen=True)
class Found:
    """What was found of a task: how many samples, whether more come after them, where the block begins that the lane is
    in, what it took to come here, and with the first samples of a lane its beginning."""

    size: int
    more: bool
    mark: Mark | None = None
    again: Again | None = None
    beginning: Mark | None = None


@dataclass(frozen=True)
class LaneFailed:
    """What went wrong in a lane: an error of evenstep's, or one of the user's code."""

    message: str
    do: str | None
    usage: bool
    error: BaseException | None


class LaneSamples:
    """Reads a task of a lane: (Found, batch). Keeps the lanes that it has begun; LaneFailed for what goes wrong.

    It runs in the training process or in a loader process. `at[0]` is the offset of the sample that is being made,
    or -2 - n while record n of the lane is read.
    """

    def __init__(
        self,
        stream: Stream,
        lanes: Lanes,
        *,
        seed: int,
        shuffle: bool,
        collate: Collate | None,
        marks: Mapping[int, Mark],
        epoch: int,
        ended: Sequence[int],
    ) -> None:
        """`marks` and `ended` (lanes that have ended) are of `epoch`."""
        check_reading(collate, 0)
        self.data, self._lanes, self._seed, self._shuffle = stream, lanes, seed, shuffle
        self._collate: Collate = default_collate if collate is None else collate
        self._own_collate = collate is not None
        self._marks, self._marked = marks, epoch
        self._ended = dict.fromkeys(ended, epoch)  # lane -> the last epoch of which it has been read to the end
        self._open: dict[int, tuple[int, Lane]] = {}
        self.at: MutableSequence[int] = [-1]

    @property
    def draws_nothing(self) -> bool:
        """Whether no code of the user's takes part, so that there is nothing to key."""
        return self.data.source.draws_nothing and self.data.transform is None and not self._own_collate

    def __call__(self, task: LaneTask, keep_error: bool = False) -> Any:
        if task.lane < 0 or self._ended.get(task.lane, -1) >= task.epoch:
            return Found(0, False), None
        no_worker()
        try:
            return self._read(task)
        except EvenstepError as error:
            return failed_with(error)
        except Exception as error:
            return failed(error, task, self.at[0], keep_error)

    def _read(self, task: LaneTask) -> tuple[Found, Any]:
        lane = self._lane(task)
        samples: list[Any] = []
        self.at[0] = 0
        for sample in lane.take(self._lanes.size(task.lane)):
            samples.append(sample)
            self.at[0] = len(samples)
        more = lane.more()
        self.at[0] = -1
        again, lane.again = lane.again, None
        found = Found(len(samples), more, lane.mark, again, None if task.start else lane.beginning)
        if not more:
            self._ended[task.lane] = task.epoch
            self._close(task.lane)
        if not samples:
            return found, None
        if self._own_collate:
            seed_generators(key(self._seed, "collate", task.epoch, task.turn, task.lane))
        try:
            return found, self._collate(samples)
        except Exception as error:
            raise CollateFailed(error) from error

    def close(self) -> None:
        """Close what is open."""
        for number in list(self._open):
            self._close(number)

    def _close(self, number: int) -> None:
        _, lane = self._open.pop(number, (0, None))
        if lane is not None:
            lane.close()

    def _lane(self, task: LaneTask) -> Lane:
        epoch, lane = self._open.get(task.lane, (-1, None))
        if lane is None or epoch != task.epoch or lane.position != task.start:
            self._close(task.lane)
            self.at[0] = -1
            mark = self._marks.get(task.lane) if task.epoch == self._marked else None
            lane = Lane(
                self.data,
                task.lane,
                self._lanes.count,
                task.epoch,
                seed=self._seed,
                shuffle=self._shuffle,
                start=task.start,
                mark=mark,
                at=self.at,
            )
            self._open[task.lane] = task.epoch, lane
        return lane


def no_worker() -> None:
    """A loader process reads whole lanes: what would read a part of a stream in each must not know of it."""
    if get_worker_info() is not None:
        torch.utils.data._utils.worker._worker_info = None


class CollateFailed(Exception):
    """What collate raised is its argument."""


def failed_with(error: EvenstepError) -> LaneFailed:
    """What is told of an error of evenstep's."""
    return LaneFailed(error.message, error.do, isinstance(error, UsageError), None)


def refuse_failed(read: Any, where: str) -> Any:
    """What was read; raises where it is LaneFailed."""
    if isinstance(read, LaneFailed):
        raised = UsageError if read.usage else DataError
        raise raised(f"{read.message} ({where})", do=read.do) from read.error
    return read


def failed(error: Exception, task: LaneTask, offset: int, keep_error: bool) -> LaneFailed:
    """What is told of an error of the user's code; `offset` as `LaneSamples.at`."""
    what = "could not be read"
    do = "the traceback above is from the stream's own code; mend the record, or leave it out there"
    if isinstance(error, CollateFailed):
        error, what = error.args[0], "could not be collated"
        do = "the traceback above is from the collate function"
    if error.__traceback__ is not None:
        error = error.with_traceback(error.__traceback__.tb_next)  # from the user's own frame on
    where = task.name(offset)
    cause: BaseException = error
    if not keep_error:
        cause = LoaderTraceback("".join(traceback.format_exception(error)))
    if "stack expects" in str(error) or "equal size" in str(error):
        do = "samples of different sizes need a collate= that pads them"
    return LaneFailed(f"{where} {what}: {type(error).__name__}: {error}", do, False, cause)


class LaneReader:
    """Reads lanes `mine`, a turn at a time; with `loaders` processes, among which the lanes are shared out, some turns
    ahead. Their number changes nothing of what is read."""

    def __init__(
        self,
        samples: LaneSamples,
        lanes: Lanes,
        mine: Sequence[int],
        *,
        seed: int,
        rank: int,
        loaders: int = 0,
        pin: bool = False,
        prefetch: int = 2,
        say: Callable[[str], None] | None = None,
    ) -> None:
        check_reading(None, loaders)
        self._samples, self._lanes, self._mine = samples, lanes, mine
        self._seed, self._rank, self._pin, self._prefetch = seed, rank, pin, prefetch
        self._count = min(loaders, len(mine))
        self._say = say or say_on_stderr
        self._loading: Loading | None = None
        self._now = (0, 0)  # epoch and turn from which on loader processes read
        self._error: Exception | None = None

    def read(self, epoch: int, turn: int) -> dict[int, tuple[Found, Any]]:
        """What a step takes of each lane. Turns are read in order; after any of them, another epoch from its first."""
        if self._error is not None:  # a script that caught it, and goes on
            raise self._error.with_traceback(None)
        try:
            return self._read(epoch, turn) if self._count == 0 else self._read_ahead(epoch, turn)
        except Exception as error:
            self._error = error
            self.close()
            raise

    def _read(self, epoch: int, turn: int) -> dict[int, tuple[Found, Any]]:
        if self._samples.draws_nothing:
            return {lane: self._one(lane, epoch, turn) for lane in self._mine}
        with kept_generators():
            return {lane: self._one(lane, epoch, turn) for lane in self._mine}

    def _one(self, lane: int, epoch: int, turn: int) -> tuple[Found, Any]:
        found, batch = self._checked(self._samples(self._task(lane, epoch, turn), keep_error=True), "")
        return found, pinned(batch) if self._pin else batch

    def _read_ahead(self, epoch: int, turn: int) -> dict[int, tuple[Found, Any]]:
        self._now = epoch, turn
        found: dict[int, tuple[Found, Any]] = {}
        try:
            if self._loading is None:
                self._loading = Loading(
                    self._samples,
                    self._tasks(),
                    count=self._count,
                    prefetch=self._prefetch,
                    pin=self._pin,
                    seed=self._seed,
                    say=partial(say_of_rank, self._say, self._rank),  # not this object: it would keep itself alive
                )
            left = len(self._padded())
            while left:
                task, loader, read = next(self._loading)
                if task.epoch != epoch:
                    continue  # asked for before the epoch was known to be over
                left -= 1
                if task.lane >= 0:
                    found[task.lane] = self._checked(read, f", loader process {loader}")
        except LoaderGone as gone:
            raise gone.told(self._rank, "leave it out in make(lane, lanes, epoch)") from None
        return found

    def _checked(self, read: Any, where: str) -> tuple[Found, Any]:
        where = f"on rank {self._rank}{where}"
        if isinstance(read, Failure):
            raise DataError(
                f"what collate= returned {where}, cannot be sent to the training process: {read.summary}",
                do="return tensors, numbers, texts, or dicts, lists and tuples of them, or give loaders=0",
            )
        found, batch = refuse_failed(read, where)
        return found, batch

    def _task(self, lane: int, epoch: int, turn: int) -> LaneTask:
        return LaneTask(lane, epoch, turn, turn * self._lanes.size(lane) if lane >= 0 else 0)

    def _padded(self) -> list[int]:
        """The lanes in the order in which loader processes take turns, so that each lane stays with one of them."""
        return [*self._mine, *[-1] * (-len(self._mine) % self._count)]

    def _tasks(self) -> Iterator[LaneTask]:
        epoch, turn = self._now
        while True:
            for lane in self._padded():
                yield self._task(lane, epoch, turn)
            turn += 1
            if self._now[0] != epoch:
                epoch, turn = self._now[0], 0

    def close(self) -> None:
        """End and join the loader processes, or close what is open here."""
        self._samples.close()
        if self._loading is not None:
            loading, self._loading = self._loading, None
            loading.close()

    def __del__(self) -> None:
        if getattr(self, "_loading", None) is not None:
            self.close()
