"""Sharded training against plain fully_shard. Run by `evenstep run --processes N [--shard] bench/shard.py ...`.

`time`: both sides live in the same processes and take turns, a step each, as in bench/step.py; the plain one reduces
its gradients at every micro-batch, as fully_shard does by itself. Prints {"ratios": [...], "fastest": ratio}.
`memory`: prints {"resident": bytes, "peak": bytes, "parameters": bytes} of rank 0 once it has trained some steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.sides import SHARE, evenstep_side, in_turns, optimizer_of, start
from bench.workloads import MLP, Batch, Transformer, Workload, workload

STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["time", "memory"])
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--depth", type=int, help="layers of the model")
    options = parser.parse_args()
    if options.what == "time":
        compare(options.turns, options.depth or 4)
    else:
        measure_memory(options.depth or 6)


def compare(turns: int, depth: int) -> None:
    small = workload("transformer")
    work = Workload(
        lambda: Transformer(depth=depth), small.data, small.micro_batch, small.loss_sum, small.samples_weight
    )
    run = start(work, int(os.environ["WORLD_SIZE"]))
    deterministic = torch.are_deterministic_algorithms_enabled()
    ours, theirs = evenstep_side(run, work), plain_side(work)

    def turn(side: Iterator[float], steps: int = 1) -> float:
        """Seconds for so many steps of one side, until the slower process has done them."""
        torch.use_deterministic_algorithms(deterministic and side is ours)
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            next(side)
        dist.barrier()
        return time.perf_counter() - started

    turn(ours, 2)  # the first steps check and allocate
    turn(theirs, 2)
    found = in_turns(lambda: turn(ours), lambda: turn(theirs), turns)
    if run.rank == 0:
        print(json.dumps(found), flush=True)
    run.close()


def plain_side(work: Workload) -> Generator[float]:
    """fully_shard by hand, block by block. Yields the loss of each step."""
    torch.manual_seed(0)
    model = work.model()
    assert isinstance(model, Transformer)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = optimizer_of(model)
    sampler: DistributedSampler[Batch] = DistributedSampler(work.data, drop_last=True)
    loader = DataLoader(work.data, work.micro_batch, sampler=sampler, drop_last=True)
    batches: Iterator[Batch] = iter(())
    epoch = 0
    while True:
        total = torch.zeros(())
        for _ in range(SHARE):
            batch = next(batches, None)
            if batch is None:
                sampler.set_epoch(epoch)
                epoch += 1
                batches = iter(loader)
                batch = next(batches)
            loss = work.loss_sum(model, batch) / (len(batch[0]) * work.samples_weight * SHARE)
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        yield float(total) / dist.get_world_size()


def measure_memory(depth: int) -> None:
    small = workload("mlp")
    work = Workload(lambda: MLP(depth=depth), small.data, small.micro_batch, small.loss_sum, small.samples_weight)
    parameters = sum(p.numel() * p.element_size() for p in work.model().parameters())
    run = start(work, int(os.environ["WORLD_SIZE"]))
    steps = evenstep_side(run, work)
    next(steps)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here: the model was built whole before
    for _ in range(STEPS):
        next(steps)
    status = Path("/proc/self/status").read_text()
    resident, peak = (1024 * int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) for name in ("VmRSS", "VmHWM"))  # type: ignore[index]
    if run.rank == 0:
        print(json.dumps({"resident": resident, "peak": peak, "parameters": parameters}), flush=True)
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
