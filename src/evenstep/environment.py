"""The environment variables by which a launcher tells a process where it stands and what it was asked for.

Names are data: each is written and read here and nowhere else. Nothing here changes the environment.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from evenstep.errors import UsageError

LAUNCH = "EVENSTEP_LAUNCH"
"""The random tag in the environment of every process of one launch; processes are found and counted by it."""

TOKEN = "EVENSTEP_TOKEN"
"""What the launchers of several hosts must all know. Never given to training processes, nor on a command line."""

SSH = "EVENSTEP_SSH"
"""The ssh client and its first options, as in GIT_SSH_COMMAND: `ssh -F file`. Default: ssh."""

TORCH_RANGE = ((2, 13), (2, 15))
"""The torch that evenstep was tested with: from the first, below the second; pyproject.toml says the same."""

NOTICES = "EVENSTEP_NOTICES"
"""The descriptor on which a training process tells its launcher these things, each with its rank, a line each."""
TAKES_SIGNALS = "takes signals"  # SIGTERM and the like ask it to stop after its step
LEAVES_SIGNALS = "leaves signals"
STOPPING = "stopping"  # it was asked, and will end by itself


@dataclass(frozen=True)
class World:
    """Where this process stands among the processes of one training."""

    rank: int
    world_size: int
    local_rank: int  # rank among the processes of this host
    local_world_size: int  # how many of them this host has
    launcher: str  # "python" | "evenstep" | "torchrun" | "slurm" | "mpi" | "environment" (RANK etc. set by hand)
    master_addr: str | None  # None: not given (python alone, mpirun); of srun the first host
    master_port: int | None
    job: str | None  # a name that all processes of this start share and no other start has; None: there is none


@dataclass(frozen=True)
class Settings:
    """What the launcher's options say. None: the script's own choice."""

    run: str | None = None
    global_batch: int | None = None
    micro_batch: int | str | None = None  # or "auto"
    seed: int | None = None
    exact: bool | None = None
    backend: str | None = None
    threads: int | None = None
    checkpoint_every: int | None = None
    keep: int | None = None
    fingerprints: bool | None = None
    allow_other_identity: bool | None = None
    loaders: int | None = None  # of run.steps
    stop_after: int | None = None  # end the script after so many steps; the run is not finished
    trace_step: int | None = None  # write into the run directory what happens in this step (train/trace.py)
    batchnorm: str | None = None
    launch: str | None = None
    stages: int | None = None
    shard: bool | None = None
    replicas: int | None = None
    thread_replicas: int | None = None
    split: int | None = None
    precision: str | None = None
    memory: int | None = None  # bytes


AUTO = "auto"
"""The micro-batch that is to be chosen by trial."""

ALONE = World(0, 1, 0, 1, "python", None, None, None)

_SMALLEST = {
    "global_batch": 1, "micro_batch": 1, "seed": 0, "threads": 1, "checkpoint_every": 1, "keep": 1,
    "loaders": 0, "stop_after": 1, "trace_step": 0,
    "stages": 1, "replicas": 1, "thread_replicas": 1, "split": 1,
}  # fmt: skip
_SWITCHES = {"exact", "fingerprints", "allow_other_identity", "shard"}


def read_world(environ: Mapping[str, str]) -> World:
    """Find out which launcher started this process, and as which of how many.

    What is set by name (RANK and WORLD_SIZE) wins; then mpirun, since it may run inside a Slurm step; then a Slurm
    step of several tasks; else the process is alone. UsageError for values that are half set or make no sense.
    """
    if "RANK" in environ:
        return _by_name(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _open_mpi(environ)
    slurm = _slurm_step(environ)
    if "PMI_RANK" in environ and "PMI_SIZE" in environ and not _same_as_step(environ, slurm):
        return _mpich(environ)
    if slurm is not None:
        return slurm
    if "WORLD_SIZE" in environ and _integer(environ, "WORLD_SIZE", 1) > 1:
        raise UsageError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set but RANK is not",
            do="set both (and LOCAL_RANK, MASTER_ADDR, MASTER_PORT), or unset WORLD_SIZE, or start with `evenstep run`",
        )
    return ALONE


def write_world(world: World) -> dict[str, str]:
    """The variables that make `read_world` return this world (launcher "evenstep"), as torchrun names them."""
    written = {
        "RANK": world.rank,
        "WORLD_SIZE": world.world_size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_world_size,
        "ROLE_RANK": world.rank,
        "ROLE_WORLD_SIZE": world.world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": world.master_port,
        LAUNCH: world.job,
    }
    return {name: str(value) for name, value in written.items() if value is not None}


def read_settings(environ: Mapping[str, str]) -> Settings:
    """The launcher's options. UsageError, naming the variable, for a value that makes no sense."""
    found: dict[str, object] = {}
    for field in fields(Settings):
        variable = _variable(field.name)
        text = environ.get(variable)
        if text is None or text == "":
            continue
        if field.name == "micro_batch" and text == AUTO:
            found[field.name] = AUTO
        elif field.name == "memory":
            found[field.name] = memory_size(text, variable)
        elif field.name in _SMALLEST:
            found[field.name] = _integer(environ, variable, _SMALLEST[field.name])
        elif field.name in _SWITCHES:
            found[field.name] = _switch(environ, variable)
        else:
            found[field.name] = text
    return Settings(**found)  # type: ignore[arg-type]  # each value was read by its field's kind


