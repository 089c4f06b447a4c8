"""What a step of two pipeline stages costs against torch.distributed.pipelining's Schedule1F1B.

Run by `evenstep run --processes 2 bench/stages.py`. Both sides cut the same transformer in the middle, compute the same
equal micro-batches, and live in the same processes and take turns, a step each. Prints {"ratios": [...],
"fastest": ratio}, as step.py does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import evenstep
from bench.sides import in_turns, optimizer_of
from bench.workloads import Batch, Transformer, Workload, workload

MICRO_BATCHES = 8  # of a step
DEPTH = 4


class Half(nn.Module):
    """One of the two stages, as PipelineStage wants it."""

    def __init__(self, model: Transformer, stage: int) -> None:
        super().__init__()
        half = DEPTH // 2
        self.layers = model.layers[:half] if stage == 0 else model.layers[half:]
        self.first = model.token if stage == 0 else None
        self.position = model.position if stage == 0 else None
        self.head = model.head if stage == 1 else None
        self.mask = model.mask

    def forward(self, x: Tensor) -> Tensor:
        if self.first is not None and self.position is not None:
            x = self.first(x) + self.position
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return x if self.head is None else self.head(x)


def stages_side(run: evenstep.Run, work: Workload) -> Generator[None]:
    """evenstep's."""
    model = run.prepare(work.model(), stages=[f"layers.{DEPTH // 2}"])
    optimizer = optimizer_of(model)

    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return work.loss_sum(model, batch), len(batch[0]) * work.samples_weight

    for step in run.steps(work.data, steps=1_000_000):
        step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        yield


def pipelining_side(work: Workload, stage: int) -> Generator[None]:
    """torch's, with a loader of its own."""
    torch.manual_seed(0)
    model = work.model()
    assert isinstance(model, Transformer)
    half = Half(model, stage)
    optimizer = optimizer_of(half)

    def mean(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    schedule = Schedule1F1B(
        PipelineStage(half, stage, 2, torch.device("cpu")), n_microbatches=MICRO_BATCHES, loss_fn=mean
    )
    while True:
        for inputs, targets in DataLoader(work.data, MICRO_BATCHES * work.micro_batch, shuffle=True, drop_last=True):
            if stage == 0:
                schedule.step(inputs)
            else:
                losses: list[Tensor] = []
                schedule.step(target=targets, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=24)
    options = parser.parse_args()
    work = replace(workload("transformer"), model=lambda: Transformer(depth=DEPTH))
    run = evenstep.start(global_batch=MICRO_BATCHES * work.micro_batch, micro_batch=work.micro_batch, seed=0, stages=2)
    ours, theirs = stages_side(run, work), pipelining_side(work, run.rank)

    def turn(side: Iterator[None], steps: int = 1) -> float:
        """Seconds for so many steps of one side, until the slower process has done them."""
        torch.use_deterministic_algorithms(side is ours)
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            next(side)
        dist.barrier()
        return time.perf_counter() - started

    turn(ours, 3)  # the first steps check, allocate and connect
    turn(theirs, 3)
    found = in_turns(lambda: turn(ours), lambda: turn(theirs), options.turns)
    run.close()
    if run.rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
