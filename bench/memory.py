"""Peak memory of one process. Run by `evenstep run --processes 2 bench/memory.py SIDE`, each side on its own.

Prints {"peak": bytes, "gradients": bytes}, of rank 0: the most physical memory that it ever had, and the size of one
copy of all gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.sides import ddp_side, evenstep_side, start
from bench.workloads import MLP, Workload, workload

STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["evenstep", "ddp"])
    side = parser.parse_args().side
    small = workload("mlp")
    work = Workload(lambda: MLP(depth=6), small.data, small.micro_batch, small.loss_sum, small.samples_weight)
    gradients = sum(p.numel() * p.element_size() for p in work.model().parameters())
    if side == "evenstep":
        run = start(work, int(os.environ["WORLD_SIZE"]))
        steps = evenstep_side(run, work)
    else:
        dist.init_process_group("gloo")
        steps = ddp_side(work)
    rank = dist.get_rank()
    for _ in range(STEPS):
        next(steps)
    peak = peak_memory()
    dist.barrier()
    if rank == 0:
        print(json.dumps({"peak": peak, "gradients": gradients}), flush=True)
    os._exit(0)  # taking DDP and gloo apart aborts now and then, and what is measured is over


def peak_memory() -> int:
    """Bytes of physical memory that this process ever had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
