"""What a run reads: the user's data set, checked."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from evenstep.errors import UsageError
from evenstep.train.data.samplers import instead_of, instead_of_loader


def checked_dataset(data: Any, name: str = "data") -> Any:
    """`data` if it has a length and samples 0..len-1; else a UsageError that says what to give instead."""
    if isinstance(data, DataLoader):
        raise UsageError(
            f"{name} is a DataLoader; evenstep reads the data set itself, so that order and randomness are keyed",
            do=instead_of_loader(data),
        )
    if isinstance(data, Sampler):
        raise UsageError(
            f"{name} is a {type(data).__name__}, which says in what order samples are read, expected the data set",
            do=f"give the data set, and for the {type(data).__name__}: {instead_of(data)}",
        )
    if isinstance(data, IterableDataset):
        raise UsageError(
            f"{name} is an IterableDataset ({type(data).__name__}): a stream has no length and no sample number i",
            do="give evenstep.stream(make), where make(lane, lanes, epoch) returns an iterator over a part of it, or "
            "evenstep.stream(data) for an IterableDataset of Hugging Face; or a data set with __len__ and __getitem__",
        )
    if isinstance(data, tuple) and data and all(_is_array(part) for part in data):
        raise UsageError(
            f"{name} is a tuple of {len(data)} arrays, which would be a data set of {len(data)} samples",
            do="give torch.utils.data.TensorDataset(*tensors), or StackDataset(*arrays) for arrays of numpy",
        )
    if isinstance(data, dict):
        parts = [name for name, part in data.items() if hasattr(part, "__getitems__")]
        if parts:  # Hugging Face's DatasetDict
            raise UsageError(
                f"{name} is a {type(data).__name__} of the data sets {parts}, expected one of them",
                do=f"give {name}[{parts[0]!r}]",
            )
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
    if isinstance(data, Iterator) or inspect.isroutine(data):
        raise UsageError(
            f"{name} is a {type(data).__name__}, expected a data set: it has no length and no sample number i",
            do="give evenstep.stream(make), where make(lane, lanes, epoch) returns an iterator over the records of one "
            "lane; or list(data) if it is small",
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
