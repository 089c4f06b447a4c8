"""One launch on several hosts, each of which was started by hand (or by something that does it)."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from evenstep.environment import Settings
from evenstep.errors import EvenstepError, MachineError, UsageError
from evenstep.launch.copies import Copy, glance, look, written
from evenstep.launch.gate import Line
from evenstep.launch.local import Outcome, Say, Script, Tell, part_of, run_part
from evenstep.launch.nodes import About, Calling, Fault, Gate, Hub, Link, Nodes, Spoke, Start, tell_node_0
from evenstep.launch.port import check_way, reserve_port
from evenstep.launch.restarts import Restarts, Verdict
from evenstep.launch.sameness import same_on_all
from evenstep.launch.undo import take_back
from evenstep.launch.warm import Warm
from evenstep.record.checkpoints import Checkpoints
from evenstep.record.paths import RunPaths
from evenstep.record.publish import write_whole

_NEWS = 0.5  # seconds for what has happened elsewhere to be heard of
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
    restarts: int,
    tell: Tell,
) -> int:
    """Find the other hosts, run this one's part, and end together; after a fault again, as node 0 decides.

    Errors as of `run_part`; UsageError and MachineError for what keeps the hosts from beginning are raised on every one
    of them. `tell` is told how each start ended; what it returns for the last is returned.
    """
    if not nodes.token and nodes.count > 1 and nodes.rank == 0:
        say("EVENSTEP_TOKEN is not set: whoever reaches this port can join. Set it to one secret on every node")
    this = _ThisNode(nodes, script, processes, settings, make_paths, show, say, Restarts(restarts))
    with ExitStack() as stack:
        gate: Gate | None = None
        if nodes.rank == 0:
            try:
                gate = Gate(nodes.address, nodes.port, nodes.token, say, nodes.patience)
            except UsageError:
                tell_node_0(nodes, this.host)  # if this is not node 0's host, that one waits for the others
                raise
            stack.callback(gate.listener.close)
        while True:
            outcome = this.run_once(gate)
            assert this.found is not None
            verdict = outcome.verdict or Verdict(False)
            code = tell(outcome, this.found[0], verdict)
            if outcome.stopped_by is not None or not verdict.again:
                return code


class _ThisNode:
    """This host, through all starts of a run."""

    def __init__(
        self,
        nodes: Nodes,
        script: Script,
        processes: int,
        settings: Settings,
        make_paths: MakePaths,
        show: str,
        say: Say,
        restarts: Restarts,
    ) -> None:
        self.host = socket.gethostname()
        self.found: tuple[RunPaths, tuple[Path, ...]] | None = None
        self._nodes, self._script, self._processes, self._settings = nodes, script, processes, settings
        self._make_paths, self._show, self._say, self._restarts = make_paths, show, say, restarts
        self._same = same_on_all(script)
        self._starts = 0

    def run_once(self, gate: Gate | None) -> Outcome:
        """One start. `gate`: of node 0."""
        with ExitStack() as stack:
            warm: Warm | None = None
            if self._processes > 1:  # it imports while the other hosts are waited for
                warm = stack.enter_context(Warm(self._script.name, as_module=self._script.as_module, once=True))
            link = self._link(gate, stack)
            stack.callback(link.close)
            try:
                start = _interruptible(link)
            except EvenstepError:
                if self.found is not None:
                    take_back(*self.found)
                raise
            try:
                with _told(link, start):
                    if gate is None:
                        self._find(start.run)
                    assert self.found is not None
                    paths, made = self.found
                    outcome = run_part(
                        self._script,
                        paths,
                        part_of(start, self._processes, link),
                        replace(self._settings, run=str(paths.root)),
                        made=made,
                        show=self._show,
                        say=self._say,
                        warm=warm,
                    )
            except MachineError:
                if link.fault is None or not link.verdict.again:
                    raise
                outcome = Outcome((), (), None, None, {}, link.fault, verdict=link.verdict)
                self._find(start.run)  # it may have been taken back
            else:
                self.found = paths, ()
        self._starts += 1
        return outcome

    def _find(self, name: str) -> None:
        """The run directory, and what was made for it, now or at a start of which nothing came."""
        before = () if self.found is None else self.found[1]
        paths, made = self._make_paths(name)
        self.found = paths, made or before

    def _link(self, gate: Gate | None, stack: ExitStack) -> Link:
        nodes = self._nodes
        if gate is None:
            about = About(self.host, self._processes, self._same, nodes.rank, nodes.count)
            if self._settings.run is not None:
                root = Path(self._settings.run).absolute()
                about = replace(about, copy=asdict(glance(RunPaths(root))), run=str(root))
            again = self._starts > 0
            calling = Calling(nodes, self._say, again=again)

            def connect() -> Line | None:
                line = calling()
                spoke.interface = calling.interface
                return line

            spoke = Spoke(about, nodes.address, self._say, connect, self._without_hub, hub_node=0, calls_again=again)
            return spoke
        if self.found is None:
            self.found = self._make_paths(None)
        paths = self.found[0]
        port, keeper = reserve_port()
        stack.enter_context(keeper)
        about = About(self.host, self._processes, self._same, 0, nodes.count, nodes.address, port)
        hub = _Node0(
            paths,
            nodes.count,
            about,
            self.host,
            self._say,
            str(Path("runs") / paths.root.name),
            nodes.patience,
            lambda fault: self._restarts.decide(paths, fault.step, lasting=fault.lasting),
            least=nodes.least,
            restart=self._restarts.done,
            restarts=self._restarts.most,
        )
        hub.open(gate)
        return hub

    def _without_hub(self) -> Verdict:
        """Node 0 is lost, which would have decided."""
        if self._restarts.most == 0:
            return Verdict(False)
        where = f"{self._nodes.address}:{self._nodes.port}"
        return Verdict(True, f"waiting for node 0 to come back at {where}, for {self._nodes.patience:.0f} s at most")


class _Node0(Hub):
    """The hub of nodes that go on from what node 0 has in its run directory."""

    def __init__(self, paths: RunPaths, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._paths = paths

    def _problem(self, about: About) -> UsageError | None:
        return super()._problem(about) or self._other_run(about)

    def _other_run(self, about: About) -> UsageError | None:
        """Whether a node was given a run directory that is not node 0's, with work in it that would be left behind."""
        theirs, own, root = Copy(**about.copy), glance(self._paths), str(self._paths.root)
        if theirs.step is None:
            return None
        another = about.run == root and None not in (own.run_id, theirs.run_id) and own.run_id != theirs.run_id
        if own.step is not None and theirs.step <= own.step and not another:
            return None
        has = "none" if own.step is None else f"step {own.step}"
        return UsageError(
            f"{about.host} (node {about.node}) has a checkpoint of step {theirs.step} in {about.run}, {self.host} "
            f"(node 0) has {has}{' of another run' if another else ''} in {root}: they do not share the run directory",
            do=f"all go on from what node 0 has: start node 0 on {about.host}, copy the run directory to {self.host}, "
            "or have it on a disk that all nodes see; for a new run give another --run",
        )


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
        watch = None if shared or node else _Checkpoints(paths, link)
        with _told(link, start):
            if not shared:
                write_whole(paths.run_id, run_id.encode())
                link.tell_hub(written=written(paths, part.ranks, node), node=node)
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


@contextmanager
def _told(link: Link, start: Start) -> Iterator[None]:
    """What keeps this host from its part (a firewall, a full disk) is told to the others, too."""
    try:
        _check_ways(link, start)
        yield
    except EvenstepError as error:
        lasting = isinstance(error, UsageError)  # a disk or a network may be well the next time
        fault = Fault(start.node, link.host, error.message, exit_code=error.exit_code, lasting=lasting, step=0)
        link.tell(fault)
        link.wait(_LAST_WORDS)
        raise


def _check_ways(link: Link, start: Start) -> None:
    """To all other hosts. MachineError where one is closed, unless the run has failed already: they may be gone."""
    for place, (address, port) in enumerate(zip(start.addresses, start.open_ports, strict=True)):
        if port and place != start.place:
            try:
                check_way(address, port)
            except MachineError:
                link.wait(_NEWS)
                if link.fault is None:
                    raise
                return


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
