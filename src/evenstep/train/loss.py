"""What a loss function must be: (sum over samples, weight) of one micro-batch, and additive over samples."""

from __future__ import annotations

import math
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.errors import LossError, UsageError

LossFn = Callable[..., Any]

FORM = """def loss_fn(model, batch):                     # one micro-batch -> (sum over its samples, weight)
            inputs, targets = batch
            loss = F.cross_entropy(model(inputs), targets, reduction="sum")
            return loss, len(targets)

        result = step.backward(loss_fn)                # in place of loss.backward()"""

_TORCH = os.path.dirname(torch.__file__)
_OURS = os.path.dirname(os.path.dirname(__file__))
_DRAWS = 8  # evaluations of a loss that draws random numbers, to compare its mean with that of its halves


@dataclass(frozen=True)
class Leaf:
    """The loss of one micro-batch: `total` has the graph; the numbers are float64."""

    total: Tensor
    value: float
    weight: float | None  # None: the loss is normalised already, its sum is taken as it is
    metrics: Mapping[str, tuple[float, float]]


def refuse_tensor(loss_fn: object) -> None:
    """LossError, with the form to use, for anything that cannot be called."""
    if isinstance(loss_fn, Tensor):
        raise LossError(
            "step.backward got a tensor; it takes the function that computes the loss of one micro-batch, "
            "since evenstep decides which process computes which micro-batch",
            do=f"write\n\n        {FORM}",
        )
    if not callable(loss_fn):
        got = type(loss_fn).__name__
        raise LossError(f"step.backward got {got}, expected a function", do=f"write\n\n        {FORM}")


def leaf(returned: object, index: int) -> Leaf:
    """Checks what a loss function returned for micro-batch `index`. LossError says what is wrong with it."""
    where = f"the loss function returned, for micro-batch {index}, "
    if isinstance(returned, Tensor) or not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
        said = f"a {_kind(returned)} alone" if isinstance(returned, Tensor) else _kind(returned)
        raise LossError(
            f"{where}{said}; expected (sum over samples, weight)",
            do="return the sum and what it is to be divided by: `return loss * n, n` where loss is the mean of n "
            "samples (or tokens), or use reduction='sum' and `return loss, n`",
        )
    total, weight = returned[0], returned[1]
    if not isinstance(total, Tensor):
        raise LossError(f"{where}a sum that is {_kind(total)}; expected a tensor", do="return the loss before .item()")
    if total.numel() != 1:
        raise LossError(
            f"{where}a sum of shape {tuple(total.shape)}; expected one number",
            do="add up over the samples: loss.sum(), or reduction='sum'",
        )
    if total.is_complex() or not total.is_floating_point():
        raise LossError(f"{where}a sum of dtype {total.dtype}; expected a real floating-point number")
    number = None if weight is None else _number(weight, f"{where}a weight that is ")
    if number is not None and (not math.isfinite(number) or number < 0):
        raise LossError(
            f"{where}the weight {number}; expected a finite number that is not negative",
            do="return how many samples (or tokens, or their weights' sum) the loss was added up over",
        )
    metrics = returned[2] if len(returned) == 3 else {}
    if not isinstance(metrics, Mapping):
        raise LossError(f"{where}as third item a {_kind(metrics)}; expected a dict {{name: (sum, weight)}}")
    return Leaf(
        total, float(total.detach()), number, {str(k): _pair(v, f"{where}as metric {k!r} ") for k, v in metrics.items()}
    )


def _pair(value: object, where: str) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise LossError(f"{where}a {_kind(value)}; expected (sum, weight)", do="return {name: (sum, weight)}")
    return _number(value[0], where), _number(value[1], where)


def _number(value: object, where: str) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise LossError(f"{where}a tensor of shape {tuple(value.shape)}; expected one number")
        return float(value.detach())
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise LossError(f"{where}a {_kind(value)}; expected a number") from error


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


Evaluated = list[tuple[float, float | None]]  # (sum, weight)


