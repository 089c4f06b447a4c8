"""The first global batch of an epoch of a billion samples, against the list of indices of DistributedSampler.

The list is measured at a hundredth of that: for a billion it would not fit into memory. Prints seconds and bytes.
"""

from __future__ import annotations

import json
import time
import tracemalloc

import torch
from torch.utils.data import DistributedSampler

from evenstep.plan.order import Shuffled

BATCH = 256
SAMPLES = 1_000_000_000
LISTED = SAMPLES // 100


def main() -> None:
    started = time.perf_counter()
    Shuffled(SAMPLES, seed=1).indices(0, 0, BATCH)
    seconds = time.perf_counter() - started

    tracemalloc.start()
    Shuffled(SAMPLES, seed=2).indices(0, 0, BATCH)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    class Samples(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return LISTED

    started = time.perf_counter()
    next(iter(DistributedSampler(Samples(), num_replicas=2, rank=0)))
    listed = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "bytes": peak, "listed_seconds": listed, "listed": LISTED}))


if __name__ == "__main__":
    main()
