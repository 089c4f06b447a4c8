"""What the launcher asks of the fork server: one frozen value, sent as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from evenstep.environment import World, write_world
from evenstep.record.paths import RunPaths


@dataclass(frozen=True)
class Script:
    """What to run, as the user wrote it."""

    name: str  # a file, a directory with __main__.py, or (as_module) a module's name
    as_module: bool
    arguments: tuple[str, ...]  # the script's own

    @property
    def words(self) -> list[str]:
        """As they follow `python`."""
        return [*(["-m"] if self.as_module else []), self.name, *self.arguments]

    def __str__(self) -> str:
        """As on a command line."""
        return shlex.join(self.words)


@dataclass(frozen=True)
class Part:
    """What one host does of a launch: `processes` of its `world_size` processes, from `first_rank` on."""

    processes: int
    first_rank: int
    world_size: int
    node: int  # the host's number, as the user gave it
    place: int  # of this host among the `nodes` that take part, from 0
    nodes: int
    address: str  # where rank 0's store listens
    port: int
    tag: str  # EVENSTEP_LAUNCH: processes of this launch are found by it
    restart: int = 0  # how often the run was started again before
    restarts: int = 0  # and how often it may be

    @property
    def ranks(self) -> range:
        """The ranks of this host's processes."""
        return range(self.first_rank, self.first_rank + self.processes)


def all_of_it(processes: int, port: int, tag: str, *, restart: int = 0, restarts: int = 0) -> Part:
    """The part of a host that no other has to do with."""
    return Part(processes, 0, processes, 0, 0, 1, "127.0.0.1", port, tag, restart, restarts)


@dataclass(frozen=True)
class Job:
    """One script, on this host's part of a launch."""

    script: Script
    part: Part
    run: str  # the run directory
    environment: Mapping[str, str]  # of every process, before its rank's own variables are added
    backend: str | None  # checked before the first process starts
    outputs: tuple[tuple[int, int], ...]  # in the order of ranks: the file descriptors that become stdout and stderr
    held: tuple[int, ...]  # the launcher's own descriptors, which the fork server keeps open and processes do not get
    launcher: int  # pid

    def paths(self) -> RunPaths:
        """The run directory's paths."""
        return RunPaths(Path(self.run))

    def environment_of(self, rank: int) -> dict[str, str]:
        """All of one process's environment."""
        part = self.part
        local = rank - part.first_rank
        world = World(rank, part.world_size, local, part.processes, "evenstep", part.address, part.port, part.tag)
        nodes = {"GROUP_RANK": str(part.place), "GROUP_WORLD_SIZE": str(part.nodes)}  # torchrun's names
        return {**self.environment, **write_world(world), **nodes}

    def threads(self) -> int | None:
        """Intra-op threads that the environment asks for in each process, None if it does not say."""
        first = self.environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        return int(first) if first.isdigit() and int(first) > 0 else None


def to_json(job: Job) -> bytes:
    """The job as one line. Names that are no UTF-8 survive as lone surrogates."""
    return json.dumps(asdict(job)).encode() + b"\n"


def from_json(line: bytes) -> Job:
    """The inverse of `to_json`."""
    fields = json.loads(line)
    script = fields["script"]
    fields["script"] = Script(script["name"], script["as_module"], tuple(script["arguments"]))
    fields["part"] = Part(**fields["part"])
    fields["outputs"], fields["held"] = tuple((out, err) for out, err in fields["outputs"]), tuple(fields["held"])
    return Job(**fields)
