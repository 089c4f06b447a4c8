"""Lists with one entry a sample, packed: their many small tensors in a few large ones, which travel at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

_OTHER = -1  # the kind of a leaf that is neither a tensor nor an array


def packed(entries: list[Any]) -> dict[str, Any]:
    """`entries`: nests of plain dicts, lists and tuples with tensors on the CPU, arrays of numpy and other values."""
    forms: dict[str, int] = {}
    skeletons: list[Any] = []
    leaves: list[Any] = []
    numbers = []
    for entry in entries:
        skeleton = _skeleton(entry, leaves)
        number = forms.setdefault(repr(skeleton), len(forms))
        if number == len(skeletons):
            skeletons.append(skeleton)
        numbers.append(number)
    kinds: list[int] = []
    shapes: list[int] = []
    groups: dict[tuple[bool, torch.dtype], list[Tensor]] = {}  # by (whether they were arrays, dtype)
    others: list[Any] = []
    for leaf in leaves:
        tensor = _as_tensor(leaf)
        if tensor is None:
            others.append(leaf)
            kinds.append(_OTHER)
            continue
        group = groups.setdefault((isinstance(leaf, np.ndarray), tensor.dtype), [])
        group.append(tensor.reshape(-1))
        kinds.append(list(groups).index((isinstance(leaf, np.ndarray), tensor.dtype)))
        shapes += [tensor.dim(), *tensor.shape]
    return {
        "skeletons": skeletons,
        "numbers": torch.tensor(numbers, dtype=torch.int64),
        "kinds": torch.tensor(kinds, dtype=torch.int64),
        "shapes": torch.tensor(shapes, dtype=torch.int64),
        "arrays": [is_array for is_array, _ in groups],
        "data": [torch.cat(group) for group in groups.values()],
        "others": others,
    }


def unpacked(parcel: dict[str, Any]) -> list[Any]:
    """The entries of which `packed` made `parcel`. Their tensors are views of those in it."""
    leaves = _leaves(parcel)
    return [_rebuilt(parcel["skeletons"][number], leaves) for number in parcel["numbers"].tolist()]


def _skeleton(nest: Any, leaves: list[Any]) -> Any:
    """The containers of `nest`, with None for each leaf; the leaves go to `leaves`."""
    if isinstance(nest, dict):
        return {name: _skeleton(value, leaves) for name, value in nest.items()}
    if isinstance(nest, (list, tuple)):
        parts = [_skeleton(part, leaves) for part in nest]
        return tuple(parts) if isinstance(nest, tuple) else parts
    leaves.append(nest)
    return None


def _rebuilt(skeleton: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(skeleton, dict):
        return {name: _rebuilt(value, leaves) for name, value in skeleton.items()}
    if isinstance(skeleton, (list, tuple)):
        parts = [_rebuilt(part, leaves) for part in skeleton]
        return tuple(parts) if isinstance(skeleton, tuple) else parts
    return next(leaves)


def _as_tensor(leaf: Any) -> Tensor | None:
    """A tensor of the numbers in `leaf`; None if it is no tensor, nor an array of numbers that torch has."""
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc" and leaf.dtype.isnative:
        try:
            return torch.from_numpy(np.array(leaf, order="C"))
        except TypeError:  # a long double
            return None
    return None


def _leaves(parcel: dict[str, Any]) -> Iterator[Any]:
    sizes = iter(parcel["shapes"].tolist())
    others = iter(parcel["others"])
    places = [0] * len(parcel["data"])
    for kind in parcel["kinds"].tolist():
        if kind == _OTHER:
            yield next(others)
            continue
        shape = torch.Size(next(sizes) for _ in range(next(sizes)))
        start = places[kind]
        places[kind] = stop = start + shape.numel()
        tensor = parcel["data"][kind][start:stop].view(shape)
        yield tensor.numpy() if parcel["arrays"][kind] else tensor
