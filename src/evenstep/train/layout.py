"""How a run is spread over devices and processes, and what this process does of it.

Each way of splitting is a file in `parallel/`, with functions that make up one Layout. All of them add the same leaves
in the same tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from evenstep.errors import UsageError
from evenstep.plan.grid import Grid, grid
from evenstep.train.lockstep import Alone, Lockstep
from evenstep.train.meeting import Meeting
from evenstep.train.norm import Folds
from evenstep.train.options import Asked, Options
from evenstep.train.parallel import replicas
from evenstep.train.parallel.split import Splits
from evenstep.train.parallel.stages import Stages
from evenstep.train.parallel.threads import ThreadReplicas
from evenstep.train.reduce import Named, Reducer
from evenstep.train.statistics import Statistics
from evenstep.train.synchronised import Together
from evenstep.train.world import Ground

if TYPE_CHECKING:
    from evenstep.train.parallel.shard import Shards
    from evenstep.train.work import Work


@dataclass(frozen=True)
class Layout:
    """What this process does of a run."""

    grid: Grid
    exact: bool
    place: Callable[[nn.Module, Asked], None]
    """Puts a prepared model where this layout wants it; once for each model."""
    own: Callable[[Named], Named]
    """Of some parameters of the models, those whose gradients this process's `reducer` sums."""
    reducer: Reducer | Shards
    """Sums the gradients of this process's leaves and those of the other replicas."""
    statistics: Statistics
    """Sums what BatchNorm layers see, over the processes that hold the same layers."""
    compute: Callable[[Work], None]
    """Computes this process's micro-batches of one step.backward."""
    deliver: Callable[[], None]
    """After `reducer` is done: gradients go to whoever else has the parameters."""
    folds: Callable[[Folds], Folds]
    """The squared norms of all gradients by name, from those that are here."""
    lockstep: Lockstep
    """The processes that hold a model together with this one."""
    close: Callable[[], None]
    """At the end of the run."""
    plan: list[str]
    """What to tell a person about it before the first step, once the models are placed."""
    together: Together | None = None
    """The processes over which BatchNorm layers are synchronised, where that was asked for."""


def lay_out(options: Options, ground: Ground) -> Layout:
    """The layout that the options ask for. UsageError, before anything is computed, for one that cannot be had."""
    cut = grid(ground.world.world_size, stages=options.stages, shard=options.shard, replicas=options.replicas)
    if options.thread_replicas > 1 and (options.stages > 1 or options.shard):
        raise UsageError(
            f"--thread-replicas together with {'--shard' if options.shard else '--stages'} is not offered",
            do="start more processes instead (--processes)",
        )
    if options.split > 1 and (options.stages > 1 or options.shard):
        raise UsageError(
            f"--split together with {'--shard' if options.shard else '--stages'} is not offered",
            do="start more processes instead (--processes), of one device each",
        )
    if options.stages > 1:
        stages = Stages(cut, ground, options.exact)
        return Layout(
            grid=cut,
            exact=options.exact,
            place=stages.place,
            own=stages.own,
            reducer=stages.reducer,
            statistics=Statistics(stages.alike),
            compute=stages.compute,
            deliver=stages.deliver,
            folds=stages.folds,
            lockstep=stages,
            close=_nothing,
            plan=stages.plan,
        )
    if cut.shards > 1:
        if options.batchnorm == "sync":
            raise UsageError(
                'batchnorm="sync" with --shard is not offered: a shard without a micro-batch has no statistics',
                do="leave it out: BatchNorm layers are exact on every layout, each over its micro-batch",
            )
        from evenstep.train.parallel.shard import ShardLockstep, Shards  # FSDP takes seconds to import

        shards = Shards(ground, cut, options.exact)
        return Layout(
            grid=cut,
            exact=options.exact,
            place=shards.place,
            own=lambda named: named,
            reducer=shards,
            statistics=Statistics(ground.meeting),
            compute=shards.compute,
            deliver=_nothing,
            folds=lambda folds: folds,
            lockstep=ShardLockstep(shards),
            close=_nothing,
            plan=shards.plan,
        )
    compute, close = replicas.compute, _nothing
    plan: list[str] = []
    devices = _devices(options, ground.device)
    splits = Splits(devices, options.exact, plan)
    if options.thread_replicas > 1:
        threads = ThreadReplicas(devices, options.exact, ground.meeting, splits)
        compute, close = threads.compute, threads.close
        plan.append(f"thread replicas: {options.thread_replicas} in each process")
    together = _together(ground) if options.batchnorm == "sync" else None
    if together is not None:
        plan.append(together.line())

    def place(model: nn.Module, asked: Asked) -> None:
        if together is not None:
            together.convert(model)
        splits.place(model, asked)

    return Layout(
        grid=cut,
        exact=options.exact,
        place=place,
        own=lambda named: named,
        reducer=Reducer(ground.world.rank, ground.world.world_size, ground.data, options.exact),
        statistics=Statistics(ground.meeting),
        compute=compute,
        deliver=_nothing,
        folds=lambda folds: folds,
        lockstep=Alone(ground.world.rank),
        close=close,
        plan=plan,
        together=together,
    )


def _devices(options: Options, first: torch.device) -> list[list[torch.device]]:
    """The devices of each thread replica of this process: one, or those over which it is split."""
    width = options.split
    if first.type != "cuda":
        return [[torch.device(first.type, k) for k in range(width)] if width > 1 else [first]] * options.thread_replicas
    devices = [torch.device("cuda", first.index + k) for k in range(options.thread_replicas * width)]
    return [devices[k : k + width] for k in range(0, len(devices), width)]


def _nothing() -> None:
    pass


def _together(ground: Ground) -> Together:
    """Groups of their own: exchanges of a backward and of gradients are under way at the same time."""
    rank, world_size = ground.world.rank, ground.world.world_size
    if world_size == 1:
        return Together(Meeting(0, 1), None)
    if ground.device.type == "cuda":
        return Together(Meeting(rank, world_size, None), dist.new_group(backend=ground.backend))
    return Together(Meeting(rank, world_size, dist.new_group(backend="gloo")), None)
