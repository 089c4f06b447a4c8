"""One launch on several hosts, each of which was started by hand (or by something that does it)."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from evenstep.errors import EvenstepError, MachineError, UsageError
from evenstep.launch.hosts.beginning import MakePaths, join, told
from evenstep.launch.hosts.calling import Calling, Nodes
from evenstep.launch.hosts.copies import Copy, glance
from evenstep.launch.hosts.gate import Gate
from evenstep.launch.hosts.hub import Hub
from evenstep.launch.hosts.line import Line
from evenstep.launch.hosts.link import Link
from evenstep.launch.hosts.messages import About
from evenstep.launch.hosts.mistakes import tell_node_0, tell_others
from evenstep.launch.hosts.sameness import same_on_all
from evenstep.launch.hosts.spoke import Spoke
from evenstep.launch.local import Work, run_part
from evenstep.launch.outcome import Outcome, Tell
from evenstep.launch.port import reserve_port
from evenstep.launch.prepare import locked
from evenstep.launch.restarts import Restarts, Verdict
from evenstep.launch.undo import take_back
from evenstep.launch.warm import Warm
from evenstep.record.paths import RunPaths


def run_on_nodes(nodes: Nodes, work: Work, make_paths: MakePaths, *, restarts: int, tell: Tell) -> int:
    """Find the other hosts, run this one's part, and end together; after a fault again, as node 0 decides.

    Errors as of `run_part`; UsageError and MachineError for what keeps the hosts from beginning are raised on every one
    of them. `tell` is told how each start ended; what it returns for the last is returned.
    """
    say = work.say
    if not nodes.token and nodes.count > 1 and nodes.rank == 0:
        say("EVENSTEP_TOKEN is not set: whoever reaches this port can join. Set it to one secret on every node")
    this = _ThisNode(nodes, work, make_paths, Restarts(restarts))
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

    def __init__(self, nodes: Nodes, work: Work, make_paths: MakePaths, restarts: Restarts) -> None:
        self.host = socket.gethostname()
        self.found: tuple[RunPaths, tuple[Path, ...]] | None = None
        self._nodes, self._work, self._make_paths, self._restarts = nodes, work, make_paths, restarts
        self._same = same_on_all(work.script)
        self._starts = 0

    def run_once(self, gate: Gate | None) -> Outcome:
        """One start. `gate`: of node 0."""
        work = self._work
        with ExitStack() as stack:
            warm: Warm | None = None
            if work.processes > 1:  # it imports while the other hosts are waited for
                warm = stack.enter_context(Warm(work.script, once=True))
            held: tuple[int, ...] = ()
            try:
                if gate is not None:
                    self.found = self.found or self._make_paths(None)
                    held = (stack.enter_context(locked(self.found[0])),)  # the other hosts may see the same directory
                link = self._link(gate, stack)
            except EvenstepError as error:
                tell_others(self._nodes, error, gate)
                raise
            stack.callback(link.close)
            try:
                start = join(link)
            except EvenstepError:
                if self.found is not None:
                    take_back(*self.found)
                raise
            try:
                with told(link, start):
                    if gate is None:
                        self._find(start.run)
                    assert self.found is not None
                    paths, made = self.found
                    outcome = run_part(work, paths, start.part, link, held=held, made=made, warm=warm)
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
        nodes, work = self._nodes, self._work
        if gate is None:
            return self._spoke()
        assert self.found is not None
        paths = self.found[0]
        port, keeper = reserve_port()
        stack.enter_context(keeper)
        about = About(self.host, work.processes, self._same, 0, nodes.count, nodes.address, port)
        hub = _Node0(
            paths,
            nodes.count,
            about,
            self.host,
            work.say,
            str(Path("runs") / paths.root.name),
            nodes.patience,
            lambda fault: self._restarts.decide(paths, fault.step, lasting=fault.lasting),
            least=nodes.least,
            restart=self._restarts.done,
            restarts=self._restarts.most,
        )
        hub.open(gate)
        return hub

    def _spoke(self) -> Spoke:
        nodes, work = self._nodes, self._work
        about = About(self.host, work.processes, self._same, nodes.rank, nodes.count)
        if work.settings.run is not None:
            root = Path(work.settings.run).absolute()
            about = replace(about, copy=asdict(glance(RunPaths(root))), run=str(root))
        again = self._starts > 0
        calling = Calling(nodes, work.say, again=again)

        def connect() -> Line | None:
            line = calling()
            spoke.interface = calling.interface
            return line

        spoke = Spoke(about, nodes.address, work.say, connect, self._without_hub, hub_node=0, calls_again=again)
        return spoke

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
