"""What a step of thread replicas costs against hand-written threads. Run by `python bench/threads.py WORKLOAD`.

Both sides live in one process and take turns, a step each. The hand-written side has, for each thread, a copy of the
model that shares its parameters' memory; each thread accumulates the gradients of its micro-batches, and they are added
up at the end. Prints {"ratios": [...], "fastest": ratio}, as step.py does.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import evenstep
from bench.sides import SHARE, evenstep_side, optimizer_of
from bench.workloads import Batch, Workload, workload


def plain_threads(work: Workload, threads: int) -> Generator[float]:
    """Yields the loss of each step."""
    torch.manual_seed(0)
    model = work.model()
    optimizer = optimizer_of(model)
    copies = [_sharing(model) for _ in range(threads)]
    weight = SHARE * threads * work.micro_batch * work.samples_weight

    def compute(copied: nn.Module, batches: list[Batch]) -> float:
        total = 0.0
        for batch in batches:
            loss = work.loss_sum(copied, batch) / weight
            loss.backward()
            total += float(loss)
        return total

    with ThreadPoolExecutor(threads) as pool:
        while True:
            batches = iter(DataLoader(work.data, work.micro_batch, shuffle=True, drop_last=True))
            for _ in range(len(work.data) // (work.micro_batch * SHARE * threads)):
                parts = [[next(batches) for _ in range(SHARE)] for _ in range(threads)]
                total = sum(pool.map(compute, copies, parts))
                for p, *others in zip(*(m.parameters() for m in (model, *copies)), strict=True):
                    p.grad = others[0].grad
                    for other in others[1:]:
                        p.grad += other.grad
                    for other in others:
                        other.grad = None
                optimizer.step()
                optimizer.zero_grad()
                yield total


def _sharing(model: nn.Module) -> nn.Module:
    """A copy whose parameters have the memory of the model's."""
    return copy.deepcopy(model, {id(p): nn.Parameter(p.detach()) for p in model.parameters()})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=["transformer", "mlp"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=24)
    options = parser.parse_args()
    work = workload(options.workload)
    with tempfile.TemporaryDirectory() as folder:
        count = SHARE * options.threads * work.micro_batch
        run = evenstep.start(
            run=folder, global_batch=count, micro_batch=work.micro_batch, seed=0, thread_replicas=options.threads
        )
        ours, theirs = evenstep_side(run, work), plain_threads(work, options.threads)
        pairs = []
        _turn(ours, 3, exact=True)  # the first steps check, allocate and build
        _turn(theirs, 3, exact=False)
        for _ in range(options.turns):
            pairs.append((_turn(ours, 1, exact=True), _turn(theirs, 1, exact=False)))
        ours.close()
        theirs.close()
        run.close()
    fastest = min(a for a, _ in pairs) / min(b for _, b in pairs)
    print(json.dumps({"ratios": [a / b for a, b in pairs], "fastest": fastest}), flush=True)


def _turn(side: Iterator[float], steps: int, *, exact: bool) -> float:
    """Seconds for so many steps of one side."""
    torch.use_deterministic_algorithms(exact)
    started = time.perf_counter()
    for _ in range(steps):
        next(side)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
