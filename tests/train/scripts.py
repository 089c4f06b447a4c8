"""Small trainings for tests: what a user's script does, as functions that return a fingerprint for every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evenstep
from evenstep.record.events import read_events
from evenstep.train.run import Run

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


OPTIMIZERS: dict[str, MakeOptimizer] = {"momentum": momentum, "adamw": adamw}


class Pictures:
    """`length` images (1, 8, 8) with augmentation from all three generators, and labels."""

    def __init__(self, length: int = 53) -> None:
        generator = torch.Generator().manual_seed(5)
        self.images = torch.rand(length, 1, 8, 8, generator=generator)
        self.labels = torch.randint(0, 10, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = torch.roll(self.images[index], int(np.random.randint(3)), 1) * random.uniform(0.8, 1.2)
        return image + 0.1 * torch.randn_like(image), self.labels[index]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout2d(0.2))
        self.classify = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(512, 10))

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.classify(self.features(images))
        return result


def classification(model: nn.Module, batch: Any) -> Any:
    images, labels = batch
    out = model(images)
    loss = F.cross_entropy(out, labels, reduction="sum")
    return loss, len(labels), {"accuracy": ((out.argmax(1) == labels).sum(), len(labels))}


class BatchNormConvolutions(nn.Module):
    """Both norms see every micro-batch twice; `extra` only some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten()
        )
        self.middle = nn.Sequential(nn.Linear(512, 16), nn.BatchNorm1d(16, momentum=None), nn.ReLU(), nn.Dropout(0.1))
        self.extra = nn.BatchNorm1d(16, affine=False)
        self.classify = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.middle(self.features(images)) + self.middle(self.features(images.flip(3)))
        if hidden.detach().sum() > 16 * len(images):
            hidden = self.extra(hidden)
        result: Tensor = self.classify(hidden)
        return result


class Sentences:
    """Sequences of different lengths; a token's target is the next one."""

    def __init__(self, length: int = 45) -> None:
        generator = torch.Generator().manual_seed(6)
        sizes = torch.randint(3, 13, (length,), generator=generator).tolist()
        self.rows = [torch.randint(0, 20, (size,), generator=generator) for size in sizes]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def padded(rows: list[Tensor]) -> Tensor:
    """(samples, longest): -1 where a row has ended."""
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


class Transformer(nn.Module):
    """Two blocks; the head's weight is the embedding's."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens.clamp(min=0))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        result: Tensor = self.head(x)
        return result


def next_token(model: nn.Module, tokens: Tensor) -> Any:
    targets = tokens[:, 1:]
    out = model(tokens[:, :-1])
    loss = F.cross_entropy(out.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    return loss, (targets != -1).sum()


def training_run(directory: Path, **options: Any) -> Run:
    given: dict[str, Any] = {"global_batch": 16, "micro_batch": 2, "seed": 3, "fingerprints": True, **options}
    return evenstep.start(run=directory, **given)


def fingerprints(run: Run) -> list[str]:
    """The fingerprint after every step, as this process recorded them; the last is the run's."""
    events = read_events(run.directory / "events" / f"rank-{run.rank}.jsonl")
    return [e["fingerprint"] for e in events if e["kind"] == "step"]


def train_cnn(directory: Path, make: MakeOptimizer = adamw, loaders: int = 0, **options: Any) -> list[str]:
    with training_run(directory, **options) as run:
        model = run.prepare(Convolutions())
        optimizer = make(model.parameters())
        steps = run.steps(Pictures(), epochs=2, loaders=loaders)
        run.restore(model=model, optimizer=optimizer)
        for step in steps:
            result = step.backward(classification)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=result.loss, **result.metrics)
    return fingerprints(run)


def train_batchnorm(directory: Path, make: MakeOptimizer = momentum, loaders: int = 0, **options: Any) -> list[str]:
    with training_run(directory, **options) as run:
        model = run.prepare(BatchNormConvolutions())
        optimizer = make(model.parameters())
        steps = run.steps(Pictures(54), epochs=2, loaders=loaders)
        run.restore(model=model, optimizer=optimizer)
        for step in steps:
            step.backward(classification)
            optimizer.step()
            optimizer.zero_grad()
    return fingerprints(run)


def train_transformer(directory: Path, make: MakeOptimizer = adamw, loaders: int = 0, **options: Any) -> list[str]:
    with training_run(directory, **options) as run:
        model = run.prepare(Transformer())
        optimizer = make(model.parameters())
        steps = run.steps(Sentences(), epochs=2, collate=padded, loaders=loaders)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=len(steps))
        run.restore(model=model, optimizer=optimizer, scheduler=scheduler)
        for step in steps:
            step.backward(next_token)
            run.clip(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return fingerprints(run)


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 64))


class Critic(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(32, 1))


def critic_loss(generator: nn.Module, critic: nn.Module, batch: Any) -> Any:
    real = batch[0].flatten(1)
    fake = generator(torch.randn(len(real), 4, device=real.device)).detach()
    return F.softplus(-critic(real)).sum() + F.softplus(critic(fake)).sum(), len(real)


def generator_loss(generator: nn.Module, critic: nn.Module, batch: Any) -> Any:
    fake = generator(torch.randn(len(batch[0]), 4, device=batch[0].device))
    return F.softplus(-critic(fake)).sum(), len(batch[0])


def train_gan(directory: Path, make: MakeOptimizer = adamw, loaders: int = 0, **options: Any) -> list[str]:
    with training_run(directory, **options) as run:
        generator, critic = run.prepare(Generator(), Critic())
        for_generator, for_critic = make(generator.parameters()), make(critic.parameters())
        steps = run.steps(Pictures(), epochs=2, loaders=loaders)
        run.restore(generator=generator, critic=critic, for_generator=for_generator, for_critic=for_critic)
        for step in steps:
            step.backward(critic_loss, generator, critic)
            for_critic.step()
            for_critic.zero_grad()
            step.backward(generator_loss, generator, critic)
            for_generator.step()
            for_generator.zero_grad()
            critic.zero_grad()
    return fingerprints(run)


TRAININGS: dict[str, Callable[..., list[str]]] = {"cnn": train_cnn, "transformer": train_transformer, "gan": train_gan}
