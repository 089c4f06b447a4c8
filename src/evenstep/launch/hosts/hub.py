"""The hub: the launcher that gathers the others, gives each its part, and decides how the run ends."""

from __future__ import annotations

import secrets
import selectors
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from evenstep.errors import EvenstepError, MachineError, UsageError
from evenstep.launch.hosts.gate import Gate
from evenstep.launch.hosts.line import Line, Message
from evenstep.launch.hosts.link import FAREWELL, SUSPECT, Link
from evenstep.launch.hosts.messages import SAY_AFTER, SAY_EVERY, About, Start, left, lost, silent_for
from evenstep.launch.job import Part
from evenstep.launch.others import Fault
from evenstep.launch.output import Say
from evenstep.launch.restarts import Verdict

_NAMED = 8  # of many
_LIKELIER = 0.5  # seconds in which a likelier cause than a peer's end may still be told
_LAST_CALL = 30.0  # seconds to wait for more hosts, where those that are there are enough
_LAST_CALL_AGAIN = 5.0  # the same when a run starts again: who is alive comes at once


@dataclass
class Member:
    """A node that has joined."""

    about: About
    line: Line
    joined: float = field(default_factory=time.monotonic)
    done: bool = False
    doing: Mapping[str, list[Any]] = field(default_factory=dict)  # by rank: step and phase, as it said last


