"""Reading one micro-batch: its samples, each with keyed generators, and what collate makes of them."""

from __future__ import annotations

import dataclasses
import hashlib
import traceback
from collections.abc import Callable, Mapping, MutableSequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from evenstep.errors import DataError, UsageError
from evenstep.train.data.rows import columns, epoch_setter, read_many, reads_many, runs_no_code
from evenstep.train.randomness import kept_generators, key, seed_generators
from evenstep.train.state import encode_tree

Collate = Callable[[list[Any]], Any]


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


@dataclass(frozen=True, slots=True)
class Task:
    """A micro-batch to read, and the indices at its positions."""

    micro_batch: MicroBatch
    indices: list[int]

    def name(self, offset: int) -> str:
        """Its sample number `offset`, for people."""
        m = self.micro_batch
        return f"sample {self.indices[offset]} (position {m.start + offset} of epoch {m.epoch})"

    def __str__(self) -> str:
        m = self.micro_batch
        return f"micro-batch {m.index} of step {m.step} (positions {m.start}..{m.stop - 1} of epoch {m.epoch})"


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong in the user's code. `offset`: which of the samples; None if that is unknown."""

    what: str  # "epoch", "sample", "samples", "collate", or "send": what collate returned does not travel
    offset: int | None
    summary: str
    error: BaseException | None


def check_reading(collate: object, loaders: object) -> None:
    """UsageError for arguments that a reader cannot work with."""
    if type(loaders) is not int or loaders < 0:
        raise UsageError(f"loaders={loaders!r}, expected a number of loader processes, 0 or more")
    if collate is not None and not callable(collate):
        raise UsageError(f"collate={collate!r}, expected a function list of samples -> batch")


class LoaderTraceback(Exception):
    """The traceback of an exception in a loader process, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Samples:
    """Reads a task: samples, then collate. Returns a Failure for what the user's code raises.

    It runs in the training process or in a loader process. `at[0]` is the offset of the sample that is being read, -1
    if it is none; a loader process puts shared memory there, so that its last sample is known if it dies.

    A data set with a method `set_epoch(epoch)` is told the epoch, from 0, before the first sample of it is read, in
    each process that reads. What it does must follow from `epoch` alone: a resumed run begins with a later one. Any
    other change of the data set's attributes, made in the training process after the loader processes have started,
    is not seen by them: they have copies. With `set_epoch=False` the data set is left at the epoch at which it is.
    """

    def __init__(self, data: Any, collate: Collate | None, seed: int, *, set_epoch: bool = True) -> None:
        self.data, self._seed = data, seed
        self._set_epoch = epoch_setter(data) if set_epoch else None
        self._epoch: int | None = None  # the last one that the data set in this process was told
        self.at: MutableSequence[int] = [-1]
        self._collate: Collate = default_collate if collate is None else collate
        self._own_collate = collate is not None
        self._at_once = reads_many(data)
        self._plain = runs_no_code(data)
        self._columns = None if self._own_collate else columns(data)

    @property
    def draws_nothing(self) -> bool:
        """Whether no code of the user's takes part, so that there is nothing to key."""
        return self._plain and not self._own_collate

    def begin_epoch(self, epoch: int) -> None:
        """Tell the data set in this process that `epoch` begins, unless it knows. Raises what its set_epoch raises."""
        if self._set_epoch is not None and epoch != self._epoch:
            with kept_generators():
                seed_generators(key(self._seed, "set_epoch", epoch))
                self._set_epoch(epoch)
            self._epoch = epoch

    def __call__(self, task: Task, keep_error: bool = False) -> Any:
        m = task.micro_batch
        try:
            self.begin_epoch(m.epoch)
        except Exception as error:
            return _ReadFailed("epoch", None, error).failure(keep_error)
        if self._columns is not None:
            chosen = torch.tensor(task.indices)
            return [column[chosen] for column in self._columns]
        try:
            samples = self.read(task)
        except _ReadFailed as failed:
            return failed.failure(keep_error)
        try:
            if self._own_collate:
                seed_generators(key(self._seed, "collate", m.step, m.index))
            return self._collate(samples)
        except Exception as error:
            return _ReadFailed("collate", None, error).failure(keep_error)

    def read(self, task: Task) -> list[Any]:
        """The samples of `task`, not collated. _ReadFailed for what the data set raises."""
        m = task.micro_batch
        if self._at_once:
            try:
                if not self._plain:
                    seed_generators(key(self._seed, "samples", m.epoch, m.start))
                return read_many(self.data, task.indices)
            except Exception as error:
                raise _ReadFailed("samples", self._which(task), error) from error
        samples = []
        for offset, index in enumerate(task.indices):
            self.at[0] = offset
            try:
                if not self._plain:
                    seed_generators(key(self._seed, "sample", m.epoch, m.start + offset))
                samples.append(self.data[index])
            except Exception as error:
                raise _ReadFailed("sample", offset, error) from error
        self.at[0] = -1
        return samples

    def _which(self, task: Task) -> int | None:
        """Which sample it is that `__getitems__` cannot read, if one alone makes it raise."""
        for offset, index in enumerate(task.indices):
            try:
                read_many(self.data, [index])
            except Exception:
                return offset
        return None


