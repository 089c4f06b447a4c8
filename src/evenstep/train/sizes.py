"""How much memory the units of a model take: what they hold, and what training keeps of a forward for the backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.train.batch import tensors
from evenstep.train.randomness import blocks, kept_generators

COPIES = 4  # of a parameter that is trained: its value, its gradient, and two of the usual optimizer's


@dataclass(frozen=True)
class UnitSize:
    """Bytes of one unit. Parameters that several units share count with the first of them."""

    name: str
    module: nn.Module
    state: int
    """Parameters and buffers."""
    training: int
    """`state`, with gradients and the optimizer's memory."""
    activations: int
    """What one forward keeps for the backward, and its output; 0 where it was not measured."""

    @property
    def cost(self) -> int:
        """What training takes in all."""
        return self.training + self.activations


def unit_sizes(model: nn.Module, example: Any = None) -> list[UnitSize]:
    """The units of `model` (`randomness.blocks`), in order. `example`: what one micro-batch gives to the model (a
    tensor, a tuple of arguments, or a dict of named ones); without it activations are not measured.
    """
    units = blocks(model)
    kept = dict.fromkeys((id(unit) for _, unit in units), 0)
    if example is not None:
        _measure(model, [unit for _, unit in units], example, kept)
    seen: set[int] = set()
    found = []
    for name, unit in units:
        state = training = 0
        for tensor in [*unit.parameters(), *unit.buffers()]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                size = tensor.numel() * tensor.element_size()
                state += size
                training += size * (COPIES if tensor.requires_grad else 1)
        found.append(UnitSize(name, unit, state, training, kept[id(unit)]))
    return found


def refuse_fewer(model: nn.Module, sizes: Sequence[UnitSize], parts: int, what: str) -> None:
    """UsageError where a model has fewer units than `parts` (of `what`)."""
    if len(sizes) < parts:
        names = ", ".join(size.name for size in sizes) or "none"
        raise UsageError(
            f"{type(model).__name__} has {len(sizes)} units ({names}), and {parts} {what} were asked for",
            do="ask for fewer; a unit is a child of the model, or an entry of a Sequential or ModuleList in it",
        )


def _measure(model: nn.Module, units: Sequence[nn.Module], example: Any, kept: dict[int, int]) -> None:
    """Adds the bytes that a forward keeps to `kept`, by unit. The model is as before afterwards."""
    inside: list[int] = []  # ids of the units whose forward runs
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    counted: set[int] = set()
    alive: list[Tensor] = []  # a storage that is freed could be another's again

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in parameters and storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            alive.append(tensor)
            kept[inside[-1]] += storage.nbytes()
        return tensor

    def enter(unit: nn.Module, *_: object) -> None:
        inside.append(id(unit))

    def leave(unit: nn.Module, _: object, output: object) -> None:
        for tensor in tensors(output):
            count(tensor)
        inside.pop()

    handles = [unit.register_forward_pre_hook(enter) for unit in units]
    handles += [unit.register_forward_hook(leave) for unit in units]
    args, kwargs = _arguments(example)
    try:
        with (
            _buffers_kept(model),
            kept_generators(),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
        ):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def _arguments(example: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(example, Mapping):
        return (), example
    return (example, {}) if isinstance(example, (tuple, list)) else ((example,), {})


@contextmanager
def _buffers_kept(model: nn.Module) -> Any:
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
