"""Gradients of which a process has a part: what a script does to them by itself would be done to the part."""

from __future__ import annotations

import torch
from torch import Tensor

from evenstep.errors import UsageError
from evenstep.train.models import Models
from evenstep.train.norm import local

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LeftGradients:
    """The `.grad` of all prepared parameters, as step.backward or run.clip left them."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._left: dict[int, tuple[Tensor, tuple[int, ...], int | None]] = {}

    def record(self, *, contents: bool) -> None:
        """As they are now. With `contents`, at some cost, writes that torch does not count (`.grad.data`) are seen."""
        self._left = {
            id(p): (p.grad, _written(p.grad), _sum(p.grad) if contents else None)
            for _, p in self._models.parameters()
            if p.grad is not None
        }

    def check(self) -> None:
        """UsageError for one that something else has changed since. One that is gone or zero is not in question."""
        for name, p in self._models.parameters():
            if p.grad is None:
                continue
            left = self._left.get(id(p))
            same = left is not None and left[0] is p.grad and left[1] == _written(p.grad)
            if same and left is not None and left[2] is not None:
                same = left[2] == _sum(p.grad)
            if not same and local(p.grad).any():
                raise UsageError(
                    f"the gradients were changed after step.backward ({name}), and this process has only a part of the "
                    "model: a norm or a sum over them would be that of the part",
                    do="use run.clip; weight decay and the like belong into the optimizer; else --processes or "
                    "--thread-replicas",
                )

    def forget(self) -> None:
        self._left.clear()


def _written(gradient: Tensor) -> tuple[int, ...]:
    """Torch's counts of writes; a DTensor has two."""
    return gradient._version, local(gradient)._version


def _sum(gradient: Tensor) -> int | None:
    """Of the bits."""
    here = local(gradient).detach()
    if here.layout != torch.strided or here.is_complex():
        return None
    return int(here.contiguous().view(_BITS[here.element_size()]).sum(dtype=torch.int64))
