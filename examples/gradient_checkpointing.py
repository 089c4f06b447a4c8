"""Activation checkpointing: blocks are computed again in the backward pass, so their activations take no memory.

evenstep run --processes 2 examples/gradient_checkpointing.py --steps 50

What differs from a script for one process is marked. Dropout draws the same the second time, on every layout. For a
model of transformers: model.gradient_checkpointing_enable({"use_reentrant": False}).
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import evenstep  # evenstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

digits = load_digits()
train_set = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))


class Block(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1))
        self.append(nn.Linear(4 * width, width))


class Net(nn.Module):
    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)  # evenstep: a sum and its weight


run = evenstep.start(global_batch=64, micro_batch=16, seed=0)  # evenstep
model = run.prepare(Net())  # evenstep
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run.restore(model=model, optimizer=optimizer)  # evenstep

for step in run.steps(train_set, steps=options.steps):  # evenstep
    run.log(loss=step.backward(loss_fn).loss)  # evenstep
    optimizer.step()
    optimizer.zero_grad()
