"""What a step costs against hand-written DDP. Run by `evenstep run --processes 2 [--no-exact] bench/step.py WORKLOAD`.

Both sides live in the same processes and take turns, a step each, so that a machine that is slower for a while is
slower for both. Prints {"ratios": [...], "fastest": ratio}: evenstep's time over DDP's for each pair of turns,
and for the fastest turn of each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.sides import ddp_side, evenstep_side, in_turns, start
from bench.workloads import workload


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=["transformer", "mlp"])
    parser.add_argument("--turns", type=int, default=48)
    parser.add_argument("--steps", type=int, default=1, help="steps in a turn")
    options = parser.parse_args()
    work = workload(options.workload)
    run = start(work, int(os.environ["WORLD_SIZE"]))
    deterministic = torch.are_deterministic_algorithms_enabled()
    ours, theirs = evenstep_side(run, work), ddp_side(work)

    def turn(side: Iterator[float], steps: int = options.steps) -> float:
        """Seconds for so many steps of one side, until the slower process has done them."""
        torch.use_deterministic_algorithms(deterministic and side is ours)
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            next(side)
        dist.barrier()
        return time.perf_counter() - started

    turn(ours, 3)  # the first steps check, allocate and build
    turn(theirs, 3)
    found = in_turns(lambda: turn(ours), lambda: turn(theirs), options.turns)
    theirs.close()  # DDP before its process group
    run.close()
    if run.rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
