"""What optimizers do in the loop: that they are known, and that a step was used."""

from __future__ import annotations

import sys
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from evenstep.errors import UsageError
from evenstep.train.checkpoint import Saved
from evenstep.train.models import Models
from evenstep.train.precision import refuse_scaler
from evenstep.train.step import Step


class OptimizerWatch:
    """Hooks that torch calls around every optimizer's step, from `begin` to `end`."""

    def __init__(self, models: Models, saved: Saved) -> None:
        self._models, self._saved = models, saved
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

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._known.get(id(optimizer)) == (optimizer, size):
            return
        name = type(optimizer).__name__
        trains = self._models.trained_by(optimizer, f"the {name} of this loop")
        if trains and self._restored and not self._saved.knows(optimizer):
            raise UsageError(
                f"a {name} updates the model, and run.restore was not given it: a resume would start its state anew",
                do="run.restore(..., optimizer=optimizer)",
            )
        if trains:
            refuse_scaler(sys._getframe(1))
        self._known[id(optimizer)] = optimizer, size

    def _after(self, *_: object) -> None:
        if self.step is not None:
            self.step.stepped = True
