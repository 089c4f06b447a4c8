"""What optimizers do in the loop: that they are known, and that a step was used."""

from __future__ import annotations

import sys
from typing import Any

from torch import optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from evenstep.errors import UsageError
from evenstep.train.checkpoint import Saved
from evenstep.train.gradients import LeftGradients
from evenstep.train.models import Models
from evenstep.train.precision import refuse_scaler
from evenstep.train.step import Step

# Each element's update depends on this element, its gradient and its state alone.
ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.ASGD,
)  # fmt: skip
# And of these on the whole parameter, but on no other one.
BY_PARAMETER = (*ELEMENTWISE, optim.Adafactor, optim.Rprop, optim.SparseAdam, optim.Muon)


class OptimizerWatch:
    """Hooks that torch calls around every optimizer's step, from `begin` to `end`.

    `elementwise`: parameters are cut, so only optimizers that update each element by itself are let through.
    `by_parameter`: processes have different ones, so only those are that update each parameter by itself."""

    def __init__(self, models: Models, saved: Saved, *, elementwise: bool = False, by_parameter: bool = False) -> None:
        self._models, self._saved = models, saved
        self._elementwise, self._by_parameter = elementwise, by_parameter
        self.gradients = LeftGradients(models) if elementwise or by_parameter else None
        self._restored = False
        self._known: dict[int, tuple[Optimizer, int]] = {}  # by id; with how many parameters it was looked at
        self._handles: list[Any] = []
        self.step: Step | None = None  # the one whose turn it is

    def begin(self, restored: bool) -> None:
        """`restored`: run.restore was called, so it must have been given every optimizer."""
        self._restored = restored
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def end(self) -> None:
        """Torch calls nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._known.clear()
        self.step = None
        if self.gradients is not None:
            self.gradients.forget()

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        self._look_at(optimizer)
        if self.gradients is not None:
            self.gradients.check()

    def _look_at(self, optimizer: Optimizer) -> None:
        """Once, and again when it has got further parameters."""
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._known.get(id(optimizer)) == (optimizer, size):
            return
        name = type(optimizer).__name__
        trains = self._models.trained_by(optimizer, f"the {name} of this loop")
        if trains and self._restored and not self._saved.knows(optimizer):
            raise UsageError(
                f"{name} updates the model, and run.restore was not given it: a resume would start its state anew",
                do="run.restore(..., optimizer=optimizer)",
            )
        if trains and self._elementwise:
            refuse_whole_tensors(optimizer)
        if trains and self._by_parameter and type(optimizer) not in BY_PARAMETER:
            known = ", ".join(kind.__name__ for kind in BY_PARAMETER)
            raise UsageError(
                f"{name} with --stages: an update of its may need parameters that lie on other stages",
                do=f"use one of torch.optim's {known}, or run without --stages",
            )
        if trains:
            refuse_scaler(sys._getframe(2))
        self._known[id(optimizer)] = optimizer, size

    def _after(self, *_: object) -> None:
        if self.step is not None:
            self.step.stepped = True


def refuse_whole_tensors(optimizer: Optimizer) -> None:
    """UsageError for an optimizer that is not known to update each element by itself."""
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        raise UsageError(
            f"{name} with --shard: an update of its may need more of a parameter than the part that a process has",
            do=f"use one of torch.optim's {', '.join(kind.__name__ for kind in ELEMENTWISE)}, or run without --shard",
        )
    if any(group.get("fused") for group in optimizer.param_groups):
        raise UsageError(
            f"{name}(fused=True) with --shard: its kernel's results can depend on how a parameter is cut",
            do="leave fused=True out",
        )
