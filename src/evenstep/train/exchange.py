"""Parts of tensors between the processes of a group, each with each and both ways at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_TAG = 0x657673  # no message of a script's own has it


def is_direct(device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Whether `swap` is to be used: on the CPU through gloo. Other backends have better collectives."""
    return device.type == "cpu" and dist.get_backend(group) == "gloo"


def swap(
    parts: Sequence[Sequence[Tensor]], into: Sequence[Sequence[Tensor]], rank: int, group: dist.ProcessGroup | None
) -> None:
    """Send parts[r] to each other process r, and receive into[r] from it. Returns when all has come and gone.

    Every receive is posted before the first send. A sender of gloo waits to hear from the other side, on the same
    connection, that somebody receives; behind what is being sent there this word comes when all of that has gone, and
    the connection carries one way at a time. gloo's all-to-all and all-gather do that: over 100 Mbit/s they take 1.7
    times as long as its all-reduce, and this takes as long.
    """
    world = len(parts)
    others = [(rank + k) % world for k in range(1, world)]  # not all to the same one at first
    works = [dist.irecv(piece, group=group, group_src=r, tag=_TAG) for r in others for piece in into[r]]
    works += [dist.isend(piece, group=group, group_dst=r, tag=_TAG) for r in others for piece in parts[r]]
    for work in works:
        if work is not None:
            work.wait()
