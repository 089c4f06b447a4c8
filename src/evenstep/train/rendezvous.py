"""Where the processes of a run meet: at the address they were told, or, under srun and mpirun, where they find it.

torch's store has no authentication, so it listens on the address that is needed, not on all of its host's.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from evenstep.environment import World
from evenstep.errors import MachineError, UsageError
from evenstep.interfaces import interface_of, interfaces, only_address
from evenstep.listening import listen_at
from evenstep.mpi import from_rank_0

_SECONDS = 120.0  # how long rank 0 is looked for
_CONNECT = 2.0  # seconds for an address to answer
_ANSWER = timedelta(seconds=5)  # for what listens there to say whose store it is
_PATIENCE = timedelta(minutes=30)  # torch's own, for processes that start late
_PORTS = range(20000, 30000)  # below those that Linux gives to connections
_TRIES = 16
_ADDRESSES = 64  # of rank 0 are told; some hosts have one for each container
_JOB = "evenstep/job"
_REACHED = "evenstep/reached"


def meet_at(world: World, address: str, port: int) -> Store:
    """The store at the address and port that all processes were told. RuntimeError where it cannot be reached.

    A process that starts a run after another finds the same store, and nothing of the first in it.
    """
    return PrefixStore(f"evenstep/run-{next(_runs)}", _store_at(world, address, port))


_runs = count()


@cache
def _store_at(world: World, address: str, port: int) -> TCPStore:
    if world.rank != 0:
        return TCPStore(address, port, world.world_size, is_master=False, timeout=_PATIENCE)
    return _serve(world, port, address)


def meet(world: World) -> Store:
    """The store of rank 0. MachineError where it is not found, UsageError where nothing says where to look."""
    if world.local_world_size == world.world_size:
        return _on_one_host(world)
    if world.launcher == "mpi":
        return _by_mpi(world)
    if world.launcher == "slurm" and world.master_addr is not None and world.job is not None:
        return _by_job(world, world.master_addr, world.job)
    raise _nowhere(world)


def _nowhere(world: World) -> UsageError:
    return UsageError(
        f"rank {world.rank} of {world.world_size} was given no MASTER_ADDR and MASTER_PORT, nor a job to meet in",
        do="start the script with `evenstep run`, torchrun, srun or mpirun",
    )


def _on_one_host(world: World) -> Store:
    """Rank 0 takes a free port and says it in a file that this start alone shares."""
    if world.job is None:
        raise _nowhere(world)
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in world.job)
    folder = Path(tempfile.gettempdir()) / f"evenstep-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise MachineError(f"{folder} belongs to another user", do="set TMPDIR to a folder of your own")
    place = folder / "port"
    if world.rank == 0:
        store = _serve(world, 0, "127.0.0.1")
        aside = folder / f"port.{os.getpid()}"
        aside.write_text(str(store.port))
        os.replace(aside, place)
        return _forget(store, world, folder)
    deadline = time.monotonic() + _SECONDS
    while not place.exists():
        if time.monotonic() > deadline:
            raise MachineError(
                f"rank {world.rank} found no rank 0 on this host within {_SECONDS:.0f} s (looked for {place})",
                do="see that all processes were started",
            )
        time.sleep(0.01)
    return _forget(TCPStore("127.0.0.1", int(place.read_text()), world.world_size, is_master=False), world, folder)


def _forget(store: TCPStore, world: World, folder: Path) -> Store:
    """Once all have found the store the file has done its work."""
    if store.add("evenstep/found", 1) == world.world_size:
        (folder / "port").unlink(missing_ok=True)
        folder.rmdir()
    return store


def _by_job(world: World, address: str, job: str) -> Store:
    """On the host of rank 0, at the first of the job's ports that is free there. All look at one address."""
    start = int.from_bytes(hashlib.blake2b(job.encode(), digest_size=4).digest())
    ports = [_PORTS[(start + k) % len(_PORTS)] for k in range(_TRIES)]
    if world.rank == 0:
        return _rank_0(world, ports, job, _ipv4(address))
    return _find(world, [address], ports, job)


def _by_mpi(world: World) -> Store:
    """Where rank 0 says through MPI that it is."""
    served: list[TCPStore] = []
    job = f"mpi-{secrets.token_hex(8)}"

    def say() -> bytes:
        known = only_address() if world.master_addr is None else _ipv4(world.master_addr)
        served.append(_serve(world, world.master_port or 0, known))
        own = [address for address in interfaces().values() if not address.startswith("127.")][:_ADDRESSES]
        names = [world.master_addr] if world.master_addr else [socket.gethostname(), *own]
        return json.dumps({"names": names, "port": served[0].port, "job": job}).encode()

    said = json.loads(from_rank_0(say, world.rank, world.world_size))
    if served:
        served[0].set(_JOB, job)
        return _on_interface(served[0], None)
    return _find(world, said["names"], [said["port"]], said["job"])


def _ipv4(name: str) -> str | None:
    with suppress(OSError):
        return socket.gethostbyname(name)
    return None


def _rank_0(world: World, ports: Sequence[int], job: str, address: str | None) -> Store:
    for port in ports:
        with suppress(RuntimeError):  # taken, by another job's rank 0 perhaps
            store = _serve(world, port, address)
            store.set(_JOB, job)
            return _on_interface(store, None)
    raise MachineError(
        f"none of the ports {ports[0]} to {ports[-1]} is free on {socket.gethostname()}",
        do="set MASTER_ADDR and MASTER_PORT, the same on every process",
    )


def _serve(world: World, port: int, address: str | None) -> TCPStore:
    """Rank 0's store. `address` None: on all of the host's, where the others' way here is not known beforehand."""
    alone = world.world_size == world.local_world_size
    listener = None if address is None else listen_at(address, port, loopback=alone)
    return TCPStore(
        address or "127.0.0.1",
        port if listener is None else listener.getsockname()[1],
        world.world_size,
        is_master=True,
        timeout=_PATIENCE,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _find(world: World, names: Sequence[str], ports: Sequence[int], job: str) -> Store:
    """Looks for the job's store at these addresses, again and again."""
    why: dict[str, str] = {}
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        for name in names:
            for port in ports:
                try:
                    with socket.create_connection((name, port), timeout=_CONNECT) as asking:
                        here, there = asking.getsockname()[0], asking.getpeername()[0]
                    store = TCPStore(name, port, world.world_size, is_master=False, timeout=_ANSWER)
                    if store.get(_JOB).decode() == job:
                        return _on_interface(store, (here, there))
                    why[name] = "another job is there"
                except (OSError, RuntimeError) as error:
                    why[name] = str(error).partition("\n")[0]
        time.sleep(0.05)
    raise MachineError(
        f"rank {world.rank} found no rank 0 within {_SECONDS:.0f} s: "
        + "; ".join(f"{name}: {said}" for name, said in why.items()),
        do="see that rank 0 was started and that no firewall is between, or set MASTER_ADDR and MASTER_PORT",
    )


def _on_interface(store: TCPStore, way: tuple[str, str] | None) -> Store:
    """Has gloo and NCCL talk on the interface on which the hosts found each other; the user's own choice wins.

    `way`: this process's own address on the way to rank 0, and rank 0's. A host name can mean the loopback interface on
    the host itself, so processes of rank 0's host wait until one of another says by which address it reached them.
    """
    store.set_timeout(timedelta(seconds=_SECONDS))
    if way is not None and way[0] != way[1]:
        own = way[0]
        store.set(_REACHED, way[1])
    else:
        own = store.get(_REACHED).decode()
    name = interface_of(own)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    return store
