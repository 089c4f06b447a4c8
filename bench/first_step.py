"""A plain DDP script, for any launcher: prints the time at which every rank had done its first optimizer step."""

from __future__ import annotations

import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps({"time": time.time()}), flush=True)
    dist.barrier()
    os._exit(0)  # taking gloo apart aborts now and then, and what is measured is over


if __name__ == "__main__":
    main()
