"""What one host has: found out by a process of that host, without importing torch into it."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep.errors import EvenstepError
from evenstep.interfaces import interface_of
from evenstep.interfaces import interfaces as interfaces_of_host
from evenstep.launch.gpus import visible_gpus
from evenstep.launch.hosts.sameness import same_on_all
from evenstep.launch.job import Script
from evenstep.record.checkpoints import Checkpoints
from evenstep.record.paths import RunPaths

CLOCK_OFFSET = "EVENSTEP_CLOCK_OFFSET"
"""Seconds by which this host's clock is taken to be wrong. For tests, whose hosts have one kernel and one clock."""

_TORCH_SECONDS = 120.0
_PROBE = 1 << 16  # bytes that the launcher writes before it starts anything
_TORCH = """
import json, time
began = time.perf_counter()
import torch
print(json.dumps({
    "version": torch.__version__,
    "seconds": time.perf_counter() - began,
    "cuda": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
    "cpu": torch.backends.cpu.get_cpu_capability(),
}))
"""


@dataclass(frozen=True)
class Facts:
    """What a host has. Plain values, to be sent as JSON. Sizes in bytes; None: not known, or there is none."""

    host: str
    processes: int
    address: str  # its own, as the others reach it
    interfaces: Mapping[str, str]  # for gloo and for NCCL: the chosen one
    why: str  # it was chosen
    all_interfaces: tuple[str, ...]
    same: Mapping[str, str]  # what must be the same on every host
    torch: Mapping[str, Any]  # as it says itself when imported; or "error"
    driver: str | None
    gpus: int
    cpu: str
    cores: int
    memory: int
    memory_free: int
    shared_memory_free: int
    folder: str  # the run directory, or the nearest folder that there is
    file_system: str
    disk: int
    disk_free: int
    unwritable: str | None
    checkpoint: int  # size of the newest; 0 if there is none
    shared: bool | None  # the first host's run directory is seen here; None: not asked
    open_files: int  # limits; -1: none
    locked_memory: int
    user_processes: int
    infiniband: bool
    problems: tuple[str, ...]  # which end a launch on this host, as it would say them


@dataclass(frozen=True)
class Asked:
    """What is to be started on the host."""

    script: Script | None
    run: str | None
    processes: int
    backend: str | None
    address: str
    alone: bool
    probe: str | None  # the name of a file that the first host has put into its run directory


def examine(asked: Asked, problems: tuple[str, ...] = ()) -> Facts:
    """Look at this host. Takes as long as torch takes to be imported."""
    folder = nearest(asked.run)
    paths = RunPaths(Path(asked.run or "runs").absolute())
    memory = _memory()
    space = shutil.disk_usage(folder)
    interfaces, why = _interfaces(asked)
    return Facts(
        host=socket.gethostname(),
        processes=asked.processes,
        address=asked.address,
        interfaces=interfaces,
        why=why,
        all_interfaces=tuple(interfaces_of_host()),
        same=same_on_all(asked.script),
        torch=_torch(),
        driver=_driver(),
        gpus=visible_gpus(os.environ),
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory=memory.get("MemTotal", 0),
        memory_free=memory.get("MemAvailable", 0),
        shared_memory_free=_free("/dev/shm"),
        folder=str(paths.root if paths.root.exists() and asked.run else folder),
        file_system=_file_system(folder),
        disk=space.total,
        disk_free=space.free,
        unwritable=_unwritable(folder),
        checkpoint=_checkpoint_size(paths) if asked.run else 0,
        shared=None if asked.probe is None else (folder / asked.probe).exists(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        user_processes=resource.getrlimit(resource.RLIMIT_NPROC)[0],
        infiniband=Path("/sys/class/infiniband").is_dir(),
        problems=problems,
    )


def clock() -> float:
    """This host's clock, in seconds since 1970."""
    return time.time() + float(os.environ.get(CLOCK_OFFSET, 0))


def nearest(run: str | None) -> Path:
    """The run directory, or what there is of the folders above it."""
    root = Path(run or "runs").absolute()
    return next(place for place in (root, *root.parents) if place.is_dir())


def _interfaces(asked: Asked) -> tuple[dict[str, str], str]:
    """What GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME will be, and why."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    if asked.alone:
        return given, "set by you" if given else "one host: processes talk over 127.0.0.1"
    own = interface_of(asked.address)
    chosen = {name: given.get(name) or own or "" for name in names}
    if len(given) == len(names):
        return chosen, "set by you"
    why = f"it has {asked.address}, where the other hosts reach this one"
    return chosen, why if own else f"no interface here has {asked.address}: gloo and NCCL choose for themselves"


def _torch() -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_TORCH_SECONDS,
        )
        if done.returncode == 0:
            found = json.loads(done.stdout)
            assert isinstance(found, dict)
            return found
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return {"error": lines[-1] if lines else f"it ended with code {done.returncode}"}
    except subprocess.TimeoutExpired:
        return {"error": f"it takes more than {_TORCH_SECONDS:.0f} s"}
    except (OSError, ValueError) as error:
        return {"error": str(error)}


def _driver() -> str | None:
    """The version of the NVIDIA driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(80)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, 80) == 0:
            return text.value.decode()
    except (OSError, AttributeError):
        pass
    return None


def _cpu() -> str:
    """Vendor and model."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    return found.get("model name") or found.get("vendor_id") or platform.machine()


def _memory() -> dict[str, int]:
    found = {}
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            found[name] = int(value.split()[0]) * 1024
    return found


def _free(folder: str) -> int:
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return 0


def _file_system(folder: Path) -> str:
    """Its kind, and where it is mounted from."""
    best = ("", "")
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            source, place, kind, *_ = line.split()
            if folder.is_relative_to(place) and len(place) >= len(best[0]):
                best = (place, kind if source in (kind, "none") else f"{kind} {source}")
    return best[1]


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be written there."""
    place = folder / f".evenstep-probe-{os.getpid()}"
    try:
        try:
            with place.open("wb") as file:
                file.write(b"\0" * _PROBE)
                file.flush()
                os.fsync(file.fileno())
        finally:
            place.unlink(missing_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _checkpoint_size(paths: RunPaths) -> int:
    with suppress(OSError, EvenstepError):
        steps = Checkpoints(paths).steps()
        if steps:
            return sum(path.stat().st_size for path in paths.checkpoint(steps[-1]).rglob("*") if path.is_file())
    return 0
