"""Tensors that a unit of a pipeline stage keeps in attributes of its modules in the forward pass (`self.aux = ...`).

Other stages get ghosts there: whoever uses one is told.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.train.batch import tensors
from evenstep.train.parallel.ghost import take_apart

Kept = dict[tuple[str, str], tuple[Any, list[Tensor]]]  # (module, attribute) -> its value, the tensors in it

_TORCHS_OWN = frozenset(vars(nn.Module())) | {"forward"}


def kept(unit: nn.Module) -> Kept:
    """What the modules of a unit have in attributes, but for parameters and buffers."""
    return {
        (path, name): (value, tensors(value))
        for path, module in unit.named_modules()
        for name, value in vars(module).items()
        if name not in _TORCHS_OWN and not isinstance(value, (bool, int, float, str, nn.Module))
    }


def changes(unit: nn.Module, before: Kept) -> list[list[Any]]:
    """Attributes that hold other tensors than before: module, attribute, structure, and form of each tensor."""
    found = []
    for at, (value, now) in kept(unit).items():
        was = before.get(at, (None, []))[1]
        if len(now) == len(was) and all(a is b for a, b in zip(now, was, strict=True)):
            continue
        made: list[Tensor] = []
        try:
            structure = take_apart(value, made, "")
            forms = [form(t) for t in made]
        except UsageError:  # of a class that other stages are not told of
            structure, forms = ["tensor", 0], [[[], "float32"]]
        found.append([*at, structure, forms])
    return found


def set_attribute(unit: nn.Module, path: str, name: str, value: Any) -> None:
    """Puts `value` there; a list or dict, which others may refer to, stays the same object."""
    attributes = vars(unit.get_submodule(path))
    have = attributes.get(name)
    if isinstance(have, list) and isinstance(value, list):
        have[:] = value
    elif isinstance(have, dict) and isinstance(value, dict):
        have.clear()
        have.update(value)
    else:
        attributes[name] = value


def form(tensor: Tensor) -> list[Any]:
    """Shape and dtype, as plain values."""
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
