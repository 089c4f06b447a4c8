"""One start of the script on one layout, and what it recorded."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from evenstep.errors import MachineError
from evenstep.launch.failures import Failure
from evenstep.launch.job import Script
from evenstep.launch.local import Work, run_alone
from evenstep.launch.outcome import Outcome
from evenstep.launch.warm import Warm
from evenstep.prove.layouts import Layout, settings_of
from evenstep.prove.reasons import known_mistake
from evenstep.record.events import read_events
from evenstep.record.identity import Identity, read_identity
from evenstep.record.paths import RunPaths

_LAST_LINES = 8
_REFUSED = "evenstep.errors.UsageError"  # exactly: its subclasses say what a script does wrong


class Interrupted(Exception):
    """A signal to the launcher ended it all."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True)
class Attempt:
    """What became of one start."""

    layout: Layout
    paths: RunPaths
    failure: Failure | None

    @cached_property
    def fingerprints(self) -> dict[int, str]:
        """After each step, counted from 1."""
        steps = [event for event in read_events(self.paths.events(0)) if event["kind"] == "step"]
        return {event["step"]: event["fingerprint"] for event in steps}

    @property
    def refused(self) -> bool:
        """Whether evenstep said that this layout cannot be had."""
        return self.error_type == _REFUSED and known_mistake(self.error_type, self.message) is None

    @property
    def error_type(self) -> str:
        """The class of the exception that it failed with, "" for none."""
        uncaught = self.failure.uncaught if self.failure else None
        return "" if uncaught is None else uncaught.type

    @property
    def message(self) -> str:
        """What it failed with, for people; the first line is the shortest form of it."""
        if self.failure is None:
            return ""
        uncaught = self.failure.uncaught
        if uncaught is not None and uncaught.type != "SystemExit":
            if uncaught.type.startswith("evenstep."):
                return uncaught.message
            return f"{uncaught.type}: {uncaught.message}\n{uncaught.traceback}"
        rank = self.failure.exit.rank
        lines = self.paths.log(rank).read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return "\n".join([f"rank {rank} {self.failure.exit.describe()}", *lines])

    def identity(self) -> Identity:
        """Of its run; empty where it has none."""
        return read_identity(self.paths.identity) or {}

    def traces(self) -> list[list[dict[str, Any]]]:
        """The events of the traced step, by rank."""
        return [read_events(self.paths.trace(rank)) for rank in range(self.layout.processes)]


class Starter:
    """Starts one script on layouts, each in a run directory of its own under `folder`."""

    def __init__(
        self,
        script: Script,
        folder: Path,
        warm: Warm,
        other: Callable[[], Warm],
        tick: Callable[[RunPaths], None] | None = None,
    ) -> None:
        """`warm` has imported what the script needs, and so has what `other` gives, with another order of hashes."""
        self._script, self._folder, self._warm, self._other = script, folder, warm, other
        self._tick = tick
        self._count = 0

    def attempt(self, layout: Layout, steps: int, *, trace_step: int | None = None) -> Attempt:
        """Run `steps` steps. Raises Interrupted after a signal, MachineError where this host does not let us start."""
        self._count += 1
        root = self._folder / f"{self._count:02d}-{layout.title.replace(',', '').replace(' ', '-')}"
        root.mkdir(parents=True)
        settings = replace(settings_of(layout, stop_after=steps, trace_step=trace_step), run=str(root))
        if layout.resumed:
            first = replace(settings, stop_after=max(1, steps // 2), checkpoint_every=max(1, steps // 2))
            begun = self._start(layout, RunPaths(root), first)
            if begun.failure is not None:
                return begun
        return self._start(layout, RunPaths(root), settings)

    def _start(self, layout: Layout, paths: RunPaths, settings: Any) -> Attempt:
        warm = self._other() if layout.again else self._warm
        tick = self._tick
        work = Work(self._script, layout.processes, settings, show="none", say=lambda line: None)
        outcome = run_alone(work, paths, made=(), warm=warm, tick=None if tick is None else lambda: tick(paths))
        _refuse_broken(outcome)
        return Attempt(layout, paths, outcome.failure)

    @property
    def file(self) -> str | None:
        """The script's file, None for a module."""
        return None if self._script.as_module else self._script.name

    def forget(self, attempts: Sequence[Attempt]) -> None:
        """Remove what they left: it may be large."""
        for one in attempts:
            shutil.rmtree(one.paths.root, ignore_errors=True)


def _refuse_broken(outcome: Outcome) -> None:
    if outcome.signal is not None:
        raise Interrupted(outcome.signal)
    if outcome.server_died is not None:
        raise MachineError(f"the fork server, the parent of all processes, {outcome.server_died}")
