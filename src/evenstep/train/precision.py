"""Mixed precision: losses are computed in 16 bits where autocast says so; parameters, gradients and their sums are not.

Method: P. Micikevicius et al., Mixed Precision Training, 2018 (arXiv:1710.03740): float32 master weights, and a scaled
loss where the 16 bits are float16. torch's own scaler cannot serve here: it decides for each process by itself, skips
steps, and knows losses that are means alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from evenstep.errors import UsageError

PRECISIONS = ("fp32", "bf16", "fp16")

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_START = 2.0**16  # of the loss scale; what torch's scaler starts with
_LARGEST = 2.0**40
_GROW_AFTER = 2000  # calls of step.backward without an overflow
_ATTEMPTS = 20  # of one step.backward, each at half the scale of the one before


class Attempt(Protocol):
    """One computation of a step.backward, whose gradients it leaves in `.grad`."""

    def run(self) -> None: ...

    @property
    def loss(self) -> float: ...  # the mean

    @property
    def weight(self) -> float | None: ...  # what it was divided by


A = TypeVar("A", bound=Attempt)


class Precision:
    """What the losses of a run are computed in: "fp32" (as the script says), "bf16" or "fp16" (under autocast)."""

    def __init__(self, name: str, device: torch.device, global_batch: int) -> None:
        self.name = name
        self.rounding = 5e-3 if name == "fp32" else 3e-2  # relative, that a sum over samples may be off by
        self.scaler = LossScaler(global_batch) if name == "fp16" else None
        self._device = device.type

    def computing(self) -> AbstractContextManager[object]:
        """For the time in which a function of the user's computes on the models.

        Without autocast's cache of cast weights: it would add up the gradients of a weight's uses in 16 bits (stages
        could not), and one thread's end would empty it for all.
        """
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self._device, _DTYPES[self.name], cache_enabled=False)

    def plan_line(self, parameters: Sequence[nn.Parameter]) -> str | None:
        """For the person who runs this. None: nothing to say."""
        dtypes = list(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in parameters))
        if self.name == "fp32" and dtypes == ["float32"]:
            return None
        computed = "" if self.name == "fp32" else f"computed in {self.name} where autocast has it; "
        scaled = "; the loss is scaled" if self.scaler is not None else ""
        return f"{computed}parameters, gradients and their sums are {' and '.join(dtypes)}{scaled}"

    def state(self) -> dict[str, object]:
        """What a checkpoint says of it."""
        return {} if self.scaler is None else {"loss scale": self.scaler.scale, "good steps": self.scaler.good}

    def load(self, about: Mapping[str, object]) -> None:
        """Goes on with what a checkpoint says."""
        if self.scaler is not None and "loss scale" in about:
            self.scaler.scale = float(about["loss scale"])  # type: ignore[arg-type]
            self.scaler.good = int(about["good steps"])  # type: ignore[call-overload]

    def scaled(self, loss: Tensor, weight: float | None) -> Tensor:
        """What the backward pass of a micro-batch begins with."""
        if self.scaler is None or not loss.requires_grad:
            return loss
        return (loss.float() if loss.dtype.itemsize < 4 else loss) * self.scaler.factor(weight)

    def divisor(self, weight: float | None) -> float | None:
        """What the sum of all gradients is divided by. The scale is a power of two: it changes no other bit."""
        if self.scaler is None:
            return weight
        return self.scaler.factor(weight) * (1.0 if weight is None else weight)


class LossScaler:
    """Keeps small gradients from vanishing in float16, and large ones from overflowing.

    `scale` is that of a mean. A sum over samples is multiplied by it over the next power of two from the samples of a
    global batch, so by less than 1 where these are many. An overflow is seen in the gradients of the whole global
    batch, which are the same on every layout, and the step is computed again at half the scale: none is skipped.
    """

    def __init__(self, global_batch: int) -> None:
        self.scale = _START
        self.good = 0  # calls of step.backward since the scale changed
        self._samples = _power_of_two(global_batch)

    def factor(self, weight: float | None) -> float:
        """What a micro-batch's loss is multiplied by; `weight` None: it is normalised already."""
        return self.scale if weight is None else self.scale / self._samples

    def until_finite(
        self, attempt: Callable[[], A], parameters: Sequence[nn.Parameter], agree: Callable[[bool], bool]
    ) -> A:
        """The attempt whose gradients are now in `.grad` (added to what was there).

        `agree` gives True where its argument is True on every process. Where no smaller scale helps, since the loss
        itself is not finite or after some attempts, they stay as they are, and so does the scale."""
        kept = [p.grad for p in parameters]
        before = self.scale, self.good
        number = 0
        try:
            while True:
                for p in parameters:
                    p.grad = None
                done = attempt()
                done.run()
                number += 1
                if not math.isfinite(done.loss):
                    break
                if agree(_finite([p.grad for p in parameters if p.grad is not None])):
                    self._went_well()
                    before = self.scale, self.good
                    break
                if number == _ATTEMPTS:
                    break
                self._overflowed(done.weight)
            self.scale, self.good = before
        except BaseException:
            self.scale, self.good = before
            for p, grad in zip(parameters, kept, strict=True):
                p.grad = grad
            raise
        for p, grad in zip(parameters, kept, strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else grad.add_(p.grad)
        return done

    def _went_well(self) -> None:
        self.good += 1
        if self.good >= _GROW_AFTER and self.scale < _LARGEST:
            self.scale, self.good = self.scale * 2, 0

    def _overflowed(self, weight: float | None) -> None:
        half = self.scale / 2
        if weight is not None and self.good == 0 and self.scale == _START:
            # The first step: now it is known of how many tokens a loss is the sum.
            half = min(half, _START * self._samples / _power_of_two(weight))
        self.scale, self.good = half, 0


def refuse_scaler(frame: FrameType | None) -> None:
    """UsageError if a frame of the stack is a method of torch's own loss scaler."""
    at = frame
    while at is not None:
        this = at.f_locals.get("self") if "self" in at.f_code.co_varnames[:1] else None
        if isinstance(this, torch.amp.GradScaler) and this.is_enabled():
            raise UsageError(
                "the optimizer is stepped by a torch.amp.GradScaler: its scale is this process's own, and "
                "step.backward gives gradients that are not scaled",
                do='evenstep.start(precision="fp16") scales losses itself: take GradScaler and autocast out, return '
                "the loss as it is, and call optimizer.step()",
            )
        at = at.f_back


def _finite(gradients: Sequence[Tensor]) -> bool:
    local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    there = [g for g in local if g.numel()]
    if not there:
        return True
    norms = torch._foreach_norm(there, math.inf)
    return bool(torch.stack([n.to(norms[0].device, torch.float64) for n in norms]).isfinite().all())


def _power_of_two(number: float) -> float:
    """The next power of two from `number`, at least 1."""
    return 2.0 ** math.ceil(math.log2(max(number, 1.0)))
