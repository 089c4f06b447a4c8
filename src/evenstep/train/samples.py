"""Reading one micro-batch: its samples, each with keyed generators, and what collate makes of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from evenstep.errors import DataError
from evenstep.train.randomness import key, seed_generators

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

    what: str  # "sample", "samples", "collate", or "send": what collate returned does not travel between processes
    offset: int | None
    summary: str
    error: BaseException | None


class LoaderTraceback(Exception):
    """The traceback of an exception in a loader process, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Samples:
    """Reads a task: samples, then collate. Returns a Failure for what the user's code raises.

    It runs in the training process or in a loader process. `at[0]` is the offset of the sample that is being read, -1
    if it is none; a loader process puts shared memory there, so that its last sample is known if it dies.
    """

    def __init__(self, data: Any, collate: Collate | None, seed: int) -> None:
        self.data, self._seed = data, seed
        self.at: MutableSequence[int] = [-1]
        self._collate: Collate = default_collate if collate is None else collate
        self._own_collate = collate is not None
        self._at_once = _reads_many(data)
        self._plain = _is_plain(data)
        self._columns = None if self._own_collate else _columns(data)

    @property
    def draws_nothing(self) -> bool:
        """Whether no code of the user's takes part, so that there is nothing to key."""
        return self._plain and not self._own_collate

    def __call__(self, task: Task, keep_error: bool = False) -> Any:
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

    def _samples(self, task: Task) -> list[Any]:
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
                self.data.__getitems__([index])
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


def data_error(failure: Failure, task: Task, where: str) -> DataError:
    """What to tell the user. `where`: the rank, and the process on it."""
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
