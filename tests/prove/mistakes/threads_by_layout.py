"""Torch gets more threads where there are fewer processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import evenstep


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


run = evenstep.start(global_batch=12, micro_batch=3, seed=0)
torch.set_num_threads(2 if run.world_size == 1 else 1)


def loss_fn(model: nn.Module, batch: Any) -> Any:
    inputs, labels = batch
    many = model(inputs.repeat_interleave(2_000, 0))
    return F.cross_entropy(many, labels.repeat_interleave(2_000), reduction="sum") / 2_000, len(labels)


points = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
model = run.prepare(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
steps = run.steps(TensorDataset(points, (points.sum(1) > 0).long()), epochs=2)
run.restore(model=model, optimizer=optimizer)

for step in steps:
    step.backward(loss_fn)
    optimizer.step()
    optimizer.zero_grad()
