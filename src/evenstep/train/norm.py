"""The norm of gradients, with the same bits however they are cut along their first dimension."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from evenstep.errors import EvenstepError, UsageError

Folds = Mapping[str, Tensor]

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
    """The 2-norm of all elements, from the sum of squares of each tensor by name; the order of the mapping does not
    count. 0 without tensors; inf or nan if one is in them."""
    if not folds:
        return 0.0
    values = [folds[name] for name in sorted(folds)]
    device = values[0].device
    return math.sqrt(_halved(torch.stack([value.to(device) for value in values])).item())  # one wait for the device


def folds_of(tensors: Mapping[str, Tensor]) -> Folds:
    """The sum of squares of each tensor, by name.

    Of a tensor that is sharded (a DTensor), the processes that have its rows must call this together.
    """
    whole = {name: tensor for name, tensor in tensors.items() if not is_sharded(tensor)}
    cut = {name: tensor for name, tensor in tensors.items() if is_sharded(tensor)}
    return {name: fold(row_squares(tensor)) for name, tensor in whole.items()} | _folds_of_shards(cut)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "device_mesh")


def _folds_of_shards(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """The fold of each tensor, of which this process has some rows, as FSDP cuts them. They are exchanged at once."""
    if not tensors:
        return {}
    mesh = next(iter(tensors.values())).device_mesh
    mine = torch.cat([row_squares(local(tensor)) for tensor in tensors.values()])
    chunks = {name: -(-tensor.shape[0] // mesh.size()) for name, tensor in tensors.items()}  # rows; the last have fewer
    longest = sum(chunks.values())
    out = mine.new_empty(mesh.size() * longest)
    dist.all_gather_single(out, nn.functional.pad(mine, (0, longest - mine.numel())), group=mesh.get_group())
    rows: dict[str, list[Tensor]] = {name: [] for name in tensors}
    for rank, part in enumerate(out.split(longest)):
        for name, tensor in tensors.items():
            here = max(0, min(chunks[name], tensor.shape[0] - rank * chunks[name]))
            rows[name].append(part[:here])
            part = part[here:]
    return {name: fold(torch.cat(parts)) for name, parts in rows.items()}


def local(tensor: Any) -> Tensor:
    """What this process has of it, in the same memory."""
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[no-any-return]


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
    folds = joined(folds_of(gradients))
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
            torch._foreach_mul_([local(gradient) for gradient in gradients.values()], coefficient)


def refuse_torch_norms(refused: Callable[[Sequence[Tensor]], bool]) -> Callable[[], None]:
    """From now on torch's norms over several tensors (clip_grad_norm_, get_total_norm) raise UsageError where these are
    `refused`: gradients of which each process has a part. Returns what ends that."""
    module: Any = clip_grad
    grouped = module._group_tensors_by_device_and_dtype  # both call it, however they were imported

    def looked_at(lists: list[list[Tensor]], *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_name == "_get_total_norm" and refused(lists[0]):
            raise UsageError(
                "torch's norm of gradients (clip_grad_norm_) where each process has a part of them: it would be that "
                "of the part, or have other bits on another layout",
                do="use run.clip(max_norm)",
            )
        return grouped(lists, *args, **kwargs)

    module._group_tensors_by_device_and_dtype = looked_at

    def put_back() -> None:
        module._group_tensors_by_device_and_dtype = grouped

    return put_back


def _halved(values: Tensor) -> Tensor:
    """The sum over dimension 0, which is overwritten: the last half is added to the first, until one is left."""
    count = values.shape[0]
    while count > 1:
        half = count // 2
        values[:half] += values[count - half : count]
        count -= half
    return values[0]
