"""What a run reads: the user's data set, checked, and the order of its samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from evenstep.errors import UsageError
from evenstep.plan.order import Indices, Natural, Order, Shuffled, fixed, weighted
from evenstep.train.randomness import kept_generators, key, seed_generators


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

    It is called with keyed generators, so that torch.randperm in it gives the same on every process. UsageError if it
    gives another order when it is asked again: a resumed run would go through other samples.
    """

    def __init__(self, function: Callable[[int], object], samples: int, seed: int) -> None:
        self._function, self._samples, self._seed = function, samples, seed
        self._current = 0, self._read(0)
        self.length = len(self._current[1])
        if not np.array_equal(self._current[1], self._read(0)):
            raise UsageError(
                "order(0) gave two different orders: the function draws from a generator of its own, or keeps a state, "
                "so a resumed run would go through other samples",
                do="let it follow from the epoch alone: torch.randperm(n), which evenstep keys, or "
                "numpy.random.default_rng(epoch).permutation(n)",
            )

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
