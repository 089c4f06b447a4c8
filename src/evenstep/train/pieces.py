"""What a process has of a tensor: all of it, some of its rows (a DTensor), or nothing (a meta tensor)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evenstep.errors import UsageError

Span = tuple[int, int] | None  # the elements from .. to, in C order, that a process has; None: none
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class Elsewhere:
    """Stands in a tree for what other processes alone know: the optimizer's state of a parameter of another stage."""


ELSEWHERE = Elsewhere()


class Piece(NamedTuple):
    """A tensor as one process has it. Rows are the indices of dimension 0; a tensor without dimensions is one row."""

    shape: torch.Size  # of the whole tensor
    dtype: torch.dtype
    first: int  # the place in the whole tensor, in C order, of the first element that is here
    values: Tensor | None  # the rows that are here, a plain tensor; None: the tensor lies on another process

    @property
    def span(self) -> Span:
        """The elements that are here; None where there are none."""
        if self.values is None or not self.values.numel():
            return None
        return self.first, self.first + self.values.numel()


def is_whole(tensor: Tensor) -> bool:
    """Whether this process has all of the tensor, in ordinary memory."""
    return type(tensor) in _PLAIN and not tensor.is_meta


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether the tensor lies on other processes alone."""
    return not is_whole(tensor) and piece(tensor).values is None


def piece(tensor: Tensor, path: str = "") -> Piece:
    """What this process has of `tensor`. UsageError, naming `path`, for a tensor that is cut in another way."""
    if not _is_dtensor(tensor):
        return Piece(tensor.shape, tensor.dtype, 0, None if tensor.is_meta else tensor.detach())
    with torch.no_grad():
        local = tensor.to_local()  # type: ignore[attr-defined]
    rows = _rows(tensor, path)
    if rows is None or local.is_meta:
        return Piece(tensor.shape, tensor.dtype, 0, None)
    expected = (rows[1] - rows[0], *tensor.shape[1:]) if tensor.dim() else ()
    if tuple(local.shape) != expected:
        raise UsageError(
            f"{path or 'a tensor'} of shape {tuple(tensor.shape)} has a part of shape {tuple(local.shape)} on this "
            f"process, where {expected} is expected",
            do="cut it as fully_shard does: equal parts along dimension 0, the last ones shorter",
        )
    return Piece(tensor.shape, tensor.dtype, rows[0] * _row_size(tensor), local)


def like(target: Tensor, rows: Callable[[int, int], Tensor]) -> Tensor:
    """A tensor that is spread as `target` is, with the values that `rows(start, stop)` gives for the rows of dimension
    0 that this process has. It is not asked for anything else."""
    if not _is_dtensor(target):
        return torch.empty_like(target) if target.is_meta else rows(0, target.shape[0] if target.dim() else 1)
    held = _rows(target, "")
    with torch.no_grad():
        local = target.to_local()  # type: ignore[attr-defined]
    if held is None or local.is_meta:
        return torch.empty_like(target)
    from torch.distributed.tensor import DTensor

    mesh, placements = target.device_mesh, target.placements  # type: ignore[attr-defined]
    values = rows(*held).to(local.device)
    return DTensor.from_local(
        values, mesh, placements, run_check=False, shape=target.shape, stride=target.stride()
    ).detach()


@lru_cache(maxsize=4096)
def holders(size: int, spans: Sequence[Span]) -> list[tuple[int, int, tuple[int, ...]]]:
    """`size` elements cut so that each part (from, to, ranks) lies on the same processes; `spans` by rank."""
    ends = sorted({0, size, *(end for span in spans if span is not None for end in span)})
    return [
        (first, last, tuple(r for r, span in enumerate(spans) if span is not None and span[0] <= first < span[1]))
        for first, last in pairwise(ends)
    ]


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def memory(tensor: Tensor) -> tuple[object, ...]:
    """Where the tensor lies: equal for those that are one and the same."""
    if is_whole(tensor):
        return tensor.data_ptr(), tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor.shape, tensor.stride()
    local: Any = tensor
    if _is_dtensor(tensor):
        with torch.no_grad():
            local = tensor.to_local()  # type: ignore[attr-defined]
    storage = local.untyped_storage()._cdata  # a meta tensor, and one of no elements, has no address
    return "part", storage, local.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # who has one has imported it; it takes a second
    return module is not None and isinstance(tensor, module.DTensor)


def is_known(tensor: Tensor) -> bool:
    """Whether the tensor's type is one that has pieces."""
    return type(tensor) in _PLAIN or _is_dtensor(tensor)


def _row_size(tensor: Tensor) -> int:
    return tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 1


def _rows(tensor: Any, path: str) -> tuple[int, int] | None:
    """The rows of a DTensor that belong to this process, as torch.chunk deals them out; None: not its tensor at all."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = tensor.device_mesh, tensor.placements
    cut = [i for i, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if len(cut) > 1 or any(type(placements[i]) is not Shard or placements[i].dim != 0 for i in cut):
        raise UsageError(
            f"{path or 'a tensor'} is spread as {placements}, and only a cut along dimension 0 is known",
            do="shard parameters along dimension 0, as fully_shard does",
        )
    place = mesh.get_coordinate()
    if place is None:
        return None
    count = tensor.shape[0] if tensor.dim() else 1
    if not cut:
        return 0, count
    size = -(-count // mesh.size(cut[0]))
    start = min(size * place[cut[0]], count)
    return start, min(start + size, count)
