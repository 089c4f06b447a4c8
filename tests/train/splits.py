"""A small model, cut by hand in every way in which processes can hold parts of it, and trained without losses."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # fully_shard imports it, which takes a second in every process that has not done so
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

from evenstep.plan.grid import Grid
from evenstep.record.checkpoints import Checkpoints
from evenstep.record.paths import RunPaths
from evenstep.train.checkpoint import Saved
from evenstep.train.meeting import Meeting
from evenstep.train.models import Models
from evenstep.train.pieces import like
from evenstep.train.randomness import Randomness

GRIDS = {
    "plain": Grid(1),
    "replicas": Grid(2),
    "shard 1": Grid(1, shards=1),
    "shard 2": Grid(2, shards=2),
    "shard 3": Grid(3, shards=3),
    "2 x shard 2": Grid(4, shards=2),
    "stages 2": Grid(2, stages=2),
    "stages 3": Grid(3, stages=3),
    "2 x stages 2": Grid(4, stages=2),
}


class Net(nn.Module):
    """Tied weights at both ends, uneven and single rows, large and small tensors, frozen and unused parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 100)
        self.wide = nn.Linear(100, 103)
        self.norm = nn.BatchNorm1d(103)
        self.unused = nn.Linear(3, 1)
        self.frozen = nn.Linear(103, 5).requires_grad_(False)
        self.head = nn.Linear(100, 7, bias=False)
        self.head.weight = self.embed.weight
        for buffer in self.norm.buffers():
            buffer.copy_(torch.rand(buffer.shape) * 100)


def place(model: nn.Module, grid: Grid, rank: int, shard: bool) -> None:
    """Cuts the model as rank `rank` of `grid` has it: the middle stage has neither of the tied ends."""
    here = grid.place(rank)
    if shard:
        groups = [grid.ranks(replica=r, stage=0) for r in range(grid.replicas)]
        meshes = [DeviceMesh.from_group(dist.new_group(ranks), "cpu") for ranks in groups if _all_make(ranks, rank)]
        fully_shard(model, mesh=meshes[0])
    stages = {"embed": 0, "wide": 0, "norm": grid.stages // 2, "unused": grid.stages // 2}
    elsewhere = [m for n, m in model.named_children() if stages.get(n, grid.stages - 1) != here.stage]
    mine = {p for n, m in model.named_children() if m not in elsewhere for p in m.parameters()}
    metas: dict[Tensor, nn.Parameter] = {}
    for module in elsewhere if grid.stages > 1 else []:
        for name, p in module.named_parameters(recurse=False):
            if p not in mine:
                meta = metas.setdefault(p, nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad))
                setattr(module, name, meta)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="meta"))
    _one_of_each(model, metas)


def _one_of_each(model: nn.Module, metas: dict[Tensor, nn.Parameter]) -> None:
    """Tied parameters that lie elsewhere stay one parameter."""
    for module in model.children():
        for name, p in module.named_parameters(recurse=False):
            if p in metas:
                setattr(module, name, metas[p])


def _all_make(ranks: list[int], rank: int) -> bool:
    if rank in ranks:
        return True
    dist.new_group(ranks)  # every process takes part in making every group
    return False


def gradients(model: nn.Module, step: int) -> None:
    """The same gradients in every layout; the same for both names of a tied parameter."""
    generator = torch.Generator().manual_seed(step)
    for name, p in model.named_parameters():
        rows = torch.randn(p.shape, generator=generator).__getitem__
        if p.requires_grad and not name.startswith("unused") and not p.is_meta:
            p.grad = like(p, lambda start, stop, rows=rows: rows(slice(start, stop)))  # type: ignore[misc]


class Shadow:
    """An object of the user's that keeps copies of the weights; it may be given nothing but what it returned."""

    def __init__(self, model: nn.Module) -> None:
        self.copies = {name: p.detach().clone() for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"copies": dict(self.copies), "of": "weights"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, copy in self.copies.items():
            given = state["copies"][name]
            assert (type(given), given.shape, given.is_meta) == (type(copy), copy.shape, copy.is_meta)
            copy.copy_(given)


class Training:
    """A process's part of a training that is saved and restored."""

    def __init__(self, name: str, rank: int, directory: Path, seed: int = 1, save: str = "all") -> None:
        self.grid = GRIDS[name]
        world = self.grid.processes
        self.meeting = Meeting(rank, world, dist.new_group(backend="gloo") if world > 1 else None)
        self.model = Net(seed)
        self.average = AveragedModel(self.model)
        models = Models(
            self.meeting, Randomness(0), lambda m, _: place(getattr(m, "module", m), self.grid, rank, "shard" in name)
        )
        models.prepare(self.model, save)
        models.prepare(self.average)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1, amsgrad=True)
        self.shadow = Shadow(self.model)
        self.saved = Saved(models, self.meeting, Checkpoints(RunPaths(directory)))
        self.saved.take(
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "average": self.average,
                "shadow": self.shadow,
                "best": 1,
            }
        )

    def step(self, number: int) -> str:
        gradients(self.model, number)
        self.optimizer.step()
        self.average.update_parameters(self.model)
        return self.saved.fingerprint(f"step {number}")

    def save(self, number: int = 1) -> str | None:
        about: dict[str, object] = {"fingerprint": self.saved.fingerprint("saving")}
        return self.saved.save(number, about, 2)


@contextmanager
def ranks_of(name: str) -> Iterator[int]:
    """This process's rank, with torch.distributed ready."""
    dist.init_process_group("gloo")
    try:
        yield int(os.environ["RANK"])
    finally:
        dist.destroy_process_group()
