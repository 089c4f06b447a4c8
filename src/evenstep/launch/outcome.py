"""How a launch ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evenstep.launch.failures import Exit, Failure, first_failure
from evenstep.launch.others import Fault
from evenstep.launch.restarts import Verdict
from evenstep.record.paths import RunPaths
from evenstep.record.uncaught import Uncaught


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    exits: tuple[Exit, ...]  # in the order in which they were seen
    uncaught: tuple[Uncaught, ...]
    signal: int | None  # the one that the launcher itself got
    server_died: str | None  # how the fork server ended, if before its time
    log_starts: dict[int, int]  # by rank: bytes that the log held before this launch's output
    fault: Fault | None = None  # the failure that ended a run of several hosts, on whichever it was
    frozen: tuple[int, ...] = ()  # ranks that somebody had stopped by a signal
    verdict: Verdict | None = None  # what follows the fault, where the hub of several hosts has decided it
    foreign: bool = False  # the script does not use evenstep

    @property
    def failure(self) -> Failure | None:
        """The failure that led, None if every process ended well."""
        for one in self.exits:
            if one.rank in self.frozen:
                return Failure(one, None)
        return first_failure(self.exits, self.uncaught)

    @property
    def stopped_by(self) -> int | None:
        """The signal that ended the run in good order, or that the launcher got."""
        orderly = [one.code - 128 for one in self.exits if one.orderly]
        return self.signal if self.signal is not None else orderly[0] if orderly and self.failure is None else None


Tell = Callable[[Outcome, RunPaths, Verdict], int]
"""Reports how a start ended and what follows; returns the command's exit code."""
