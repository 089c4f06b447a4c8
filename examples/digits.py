"""Handwritten digits: a small CNN with dropout and augmentation, over 97 % right on digits it has not seen.

python examples/digits.py
evenstep run --processes 3 examples/digits.py --epochs 5
"""

from __future__ import annotations

import argparse
import random

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

import evenstep

Sample = tuple[Tensor, Tensor]  # an image (1, 8, 8) in 0..1 and its digit ()


class Digits(Dataset[Sample]):
    """scikit-learn's 1,797 digits, 360 of them held out; training images are shifted, dimmed and made noisy."""

    def __init__(self, *, train: bool) -> None:
        data = load_digits()
        order = np.random.RandomState(0).permutation(len(data.images))
        chosen = order[360:] if train else order[:360]
        self.images = torch.tensor(data.images[chosen] / 16, dtype=torch.float32).unsqueeze(1)
        self.labels = torch.tensor(data.target[chosen])
        self.augment = train

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        image = self.images[index]
        if self.augment:
            # Any generator may be used: each sample has its own randomness, whichever process reads it.
            down, right = torch.randint(0, 3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
            noise = np.random.normal(0, 0.05, image.shape).astype(np.float32)
            image = image * random.uniform(0.8, 1.2) + torch.from_numpy(noise)
        return image, self.labels[index]


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
        )
        self.classify = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(2 * width * 4 * 4, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images))


def loss_fn(model: Net, batch: Sample) -> tuple[Tensor, int]:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


def correct_fn(model: Net, batch: Sample) -> tuple[Tensor, int]:
    images, labels = batch
    return (model(images).argmax(1) == labels).sum(), len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--loaders", type=int, default=0, help="loader processes of each training process")
    options = parser.parse_args()

    run = evenstep.start(global_batch=128, micro_batch=16, seed=0)
    model = run.prepare(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    steps = run.steps(Digits(train=True), epochs=options.epochs, loaders=options.loaders)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=len(steps))
    run.restore(model=model, optimizer=optimizer, scheduler=scheduler)
    test_set = Digits(train=False)

    for step in steps:
        result = step.backward(loss_fn)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.log(loss=result.loss)
        if step.ends_epoch:
            run.log(accuracy=run.evaluate(test_set, correct_fn))


if __name__ == "__main__":
    main()
