"""What one host's part of a run knows of the other hosts: how they are told, and how the run failed on one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from evenstep.launch.restarts import Verdict
from evenstep.record.activity import Doing

Doings = Mapping[int, Doing]
"""What the processes of a host were doing last, by rank."""


@dataclass(frozen=True)
class Fault:
    """The failure that ended a run, wherever it was."""

    node: int  # -1: the launcher that started all of them
    host: str
    what: str  # "was killed by SIGKILL", "nothing was heard from it for 4 s"
    rank: int | None = None
    log: str = ""
    exit_code: int = 4
    secondary: bool = False  # another's end is the likely cause
    lasting: bool = False  # the same command would meet it again
    doing: str = ""  # what it was doing last: "rank 1 was in step 12, computing gradients"
    step: int | None = None  # in which it came; 0: before the first
    before: str = ""  # who had ended well before, where it looks like a consequence
    silent: bool = False  # the whole host is out of reach
    stopped: bool = False  # somebody has stopped the run: no failure to start again after


def doing_text(doings: Doings) -> str:
    """`rank 1 was in step 12, computing gradients; rank 2 ...`, of four at most."""
    said = [f"rank {rank} was {doing}" for rank, doing in sorted(doings.items())]
    return "; ".join(said[:4]) + (f"; and {len(said) - 4} more" if len(said) > 4 else "")


class Others(Protocol):
    """The launchers of the other hosts. The functions that it is given are called in a thread of its own."""

    host: str  # this one's name
    interface: str  # this host's own address on the way to the others, "" if it does not matter
    fault: Fault | None
    verdict: Verdict  # what follows the fault

    def report(self, doings: Callable[[], Doings]) -> None:
        """Have the others learn from time to time what this host's processes are doing."""

    def watch(self, on_fault: Callable[[Fault], None]) -> None:
        """Call `on_fault` when the run fails somewhere, at once if it has."""

    def obey(self, on_order: Callable[[Mapping[str, Any]], None]) -> None:
        """Call `on_order` for {"stop": signal} and {"kill": true}, as the launcher that started this one was told."""

    def tell(self, fault: Fault) -> None:
        """A failure on this host."""

    def ended(self, rank: int) -> None:
        """A process of this host has ended by itself, with exit code 0."""

    def done(self, signal: int | None) -> None:
        """This host's processes have all ended well."""

    def wait(self, seconds: float | None = None) -> bool:
        """Until it is known how the run ended on all hosts."""
