"""What data sets are made of: reading rows of a Subset, a concatenation, columns and arrays at once."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

_ARRAYS = (np.ndarray, np.memmap)
_PLAIN = (*_ARRAYS, torch.Tensor, TensorDataset, list, tuple, range)


def reads_many(data: Any) -> bool:
    """Whether rows of `data` can be read at once: it has a `__getitems__` of its own, or all that it consists of has.

    torch's Subset has one always, and reads row by row behind it if it is a subset of a data set without. A class that
    inherits one, and has a `__getitem__` of its own, wants that one to be called.
    """
    if type(data) in _PLAIN:
        return True
    if _reads_as_torch(data):
        return all(map(reads_many, _parts(data)))
    depth = _depth(data, "__getitems__")
    return depth < math.inf and depth <= _depth(data, "__getitem__")


def read_many(data: Any, indices: list[int]) -> list[Any]:
    """The samples at `indices`, for data of which `reads_many` is true. ValueError if there are not as many."""
    if type(data) in _ARRAYS:  # a copy: rows of a file that is open for reading are read-only
        return list(np.asarray(data[np.asarray(indices, dtype=np.int64)]))
    if type(data) in _PLAIN:
        return [data[i] for i in indices]
    if _reads_as_torch(data):
        if isinstance(data, Subset):
            return read_many(data.dataset, [int(data.indices[i]) for i in indices])
        if isinstance(data, ConcatDataset):
            return _read_from_parts(data, indices)
        return _read_columns(data.datasets, indices)
    samples = data.__getitems__(indices)
    if len(samples) != len(indices):
        raise ValueError(f"__getitems__ returned {len(samples)} samples for {len(indices)} indices")
    return list(samples)


def runs_no_code(data: Any) -> bool:
    """Whether reading a sample runs no code but torch's and numpy's, and so draws nothing."""
    if _reads_as_torch(data):
        return all(map(runs_no_code, _parts(data)))
    return type(data) in _PLAIN


def columns(data: Any) -> tuple[torch.Tensor, ...] | None:
    """The tensors whose rows are the samples of `data`, if all that is left to do is to take rows of them."""
    if type(data) is not TensorDataset:
        return None
    tensors: tuple[torch.Tensor, ...] = data.tensors
    return tensors if all(t.layout == torch.strided and t.is_contiguous() for t in tensors) else None


def epoch_setter(data: Any) -> Callable[[int], object] | None:
    """The `set_epoch` of `data`, or of those that it consists of."""
    own = getattr(data, "set_epoch", None)
    if callable(own):
        return own  # type: ignore[no-any-return]
    setters = [setter for part in _parts(data) if (setter := epoch_setter(part)) is not None]
    if not setters:
        return None

    def set_all(epoch: int) -> None:
        for setter in setters:
            setter(epoch)

    return set_all


def _parts(data: Any) -> list[Any]:
    """The data sets that a Subset, ConcatDataset or StackDataset of torch's consists of."""
    if isinstance(data, Subset):
        return [data.dataset]
    if isinstance(data, (ConcatDataset, StackDataset)):
        return list(data.datasets.values()) if isinstance(data.datasets, dict) else list(data.datasets)
    return []


def _reads_as_torch(data: Any) -> bool:
    """Whether `data` is one of these, and no class of the user's changes how it reads."""
    own = type(data)
    return any(
        isinstance(data, kind)
        and all(getattr(own, name, None) is getattr(kind, name, None) for name in ("__getitem__", "__getitems__"))
        for kind in (Subset, ConcatDataset, StackDataset)
    )


def _depth(data: Any, name: str) -> float:
    """How far up its classes `data` gets its method `name` from."""
    return next((depth for depth, kind in enumerate(type(data).__mro__) if name in vars(kind)), math.inf)


def _read_from_parts(data: ConcatDataset[Any], indices: list[int]) -> list[Any]:
    by_part: dict[int, list[int]] = {}  # places in `indices`
    for place, index in enumerate(indices):
        by_part.setdefault(bisect.bisect_right(data.cumulative_sizes, index), []).append(place)
    samples: list[Any] = [None] * len(indices)
    for part, places in sorted(by_part.items()):
        before = data.cumulative_sizes[part - 1] if part else 0
        found = read_many(data.datasets[part], [indices[place] - before for place in places])
        for place, sample in zip(places, found, strict=True):
            samples[place] = sample
    return samples


def _read_columns(datasets: Any, indices: list[int]) -> list[Any]:
    if isinstance(datasets, dict):
        read = {name: read_many(part, indices) for name, part in datasets.items()}
        return [dict(zip(read, row, strict=True)) for row in zip(*read.values(), strict=True)]
    return list(zip(*(read_many(part, indices) for part in datasets), strict=True))
