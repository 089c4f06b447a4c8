"""A micro-batch on its way through a pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from evenstep.train.parallel.pipe import Message


class Slot:
    """A received activation, and its gradient once the backward has come there."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.gradient: Tensor | None = None

    def arrive(self, anchor: Tensor) -> Tensor:
        """The activation, in the graph of this stage. `anchor`: any tensor that requires a gradient."""
        arrived: Tensor = _Arrive.apply(anchor, self)  # type: ignore[no-untyped-call]
        return arrived


@dataclass
class Flight:
    """One micro-batch on its way through this stage."""

    received: Message | None = None
    slots: list[Slot | None] = field(default_factory=list)  # for each tensor received that wants a gradient
    entry: int | None = None  # the unit that took what was received
    called: set[int] = field(default_factory=set)
    made: dict[str, list[Any]] = field(default_factory=dict)  # unit -> what it returned: structure, shapes and dtypes
    handed: Message | None = None  # what goes to the next stage
    outputs: list[Tensor] = field(default_factory=list)  # its tensors; on the last stage the loss
    recomputing: bool = False  # activation checkpointing runs units again, in the backward


class _Arrive(torch.autograd.Function):
    """Where a received activation enters the graph of this stage. Unlike a leaf it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, slot: Slot) -> Tensor:
        ctx.slot = slot
        return slot.value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        have = ctx.slot.gradient
        ctx.slot.gradient = gradient if have is None else have + gradient
        return None, None
