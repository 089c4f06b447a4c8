"""The two trainings that are measured: one heavy in computation, one in communication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

LENGTH = 128  # tokens of a sample of the transformer

Batch = tuple[Tensor, Tensor]


class Rows(Dataset[Batch]):
    """Inputs and targets that are there already: reading costs next to nothing."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        return self.inputs[index], self.targets[index]


class Transformer(nn.Module):
    """A causal language model over 256 tokens; 1.7 million parameters."""

    def __init__(self, width: int = 256, depth: int = 2, length: int = LENGTH) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        layers = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        ]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, 256)
        # No buffer: DDP would broadcast it in every step, which is not what is to be compared.
        self.mask = nn.Transformer.generate_square_subsequent_mask(length)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


class MLP(nn.Sequential):
    """Wide layers and few samples; the gradient is large for the time that it takes to compute."""

    def __init__(self, width: int = 2048, depth: int = 2) -> None:
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        super().__init__(*hidden, nn.Linear(width, 16))


@dataclass(frozen=True)
class Workload:
    """A model, its data, and how a micro-batch's loss is summed: (model, batch) -> sum over samples."""

    model: Callable[[], nn.Module]
    data: Rows
    micro_batch: int
    loss_sum: Callable[[nn.Module, Batch], Tensor]
    samples_weight: int  # what one sample counts in the mean


def workload(name: str) -> Workload:
    """`transformer` or `mlp`."""
    generator = torch.Generator().manual_seed(0)
    if name == "transformer":
        tokens = torch.randint(0, 256, (1024, LENGTH + 1), generator=generator)

        def per_token(model: nn.Module, batch: Batch) -> Tensor:
            inputs, targets = batch
            return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")

        return Workload(Transformer, Rows(tokens[:, :-1], tokens[:, 1:]), 4, per_token, LENGTH)

    inputs = torch.randn(1024, 2048, generator=generator)
    targets = torch.randint(0, 16, (1024,), generator=generator)

    def per_sample(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    return Workload(MLP, Rows(inputs, targets), 16, per_sample, 1)
