"""What is looked at before anything starts. Whatever cannot work is a UsageError that says what to do."""

from __future__ import annotations

import difflib
import errno
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evenstep.environment import LAUNCH, TOKEN, World, read_world
from evenstep.errors import EvenstepError, MachineError, UsageError
from evenstep.interfaces import own_address
from evenstep.launch.gpus import visible_gpus
from evenstep.launch.hosts.calling import Nodes
from evenstep.launch.hosts.hostfile import Host, parse_hosts, read_hostfile
from evenstep.launch.hosts.mistakes import tell_node_0, tell_others
from evenstep.launch.port import reserve_port
from evenstep.launch.schedulers.slurm import allocation
from evenstep.launch.undo import absent, take_back
from evenstep.mpi import from_rank_0
from evenstep.record.paths import RunPaths, new_run_directory

PROCESS_WORDS = ("gpu", "cpu", "auto")


def refuse_nested() -> None:
    """A launcher inside a launcher would start everything once for each process of the outer one."""
    environ = os.environ
    if LAUNCH in environ:
        raise UsageError(
            "this is already a process of `evenstep run` (EVENSTEP_LAUNCH is set), and it was asked to start another",
            do="give the script itself to `evenstep run`, not a command that calls `evenstep run`",
        )
    if _by_operator(environ):
        return
    if "RANK" in environ:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "another launcher, or by hand"
        raise UsageError(
            f"RANK={environ['RANK']} is set already (by {launcher}), so this would be a launcher inside a launcher",
            do="start the script with that launcher alone, or unset RANK, WORLD_SIZE and LOCAL_RANK for `evenstep run`",
        )
    world = _outer_world()
    if world.world_size > 1 and not _is_one_a_host(world):
        starter = {"slurm": "srun", "mpi": "mpirun"}.get(world.launcher, world.launcher)
        other = {
            "slurm": "; or call `evenstep run` once in the allocation, without srun: it starts itself on each node",
            "mpi": "; or have mpirun start one `evenstep run` on each host (--map-by ppr:1:node, -ppn 1)",
        }
        raise UsageError(
            f"{starter} starts `evenstep run` {world.world_size} times: a launcher inside a launcher",
            do=f"give the script itself to {starter} ({starter} ... python script.py); evenstep finds its place"
            + other.get(world.launcher, ""),
        )


def nodes_of_mpirun(patience: float) -> Nodes | None:
    """Where this launcher stands among those that mpirun has started, one on each host; None: it has started none.

    Node 0 says through MPI where it is, and a token.
    """
    world = _outer_world()
    if world.world_size == 1 or not _is_one_a_host(world):
        return None

    def say() -> bytes:
        port, keeper = reserve_port()
        keeper.close()
        place = [own_address(), port, os.environ.get(TOKEN) or secrets.token_urlsafe(24)]
        return json.dumps(place).encode()

    address, port, token = json.loads(from_rank_0(say, world.rank, world.world_size))
    return Nodes(world.world_size, world.rank, address, port, token, patience, world.world_size)