def memory_size(value: object, name: str) -> int:
    """A number of bytes from "2GiB", "500 MB" or 2147483648. UsageError, naming what it was given as."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", str(value).strip().lower())
    factor = 1
    if match and match[2]:
        factor = (1024 if match[3] else 1000) ** ("kmgt".index(match[2]) + 1)
    size = int(float(match[1]) * factor) if match and not isinstance(value, bool) else 0
    if size < 1:
        raise UsageError(
            f"{name}={value!r} is no amount of memory", do="give bytes, or a number and a unit: 2GiB, 500MB"
        )
    return size


def write_settings(settings: Settings) -> dict[str, str]:
    """The variables that make `read_settings` return these settings."""
    written: dict[str, str] = {}
    for field in fields(Settings):
        value = getattr(settings, field.name)
        if value is not None:
            written[_variable(field.name)] = str(int(value)) if isinstance(value, bool) else str(value)
    return written


def _variable(field: str) -> str:
    return "EVENSTEP_" + field.upper()


def _by_name(environ: Mapping[str, str]) -> World:
    """RANK, WORLD_SIZE, ...: evenstep's launcher, torchrun, or somebody's own script."""
    world_size = _integer(environ, "WORLD_SIZE", 1, because="RANK is set")
    rank = _integer(environ, "RANK", 0)
    _below("RANK", rank, "WORLD_SIZE", world_size)
    if world_size == 1 and "LOCAL_RANK" not in environ:
        local_rank, local_world_size = 0, 1
    else:
        local_rank = _integer(environ, "LOCAL_RANK", 0, because="RANK and WORLD_SIZE are set")
        if local_rank == rank and "LOCAL_WORLD_SIZE" not in environ:
            local_world_size = world_size  # nothing speaks of a second host
        else:
            local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", 1, because="LOCAL_RANK is set")
    _below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    if local_world_size > world_size:
        raise UsageError(
            f"LOCAL_WORLD_SIZE={local_world_size} is more than WORLD_SIZE={world_size}",
            do="LOCAL_WORLD_SIZE counts the processes of this host, WORLD_SIZE those of all hosts",
        )
    address, port = _master(environ)
    if environ.get(LAUNCH):
        launcher, job = "evenstep", environ[LAUNCH]
    elif "TORCHELASTIC_RUN_ID" in environ:
        # The run id is "none" unless the user names one; the port and the restart count tell starts apart.
        restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        launcher, job = "torchrun", f"torchrun-{environ['TORCHELASTIC_RUN_ID']}-{address}-{port}-{restart}"
    else:
        launcher, job = "environment", None
    return World(rank, world_size, local_rank, local_world_size, launcher, address, port, job)


def _open_mpi(environ: Mapping[str, str]) -> World:
    because = "OMPI_COMM_WORLD_RANK is set"
    world_size = _integer(environ, "OMPI_COMM_WORLD_SIZE", 1, because=because)
    rank = _integer(environ, "OMPI_COMM_WORLD_RANK", 0)
    local_rank = _integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0, because=because)
    local_world_size = _integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 1, because=because)
    _below("OMPI_COMM_WORLD_RANK", rank, "OMPI_COMM_WORLD_SIZE", world_size)
    _below("OMPI_COMM_WORLD_LOCAL_RANK", local_rank, "OMPI_COMM_WORLD_LOCAL_SIZE", local_world_size)
    # The namespace can come again in a later start; the address of mpirun's own daemon (with its port) does not.
    hosts_share = [
        environ[name]
        for name in ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess_base_jobid", "PRTE_MCA_prte_hnp_uri")
        if name in environ
    ]
    if local_world_size == world_size:
        job: str | None = _parent_name("OMPI_COMM_WORLD_RANK")
    else:
        job = _named("mpi", *hosts_share) if hosts_share else None
    return World(rank, world_size, local_rank, local_world_size, "mpi", *_master(environ), job)


def _mpich(environ: Mapping[str, str]) -> World:
    """MPICH's and Intel MPI's mpirun (hydra)."""
    because = "PMI_RANK is set"
    world_size = _integer(environ, "PMI_SIZE", 1, because=because)
    rank = _integer(environ, "PMI_RANK", 0)
    _below("PMI_RANK", rank, "PMI_SIZE", world_size)
    if world_size == 1:
        local_rank, local_world_size = 0, 1
    else:
        local_rank = _integer(environ, "MPI_LOCALRANKID", 0, because=because)
        local_world_size = _integer(environ, "MPI_LOCALNRANKS", 1, because=because)
        _below("MPI_LOCALRANKID", local_rank, "MPI_LOCALNRANKS", local_world_size)
    if local_world_size == world_size:
        job: str | None = _parent_name("PMI_RANK")
    else:
        job = None  # hydra gives the processes of several hosts no common name
    return World(rank, world_size, local_rank, local_world_size, "mpi", *_master(environ), job)


def _slurm_step(environ: Mapping[str, str]) -> World | None:
    """A task of an srun step with several tasks, else None.

    SLURM_NTASKS belongs to the job: in sbatch's script and in a shell of salloc it is the number of tasks asked for,
    with SLURM_PROCID=0, though one process was started. SLURM_STEP_NUM_TASKS is set by srun alone.
    """
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    world_size = _integer(environ, "SLURM_STEP_NUM_TASKS", 1)
    if world_size == 1:
        return None
    because = "SLURM_STEP_NUM_TASKS is set"
    rank = _integer(environ, "SLURM_PROCID", 0)
    _below("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", world_size)
    local_rank = _integer(environ, "SLURM_LOCALID", 0, because=because)
    local_world_size = _tasks_here(environ, world_size)
    _below("SLURM_LOCALID", local_rank, "the tasks of this host", local_world_size)
    job_id = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID"))
    step_id = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    # A requeued job counts its steps from 0 again, and another cluster its jobs from 1; srun's port tells them apart.
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    port = environ.get("SLURM_STEP_LAUNCHER_PORT", "0")
    job = None if job_id is None or step_id is None else f"slurm-{job_id}.{step_id}.{restarts}.{port}"
    address, master_port = _master(environ)
    if address is None and local_world_size < world_size and environ.get("SLURM_STEP_NODELIST"):
        address, master_port = first_node(environ["SLURM_STEP_NODELIST"]), None
    return World(rank, world_size, local_rank, local_world_size, "slurm", address, master_port, job)


def first_node(nodes: str) -> str:
    """The first of Slurm's list of nodes: host02 of host[02-04,7],other."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", "" if first is None else first[0])


