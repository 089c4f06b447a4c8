"""Handwritten digits: trained, validated after every epoch, logged, and saved so that it can go on."""

import evenstep
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

EPOCHS = 5


def loss_fn(model, batch):
    images, labels = batch
    logits = model(images)
    correct = (logits.argmax(1) == labels).sum()
    return F.cross_entropy(logits, labels, reduction="sum"), len(labels), {"accuracy": (correct, len(labels))}


run = evenstep.start(global_batch=64, micro_batch=16, seed=0)
digits = load_digits()
data = torch.utils.data.TensorDataset(torch.tensor(digits.data / 16).float(), torch.tensor(digits.target))
train_set, test_set = torch.utils.data.random_split(data, [1437, 360])
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
run.prepare(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
steps = run.steps(train_set, epochs=EPOCHS)
run.restore(model=model, optimizer=optimizer, scheduler=scheduler)

for epoch, steps_of_epoch in steps.by_epoch():
    for step in steps_of_epoch:
        result = step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=result.loss)
    scheduler.step()
    accuracy = run.evaluate(test_set, loss_fn)["accuracy"]
    run.log(accuracy=accuracy)
    print(f"epoch {epoch}: accuracy {accuracy:.3f}")