class _ReadFailed(Exception):
    def __init__(self, what: str, offset: int | None, error: Exception) -> None:
        self._what, self._offset, self._error = what, offset, error

    def failure(self, keep_error: bool) -> Failure:
        error = self._error
        if error.__traceback__ is not None:
            error = error.with_traceback(error.__traceback__.tb_next)  # from the user's own frame on
        cause: BaseException = error
        if not keep_error:
            cause = LoaderTraceback("".join(traceback.format_exception(error)))
        return Failure(self._what, self._offset, f"{type(error).__name__}: {error}", cause)


def digest(sample: Any) -> str:
    """Of a sample or a batch of any type, as hex; "" for a type unknown."""
    try:
        return hashlib.blake2b(encode_tree(_encodable(sample)), digest_size=16).hexdigest()
    except Exception:
        return ""


def _encodable(nest: Any) -> Any:
    """The values in a sample, in the containers and array types that `encode_tree` knows."""
    if isinstance(nest, torch.Tensor):
        return nest.detach().as_subclass(torch.Tensor)
    if isinstance(nest, Mapping):
        return {name: _encodable(value) for name, value in nest.items()}
    if isinstance(nest, (list, tuple)):
        return [_encodable(value) for value in nest]
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return [_encodable(getattr(nest, field.name)) for field in dataclasses.fields(nest)]
    if hasattr(nest, "__array_interface__") and not isinstance(nest, np.generic):
        return np.asarray(nest)  # a picture of PIL's, too
    return nest


def data_error(failure: Failure, task: Task, where: str) -> DataError:
    """What to tell the user. `where`: the rank, and the process on it."""
    if failure.what == "epoch":
        return epoch_error(task.micro_batch.epoch, where, failure.summary)
    if failure.what == "collate":
        return DataError(
            f"collate failed for {task}, samples {_short(task.indices)}, {where}: {failure.summary}",
            do="samples of different sizes need a collate= that pads them"
            if "stack expects" in failure.summary or "equal size" in failure.summary
            else "the traceback above is from the collate function",
        )
    if failure.what == "send":
        return DataError(
            f"what collate= returned for {task} {where}, cannot be sent to the training process: {failure.summary}",
            do="return tensors, numbers, texts, or dicts, lists and tuples of them, or give loaders=0",
        )
    name = f"samples {_short(task.indices)} ({task})" if failure.offset is None else task.name(failure.offset)
    return DataError(
        f"{name} could not be read {where}: {failure.summary}",
        do="the traceback above is from the data set's own code; mend the sample, or leave it out with order=",
    )


def epoch_error(epoch: int, where: str, summary: str) -> DataError:
    """What to tell the user when set_epoch raises. `where`: the rank, and the process on it."""
    return DataError(
        f"set_epoch({epoch}) of the data set failed {where}: {summary}",
        do="the traceback above is from the data set's own code; set_epoch takes one number, the epoch from 0",
    )


def _short(indices: list[int]) -> str:
    return str(indices) if len(indices) <= 8 else f"[{', '.join(map(str, indices[:8]))}, ...]"
