"""Handwritten digits: trained, validated after every epoch, logged, and saved so that it can go on."""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.tensorboard import SummaryWriter

EPOCHS = 5


def loss_fn(model, batch):
    images, labels = batch
    logits = model(images)
    correct = (logits.argmax(1) == labels).sum()
    return F.cross_entropy(logits, labels), correct


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = sum(loss_fn(model, [t.to(device) for t in batch])[1].item() for batch in loader)
    model.train()
    return correct / len(loader.dataset)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
digits = load_digits()
data = torch.utils.data.TensorDataset(torch.tensor(digits.data / 16).float(), torch.tensor(digits.target))
train_set, test_set = torch.utils.data.random_split(data, [1437, 360])
train_loader = torch.utils.data.DataLoader(train_set, batch_size=64, shuffle=True)
test_loader = torch.utils.data.DataLoader(test_set, batch_size=64)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
writer = SummaryWriter("runs/digits")
first = step = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first, step = saved["epoch"], saved["step"]

for epoch in range(first, EPOCHS):
    for batch in train_loader:
        loss, _ = loss_fn(model, [t.to(device) for t in batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        writer.add_scalar("loss", loss.item(), step)
    scheduler.step()
    accuracy = evaluate(model, test_loader)
    writer.add_scalar("accuracy", accuracy, step)
    print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    states = {name: thing.state_dict() for name, thing in objects.items()}
    torch.save({**states, "epoch": epoch + 1, "step": step}, "checkpoint.pt")
