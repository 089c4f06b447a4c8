"""Early stopping: ends when the accuracy has not risen for some epochs, and keeps the best model.

evenstep run --processes 2 examples/early_stopping.py --patience 2

What differs from a script for one process is marked. What run.evaluate returns is the same on every process, so all of
them stop at the same step. The best weights are in every checkpoint, so a run that was killed still has them.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenstep  # evenstep

EPOCHS = 100  # at most

parser = argparse.ArgumentParser()
parser.add_argument("--patience", type=int, default=3)
options = parser.parse_args()

digits = load_digits()
samples = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
train_set, test_set = torch.utils.data.random_split(samples, [1437, 360], torch.Generator().manual_seed(0))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int, dict[str, tuple[Tensor, int]]]:
    inputs, labels = batch
    logits, n = model(inputs), len(labels)
    correct = (logits.argmax(1) == labels).sum()
    return F.cross_entropy(logits, labels, reduction="sum"), n, {"accuracy": (correct, n)}  # evenstep: sums and weights


run = evenstep.start(global_batch=128, micro_batch=32, seed=0)  # evenstep
model = run.prepare(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))  # evenstep
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
steps = run.steps(train_set, epochs=EPOCHS)  # evenstep
state = run.restore(model=model, optimizer=optimizer, best=0.0, best_epoch=0, weights={})  # evenstep

for epoch, steps_of_epoch in steps.by_epoch():  # evenstep
    for step in steps_of_epoch:  # evenstep
        step.backward(loss_fn)  # evenstep
        optimizer.step()
        optimizer.zero_grad()
    accuracy = run.evaluate(test_set, loss_fn)["accuracy"]  # evenstep
    print(f"epoch {epoch}: {accuracy:.3f}")
    if accuracy > state.best:
        state.best, state.best_epoch, state.weights = accuracy, epoch, copy.deepcopy(model.state_dict())
    if epoch - state.best_epoch >= options.patience or epoch + 1 == EPOCHS:
        model.load_state_dict(state.weights)  # so model.safetensors has the best ones
        break
print(f"best: {state.best:.3f} in epoch {state.best_epoch}")
