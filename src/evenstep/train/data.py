"""Reading a data set: the same samples with the same random numbers, whoever reads them.

A sample's randomness is keyed by its position in the epoch, a collate call's by its micro-batch. So neither the layout
nor the number of loader processes shows in what comes out.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from evenstep.errors import DataError, UsageError
from evenstep.plan.order import Indices, Natural, Order, Shuffled, fixed, weighted
from evenstep.plan.schedule import Schedule
from evenstep.plan.tree import share
from evenstep.train.batch import pinned, split_batch, to_device
from evenstep.train.loaders import CannotSend, LoaderGone, Loaders
from evenstep.train.randomness import kept_generators, key, seed_generators

__all__ = ["MicroBatch", "Reader", "checked_dataset", "choose_order", "shares", "split_batch", "to_device"]

Collate = Callable[[list[Any]], Any]

_WINDOW = 2048  # positions whose indices are computed at a time: most of the cost of a few of them is the call


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Micro-batch `index` of step `step`: the positions [start, stop) of `epoch`."""

    step: int
    epoch: int
    index: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many samples it has."""
        return self.stop - self.start


def shares(schedule: Schedule, world_size: int, rank: int, first_step: int = 0) -> Iterator[MicroBatch]:
    """The micro-batches that `rank` computes, from step `first_step` to the end."""
    for number in range(first_step, len(schedule)):
        step = schedule.step(number)
        for index in share(step.micro_batches, world_size, rank):
            yield MicroBatch(number, step.epoch, index, *step.micro(index))


def checked_dataset(data: Any, name: str = "data") -> Any:
    """`data` if it has a length and samples 0..len-1; else a UsageError that says what to give instead."""
    if isinstance(data, DataLoader):
        raise UsageError(
            f"{name} is a DataLoader; evenstep reads the data set itself, so that order and randomness are keyed",
            do="give loader.dataset; its collate_fn becomes collate=, num_workers loaders=, and a sampler order=",
        )
    if isinstance(data, IterableDataset):
        raise UsageError(
            f"{name} is an IterableDataset ({type(data).__name__}): a stream has no length and no sample number i",
            do="give a data set with __len__ and __getitem__; write the stream to files or a list once, and index them",
        )
    if isinstance(data, tuple) and data and all(_is_array(part) for part in data):
        raise UsageError(
            f"{name} is a tuple of {len(data)} tensors, which would be a data set of {len(data)} samples",
            do="give torch.utils.data.TensorDataset(*tensors)",
        )
    if isinstance(data, dict):
        raise UsageError(
            f"{name} is a dict with the keys {list(data)[:4]}, expected samples numbered 0..len-1",
            do="give a list of samples, or torch.utils.data.TensorDataset(*tensors) for columns of tensors",
        )
    if isinstance(data, (str, bytes, os.PathLike)):
        raise UsageError(f"{name} is {data!r}, expected a data set", do="open it first: a list of samples is enough")
    if hasattr(data, "iloc"):
        raise UsageError(
            f"{name} is a {type(data).__name__}, which is indexed by column, expected samples numbered 0..len-1",
            do='give frame.to_dict("records"), or a data set whose __getitem__ reads frame.iloc[index]',
        )
    try:
        length = len(data)
    except (TypeError, NotImplementedError) as error:
        raise UsageError(
            f"{name} ({type(data).__name__}) has no length; steps, epochs and shuffling need to know it",
            do="give it a __len__, or list(data) if it is small; write a stream to files once, and index them",
        ) from error
    if not hasattr(data, "__getitem__") and not hasattr(data, "__getitems__"):
        raise UsageError(
            f"{name} ({type(data).__name__}) cannot be indexed: it has no __getitem__",
            do="give it a __getitem__(index) that returns sample `index`, or list(data) if it is small",
        )
    if length == 0:
        raise UsageError(f"{name} is empty", do="check its path and its filters; len(data) must be at least 1")
    return data


def _is_array(part: object) -> bool:
    return isinstance(part, (torch.Tensor, np.ndarray)) and part.ndim > 0


class PerEpoch:
    """An order from the user's function epoch -> indices, each epoch of the same length.

    It is called with keyed generators, so that torch.randperm in it gives the same on every process.
    """

    def __init__(self, function: Callable[[int], object], samples: int, seed: int) -> None:
        self._function, self._samples, self._seed = function, samples, seed
        self._current = -1, self._read(0)
        self.length = len(self._current[1])

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        if self._current[0] != epoch:
            sequence = self._read(epoch)
            if len(sequence) != self.length:
                raise UsageError(
                    f"order({epoch}) has {len(sequence)} indices, but order(0) has {self.length}",
                    do="give every epoch the same number of indices, so that the number of steps is known",
                )
            self._current = epoch, sequence
        return self._current[1][start:stop]

    def _read(self, epoch: int) -> Indices:
        with kept_generators():
            seed_generators(key(self._seed, "order", epoch))
            return fixed(_listed(self._function(epoch), f"order({epoch})"), self._samples, f"order({epoch})").sequence


def choose_order(data: Any, *, seed: int, shuffle: bool = True, order: object = None, weights: object = None) -> Order:
    """The order that the arguments of `run.steps` ask for.

    `order` is a sequence of indices (list, array, tensor, or a sized iterable such as a torch Sampler, read once) or a
    function epoch -> such a sequence. `weights` draws with replacement. Else the data set is shuffled, or not.
    """
    samples = len(data)
    if order is not None and weights is not None:
        raise UsageError("got both order= and weights=, expected one of them", do="leave one of them out")
    if weights is not None:
        return weighted(_listed(weights, "weights="), samples, seed)
    if order is None:
        return Shuffled(samples, seed) if shuffle else Natural(samples)
    if callable(order) and not hasattr(order, "__iter__"):
        return PerEpoch(order, samples, seed)
    with kept_generators():
        seed_generators(key(seed, "order"))
        return fixed(_listed(order, "order="), samples)


def _listed(sequence: object, name: str) -> object:
    """`sequence` as something that numpy understands."""
    if isinstance(sequence, torch.Tensor):
        return sequence.detach().cpu().numpy()
    if isinstance(sequence, (list, tuple, range, np.ndarray)):
        return sequence
    if isinstance(sequence, Iterable) and hasattr(sequence, "__len__"):
        return list(sequence)
    raise UsageError(
        f"{name} is {type(sequence).__name__}, expected a sequence with a length",
        do="give a list, array, tensor, or a function epoch -> list",
    )


class Reader:
    """An iterator of (micro-batch, what collate made of its samples), in the order of `micro_batches`.

    With `loaders` processes reading `prefetch` micro-batches ahead each; with 0 it reads when asked, and the
    generators of torch, numpy and random do not show it. It goes on across epochs. Close it when leaving early.
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
    ) -> None:
        if type(loaders) is not int or loaders < 0:
            raise UsageError(f"loaders={loaders!r}, expected a number of loader processes, 0 or more")
        if collate is not None and not callable(collate):
            raise UsageError(f"collate={collate!r}, expected a function list of samples -> batch")
        self._work = _Work(data, collate, seed)
        self._order = order
        self._micro_batches = iter(micro_batches)
        self._rank, self._pin = rank, pin
        self._count, self._ahead = loaders, loaders * prefetch
        self._loaders: Loaders | None = None
        self._asked: list[_Task] = []
        self._window: tuple[int, int, Indices] = (-1, 0, np.empty(0, np.int64))

    def __iter__(self) -> Iterator[tuple[MicroBatch, Any]]:
        return self

    def __next__(self) -> tuple[MicroBatch, Any]:
        task, read, where = self._read_here() if self._count == 0 else self._read_ahead()
        if isinstance(read, _Failure):
            self.close()
            raise _data_error(read, task, f"on rank {self._rank}, {where}") from read.error
        return task.micro_batch, pinned(read) if self._pin else read

    def _read_here(self) -> tuple[_Task, Any, str]:
        task = self._task(next(self._micro_batches))
        if self._work.draws_nothing:
            return task, self._work(task, keep_error=True), "in the training process"
        with kept_generators():
            return task, self._work(task, keep_error=True), "in the training process"

    def _read_ahead(self) -> tuple[_Task, Any, str]:
        if self._loaders is None:
            self._loaders = Loaders(self._work, self._count, self._work.data)
        while self._loaders.waiting < self._ahead:
            micro_batch = next(self._micro_batches, None)
            if micro_batch is None:
                break
            task = self._task(micro_batch)
            self._asked.append(task)
            self._loaders.ask(task)
        if not self._asked:
            self.close()
            raise StopIteration
        task = self._asked.pop(0)
        try:
            loader, read = self._loaders.take()
        except LoaderGone as error:
            self.close()
            raise DataError(
                f"{error} on rank {self._rank}, before it handed over {task}",
                do="if it was killed, look for too little memory and give fewer loaders=; else try loaders=0",
            ) from None
        except CannotSend as error:
            self.close()
            raise DataError(
                f"what collate= returned for {task} cannot be sent from a loader process: {error}",
                do="return tensors, numbers, texts, or dicts, lists and tuples of them, or give loaders=0",
            ) from None
        return task, read, f"in loader process {loader}"

    def _task(self, micro_batch: MicroBatch) -> _Task:
        epoch, start, indices = self._window
        first, last = micro_batch.start - start, micro_batch.stop - start
        if epoch != micro_batch.epoch or first < 0 or last > len(indices):
            start = micro_batch.start
            stop = min(max(micro_batch.stop, start + _WINDOW), self._order.length)
            indices = self._order.indices(micro_batch.epoch, start, stop)
            self._window = micro_batch.epoch, start, indices
            first, last = 0, micro_batch.size
        return _Task(micro_batch, indices[first:last].tolist())

    def close(self) -> None:
        """End and join the loader processes. Nothing more can be read."""
        if self._loaders is not None:
            self._loaders.close()
            self._loaders = None
        self._micro_batches = iter(())
        self._asked.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_loaders", None) is not None:
            self.close()


