"""`evenstep.start`: from the environment and the script's options to a run."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from evenstep.environment import AUTO, read_settings, read_world
from evenstep.errors import IdentityError, MachineError
from evenstep.record.identity import Scalar, read_identity
from evenstep.record.paths import RunPaths, new_run_directory
from evenstep.train.allocation import keep_freed_memory
from evenstep.train.auto import refuse_auto
from evenstep.train.identity import check_identity
from evenstep.train.options import Options, check_micro_batch, choose
from evenstep.train.randomness import key, seed_generators
from evenstep.train.run import Run
from evenstep.train.world import (
    Ground,
    check_backend,
    check_same,
    check_torch,
    choose_device,
    connect,
    hold_arithmetic,
    identity,
)

_current: Run | None = None


def start(
    *,
    global_batch: int,
    micro_batch: int | str | None = None,
    seed: int = 0,
    run: str | os.PathLike[str] | None = None,
    exact: bool = True,
    backend: str = "auto",
    threads: int = 1,
    device: str | None = None,
    checkpoint_every: int | None = None,
    keep: int = 2,
    fingerprints: bool = False,
    allow_other_identity: bool = False,
    stages: int = 1,
    shard: bool = False,
    replicas: int | None = None,
    thread_replicas: int = 1,
    split: int = 1,
    precision: str = "fp32",
    batchnorm: str = "exact",
    memory: int | str | None = None,
) -> Run:
    """Begin a run. The layout comes from the launcher; a script started with plain `python` is one process.

    Options of the launcher (`evenstep run --global-batch ...`) win over those given here.

    global_batch: samples of one optimizer step, over all processes.
    micro_batch: samples of one forward and backward (default: the whole global batch, which only one process can do).
        "auto": as many as fit the memory, found by trial at the first step.backward; the number is then part of the
        run's identity, and a resume takes it.
    memory: what a process may use, for micro_batch="auto": bytes, or "2GiB". The CPU needs it; a GPU's is known.
    seed: of everything that is random. The generators of torch, numpy and random are seeded with it now.
    run: the run directory; a new one under runs/ by default. One that holds checkpoints is gone on with.
    exact: the same bits on every layout. False: the backend's own all-reduce and any kernel; equal to rounding.
    backend: "auto" (nccl where there are GPUs, else gloo), "gloo", "nccl", "mpi" or "ucc".
    threads: intra-op threads of each process; part of the run's identity, since it can change bits.
    device: "cpu" or "cuda", where another than the backend's is wanted.
    checkpoint_every: steps between checkpoints (default: at each epoch's end). keep: how many stay.
    fingerprints: compute and record the fingerprint after every step, not only at checkpoints.
    allow_other_identity: go on in a run directory that was made with other options or on another kind of machine.
    stages: cut the model into pipeline stages, one process each; processes that are left make replicas of it.
    shard: each process holds a part of every parameter (FSDP2). replicas: how many such copies there are.
    thread_replicas: replicas of the model in threads of each process, on one device each (on the CPU: one thread).
    split: spread the model of each process (or thread replica) over so many devices.
    None of the last five changes a bit of the result.
    precision: "fp32", "bf16" or "fp16": losses, evaluation and prediction are computed under autocast, fp16 with a
        loss that is scaled; parameters, gradients and their sums keep the parameters' dtype. Part of the identity.
    batchnorm: "exact": BatchNorm normalises over its micro-batch, the same on every layout. "sync": over the
        micro-batches that the processes compute at the same time; equal to rounding, at this number of processes only.

    Raises UsageError for options that cannot work, before anything is computed.
    """
    global _current
    check_torch()
    keep_freed_memory()
    if _current is not None:
        _current.close()
        _current = None
    world = read_world(os.environ)
    asked = Options(
        global_batch=global_batch,
        micro_batch=global_batch if micro_batch is None else micro_batch,
        seed=seed,
        exact=exact,
        backend=backend,
        threads=threads,
        device=device,
        run=None if run is None else os.fspath(run),
        checkpoint_every=checkpoint_every,
        keep=keep,
        fingerprints=fingerprints,
        allow_other_identity=allow_other_identity,
        stages=stages,
        shard=shard,
        replicas=replicas,
        thread_replicas=thread_replicas,
        split=split,
        precision=precision,
        batchnorm=batchnorm,
        memory=memory,
    )
    options = choose(read_settings(os.environ), asked, world.world_size)
    used = check_backend(options.backend)
    ground = connect(world, used, choose_device(world, used, options.device, options.thread_replicas * options.split))
    said: dict[str, Scalar] = {
        "global_batch": options.global_batch,
        "micro_batch": options.micro_batch,
        "seed": options.seed,
        "exact": options.exact,
        "precision": options.precision,
        "threads": options.threads,
        "batchnorm": options.batchnorm,
    }
    if options.batchnorm == "sync":
        said["the processes that batchnorm normalises over"] = world.world_size
    put_back = hold_arithmetic(options.exact, options.threads)
    said.update(identity(ground.device))
    check_same(ground, {**said, "backend": used})
    paths = _run_directory(ground, options)
    if options.micro_batch == AUTO:
        options = _with_recorded(ground, paths, options)
        said["micro_batch"] = options.micro_batch
    check_identity(ground, paths, said, options.allow_other_identity)
    seed_generators(key(options.seed, "start"))
    _current = Run(options, ground, paths, put_back)
    return _current


def _run_directory(ground: Ground, options: Options) -> RunPaths:
    """The run directory, the same on every process; rank 0 makes it."""
    said = {"root": "", "failed": ""}
    if ground.world.rank == 0:
        try:
            root = Path(options.run) if options.run else new_run_directory(_script(), Path.cwd())
            root.mkdir(parents=True, exist_ok=True)
            said["root"] = str(root.absolute())
        except (MachineError, OSError) as error:
            said["failed"] = error.message if isinstance(error, MachineError) else f"cannot make {options.run}: {error}"
    answer = ground.meeting.say("evenstep.start", said, site="")[0]
    if answer["failed"]:
        raise MachineError(
            answer["failed"], do="name a writable place, or make room there: --run DIR, or start(run=...)"
        )
    return RunPaths(Path(answer["root"]))


def _with_recorded(ground: Ground, paths: RunPaths, options: Options) -> Options:
    """With the micro-batch that the run directory was made with, if one was chosen. UsageError if none can be."""
    said = None
    if ground.world.rank == 0:
        with suppress(IdentityError):  # it is told later
            said = (read_identity(paths.identity) or {}).get("micro_batch")
    recorded = ground.meeting.say("evenstep.start", said, site="")[0]
    if isinstance(recorded, int):
        options = replace(options, micro_batch=recorded)
        check_micro_batch(options, ground.world.world_size)
    else:
        refuse_auto(options, ground.device)
    return options


def _script() -> str | None:
    main = sys.modules.get("__main__")
    return getattr(main, "__file__", None)
