"""What a data set and its collate function hand out: nests of tensors, moved and split without knowing their type."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device | str) -> Any:
    """`batch` with its tensors on `device`: dict, list, tuple, namedtuple, dataclass, objects with `.to`.

    Everything else stays as it is. Copies from pinned memory do not wait for the device.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=leaf.is_pinned() if leaf.device.type == "cpu" else False)
        if callable(getattr(leaf, "to", None)) and not isinstance(
            leaf, type
        ):  # transformers' BatchEncoding, PyG's Data
            return leaf.to(device)
        return None

    return _rebuilt(batch, move)


def pinned(batch: Any) -> Any:
    """`batch` with its CPU tensors in pinned memory."""

    def pin(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.pin_memory() if leaf.device.type == "cpu" and leaf.layout == torch.strided else leaf
        return leaf.pin_memory() if callable(getattr(leaf, "pin_memory", None)) else None

    return _rebuilt(batch, pin)


def map_tensors(nest: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`nest` with `change(tensor)` in place of each tensor: in dict, list, tuple, namedtuple, dataclass."""
    return _rebuilt(nest, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else None)


def tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors in `batch`, in order: those in dict, list, tuple, namedtuple and dataclass, however deep."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [found for value in batch.values() for found in tensors(value)]
    if isinstance(batch, (list, tuple)):
        return [found for value in batch for found in tensors(value)]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [found for field in dataclasses.fields(batch) for found in tensors(getattr(batch, field.name))]
    return []


def split_batch(batch: Any, size: int) -> tuple[Any, Any] | None:
    """The two halves of a batch of `size` samples, cut along dimension 0; None if it cannot be told how to cut it."""
    half = size // 2
    if half == 0:
        return None
    try:
        return _sliced(batch, size, slice(0, half)), _sliced(batch, size, slice(half, size))
    except _CannotSplit:
        return None


class _CannotSplit(Exception):
    pass


def _sliced(batch: Any, size: int, part: slice) -> Any:
    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.dim() == 0 or leaf.shape[0] != size:
                raise _CannotSplit
            return leaf[part]
        if isinstance(leaf, list) and not _holds_tensors(leaf):  # one entry a sample: texts, file names
            if len(leaf) != size:
                raise _CannotSplit
            return leaf[part]
        return None

    def other(leaf: Any) -> Any:
        # A plain number may well be the batch's size; who knows what it is for the half of it.
        if leaf is None or isinstance(leaf, (str, bytes, bool)):
            return leaf
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and len(leaf.shape) > 0 and leaf.shape[0] == size:
            return leaf[part]  # a numpy array
        raise _CannotSplit

    return _rebuilt(batch, cut, other)


def _holds_tensors(nest: Any) -> bool:
    if isinstance(nest, torch.Tensor):
        return True
    if isinstance(nest, Mapping):
        return any(_holds_tensors(v) for v in nest.values())
    return isinstance(nest, (list, tuple)) and any(_holds_tensors(v) for v in nest)


def _rebuilt(nest: Any, change: Callable[[Any], Any], other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """`nest` with `change(node)` in place of each node for which it is not None; `other` for the remaining leaves."""
    changed = change(nest)
    if changed is not None:
        return changed
    if isinstance(nest, (list, tuple)):
        values = [_rebuilt(v, change, other) for v in nest]
        if hasattr(nest, "_fields"):  # a namedtuple
            return type(nest)(*values)
        return type(nest)(values) if type(nest) in (list, tuple) else _filled(copy.copy(nest), values)
    if isinstance(nest, MutableMapping):
        items = {k: _rebuilt(v, change, other) for k, v in nest.items()}
        if type(nest) is dict:
            return items
        clone = copy.copy(nest)  # of whatever class: OrderedDict, defaultdict, UserDict
        for name, value in items.items():
            clone[name] = value
        return clone
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        twin = copy.copy(nest)
        for field in dataclasses.fields(nest):
            object.__setattr__(twin, field.name, _rebuilt(getattr(nest, field.name), change, other))
        return twin
    return other(nest)


def _filled(clone: Any, values: list[Any]) -> Any:
    """A subclass of list or tuple with other entries."""
    if isinstance(clone, list):
        clone[:] = values
        return clone
    return type(clone)(values)
