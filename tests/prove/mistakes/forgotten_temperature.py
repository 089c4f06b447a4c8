"""A temperature falls from step to step, and a checkpoint does not hold it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import evenstep


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))


run = evenstep.start(global_batch=12, micro_batch=3, seed=0)
temperature = 2.0


def loss_fn(model: nn.Module, batch: Any) -> Any:
    inputs, labels = batch
    return F.cross_entropy(model(inputs) / temperature, labels, reduction="sum"), len(labels)


points = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
model = run.prepare(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
steps = run.steps(TensorDataset(points, (points.sum(1) > 0).long()), epochs=2)
run.restore(model=model, optimizer=optimizer)

for step in steps:
    step.backward(loss_fn)
    optimizer.step()
    optimizer.zero_grad()
    temperature *= 0.9
