"""What a launch needs on this host before it starts a process: the run directory for itself, room, an environment."""

from __future__ import annotations

import fcntl
import os
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from evenstep.environment import TOKEN, Settings, write_settings
from evenstep.errors import MachineError, UsageError
from evenstep.interfaces import interface_of
from evenstep.launch.job import Part
from evenstep.launch.others import Others
from evenstep.launch.output import descriptors
from evenstep.record.paths import RunPaths
from evenstep.record.uncaught import error_path

_LOCK_PATIENCE = 3.0  # seconds for a killed launcher's processes to be gone


def environment_for(settings: Settings, part: Part, others: Others | None) -> Mapping[str, str]:
    """What every process gets: ours with the options' variables."""
    environment = {name: value for name, value in os.environ.items() if name != TOKEN}
    environment.update(write_settings(settings))
    environment["TORCHELASTIC_RESTART_COUNT"] = str(part.restart)  # torchrun's names
    environment["TORCHELASTIC_MAX_RESTARTS"] = str(part.restarts)
    if settings.threads is not None:
        environment["OMP_NUM_THREADS"] = str(settings.threads)
    elif part.world_size > 1:
        # As torchrun does: else every process would take all cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
    if others is None and part.world_size > 1:  # no other host is to reach gloo
        name = interface_of("127.0.0.1")
        if name is not None:
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
    elif others is not None and others.interface:
        name = interface_of(others.interface)
        if name is not None:  # that on which the hosts found each other; the user's own choice wins
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
            environment.setdefault("NCCL_SOCKET_IFNAME", name)
    return environment


@contextmanager
def locked(paths: RunPaths) -> Iterator[int]:
    """Keeps other launchers out of the run directory for as long as the descriptor is open, here or in the fork server.
    UsageError where one is at work in it."""
    descriptor = os.open(paths.root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, paths)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, paths: RunPaths) -> None:
    deadline = time.monotonic() + _LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"run directory {paths.root} is in use by another `evenstep run`",
                    do="wait for it, stop it, or give another --run DIR",
                ) from None
            time.sleep(0.05)
        except OSError:
            return  # a file system without locks


def see_descriptors(processes: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < descriptors(processes):
        raise MachineError(
            f"{processes} processes on one host take {descriptors(processes)} open files, and {limit} are allowed",
            do="raise `ulimit -n`, or start fewer processes",
        )


def prepare_logs(paths: RunPaths, ranks: range) -> None:
    """Make the logs' folder, see that the disk takes something, and remove what an earlier start said of its end."""
    folder = paths.log(0).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*map(error_path, map(paths.log, ranks)), *map(paths.activity, ranks)):
            old.unlink(missing_ok=True)
        probe = folder / f"probe-{os.getpid()}"
        try:
            with open(probe, "wb") as file:
                file.write(b"\0" * (1 << 16))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(
            f"cannot write into the run directory {paths.root}: {error.strerror}",
            do="free space there, or give another --run DIR",
        ) from error
