"""The two sides of a comparison, each as an endless iterator that does one optimizer step a turn.

Both do the same work: read the samples, SHARE micro-batches forward and backward on each of the processes, one exchange
of gradients, the mean loss known on every process, one step of the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import evenstep
from bench.workloads import Batch, Workload

SHARE = 4  # micro-batches of each process in a step


def in_turns(ours: Callable[[], float], theirs: Callable[[], float], turns: int) -> dict[str, object]:
    """Both sides, which give their seconds, in turns, each first as often as the other.

    "ratios": of each pair; "fastest": of the fastest turn of each.
    """
    pairs = []
    for number in range(turns):
        if number % 2 == 0:
            seconds = ours()
            pairs.append((seconds, theirs()))
        else:
            seconds = theirs()
            pairs.append((ours(), seconds))
    fastest = min(a for a, _ in pairs) / min(b for _, b in pairs)
    return {"ratios": [a / b for a, b in pairs], "fastest": fastest}


def start(work: Workload, processes: int) -> evenstep.Run:
    return evenstep.start(global_batch=SHARE * processes * work.micro_batch, micro_batch=work.micro_batch, seed=0)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def evenstep_side(run: evenstep.Run, work: Workload) -> Generator[float]:
    """Yields the loss of each step."""
    model = run.prepare(work.model())
    optimizer = optimizer_of(model)

    def loss_fn(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        return work.loss_sum(model, batch), len(batch[0]) * work.samples_weight

    for step in run.steps(work.data, steps=1_000_000):
        result = step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        yield float(result.loss)


def ddp_side(work: Workload) -> Generator[float]:
    """Hand-written DistributedDataParallel with gradient accumulation under no_sync. Yields the loss of each step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(work.model())
    optimizer = optimizer_of(model)
    sampler: DistributedSampler[Batch] = DistributedSampler(work.data, drop_last=True)
    loader = DataLoader(work.data, work.micro_batch, sampler=sampler, drop_last=True)
    epoch = 0
    batches = iter(loader)
    while True:
        total = torch.zeros(())
        for number in range(SHARE):
            batch = next(batches, None)
            if batch is None:
                epoch += 1
                sampler.set_epoch(epoch)
                batches = iter(loader)
                batch = next(batches)
            with model.no_sync() if number < SHARE - 1 else contextlib.nullcontext():
                loss = work.loss_sum(model, batch) / (len(batch[0]) * work.samples_weight * SHARE)
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        yield float(total) / dist.get_world_size()