def _outer_world() -> World:
    return read_world({name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")})


def _is_one_a_host(world: World) -> bool:
    return world.launcher == "mpi" and world.local_world_size == 1


def _by_operator(environ: Mapping[str, str]) -> bool:
    """Whether this is a pod of a PyTorchJob, where RANK counts pods; torchrun's processes, too, have LOCAL_RANK."""
    return "LOCAL_RANK" not in environ and environ.get("RANK", "none") == environ.get("PET_NODE_RANK")


@contextmanager
def told_to_other_nodes(options: Mapping[str, Any]) -> Iterator[None]:
    """A mistake on one node of several that are started by hand is told to the others, which would wait for it."""
    try:
        yield
    except EvenstepError as error:
        asked, rank = options["nodes"], options["node_rank"]
        address, port = options["master_addr"], options["master_port"]
        if asked is not None and rank is not None and rank < asked[1] and address and port is not None:
            tell_others(Nodes(asked[1], rank, address, port, os.environ.get(TOKEN, ""), 0.0, asked[0]), error)
        raise


def check_script(name: str) -> None:
    """The script is a file, or a directory with __main__.py."""
    path = Path(name)
    try:
        if path.is_file():
            with path.open("rb"):
                return
        if path.is_dir():
            if (path / "__main__.py").is_file():
                return
            raise UsageError(
                f"{name} is a directory without __main__.py", do=_or_near("give a script file", _scripts(path))
            )
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}", do="see its permissions") from error
    if path.exists():
        raise UsageError(f"{name} is not a file", do="give a Python script")
    if not path.parent.is_dir():
        raise UsageError(f"there is no script {name}: no directory {path.parent}", do="see the path")
    near = difflib.get_close_matches(path.stem, [one.stem for one in _scripts(path.parent)], n=3)
    raise UsageError(
        f"there is no script {name} in {path.parent.resolve()}",
        do=_or_near("see the name; options of evenstep come before it", [path.parent / f"{one}.py" for one in near]),
    )


def run_paths(given: str | None, script: str) -> tuple[RunPaths, tuple[Path, ...]]:
    """The run directory, the one asked for or a new one; and the folders that were made for it, innermost first."""
    if given is None:
        made = absent(Path.cwd() / "runs")
        try:
            root = new_run_directory(script, Path.cwd())
        except MachineError as error:
            raise UsageError(error.message, do=error.do) from error
        return RunPaths(root), (root, *made)
    root = Path(given).absolute()
    made = absent(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"--run {given} is a file, not a directory", do="name a directory") from None
    except OSError as error:
        take_back(RunPaths(root), made)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UsageError(
            f"cannot make the run directory {root}: {error.strerror}",
            do="free space there, or name another place with --run DIR" if full else "name a writable place with --run",
        ) from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise UsageError(f"the run directory {root} is not writable", do="name a writable place with --run DIR")
    return RunPaths(root), made


def process_count(asked: int | str | None, replicas: int = 1, split: int = 1) -> int:
    """How many processes of `replicas` thread replicas over `split` devices each: as asked, or as many as the visible
    GPUs are enough for, or one."""
    if isinstance(asked, int):
        return asked
    gpus = visible_gpus(os.environ)
    if asked == "gpu" and gpus == 0:
        raise UsageError("--processes gpu: torch sees no GPU here", do="give a number, or --processes cpu")
    if asked == "cpu" or (asked == "auto" and gpus == 0):
        return max(1, len(os.sched_getaffinity(0)) // replicas)
    return max(1, gpus // (replicas * split))


def nodes(
    asked: tuple[int, int] | None, rank: int | None, address: str | None, port: int | None, patience: float
) -> Nodes | None:
    """What was said about several hosts; None: there is one, and nothing was said. `asked`: the least, and the most."""
    least, count = asked or (None, None)
    if count is None and rank in (None, 0):
        if address is not None or port is not None:
            raise UsageError(
                "--master-addr and --master-port are for several hosts, and --nodes was not given",
                do="give --nodes and --node-rank too; on one host leave them out: evenstep finds a free port",
            )
        return None
    if count is None or (rank is not None and rank >= count):
        said = "--nodes was not given" if count is None else f"--nodes is {count}"
        wanted = max(2, (rank or 0) + 1)
        if count is not None and address is not None and port is not None:
            tell_node_0(Nodes(count, rank or 0, address, port, os.environ.get(TOKEN, ""), 0.0, 1), socket.gethostname())
        raise UsageError(
            f"--node-rank {rank}, but {said}: nodes are numbered from 0 to {(count or 1) - 1}",
            do=f"give --nodes {wanted} (how many there are in all) on every node",
        )
    if count == 1 and (address is None or port is None):
        return None
    if rank is None or address is None or port is None:
        missing = {"--node-rank": rank, "--master-addr": address, "--master-port": port}
        raise UsageError(
            f"--nodes {count} needs {', '.join(name for name, value in missing.items() if value is None)} too",
            do="on the first host: --node-rank 0 --master-addr ITS-ADDRESS --master-port PORT; on the others the same "
            "with --node-rank 1, 2, ...",
        )
    try:
        possible = bool(address.strip()) and bool(address.encode("idna"))
    except UnicodeError:
        possible = False
    if not possible:
        raise UsageError(f"--master-addr {address!r} is no address and no name", do="give node 0's address")
    return Nodes(count, rank, address, port, os.environ.get(TOKEN, ""), patience, least or count)


def one_number(asked: tuple[int, int] | None, where: str) -> int:
    """How many nodes, where it must be one number."""
    least, most = asked or (1, 1)
    if least != most:
        raise UsageError(f"--nodes {least}:{most} goes without {where}", do=f"give one number, as --nodes {most}")
    return most


def least_hosts(asked: int | None, nodes: tuple[int, int] | None, hosts: list[Host] | None) -> int:
    """How many of the hosts are enough: as --min-hosts or, in an allocation, --nodes MIN:MAX says; else all."""
    count = len(hosts or [])
    if asked is None:
        return min(count, nodes[0]) if nodes else count
    if hosts is None:
        raise UsageError("--min-hosts goes with --hosts or --hostfile", do="with --nodes write --nodes MIN:MAX")
    if asked > count:
        raise UsageError(f"--min-hosts {asked}, but there are {count} hosts", do=f"give a number from 1 to {count}")
    return asked


def hosts(
    listed: str | None, file: str | None, nodes: tuple[int, int] | None, processes: int | str | None
) -> list[Host] | None:
    """The hosts that were named; None: none were."""
    if listed is None and file is None:
        return None
    if listed is not None and file is not None:
        raise UsageError("--hosts and --hostfile together", do="give one of them")
    if nodes is not None:
        raise UsageError(
            "--nodes goes without --hosts: it is for hosts on which you start the command yourself",
            do="leave --nodes and --node-rank out",
        )
    found = parse_hosts(listed) if listed is not None else read_hostfile(Path(str(file)))
    if isinstance(processes, int):
        found = [Host(host.name, host.processes or processes) for host in found]
    return found


def allocated_hosts(nodes: tuple[int, int] | None, processes: int | str | None) -> list[Host] | None:
    """The nodes of the Slurm allocation that this is in, or as many of them as were asked for; None: it is in none."""
    found = allocation(os.environ)
    if found is None:
        return None
    least, most = nodes or (1, None)
    if least > len(found):
        raise UsageError(
            f"--nodes {least}, and the Slurm allocation has {len(found)}: {', '.join(host.name for host in found)}",
            do="leave --nodes out, or ask Slurm for more",
        )
    asked = processes if isinstance(processes, int) else None
    return [Host(host.name, asked or host.processes) for host in found[:most]]


def _scripts(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob("*.py"))
    except OSError:
        return []


def _or_near(advice: str, near: list[Path]) -> str:
    return f"{advice}; near it: {', '.join(str(one) for one in near[:5])}" if near else advice
