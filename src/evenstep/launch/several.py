"""One launch on several hosts, each of which was started by hand (or by something that does it)."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from evenstep.environment import Settings
from evenstep.errors import EvenstepError, UsageError
from evenstep.launch.copies import look, written
from evenstep.launch.gate import Line
from evenstep.launch.local import Outcome, Say, Script, part_of, run_part
from evenstep.launch.nodes import About, Calling, Gate, Hub, Link, Nodes, Spoke, Start, tell_node_0
from evenstep.launch.port import reserve_port
from evenstep.launch.sameness import same_on_all
from evenstep.launch.undo import take_back
from evenstep.record.checkpoints import Checkpoints
from evenstep.record.paths import RunPaths
from evenstep.record.publish import write_whole

_LAST_WORDS = 5.0  # seconds for output to be carried to the hub

# A run directory by name (None: a new one), and the folders that were made for it, innermost first.
MakePaths = Callable[[str | None], tuple[RunPaths, tuple[Path, ...]]]


def run_on_nodes(
    nodes: Nodes,
    script: Script,
    processes: int,
    settings: Settings,
    make_paths: MakePaths,
    *,
    show: str,
    say: Say,
) -> tuple[Outcome, RunPaths]:
    """Find the other hosts, run this one's part, and end together. As `run_part`, whose errors it raises; UsageError
    and MachineError for what keeps the hosts from beginning are raised on every one of them."""
    if not nodes.token and nodes.count > 1 and nodes.rank == 0:
        say("EVENSTEP_TOKEN is not set: whoever reaches this port can join. Set it to one secret on every node")
    host = socket.gethostname()
    same = same_on_all(script)
    with ExitStack() as stack:
        link: Link
        calling = Calling(nodes, say)
        found: tuple[RunPaths, tuple[Path, ...]] | None = None
        if nodes.rank == 0:
            try:
                gate = Gate(nodes.address, nodes.port, nodes.token, say, nodes.patience)
            except UsageError:
                tell_node_0(nodes, host)  # if this is not node 0's host, that one waits for the others
                raise
            found = make_paths(None)
            port, keeper = reserve_port()
            stack.enter_context(keeper)
            about = About(host, processes, same, 0, nodes.count, nodes.address, port)
            run = str(Path("runs") / found[0].root.name)
            link = hub = Hub(nodes.count, about, host, say, secrets.token_hex(8), run, nodes.patience)
            hub.open(gate)
        else:
            about = About(host, processes, same, nodes.rank, nodes.count)
            link = Spoke(about, f"{nodes.address} (node 0)", say, calling)
        stack.callback(link.close)
        try:
            start = _interruptible(link)
        except EvenstepError:
            if found is not None:
                take_back(*found)
            raise
        if found is None:
            found = make_paths(start.run)
            link.interface = calling.interface
        paths, made = found
        outcome = run_part(
            script,
            paths,
            part_of(start, processes, link),
            replace(settings, run=str(paths.root)),
            made=made,
            show=show,
            say=say,
        )
    return outcome, paths


def run_for_hub(
    line: Line,
    outputs: tuple[int, int],
    script: Script,
    processes: int,
    settings: Settings,
    *,
    node: int,
    nodes: int,
    address: str,
    make_paths: MakePaths,
    tell: Callable[[Outcome, RunPaths], None],
    shared: bool,
    run_id: str,
    show: str,
    say: Say,
) -> Outcome:
    """Run this host's part for the launcher at the other end of `line`, which started this one.

    What comes out of `outputs`, the other ends of this process's own output and error streams, is sent there. `tell`
    says what a failed process said, before that. `shared`: that launcher sees this host's run directory.
    """
    with ExitStack() as stack:
        port, keeper = reserve_port()
        stack.enter_context(keeper)
        about = About(socket.gethostname(), processes, same_on_all(script), node, nodes, address, port)
        found: tuple[RunPaths, tuple[Path, ...]] | None = None
        unable: EvenstepError | None = None
        try:
            found = make_paths(None)
            about = replace(about, copy=asdict(look(found[0], shared=shared)))
        except EvenstepError as error:
            unable = error
        link = Spoke(about, "the host that started it", say, lambda: line)
        stack.callback(link.close)
        for to, descriptor in enumerate(outputs, 1):
            link.carry(descriptor, to)
        if unable is not None:
            link.give_up(unable)
        try:
            start = _interruptible(link)
        except EvenstepError:
            if found is not None and not shared:
                take_back(*found)
            raise
        assert found is not None  # else the line above has raised
        paths, made = found
        link.interface = (start.address if node == 0 else address) if nodes > 1 else ""
        part = part_of(start, processes, link)
        settings = replace(settings, run=str(paths.root))
        if not shared:
            write_whole(paths.run_id, run_id.encode())
            link.tell_hub(written=written(paths, part.ranks, node), node=node)
        watch = None if shared or node else _Checkpoints(paths, link)
        outcome = run_part(script, paths, part, settings, made=made, show=show, say=say, tick=watch)
        if watch is not None:
            watch()
        tell(outcome, paths)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor in (1, 2):
            os.close(descriptor)  # what is still in the pipes has an end
        link.carried.wait(_LAST_WORDS)
    return outcome


class _Checkpoints:
    """Tells the hub, which does not see them, of the checkpoints that rank 0 writes."""

    def __init__(self, paths: RunPaths, link: Spoke) -> None:
        self._checkpoints, self._link = Checkpoints(paths), link
        self._told = self._checkpoints.steps()

    def __call__(self) -> None:
        steps = self._checkpoints.steps()
        if steps != self._told:
            self._told = steps
            self._link.tell_hub(checkpoints=steps)


def _interruptible(link: Link) -> Start:
    """`link.join()`, which Ctrl-C and SIGTERM end."""
    got: list[int] = []
    before = {number: signal.signal(number, lambda n, _: got.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        start = link.join(lambda: bool(got))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if start is None:
        raise KeyboardInterrupt
    return start
