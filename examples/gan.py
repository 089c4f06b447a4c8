"""Drawn digits: a generator and a critic with an optimizer each, two backward passes in one step.

python examples/gan.py
evenstep run --processes 2 examples/gan.py --epochs 5
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

import evenstep

LATENT = 16
PIXELS = 8 * 8


class Digits(Dataset[Tensor]):
    """scikit-learn's 1,797 digits, each as 64 pixels in 0..1."""

    def __init__(self) -> None:
        self.images = torch.tensor(load_digits().images / 16, dtype=torch.float32).flatten(1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index]


class Generator(nn.Sequential):
    def __init__(self, width: int = 128) -> None:
        super().__init__(
            nn.Linear(LATENT, width),
            nn.LayerNorm(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.ReLU(),
            nn.Linear(width, PIXELS),
            nn.Sigmoid(),
        )

    def draw(self, count: int) -> Tensor:
        return self(torch.randn(count, LATENT, device=next(self.parameters()).device))


class Critic(nn.Sequential):
    def __init__(self, width: int = 128) -> None:
        super().__init__(
            nn.Linear(PIXELS, width),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(width, 1),
        )


def critic_loss(generator: Generator, critic: Critic, real: Tensor) -> tuple[Tensor, int]:
    drawn = generator.draw(len(real)).detach()
    return (F.softplus(-critic(real)) + F.softplus(critic(drawn))).sum(), len(real)


def generator_loss(generator: Generator, critic: Critic, real: Tensor) -> tuple[Tensor, int]:
    return F.softplus(-critic(generator.draw(len(real)))).sum(), len(real)


def show(images: Tensor) -> None:
    """Prints images side by side; the darker a pixel, the heavier the sign."""
    for row in range(8):
        lines = [image[8 * row : 8 * row + 8].tolist() for image in images]
        print("   ".join("".join(2 * " .:-=+*#%@"[int(9 * value)] for value in line) for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--loaders", type=int, default=0, help="loader processes of each training process")
    options = parser.parse_args()

    run = evenstep.start(global_batch=64, micro_batch=16, seed=0)
    generator, critic = run.prepare(Generator(), Critic())
    generator_optimizer = torch.optim.AdamW(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
    steps = run.steps(Digits(), epochs=options.epochs, loaders=options.loaders)
    run.restore(
        generator=generator,
        critic=critic,
        generator_optimizer=generator_optimizer,
        critic_optimizer=critic_optimizer,
    )

    for step in steps:
        judged = step.backward(critic_loss, generator, critic)
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        drew = step.backward(generator_loss, generator, critic)
        generator_optimizer.step()
        generator_optimizer.zero_grad()
        critic_optimizer.zero_grad()  # what the generator's loss left there
        run.log(critic_loss=judged.loss, generator_loss=drew.loss)

    with torch.no_grad():
        drawn = generator.eval().draw(5)  # by all processes: each may have a part of the model only
    if run.rank == 0:
        show(drawn)


if __name__ == "__main__":
    main()