class Hub(Link):
    """Node 0's launcher (`own`), or one that has no processes of its own and has started all the others."""

    def __init__(
        self,
        count: int,
        own: About | None,
        host: str,
        say: Say,
        run: str,
        patience: float,
        decide: Callable[[Fault], Verdict],
        *,
        least: int | None = None,
        restart: int = 0,
        restarts: int = 0,
    ) -> None:
        """`least`: nodes that are enough (None: all). `decide` says what follows a fault. `restart`, `restarts`: how
        often the run was started again, and may be."""
        super().__init__(host, say)
        self.count, self._run_name, self._patience = count, run, patience
        self._own = None if own is None else self._opened(own)
        self.least = count if least is None else least
        self._decide, self._restart, self._restarts = decide, restart, restarts
        self._tag = secrets.token_hex(8)
        self._waiting: list[Line] = []  # nodes that came after the run began
        self.where = ""  # where others reach this hub, for messages
        self.farewell = FAREWELL
        self._members: dict[int, Member] = {}
        self._suspect: tuple[float, Fault] | None = None  # a failure that may be the consequence of another
        self._own_done = own is None
        self._ended: defaultdict[int, list[int]] = defaultdict(list)  # ranks, by node
        self.ended_by: int | None = None  # the signal after which all processes ended in good order
        self._gate: Gate | None = None

    def open(self, gate: Gate) -> None:
        """Have nodes come through `gate`."""
        self._gate = gate
        self.where, self.interface = gate.where, gate.address
        self._selector.register(gate.listener, selectors.EVENT_READ, lambda: gate.accept(self._selector, self.welcome))

    def _close_gate(self) -> None:
        """Who comes from now on waits for the next start, if there is one."""
        if self._gate is not None:
            with suppress(KeyError):
                self._selector.unregister(self._gate.listener)

    def welcome(self, line: Line) -> None:
        """A connection to a node that has not said who it is."""
        self._listen_to(line, lambda: self._hear_new(line))

    def _run(self) -> None:
        self._gather()
        self._supervise()

    def _gather(self) -> None:
        """Until every node has said what it has."""
        began = time.monotonic()
        next_word = began + SAY_AFTER
        while (missing := self._missing()) or not self._prepared():
            if self._closing:
                return
            now = time.monotonic()
            if missing and self._enough(now, began) and self._prepared():
                self._say(f"going on without {missing}: {self._present()} are enough")
                break
            if missing and now > began + self._patience:
                self._end_all(
                    MachineError(
                        f"{missing} did not come within {self._patience:.0f} s",
                        do=f"start the same command there with its --node-rank, and see that it reaches {self.where}",
                    )
                )
            if missing and now > next_word:
                self._say(f"waiting {f'at {self.where} ' if self.where else ''}for {missing}")
                next_word = now + SAY_EVERY
            self._turn()
            self._sweep_gate()
            self._send_beats()
            for member in list(self._members.values()):
                silence = self._silence(member.line)
                if silence is not None:
                    self._lost_early(member, silent_for(silence))
        self._give_places()
        self._begin(self._start)

    def _give_places(self) -> None:
        """Tell every node where its processes stand."""
        abouts = {k: member.about for k, member in self._members.items()}
        if self._own is not None:
            abouts[0] = self._own
        there = [abouts[k] for k in sorted(abouts)]
        total = sum(about.processes for about in there)
        first = 0
        for place, about in enumerate(there):
            k = about.node
            part = Part(
                processes=about.processes,
                first_rank=first,
                world_size=total,
                node=k,
                place=place,
                nodes=len(there),
                address=there[0].address,
                port=there[0].port,
                tag=f"{self._tag}-{k}",
                restart=self._restart,
                restarts=self._restarts,
            )
            addresses, open_ports = [about.address for about in there], [about.open_port for about in there]
            start = Start(part, addresses, open_ports, self._run_name)
            first += about.processes
            if k in self._members:
                self._members[k].line.send(begin=asdict(start))
            else:
                self._start = start
        if self._restart:
            where = ", ".join(f"{about.host} ({about.processes})" for about in there)
            hosts = "1 host" if len(there) == 1 else f"{len(there)} hosts"
            self._say(f"again on {hosts} with {total} process{'' if total == 1 else 'es'}: {where}")

    def _present(self) -> int:
        return len(self._members) + (self._own is not None)

    def _enough(self, now: float, began: float) -> bool:
        """Whether to begin without those who have not come."""
        last_call = _LAST_CALL_AGAIN if self._restart else _LAST_CALL
        if self._present() < self.least or (self._own is None and 0 not in self._members):
            return False
        return now > max([began, *(member.joined for member in self._members.values())]) + last_call

    def _supervise(self) -> None:
        """Until all are done, or something has failed and all have been told."""
        until: float | None = None
        while until is None or (self._members and time.monotonic() < until):
            self._turn()
            self._sweep_gate()
            for message in self._mail():
                if message.get("done"):
                    self._own_done = True
                elif "fault" in message:
                    self._suspected(Fault(**message["fault"]))
                elif "ended" in message and self._own is not None:
                    self._ended[self._own.node].append(message["ended"])
                elif "all" in message:
                    for member in self._members.values():
                        member.line.send(**message["all"])
            now = time.monotonic()
            self._send_beats()
            for member in list(self._members.values()):
                silence = self._silence(member.line)
                if not member.done and silence is not None:
                    self._lost(member, silent_for(silence), silent=True)
            if self._suspect is not None and now > self._suspect[0]:
                self._failed(self._after_others(self._suspect[1]))
            if until is not None:
                continue
            if self._closing and self.fault is None:
                self._failed(left(0, self.host))
            if self.fault is not None:
                if not self.fault.stopped:
                    self.verdict = self._decide(self.fault)
                self._end_with(fault=asdict(self.fault), verdict=asdict(self.verdict))
                until = now + self.farewell
            elif self._own_done and all(m.done for m in self._members.values()):
                self._end_with(over=True)
                until = now + self.farewell

    def _send_beats(self) -> None:
        """Those that are due; and what waits for a connection to take it."""
        beat = self._beat() if self._is_due() else {}
        for member in self._members.values():
            if beat:
                member.line.send(**beat)
            else:
                member.line.flush()

    def _end_with(self, **message: object) -> None:
        self._close_gate()
        for member in self._members.values():
            member.line.send(**message)
        for line in self._waiting:
            if not self.verdict.again:
                line.send(refused=["the run has ended without this host, which came late", None], code=4)
            line.close()
        self._over.set()

    def _sweep_gate(self) -> None:
        if self._gate is not None:
            self._gate.turn_away_late(self._selector)

    def _hear_new(self, line: Line) -> None:
        """The first words of a node."""
        messages = line.receive()
        if messages == []:
            return
        self._selector.unregister(line)
        if messages is not None and "unable" in messages[0]:
            self._unable(line, messages[0])
            return
        if messages is None or "hello" not in messages[0]:
            self._gone_before(line)
            line.close()
            return
        about = About(**messages[0]["hello"])
        if self._begun.is_set() and about.node in self._members:
            before = self._members[about.node]
            if before.about.host == about.host and time.monotonic() - before.line.heard > SUSPECT:
                self._lost(before, "its launcher was lost, and has come again")
        problem = self._problem(about)
        if problem is None and self._begun.is_set():
            self._say(f"{about.host} (node {about.node}) has come: it takes part if the run starts again")
            line.send(later=True)
            self._waiting.append(line)
            return
        if problem is not None:
            line.send(refused=[problem.message, problem.do], code=problem.exit_code)
            if not self._begun.is_set():
                self._members[-1 - len(self._members)] = Member(about, line)
                self._end_all(problem)
            elif self.count > 1:
                self._say(f"refused {about.host}, which comes late: {problem.message}")
                line.close()
            else:  # --nodes 1 on every host: each would train alone
                self._failed(Fault(0, self.host, f"{problem.message}: {problem.do}", exit_code=problem.exit_code))
            return
        member = self._members[about.node] = Member(about, line)
        self._listen_to(line, lambda: self._hear(member))

    def _unable(self, line: Line, message: Message) -> None:
        """A host that cannot begin. To a run that has begun once it is as if it had not come."""
        said, do = message["unable"]
        if self._begun.is_set() or (self._restart and self._gate is not None):
            self._say(f"{message['host']} cannot take part: {said}")
            line.close()
            return
        kind = UsageError if message["code"] == UsageError.exit_code else MachineError
        self._end_all(kind(f"{message['host']}: {said}", do=do))

    def _prepared(self) -> bool:
        """All have come: whether they may begin."""
        return True

    def _gone_before(self, line: Line) -> None:
        """A connection ended before it had said who it is."""

    def _take(self, message: Message) -> None:
        """Something else that a node said."""

    def _problem(self, about: About) -> UsageError | None:
        """Why this node cannot belong to the run."""
        here = {k: m.about for k, m in self._members.items()}
        if self._own is not None:
            here[0] = self._own
        if about.node >= self.count:
            return UsageError(
                f"{about.host} was started as --node-rank {about.node}, and --nodes is {self.count}",
                do=f"give --nodes {about.node + 1} (how many there are in all) on every node",
            )
        if about.nodes != self.count:
            return UsageError(
                f"{about.host} was started with --nodes {about.nodes} (--node-rank {about.node}), "
                f"{self.host} with --nodes {self.count}",
                do="give every node the same --nodes, and --node-rank 0, 1, ... one each",
            )
        if about.node in here:
            return UsageError(
                f"two nodes have --node-rank {about.node}: {here[about.node].host} and {about.host}",
                do=f"number the {self.count} nodes from 0 to {self.count - 1}, one each",
            )
        for other in here.values():
            for name in {**other.same, **about.same}:
                ours, theirs = (said.same.get(name, "none") for said in (other, about))
                if ours != theirs:
                    return UsageError(
                        f"{name} differs: {ours} on {other.host} (node {other.node}), "
                        f"{theirs} on {about.host} (node {about.node})",
                        do=f"have the same {name.removeprefix('the ')} on every node",
                    )
        return None

    def _end_all(self, error: EvenstepError) -> None:
        """Before the beginning: every node gets the same error."""
        for member in self._members.values():
            member.line.send(refused=[error.message, error.do], code=error.exit_code)
        raise error

    def _hear(self, member: Member) -> None:
        messages = member.line.receive()
        if messages is None:
            if not self._begun.is_set():
                self._lost_early(member, "its launcher has ended")
            elif member.done or self.fault is not None:
                self._drop(member)
            else:
                self._lost(member, "its launcher has ended")
            return
        for message in messages:
            if "beat" in message:
                member.doing = message["beat"] or member.doing
            elif message.get("done"):
                member.done = True
                self.ended_by = self.ended_by or message["signal"]
            elif "ended" in message:
                self._ended[member.about.node].append(message["ended"])
            elif "fault" in message:
                self._suspected(Fault(**message["fault"]))
            else:
                self._take(message)

    def _lost_early(self, member: Member, what: str) -> None:
        """Before the beginning. It may come again."""
        self._drop(member)
        self._say(f"node {member.about.node} ({member.about.host}) has gone again: {what}")

    def _suspected(self, fault: Fault) -> None:
        if not fault.secondary:
            self._failed(fault)
        elif self._suspect is None:
            self._suspect = time.monotonic() + _LIKELIER, fault

    def _after_others(self, fault: Fault) -> Fault:
        """A failure that is the consequence of another's end, with the processes that had ended by then."""
        abouts = [member.about for member in self._members.values()] + ([] if self._own is None else [self._own])
        said = []
        for about in sorted(abouts, key=lambda one: one.node):
            ranks = self._ended[about.node]
            if ranks:
                some = ", ".join(map(str, sorted(ranks)[:_NAMED])) + (", ..." if len(ranks) > _NAMED else "")
                whole = len(ranks) == about.processes
                whose = "all processes" if whole else f"rank{'s' if len(ranks) > 1 else ''} {some}"
                said.append(f"{whose} of {about.host} (node {about.node})")
        if not said:
            return fault
        names = ", ".join(said[:_NAMED]) + (", ..." if len(said) > _NAMED else "")
        return replace(fault, before=f"{names} had ended before, with exit code 0")

    def _lost(self, member: Member, what: str, *, silent: bool = False) -> None:
        fault = lost(member.about.node, member.about.host, what, member.doing, silent=silent)
        member.line.send(fault=asdict(fault), verdict=asdict(Verdict(False)))  # should it come to life again
        self._drop(member)
        self._failed(self._cause(fault, -1 if self._own is None else self._own.node))

    def _drop(self, member: Member) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(member.line)
        member.line.close()
        self._members.pop(member.about.node, None)

    def _missing(self) -> str:
        own = set() if self._own is None else {self._own.node}
        missing = [str(k) for k in range(self.count) if k not in self._members and k not in own]
        return f"node{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {self.count}" if missing else ""
