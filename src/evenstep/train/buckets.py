"""Gradients that travel together, and their memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evenstep.train.pieces import is_dense

FIRST_BUCKET = 1 << 20  # bytes; small, so that communication starts early
BUCKET = 25 << 20  # bytes


@dataclass
class Bucket:
    """Parameters whose gradients travel together, flat, each in the memory order of its parameter.

    Behind them stand one flag a parameter (was it used by any micro-batch?) and one that says that a process failed.
    """

    params: list[torch.nn.Parameter]
    first: int  # index of params[0] among the parameters of the reduction
    elements: int
    out: Tensor | None = field(default=None, repr=False)  # the memory that the last step's .grad are views of

    @property
    def length(self) -> int:
        return self.elements + len(self.params) + 1

    @property
    def dtype(self) -> torch.dtype:
        return _real_dtype(self.params[0])

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """A view of `flat` for each parameter, in its shape and, where it is dense, with its strides."""
        start = 0
        for p in self.params:
            stop = start + _reals(p)
            piece = flat[start:stop]
            if p.is_complex():
                piece = torch.view_as_complex(piece.view(-1, 2))
            yield (
                piece.as_strided(p.size(), p.stride(), piece.storage_offset()) if is_dense(p) else piece.view(p.size())
            )
            start = stop

    def memory(self, length: int) -> Tensor:
        """Memory for this step's gradients: that of the last step unless somebody still holds a view of it."""
        out = self.out
        if out is not None and out.numel() == length:
            storage = out.untyped_storage()
            if torch._C._storage_Use_Count(storage._cdata) <= 2:  # `out` and `storage`
                return out
        self.out = torch.zeros(length, dtype=self.dtype, device=self.device)
        return self.out


def fill_buckets(params: list[torch.nn.Parameter]) -> list[Bucket]:
    """Fixed buckets in the order of `params`, of one dtype and device each."""
    buckets: list[Bucket] = []
    size, limit = 0, 0
    for k, p in enumerate(params):
        other = not buckets or (p.dtype, p.device) != (buckets[-1].params[0].dtype, buckets[-1].params[0].device)
        if other or size >= limit:
            limit = BUCKET if buckets else FIRST_BUCKET
            buckets.append(Bucket([], k, 0))
            size = 0
        buckets[-1].params.append(p)
        buckets[-1].elements += _reals(p)
        size += p.numel() * p.element_size()
    return buckets


def _real_dtype(p: Tensor) -> torch.dtype:
    return p.dtype.to_real() if p.is_complex() else p.dtype


def _reals(p: Tensor) -> int:
    return p.numel() * (2 if p.is_complex() else 1)