@dataclass(frozen=True, slots=True)
class _Task:
    """A micro-batch to read, and the indices at its positions."""

    micro_batch: MicroBatch
    indices: list[int]

    def __str__(self) -> str:
        m = self.micro_batch
        return f"micro-batch {m.index} of step {m.step} (positions {m.start}..{m.stop - 1} of epoch {m.epoch})"


@dataclass(frozen=True, slots=True)
class _Failure:
    """What the user's data set or collate function raised. `offset`: which of the samples; None if that is unknown."""

    what: str  # "sample", "samples" or "collate"
    offset: int | None
    summary: str
    error: BaseException | None


class LoaderTraceback(Exception):
    """The traceback of an exception in a loader process, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class _Work:
    """Reads a task: samples, then collate. Never raises; runs in the training process or in a loader process."""

    def __init__(self, data: Any, collate: Collate | None, seed: int) -> None:
        self.data, self._seed = data, seed
        self._collate: Collate = default_collate if collate is None else collate
        self._own_collate = collate is not None
        self._at_once = _reads_many(data)
        self._plain = _is_plain(data)
        self._columns = None if self._own_collate else _columns(data)

    @property
    def draws_nothing(self) -> bool:
        """Whether no code of the user's takes part, so that there is nothing to key."""
        return self._plain and not self._own_collate

    def __call__(self, task: _Task, keep_error: bool = False) -> Any:
        m = task.micro_batch
        if self._columns is not None:
            chosen = torch.tensor(task.indices)
            return [column[chosen] for column in self._columns]
        try:
            samples = self._samples(task)
        except _ReadFailed as failed:
            return failed.failure(keep_error)
        try:
            if self._own_collate:
                seed_generators(key(self._seed, "collate", m.step, m.index))
            return self._collate(samples)
        except Exception as error:
            return _ReadFailed("collate", None, error).failure(keep_error)

    def _samples(self, task: _Task) -> list[Any]:
        m = task.micro_batch
        if self._at_once:
            try:
                seed_generators(key(self._seed, "samples", m.epoch, m.start))
                samples = self.data.__getitems__(task.indices)
            except Exception as error:
                raise _ReadFailed("samples", self._which(task), error) from error
            if len(samples) != len(task.indices):
                wrong = ValueError(f"__getitems__ returned {len(samples)} samples for {len(task.indices)} indices")
                raise _ReadFailed("samples", None, wrong)
            return list(samples)
        samples = []
        for offset, index in enumerate(task.indices):
            try:
                if not self._plain:
                    seed_generators(key(self._seed, "sample", m.epoch, m.start + offset))
                samples.append(self.data[index])
            except Exception as error:
                raise _ReadFailed("sample", offset, error) from error
        return samples

    def _which(self, task: _Task) -> int | None:
        """Which sample it is that `__getitems__` cannot read, if one alone makes it raise."""
        for offset, index in enumerate(task.indices):
            try:
                self.data.__getitems__([index])
            except Exception:
                return offset
        return None


