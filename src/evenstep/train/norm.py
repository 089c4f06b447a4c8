"""The norm of gradients, with the same bits however they are cut along their first dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from evenstep.errors import EvenstepError, UsageError

_CHUNK = 1 << 16  # elements squared at a time: they stay in the cache


def row_squares(tensor: Tensor) -> Tensor:
    """The sum of squares of each row (index of dimension 0): float64, [rows]. A 0-d tensor is one row.

    A row's value depends on nothing but the row, so what a shard along dimension 0 gives is its slice of the whole.
    Each is summed by pairwise halving: the last half is added to the first, until one is left.
    """
    if tensor.layout != torch.strided:
        raise UsageError(f"a norm of a {tensor.layout} tensor cannot be taken", do="use dense gradients (sparse=False)")
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    rows = tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1) if tensor.numel() else tensor.new_empty(0, 1)
    out = torch.empty(rows.shape[0], dtype=torch.float64, device=rows.device)
    step = max(1, _CHUNK // rows.shape[1])
    scratch = torch.empty_like(rows[:step], dtype=torch.float64)  # one for all: fresh memory costs more than the sum
    for start in range(0, rows.shape[0], step):
        chunk = rows[start : start + step]
        out[start : start + step] = _halved(scratch[: chunk.shape[0]].copy_(chunk).square_().t())
    return out


def fold(rows: Tensor) -> Tensor:
    """The sum of the values of all rows (float64, 0-d), by pairwise halving. 0 if there are none."""
    return _halved(rows.clone()) if rows.numel() else rows.new_zeros(())


def norm_of_folds(folds: Mapping[str, Tensor]) -> float:
    """The norm, from the sum of squares of each tensor by name; the order of the mapping does not count."""
    if not folds:
        return 0.0
    values = [folds[name] for name in sorted(folds)]
    device = values[0].device
    return math.sqrt(_halved(torch.stack([value.to(device) for value in values])).item())  # one wait for the device


def total_norm(tensors: Mapping[str, Tensor]) -> float:
    """The 2-norm of all elements of `tensors`, in float64. 0 without tensors; inf or nan if one is in them."""
    return norm_of_folds({name: fold(row_squares(tensor)) for name, tensor in tensors.items()})


Folds = Mapping[str, Tensor]


def clip_(
    parameters: Mapping[str, nn.Parameter],
    max_norm: float,
    joined: Callable[[Folds], Folds] = lambda folds: folds,
    *,
    error_if_nonfinite: bool = False,
) -> float:
    """Scale the gradients in place so that their norm is at most `max_norm`; the norm before that.

    As torch.nn.utils.clip_grad_norm_: all are multiplied by max_norm / (norm + 1e-6), if that is below 1. A norm that
    is not finite does that to the gradients too, or, with `error_if_nonfinite`, raises and changes nothing. `joined`
    gives the sums of squares by name of all that other processes have too, from those that are here.
    """
    if not max_norm >= 0:
        raise UsageError(f"max_norm is {max_norm}; a number from 0 on is expected", do="give the largest norm allowed")
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    folds = joined({name: fold(row_squares(gradient)) for name, gradient in gradients.items()})
    norm = norm_of_folds(folds)
    if error_if_nonfinite and not math.isfinite(norm):
        bad = [name for name, squares in folds.items() if not math.isfinite(squares)]
        raise EvenstepError(
            f"the norm of the gradients is {norm}: {', '.join(bad[:5])} have values that are not finite",
            do="look at the loss of this step, or lower the learning rate",
        )
    scale(gradients, max_norm, norm)
    return norm


def scale(gradients: Mapping[str, Tensor], max_norm: float, norm: float) -> None:
    """Multiply `gradients` in place by max_norm / (norm + 1e-6), if that is below 1 (or nan)."""
    coefficient = max_norm / (norm + 1e-6)
    if not coefficient >= 1.0 and gradients:
        with torch.no_grad():
            torch._foreach_mul_(list(gradients.values()), coefficient)


def _halved(values: Tensor) -> Tensor:
    """The sum over dimension 0, which is overwritten: the last half is added to the first, until one is left."""
    count = values.shape[0]
    while count > 1:
        half = count // 2
        values[:half] += values[count - half : count]
        count -= half
    return values[0]
