"""What the launcher asks of the fork server: one frozen value, sent as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from evenstep.environment import World, write_world
from evenstep.record.paths import RunPaths


@dataclass(frozen=True)
class Job:
    """One script on `processes` processes of this host, ranks from `first_rank` on of `world_size`."""

    script: str  # as the user wrote it: a file, a directory with __main__.py, or (as_module) a module's name
    as_module: bool
    arguments: tuple[str, ...]  # the script's own
    run: str  # the run directory
    processes: int
    environment: Mapping[str, str]  # of every process, before its rank's own variables are added
    tag: str  # EVENSTEP_LAUNCH: processes of this launch are found by it
    address: str  # where rank 0's store listens
    port: int
    first_rank: int
    world_size: int
    node: int
    place: int  # of this host among the `nodes` that take part
    nodes: int
    backend: str | None  # checked before the first process starts
    outputs: tuple[tuple[int, int], ...]  # in the order of ranks: the file descriptors that become stdout and stderr
    held: tuple[int, ...]  # the launcher's own descriptors, which the fork server keeps open and processes do not get
    launcher: int  # pid

    @property
    def ranks(self) -> range:
        """The ranks of this host's processes."""
        return range(self.first_rank, self.first_rank + self.processes)

    def paths(self) -> RunPaths:
        """The run directory's paths."""
        return RunPaths(Path(self.run))

    def environment_of(self, rank: int) -> dict[str, str]:
        """All of one process's environment."""
        local = rank - self.first_rank
        world = World(rank, self.world_size, local, self.processes, "evenstep", self.address, self.port, self.tag)
        nodes = {"GROUP_RANK": str(self.place), "GROUP_WORLD_SIZE": str(self.nodes)}  # torchrun's names
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
    fields["arguments"], fields["held"] = tuple(fields["arguments"]), tuple(fields["held"])
    fields["outputs"] = tuple((out, err) for out, err in fields["outputs"])
    return Job(**fields)