def _tasks_here(environ: Mapping[str, str], world_size: int) -> int:
    """How many tasks of the step this host has."""
    if "SLURM_STEP_TASKS_PER_NODE" not in environ:
        return world_size
    counts = task_counts(environ, "SLURM_STEP_TASKS_PER_NODE")
    node = _integer(environ, "SLURM_NODEID", 0) if "SLURM_NODEID" in environ else 0
    if node >= len(counts):
        text = environ["SLURM_STEP_TASKS_PER_NODE"]
        raise UsageError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={text!r} names {len(counts)} hosts")
    return counts[node]


def task_counts(environ: Mapping[str, str], variable: str) -> list[int]:
    """Slurm's tasks of each node, which it writes like 4(x2),3."""
    counts: list[int] = []
    for part in environ[variable].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UsageError(f"{variable}={environ[variable]!r} is not a list of counts like 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _same_as_step(environ: Mapping[str, str], step: World | None) -> bool:
    """srun with PMI sets the PMI names too; mpirun under srun has one Slurm task for each host instead."""
    return step is not None and (environ["PMI_RANK"], environ["PMI_SIZE"]) == (str(step.rank), str(step.world_size))


def _master(environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    address = environ.get("MASTER_ADDR") or None
    port = _integer(environ, "MASTER_PORT", 0) if environ.get("MASTER_PORT") else None
    if port is not None and port > 65535:
        raise UsageError(f"MASTER_PORT={port} is not a port", do="give one from 1 to 65535")
    return address, port


def _parent_name(variable: str) -> str:
    """A name of the process that started this host's processes: its pid and when it started.

    A wrapper (`mpirun -n 2 sh -c "..."`) stands between; it has the variable itself, so climb past it.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            break  # another user's, as a system daemon's: certainly not a wrapper of ours
        if not any(entry.startswith(f"{variable}=".encode()) for entry in environ.split(b"\0")):
            break
        pid = int(_stat(pid)[1])
    return _named("parent", str(pid), _stat(pid)[19])


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat after the name: [0] state, [1] parent, [19] start time in clock ticks since boot."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ["?"] + ["0"] * 49
    return text[text.rindex(")") + 2 :].split()


def _named(kind: str, *parts: str) -> str:
    return f"{kind}-{hashlib.blake2b(chr(0).join(parts).encode(), digest_size=8).hexdigest()}"


def _integer(environ: Mapping[str, str], variable: str, smallest: int, *, because: str | None = None) -> int:
    text = environ.get(variable)
    if text is None:
        raise UsageError(
            f"{variable} is not set{'' if because is None else f', but {because}'}",
            do=f"set {variable} too, or start with `evenstep run`, which sets all of them",
        )
    try:
        value = int(text)
    except ValueError:
        raise UsageError(f"{variable}={text!r} is not a whole number", do=f"set it to {smallest} or more") from None
    if value < smallest:
        raise UsageError(f"{variable}={value} is too small", do=f"set it to {smallest} or more")
    return value


def _switch(environ: Mapping[str, str], variable: str) -> bool:
    text = environ[variable].lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise UsageError(f"{variable}={environ[variable]!r} is neither on nor off", do="set it to 1 or 0")


def _below(name: str, value: int, bound: str, limit: int) -> None:
    if value >= limit:
        raise UsageError(f"{name}={value}, but {bound} is {limit}", do=f"{name} counts from 0 to {limit - 1}")
