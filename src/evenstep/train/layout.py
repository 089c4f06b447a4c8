"""How a run is spread over devices and processes, and what this process does of it.

Each way of splitting is a file in `parallel/`, with functions that make up one Layout. All of them add the same leaves
in the same tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from evenstep.errors import UsageError
from evenstep.plan.grid import Grid, grid
from evenstep.train.lockstep import Alone, Lockstep
from evenstep.train.options import Options
from evenstep.train.parallel import replicas
from evenstep.train.reduce import Reducer
from evenstep.train.statistics import Statistics
from evenstep.train.world import Ground

if TYPE_CHECKING:
    from evenstep.train.step import Work


@dataclass(frozen=True)
class Layout:
    """What this process does of a run."""

    grid: Grid
    exact: bool
    place: Callable[[nn.Module], None]
    """Puts a prepared model where this layout wants it; once for each model."""
    reducer: Reducer
    """Sums the gradients of this process's leaves and those of the other replicas."""
    statistics: Statistics
    """Sums what BatchNorm layers see, over the processes that hold the same layers."""
    compute: Callable[[Work], None]
    """Computes this process's micro-batches of one step.backward."""
    lockstep: Lockstep
    """The processes that hold a model together with this one."""


def lay_out(options: Options, ground: Ground) -> Layout:
    """The layout that the options ask for. UsageError, before anything is computed, for one that cannot be had."""
    cut = grid(ground.world.world_size, stages=options.stages, shard=options.shard, replicas=options.replicas)
    asked = {
        "--stages": options.stages > 1,
        "--shard": options.shard,
        "--thread-replicas": options.thread_replicas > 1,
        "--split": options.split > 1,
    }
    for name in (name for name, wanted in asked.items() if wanted):
        raise UsageError(f"{name} is not there yet")
    reducer = Reducer(ground.world.rank, ground.world.world_size, ground.data, ground.device, options.exact)
    statistics = Statistics(ground.meeting)
    alone = Alone(ground.world.rank)
    return Layout(cut, options.exact, lambda model: _to(model, ground), reducer, statistics, replicas.compute, alone)


def _to(model: nn.Module, ground: Ground) -> None:
    model.to(ground.device)
