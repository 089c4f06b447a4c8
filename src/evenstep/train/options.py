"""What a run was asked for: the script's own words, and the launcher's, which win."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from evenstep.environment import AUTO, Settings, memory_size
from evenstep.errors import UsageError
from evenstep.plan.grid import grid
from evenstep.plan.integers import integer
from evenstep.train.precision import PRECISIONS


@dataclass(frozen=True)
class Options:
    """Checked options of a run."""

    global_batch: int
    micro_batch: int | str  # or "auto"
    seed: int
    exact: bool
    backend: str
    threads: int
    device: str | None
    run: str | None
    checkpoint_every: int | None
    keep: int
    fingerprints: bool
    allow_other_identity: bool
    stages: int = 1
    shard: bool = False
    replicas: int | None = None
    thread_replicas: int = 1
    split: int = 1
    precision: str = "fp32"
    batchnorm: str = "exact"
    memory: int | str | None = None  # bytes, once they are chosen
    loaders: int | None = None
    stop_after: int | None = None
    trace_step: int | None = None


Devices = Sequence[Any] | Mapping[str, Any]
"""Devices over which a model is balanced, or {name of a submodule: device}. A device: its name, or a torch.device."""


@dataclass(frozen=True)
class Asked:
    """What a script says in run.prepare of where one model is cut."""

    stages: Sequence[str] | None = None  # names of the first units of all stages but the first
    devices: Devices | None = None
    example: Any = None  # what a micro-batch gives to the model
    shard: Sequence[str] | None = None  # names of the modules that are sharded by themselves


NOTHING = Asked()
_LEAST = {  # options that are whole numbers
    "global_batch": 1,
    "micro_batch": 1,
    "seed": 0,
    "threads": 1,
    "keep": 1,
    "stages": 1,
    "thread_replicas": 1,
    "split": 1,
}
_NUMBERS = (*_LEAST, "replicas", "checkpoint_every", "memory")


def choose(settings: Settings, script: Options, world_size: int) -> Options:
    """`script` with what the launcher was told in its place. UsageError, naming option and fix, for what can't work."""

    def first(name: str) -> object:
        said = getattr(settings, name)
        return getattr(script, name) if said is None else said

    both = {field.name for field in fields(Options)} & {field.name for field in fields(Settings)}
    chosen = replace(script, **{name: first(name) for name in both})  # type: ignore[arg-type]
    chosen = replace(chosen, **{name: integer(getattr(chosen, name)) for name in _NUMBERS})
    if chosen.memory is not None:
        chosen = replace(chosen, memory=memory_size(chosen.memory, "memory"))
    for name, least in _LEAST.items():
        if (name, getattr(chosen, name)) != ("micro_batch", AUTO):
            _whole(name, getattr(chosen, name), least)
    if chosen.replicas is not None:
        _whole("replicas", chosen.replicas, 1)
    _check_batchnorm(chosen)
    if chosen.precision not in PRECISIONS:
        raise UsageError(f"precision={chosen.precision!r}, expected one of {', '.join(PRECISIONS)}")
    if chosen.checkpoint_every is not None:
        _whole("checkpoint_every", chosen.checkpoint_every, 1)
    check_micro_batch(chosen, world_size)
    return chosen


def workers(chosen: Options, world_size: int) -> int:
    """How many compute micro-batches side by side."""
    computing = grid(world_size, stages=chosen.stages, shard=chosen.shard, replicas=chosen.replicas)
    return world_size // computing.stages * chosen.thread_replicas


def check_micro_batch(chosen: Options, world_size: int) -> None:
    """UsageError where the micro-batch, if it is known, is too large for the global batch, or there are too few."""
    micro_batch = 1 if isinstance(chosen.micro_batch, str) else chosen.micro_batch
    if chosen.global_batch < micro_batch:
        raise UsageError(
            f"global_batch={chosen.global_batch} is smaller than micro_batch={chosen.micro_batch}: a global batch is "
            "made of micro-batches",
            do=f"give micro_batch={chosen.global_batch} or less (--micro-batch), or a larger --global-batch",
        )
    micro_batches = -(-chosen.global_batch // micro_batch)
    count = workers(chosen, world_size)
    if count > micro_batches:
        raise UsageError(
            f"{_workers(chosen, world_size)} for {micro_batches} micro-batches (global_batch={chosen.global_batch}, "
            f"micro_batch={chosen.micro_batch}): some would never have anything to do",
            do=f"start at most {micro_batches} of them (--processes, --thread-replicas), or give "
            f"micro_batch={max(1, chosen.global_batch // count)} or less (--micro-batch)",
        )


def _check_batchnorm(chosen: Options) -> None:
    if chosen.batchnorm not in ("exact", "sync"):
        raise UsageError(f"batchnorm={chosen.batchnorm!r}, expected 'exact' or 'sync'")
    others = {
        "--stages": chosen.stages > 1,
        "--shard": chosen.shard,
        "--thread-replicas": chosen.thread_replicas > 1,
    }
    for name in (name for name, asked in others.items() if asked and chosen.batchnorm == "sync"):
        raise UsageError(
            f'batchnorm="sync" goes with whole models in processes of their own, not with {name}',
            do=f'leave {name} out, or use batchnorm="exact" (the default), which gives the same bits with it',
        )


def _workers(chosen: Options, world_size: int) -> str:
    """What computes micro-batches side by side."""
    said = f"{world_size} processes"
    if chosen.stages > 1:
        said = f"{world_size // chosen.stages} pipelines of {chosen.stages} stages"
    return said + (f" of {chosen.thread_replicas} thread replicas" if chosen.thread_replicas > 1 else "")


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}={value!r}, expected a whole number of at least {least}")