def additive(exact: bool, rounding: float) -> Generator[list[tuple[int, int]], Evaluated, None]:
    """LossError unless the loss of a micro-batch is the sum of the losses of its two halves.

    Yields what it wants evaluated, (part, draw) each, and is sent (sum, weight) for each: part 0 is the micro-batch, 1
    and 2 are its halves; `draw` keys the random numbers. A loss that draws random numbers (noise, time steps) is
    compared in the mean over some draws; one that gives another value for the same draw has a state of its own and is
    refused too (where `exact`). `rounding` is relative: far above what other kernel shapes change, far below what a
    mean does.
    """
    both = [(part, draw) for draw in (0, 1) for part in (0, 1, 2)]
    again, *first = yield [(0, 0), *both]
    if exact and repr(again) != repr(first[0]):  # repr: a NaN equals itself
        raise LossError(
            f"the loss of one micro-batch, computed twice, is {again[0]!r} and then {first[0][0]!r}: the model or the "
            "loss function has a state or a random generator of its own, so the result would depend on the layout",
            do="draw from the global generators of torch, numpy and random, which are keyed for every micro-batch; "
            "keep no hidden state from one micro-batch for the next",
        )
    _check_weights(first[0][1], [w for _, w in first[1:3]])
    random = [value for value, _ in first[:3]] != [value for value, _ in first[3:]]
    if random:
        first += yield [(part, draw) for draw in range(2, _DRAWS) for part in (0, 1, 2)]
    wholes = [value for value, _ in first[::3]]
    sums = [a + b for (a, _), (b, _) in zip(first[1::3], first[2::3], strict=True)]
    if not all(map(math.isfinite, wholes + sums)):
        return  # nothing can be said
    gap = abs(statistics.fmean(wholes) - statistics.fmean(sums))
    parts = [abs(a) + abs(b) for (a, _), (b, _) in zip(first[1::3], first[2::3], strict=True)]
    size = max(statistics.fmean(map(abs, wholes)), statistics.fmean(parts))
    spread = 0.0
    if random:
        spread = 8 * math.sqrt((statistics.variance(wholes) + statistics.variance(sums)) / len(wholes))
    if gap > rounding * size + spread:
        raise LossError(
            f"the loss is not additive over samples: one micro-batch gives {statistics.fmean(wholes):.6g}, "
            f"its two halves give {statistics.fmean(sums):.6g} together",
            do="return a sum over samples, not a mean (reduction='sum', or `loss * n, n`); put a term that does not "
            "depend on samples (weight decay) into the optimizer, or multiply it by the weight; a loss that compares "
            "the samples of a batch with each other (contrastive) goes to step.backward_whole(embed_fn, loss_fn)",
        )


def _check_weights(whole: float | None, parts: Sequence[float | None]) -> None:
    if whole is None or any(w is None for w in parts):
        return
    total = sum(w for w in parts if w is not None)
    if abs(whole - total) > 1e-6 * max(abs(whole), abs(total)):
        raise LossError(
            f"the weight is not additive over samples: one micro-batch gives {whole:g}, its two halves give {total:g}",
            do="return how many samples (or tokens) the loss was added up over, and the sum over them",
        )


# ---- models


@contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Eval mode without gradients; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def naming_nondeterministic(look: bool) -> Iterator[None]:
    """Collects every operation without a deterministic form, and refuses them in one UsageError at the end."""
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if not (look and strict):
        yield
        return
    found: dict[str, str] = {}

    def collect(message: Warning | str, *about: Any, **more: Any) -> None:
        operation, said, _ = str(message).partition(" does not have a deterministic implementation")
        if said:
            found.setdefault(operation, _users_line())
        else:
            show(message, *about, **more)

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=".*does not have a deterministic implementation")
            show, warnings.showwarning = warnings.showwarning, collect
            yield
    finally:
        torch.use_deterministic_algorithms(True)
    if found:
        raise UsageError(
            "operations without a deterministic form: " + "; ".join(f"{op} ({place})" for op, place in found.items()),
            do="replace them, or give up exactness with exact=False (--no-exact)",
        )


def _users_line() -> str:
    """`file:line` of the user's code that runs; "in backward" where autograd was called by evenstep."""
    frame: FrameType | None = sys._getframe(2)  # whoever called `collect`
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, warnings.__file__)):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_OURS):
        return "in backward"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
