"""A module drops more on the first process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenstep


class Scale(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return self.by * x


class Net(nn.Sequential):
    def __init__(self, by: float) -> None:
        super().__init__(nn.Linear(6, 16), Scale(by), nn.ReLU(), nn.Linear(16, 2))


run = evenstep.start(global_batch=12, micro_batch=3, seed=0)


def loss_fn(model: nn.Module, batch: Any) -> Any:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


points = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
model = run.prepare(Net(1.0 + 0.5 * run.rank))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
steps = run.steps(TensorDataset(points, (points.sum(1) > 0).long()), epochs=2)
run.restore(model=model, optimizer=optimizer)

for step in steps:
    step.backward(loss_fn)
    optimizer.step()
    optimizer.zero_grad()
