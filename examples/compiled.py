"""torch.compile: model.compile(), as in any script.

evenstep run --processes 2 examples/compiled.py --steps 50

What differs from a script for one process is marked. The compiler makes one kernel out of several operations, so its
model is another than that of the plain operations (or of another compiler), and the same on any number of processes.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenstep  # evenstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--backend", default="inductor", help="inductor needs a C++ compiler; eager compiles nothing")
options = parser.parse_args()

digits = load_digits()
train_set = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(F.gelu(self.first(x))))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)  # evenstep: a sum and its weight


run = evenstep.start(global_batch=64, micro_batch=16, seed=0)  # evenstep
model = run.prepare(Net())  # evenstep
model.compile(backend=options.backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
# Each shape is compiled for itself: without the ragged last batch there is one.
steps = run.steps(train_set, steps=options.steps, drop_last=True)  # evenstep
run.restore(model=model, optimizer=optimizer)  # evenstep

for step in steps:  # evenstep
    run.log(loss=step.backward(loss_fn).loss)  # evenstep
    optimizer.step()
    optimizer.zero_grad()
