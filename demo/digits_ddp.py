"""The training of examples/digits.py as it is usually written by hand for DistributedDataParallel.

The same model, data, batch, optimizer and schedule; DistributedSampler with set_epoch, gradient accumulation with
no_sync, a seed for each rank. Nothing is wrong with it. Run it with any launcher:

    torchrun --nproc-per-node 2 demo/digits_ddp.py
    evenstep run --processes 2 demo/digits_ddp.py
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from digits import Digits, Net, Sample

GLOBAL_BATCH, MICRO_BATCH, SEED = 128, 16, 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # 128 samples are 8 micro-batches, which 3 ranks cannot share evenly: the nearest is 3 each, a batch of 144.
    accumulate = max(1, round(GLOBAL_BATCH / (MICRO_BATCH * world_size)))

    torch.manual_seed(SEED)
    model = DistributedDataParallel(Net())
    torch.manual_seed(SEED + rank)
    np.random.seed(SEED + rank)
    random.seed(SEED + rank)

    train_set = Digits(train=True)
    sampler: DistributedSampler[Sample] = DistributedSampler(train_set, seed=SEED)
    loader = DataLoader(train_set, MICRO_BATCH, sampler=sampler)
    steps_per_epoch = -(-len(loader) // accumulate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    total = steps_per_epoch * options.epochs
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=total)

    started = time.perf_counter()
    accuracy = 0.0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(loader):
            last = (number + 1) % accumulate == 0 or number + 1 == len(loader)
            with contextlib.nullcontext() if last else model.no_sync():
                (F.cross_entropy(model(images), labels) / accumulate).backward()
            if last:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accuracy = evaluate(model.module)
        if rank == 0:
            print(f"epoch {epoch + 1}/{options.epochs}: accuracy {accuracy:.4f}", flush=True)
    seconds = time.perf_counter() - started

    if rank == 0:
        weights = b"".join(value.numpy().tobytes() for value in model.module.state_dict().values())
        result = {
            "accuracy": accuracy,
            "steps_per_second": total / seconds,
            "global_batch": accumulate * MICRO_BATCH * world_size,
            "fingerprint": hashlib.blake2b(weights, digest_size=8).hexdigest(),
        }
        print(json.dumps(result), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # taking DDP and gloo apart hangs or aborts now and then


@torch.no_grad()
def evaluate(model: torch.nn.Module) -> float:
    """The share of held-out digits that are right; every rank looks at all of them."""
    model.eval()
    test_set = Digits(train=False)
    right = (model(test_set.images).argmax(1) == test_set.labels).double().mean()
    model.train()
    return float(right)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
