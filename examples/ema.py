"""An exponential moving average of the weights, by torch's AveragedModel, beside the model that is trained.

evenstep run --processes 2 examples/ema.py --epochs 5

What differs from a script for one process is marked.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import evenstep  # evenstep

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
options = parser.parse_args()

digits = load_digits()
samples = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
train_set, test_set = torch.utils.data.random_split(samples, [1437, 360], torch.Generator().manual_seed(0))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)  # evenstep: a sum and its weight


def correct_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    inputs, labels = batch
    return (model(inputs).argmax(1) == labels).sum(), len(labels)


run = evenstep.start(global_batch=128, micro_batch=32, seed=0)  # evenstep
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
model, average = run.prepare(model, average)  # evenstep
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
steps = run.steps(train_set, epochs=options.epochs)  # evenstep
run.restore(model=model, average=average, optimizer=optimizer)  # evenstep

for epoch, steps_of_epoch in steps.by_epoch():  # evenstep
    for step in steps_of_epoch:  # evenstep
        result = step.backward(loss_fn, model)  # evenstep
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        run.log(loss=result.loss)  # evenstep
    accuracy = run.evaluate(test_set, correct_fn, model)  # evenstep
    of_average = run.evaluate(test_set, correct_fn, average)  # evenstep
    run.log(accuracy=accuracy, accuracy_of_average=of_average)  # evenstep
    print(f"epoch {epoch}: {accuracy:.3f}, with averaged weights {of_average:.3f}")