class _ReadFailed(Exception):
    def __init__(self, what: str, offset: int | None, error: Exception) -> None:
        self._what, self._offset, self._error = what, offset, error

    def failure(self, keep_error: bool) -> _Failure:
        error = self._error
        if error.__traceback__ is not None:
            error = error.with_traceback(error.__traceback__.tb_next)  # from the user's own frame on
        cause: BaseException = error
        if not keep_error:
            cause = LoaderTraceback("".join(traceback.format_exception(error)))
        return _Failure(self._what, self._offset, f"{type(error).__name__}: {error}", cause)


def _data_error(failure: _Failure, task: _Task, where: str) -> DataError:
    if failure.what == "collate":
        return DataError(
            f"collate failed for {task}, samples {_short(task.indices)}, {where}: {failure.summary}",
            do="samples of different sizes need a collate= that pads them"
            if "stack expects" in failure.summary or "equal size" in failure.summary
            else "the traceback above is from the collate function",
        )
    if failure.offset is None:
        name = f"samples {_short(task.indices)} ({task})"
    else:
        position = task.micro_batch.start + failure.offset
        name = f"sample {task.indices[failure.offset]} (position {position} of epoch {task.micro_batch.epoch})"
    return DataError(
        f"{name} could not be read {where}: {failure.summary}",
        do="the traceback above is from the data set's own code; mend the sample, or leave it out with order=",
    )


def _short(indices: list[int]) -> str:
    return str(indices) if len(indices) <= 8 else f"[{', '.join(map(str, indices[:8]))}, ...]"


def _reads_many(data: Any) -> bool:
    """Whether `data` has a `__getitems__` of its own; a Subset has one only if what it is a subset of has one."""
    while isinstance(data, Subset):
        if type(data).__getitems__ is not Subset.__getitems__:
            return True
        data = data.dataset
    return callable(getattr(data, "__getitems__", None))


def _is_plain(data: Any) -> bool:
    """Whether reading a sample runs no code but torch's and numpy's, and so draws nothing."""
    while type(data) is Subset:
        data = data.dataset
    return type(data) in (TensorDataset, torch.Tensor, np.ndarray, list, tuple, range)


def _columns(data: Any) -> tuple[torch.Tensor, ...] | None:
    """The tensors whose rows are the samples of `data`, if all that is left to do is to take rows of them."""
    if type(data) is not TensorDataset:
        return None
    tensors: tuple[torch.Tensor, ...] = data.tensors
    return tensors if all(t.layout == torch.strided and t.is_contiguous() for t in tensors) else None
