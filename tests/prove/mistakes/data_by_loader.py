"""A data set gives other samples in loader processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, get_worker_info

import evenstep


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))


class Points(Dataset[Any]):
    def __len__(self) -> int:
        return len(points)

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        shift = 0.0 if worker is None else 0.1 + worker.id
        return points[index] + shift, (points[index].sum() > 0).long()


run = evenstep.start(global_batch=12, micro_batch=3, seed=0)


def loss_fn(model: nn.Module, batch: Any) -> Any:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


points = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
model = run.prepare(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
steps = run.steps(Points(), epochs=2)
run.restore(model=model, optimizer=optimizer)

for step in steps:
    step.backward(loss_fn)
    optimizer.step()
    optimizer.zero_grad()
