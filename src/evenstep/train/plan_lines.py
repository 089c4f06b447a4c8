"""The plan of a run, for people: what a step is, who computes what of it, and how idle they are."""

from __future__ import annotations

import os
from itertools import groupby

from evenstep.plan.schedule import Schedule
from evenstep.plan.tree import share


def batch_line(schedule: Schedule) -> str:
    """The batch and the steps."""
    first = schedule.step(0)
    whole, rest = divmod(first.samples, first.micro_batch)
    batch = f"{_count(whole, 'micro-batch')} of {first.micro_batch}" + (f" and one of {rest}" if rest else "")
    several = f", {schedule.steps_per_epoch} an epoch" if len(schedule) > schedule.steps_per_epoch else ""
    return f"global batch {first.samples}: {batch}; {_count(len(schedule), 'step')}{several}"


def shares_line(
    micro_batches: int,
    world_size: int,
    *,
    stages: int = 1,
    device: str | None = None,
    backend: str | None = None,
    exact: bool = True,
) -> str:
    """The processes' shares of so many micro-batches, and how idle they are.

    With `stages`, so many processes make a pipeline, which has one share. `device` (cuda:0 is said as cuda), `backend`
    and `exact=False` are named if they are given.
    """
    where = "" if device is None else f" on {device.split(':')[0]}"
    where += "" if backend is None else f" over {backend}"
    where += "" if exact else ", equal to rounding"
    if world_size == 1:
        return f"1 process{where} computes all of them"

    workers = world_size // stages
    shares = [len(share(micro_batches, workers, worker)) for worker in range(workers)]
    one, noun = ("rank", "processes") if stages == 1 else ("pipeline", f"pipelines of {stages} stages")
    said = []
    for size, group in groupby(range(workers), key=shares.__getitem__):
        found = list(group)
        if workers == 1:
            said.append(f"it computes all {_count(size, 'micro-batch')}")
        elif len(found) == workers:
            said.append(f"each computes {_count(size, 'micro-batch')}")
        elif len(found) == 1:
            said.append(f"{one} {found[0]} computes {size}")
        else:
            said.append(f"{one}s {found[0]}-{found[-1]} compute {size} each")
    idle = 1 - micro_batches / (workers * max(shares))
    if idle > 0:
        none_idle = [str(n) for n in range(2, 2 * workers + 1) if micro_batches % n == 0]
        said[-1] += f"; {_percent(idle)} idle" + (f" (none with {_either(none_idle)} {noun})" if none_idle else "")
    elif stages == 1:
        said[-1] += "; none is idle"
    if stages > 1:
        waiting = (stages - 1) / (max(shares) + stages - 1)
        said[-1] += f"; stages wait for {_percent(waiting)} of a step, while it fills and empties"
    what = f"{world_size} processes" if stages == 1 else _count(workers, "pipeline") + f" of {stages} stages"
    return f"{what}{where}: {', '.join(said)}"


def idle_cores(used: int) -> list[str]:
    """What to do about cores of this machine beyond the `used` ones, if there are any."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if used >= cores:
        return []
    return [f"{used} of {cores} cores are used: more processes (evenstep run --processes {cores}) use them all"]


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.01 else "under 1 %"


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"
