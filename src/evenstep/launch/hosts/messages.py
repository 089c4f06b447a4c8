"""What launchers of several hosts say to each other, besides beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenstep.launch.job import Part
from evenstep.launch.others import Fault, doing_text
from evenstep.record.activity import Doing

BEAT = 0.25  # seconds between two beats
SILENCE = 4.0  # seconds without any after which a host is lost; a flap of two seconds is not
SAY_AFTER = 2.0  # seconds after which it is said what is waited for, and then every so often
SAY_EVERY = 15.0


@dataclass(frozen=True)
class Start:
    """A node's part, as the hub decided, and what it needs to know of the other nodes."""

    part: Part
    addresses: Sequence[str]  # of all hosts, by place
    open_ports: Sequence[int]  # and where their launchers listen, for the others to try the way; 0: nowhere
    run: str  # the run directory


def read_start(said: Mapping[str, Any]) -> Start:
    """From its fields."""
    return Start(**{**said, "part": Part(**said["part"])})


@dataclass(frozen=True)
class About:
    """What a launcher says of its host. What is in `same` must be the same on all."""

    host: str
    processes: int
    same: Mapping[str, str]
    node: int
    nodes: int
    address: str = ""  # its own, as the others reach it
    port: int = 0  # a free one, for rank 0's store
    open_port: int = 0  # where it listens itself, for the others to try the way
    copy: Mapping[str, Any] = field(default_factory=dict)  # of the run directory, if it is named (copies.Copy)
    run: str = ""  # which that is; by hand


def silent_for(seconds: float) -> str:
    """What is said of a host that has sent no beat for so long, on the clock of the launcher that says it."""
    return f"nothing was heard from it for {seconds:.1f} s: its cable, its power, or its launcher"


def lost(node: int, host: str, what: str, doing: Mapping[str, list[Any]], *, silent: bool = False) -> Fault:
    """A host that is gone, with what its processes were doing as it said last. `silent`: out of reach as a whole."""
    last = {int(rank): Doing(*said) for rank, said in doing.items()}
    step = max((one.step for one in last.values()), default=None)
    return Fault(node, host, what, doing=doing_text(last), step=step, silent=silent)


def left(node: int, host: str) -> Fault:
    """A host whose launcher was told to stop."""
    return Fault(node, host, "its launcher was stopped", stopped=True)
