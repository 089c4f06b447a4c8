"""What a training process stands on: its process groups, its device, and the arithmetic it is held to."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.utils.deterministic as deterministic

from evenstep.environment import TORCH_RANGE, World
from evenstep.errors import MachineError, UsageError
from evenstep.record.identity import Scalar
from evenstep.train.meeting import Meeting, by_value, ranks_text
from evenstep.train.rendezvous import meet, meet_at

BACKENDS = ("auto", "gloo", "nccl", "mpi", "ucc")


@dataclass(frozen=True)
class Ground:
    """`meeting` carries small things on the CPU, `data` gradients (None for one process)."""

    world: World
    device: torch.device
    backend: str
    meeting: Meeting
    data: dist.ProcessGroup | None
    made_group: bool


def check_torch() -> None:
    """UsageError where this torch is outside the range that evenstep was tested with."""
    have = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low, high = TORCH_RANGE
    wanted = f"{low[0]}.{low[1]},<{high[0]}.{high[1]}"
    if not low <= have < high:
        raise UsageError(
            f"torch {torch.__version__} is installed; evenstep works with torch>={wanted}",
            do=f"pip install 'torch>={wanted}'",
        )


def check_backend(name: str) -> str:
    """The backend to use: `auto` is nccl where there are GPUs, else gloo. UsageError for one that is not there."""
    if name not in BACKENDS:
        raise UsageError(f"backend {name!r} is unknown; there are {', '.join(BACKENDS)}")
    if name == "auto":
        return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    there = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
    }
    if not there[name]():
        ways = {
            "nccl": "install a CUDA build of torch, or choose --backend gloo",
            "mpi": "build torch from source against your MPI, or choose --backend gloo (mpirun can start it too)",
            "ucc": "install a build of torch with UCC, or choose --backend gloo or nccl",
            "gloo": "install a build of torch with gloo",
        }
        raise UsageError(f"this torch build ({torch.__version__}) has no {name} backend", do=ways[name])
    if name == "nccl" and not torch.cuda.is_available():
        raise UsageError("backend nccl needs GPUs, and torch sees none", do="choose --backend gloo")
    return name


def choose_device(world: World, backend: str, asked: str | None, width: int = 1) -> torch.device:
    """The first of `width` GPUs per local rank where there are GPUs and the backend can use them, else the CPU."""
    if asked is not None:
        device = torch.device(asked)
        if asked == "cuda":
            device = torch.device("cuda", world.local_rank * width)
    elif torch.cuda.is_available() and (backend == "nccl" or world.world_size == 1):
        device = torch.device("cuda", world.local_rank * width)
    else:
        device = torch.device("cpu")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        last = (device.index or 0) + width - 1
        if last >= count:
            raise UsageError(
                f"local rank {world.local_rank} wants GPU {last}, and {count} are visible",
                do=f"start at most {count // width} processes on this host, or choose --backend gloo"
                if width == 1
                else "start fewer processes, --thread-replicas or --split: together they want more GPUs than there are",
            )
        torch.cuda.set_device(device)
    return device


def connect(world: World, backend: str, device: torch.device) -> Ground:
    """Joins the process groups. One process needs none and makes none."""
    if world.world_size == 1:
        return Ground(world, device, backend, Meeting(0, 1), None, False)
    made = not dist.is_initialized()
    if made:
        whole = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
        try:
            if world.master_addr is None or world.master_port is None:
                dist.init_process_group(whole, store=meet(world), rank=world.rank, world_size=world.world_size)
            elif world.launcher == "torchrun":  # its agent may have a store there
                dist.init_process_group(whole, init_method="env://", rank=world.rank, world_size=world.world_size)
            else:
                store = meet_at(world, world.master_addr, world.master_port)
                dist.init_process_group(whole, store=store, rank=world.rank, world_size=world.world_size)
        except (RuntimeError, OSError) as error:
            raise MachineError(
                f"rank {world.rank} of {world.world_size} could not join the others "
                f"at {world.master_addr or 'this host'}:{world.master_port or '?'}: {error}",
                do="see that all processes were started, with the same address and port, and that the hosts reach "
                f"each other on every port of one interface (GLOO_SOCKET_IFNAME is "
                f"{os.environ.get('GLOO_SOCKET_IFNAME', 'not set')}); `evenstep doctor` tries it",
            ) from error
    elif dist.get_world_size() != world.world_size or dist.get_rank() != world.rank:
        raise UsageError(
            f"torch.distributed says rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"the environment says {world.rank} of {world.world_size}",
            do="call evenstep.start() before, or instead of, init_process_group",
        )
    control = dist.new_group(backend="gloo")
    data = control if backend == "gloo" else dist.new_group(backend=backend)
    return Ground(world, device, backend, Meeting(world.rank, world.world_size, control), data, made)


def disconnect(ground: Ground) -> None:
    """Leaves the process groups that `connect` made."""
    if ground.made_group and dist.is_initialized():
        dist.destroy_process_group()


def hold_arithmetic(exact: bool, threads: int) -> Callable[[], None]:
    """Sets what the exact tier needs of torch in this process; returns what puts it all back."""
    before_threads = torch.get_num_threads()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before_fill = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    before_cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    before_cublas = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    torch.set_num_threads(threads)
    if exact:
        if torch.cuda.is_available():
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory with NaN costs time in every allocation and changes no result of sound code.
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True

    def put_back() -> None:
        torch.set_num_threads(before_threads)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = before_fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before_cudnn
        if before_cublas is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)

    return put_back


def identity(device: torch.device) -> dict[str, str | int | bool]:
    """What of this machine and torch build can change bits."""
    said: dict[str, str | int | bool] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "cpu vendor": _cpu_vendor(),
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }
    if device.type == "cuda":
        said["tf32"] = torch.backends.cuda.matmul.allow_tf32
        said["cuda"] = str(torch.version.cuda)
    return said


def _cpu_vendor() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("vendor_id"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def check_same(ground: Ground, things: Mapping[str, Scalar]) -> None:
    """UsageError on every process where `things` (name -> value) differ between processes, naming ranks and values."""
    answers = ground.meeting.say("evenstep.start", things, site="")
    for name in things:
        values = by_value(str(answer.get(name)) for answer in answers)
        if len(values) > 1:
            said = "; ".join(f"{ranks_text(ranks)}: {value}" for value, ranks in values.items())
            raise UsageError(
                f"the processes of this run differ in {name} ({said})",
                do=f"start every process with the same {name}",
            )
