"""Several hosts: their launchers find each other, begin together, and end together.

One launcher is the hub: node 0's, or one that started all the others (by ssh, by srun). The others reach it over a
connection on which they have proved that they know the run's token, or over the pipes of the program that started them.
Each says what it has; once all are there and agree the hub sends each its place. From then on everybody sends a beat
several times a second: a host that falls silent has failed, and what fails anywhere is told everywhere. A thread does
all this, so that a terminal that stands still makes no host look dead.
"""

from __future__ import annotations

import base64
import errno
import os
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from ipaddress import ip_address
from typing import Any

from evenstep.errors import EvenstepError, MachineError, UsageError
from evenstep.interfaces import interfaces
from evenstep.launch.gate import Knock, Line, Message, SilentError, StrangerError, call, socket_line
from evenstep.launch.port import open_to_others
from evenstep.launch.restarts import Verdict
from evenstep.record.activity import Doing

BEAT = 0.25  # seconds between two beats
SILENCE = 4.0  # seconds without any after which a host is lost; a flap of two seconds is not
_SAY_AFTER = 2.0  # seconds after which it is said what is waited for, and then every so often
_SAY_EVERY = 15.0
_LIKELIER = 0.5  # seconds in which a likelier cause than a peer's end may still be told
_BUSY = 10.0  # seconds for node 0 to end one start of a run and come to the next
_TELL = 5.0  # seconds in which node 0 is told of a mistake
_UNPROVEN = 64  # connections that may be open without having proved themselves
_SUSPECT = 1.0  # seconds of silence after which another launcher of the same host is believed to replace it
_FAREWELL = 2.0  # seconds for the last words
_LAST_CALL = 30.0  # seconds to wait for more hosts, where those that are there are enough
_LAST_CALL_AGAIN = 5.0  # the same when a run starts again: who is alive comes at once
_STOPPED = "its launcher was stopped"
_SILENT = f"nothing was heard from it for {SILENCE:.0f} s: its cable, its power, or its launcher"

Say = Callable[[str], None]
Doings = Mapping[int, Doing]
"""What the processes of a host were doing last, by rank."""


@dataclass(frozen=True)
class Nodes:
    """What the command line said: this is node `rank` of `count`, and node 0 listens at `address`:`port`."""

    count: int
    rank: int
    address: str
    port: int
    token: str
    patience: float  # seconds to wait for the others
    least: int  # nodes that are enough


@dataclass(frozen=True)
class Start:
    """Where a node's processes stand, as the hub decided."""

    node: int
    nodes: int
    first_rank: int
    world_size: int
    address: str  # of rank 0's store
    port: int
    addresses: Sequence[str]  # of all hosts, by place
    open_ports: Sequence[int]  # and where their launchers listen, for the others to try the way; 0: nowhere
    tag: str
    run: str  # the run directory
    place: int  # of this node among those that are there, from 0
    restart: int  # how often the run was started again before
    restarts: int  # and how often it may be


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

    @property
    def stopped(self) -> bool:
        """Whether somebody has stopped the run; that is no failure to start again after."""
        return self.what == _STOPPED

    @property
    def silent(self) -> bool:
        """Whether the whole host is out of reach."""
        return self.what == _SILENT


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


@dataclass
class Member:
    """A node that has joined."""

    about: About
    line: Line
    joined: float = field(default_factory=time.monotonic)
    done: bool = False
    doing: Mapping[str, list[Any]] = field(default_factory=dict)  # by rank: step and phase, as it said last


class Link:
    """This launcher's connection to the others. One thread; `watch`'s function and `say` are called in it."""

    def __init__(self, host: str, say: Say) -> None:
        self.host = host
        self.fault: Fault | None = None
        self.verdict = Verdict(False)  # what follows the fault
        self.interface = ""  # this host's own address on the way to the others
        self._say = say
        self._on_fault: Callable[[Fault], None] = lambda fault: None
        self._doings: Callable[[], Doings] = dict
        self._start: Start | None = None
        self._error: EvenstepError | None = None
        self._begun = threading.Event()  # or refused
        self._over = threading.Event()
        self._outbox: list[Message] = []
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: None)
        self._open: socket.socket | None = None  # for the others to try the way
        self._told = ""  # what has failed on this node
        self._closing = False
        self._turned = 0.0  # when `_turn` was last left
        self._stood = (0.0, 0.0)  # when this process stood still last, and for how many seconds
        self._thread = threading.Thread(target=self._work, name="evenstep-nodes", daemon=True)

    # ---- for the launcher

    def join(self, interrupted: Callable[[], bool]) -> Start | None:
        """Wait until all nodes are there. None if `interrupted`. UsageError and MachineError come on every node."""
        self._thread.start()
        while not self._begun.wait(0.05):
            if interrupted():
                return None
        if self._error is not None:
            raise self._error
        return self._start

    def watch(self, on_fault: Callable[[Fault], None]) -> None:
        """Call `on_fault` when the run fails somewhere, at once if it has."""
        self._on_fault = on_fault
        if self.fault is not None:
            on_fault(self.fault)

    def report(self, doings: Callable[[], Doings]) -> None:
        """Have every beat say what this host's processes are doing."""
        self._doings = doings

    def tell(self, fault: Fault) -> None:
        """A failure on this node."""
        self._told = fault.what
        self._post(fault=asdict(fault))

    def done(self, signal: int | None) -> None:
        """This node's processes have all ended well."""
        self._post(done=True, signal=signal)

    def wait(self, seconds: float | None = None) -> bool:
        """Until it is known how the run ended on all nodes."""
        return self._over.wait(seconds)

    def close(self) -> None:
        """Leave. Nodes that are still at work take it for a failure of this one."""
        self._closing = True
        self._post()
        if self._thread.is_alive():
            self._thread.join(2 * _FAREWELL)
        if self._open is not None:
            self._open.close()
        for descriptor in (self._woken, self._wake):
            with suppress(OSError):
                os.close(descriptor)

    def _opened(self, about: About) -> About:
        """With the port at which this launcher listens from now on, until it leaves."""
        if about.nodes == 1 or not about.address:
            return about
        if self._open is not None:
            self._open.close()
        self._open = open_to_others(about.address)
        return replace(about, open_port=self._open.getsockname()[1])

    def _beat(self) -> Message:
        return {"beat": {rank: (doing.step, doing.phase) for rank, doing in self._doings().items()}}

    def _post(self, **message: object) -> None:
        if message:
            self._outbox.append(message)
        with suppress(OSError):
            os.write(self._wake, b".")

    # ---- the thread

    def _work(self) -> None:
        try:
            self._run()
        except EvenstepError as error:
            self._refuse(error)
        except Exception as error:  # a bug must not leave the launcher waiting
            self._refuse(MachineError(f"the connection between hosts failed: {type(error).__name__}: {error}"))
        finally:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, (Line, Knock)):
                    key.fileobj.close()
            self._selector.close()
            self._begun.set()
            self._over.set()

    def _run(self) -> None:
        raise NotImplementedError

    def _refuse(self, error: EvenstepError) -> None:
        if self._begun.is_set():
            self._failed(Fault(-1, self.host, error.message))
        else:
            self._error = error
            self._begun.set()

    def _begin(self, start: Start | None) -> None:
        self._start = start
        self._begun.set()

    def _failed(self, fault: Fault) -> None:
        if self.fault is None:
            self.fault = fault
            self._on_fault(fault)

    def _listen_to(self, line: Line, hear: Callable[[], None]) -> None:
        self._selector.register(line, selectors.EVENT_READ, hear)

    def _turn(self, seconds: float) -> None:
        """Take in what comes within `seconds`."""
        for key, _ in self._selector.select(seconds):
            key.data()
        before, self._turned = self._turned, time.monotonic()
        stood = self._turned - (before or self._turned) - seconds
        if stood > _SUSPECT:  # somebody has stopped this very process: what came meanwhile is not late
            self._stood = self._turned, stood
            for key, _ in self._selector.select(0.0):
                key.data()

    def _is_silent(self, line: Line) -> bool:
        """Whether nothing has come over the line for long, while this process was listening."""
        now = time.monotonic()
        return now - line.heard > SILENCE and now - self._turned < _SUSPECT

    def _cause(self, fault: Fault, node: int) -> Fault:
        """Of a host that is lost: this one, `node`, if it is this launcher that others have lost."""
        until, stood = self._stood
        if time.monotonic() > until + _SUSPECT or stood < SILENCE - 2 * BEAT:
            return fault
        what = f"its launcher stood still for {stood:.0f} s: somebody stopped it, or the machine gave it no time"
        return Fault(node, self.host, what, step=fault.step)

    def _mail(self) -> list[Message]:
        """What the launcher's main thread wants said."""
        with suppress(BlockingIOError):
            while os.read(self._woken, 4096):
                pass
        mail, self._outbox = self._outbox, []
        return mail


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
        self.farewell = _FAREWELL
        self._members: dict[int, Member] = {}
        self._suspect: tuple[float, Fault] | None = None  # a failure that may be the consequence of another
        self._own_done = own is None
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
        next_word = began + _SAY_AFTER
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
                next_word = now + _SAY_EVERY
            self._turn(0.2)
            self._sweep_gate()
            for member in list(self._members.values()):
                member.line.send(**self._beat())
                if self._is_silent(member.line):
                    self._lost_early(member, _SILENT)
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
            start = Start(
                node=k,
                nodes=len(there),
                first_rank=first,
                world_size=total,
                address=there[0].address,
                port=there[0].port,
                addresses=[about.address for about in there],
                open_ports=[about.open_port for about in there],
                tag=f"{self._tag}-{k}",
                run=self._run_name,
                place=place,
                restart=self._restart,
                restarts=self._restarts,
            )
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
            self._turn(BEAT)
            self._sweep_gate()
            for message in self._mail():
                if message.get("done"):
                    self._own_done = True
                elif "fault" in message:
                    self._suspected(Fault(**message["fault"]))
                elif "all" in message:
                    for member in self._members.values():
                        member.line.send(**message["all"])
            now = time.monotonic()
            beat = self._beat()
            for member in list(self._members.values()):
                member.line.send(**beat)
                if not member.done and self._is_silent(member.line):
                    self._lost(member, _SILENT)
            if self._suspect is not None and now > self._suspect[0]:
                self._failed(self._after_others(self._suspect[1]))
            if until is not None:
                continue
            if self._closing and self.fault is None:
                self._failed(Fault(0, self.host, _STOPPED))
            if self.fault is not None:
                if not self.fault.stopped:
                    self.verdict = self._decide(self.fault)
                self._end_with(fault=asdict(self.fault), verdict=asdict(self.verdict))
                until = now + self.farewell
            elif self._own_done and all(m.done for m in self._members.values()):
                self._end_with(over=True)
                until = now + self.farewell

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
            said, do = messages[0]["unable"]
            kind = UsageError if messages[0]["code"] == UsageError.exit_code else MachineError
            self._end_all(kind(f"{messages[0]['host']}: {said}", do=do))
        if messages is None or "hello" not in messages[0]:
            self._gone_before(line)
            line.close()
            return
        about = About(**messages[0]["hello"])
        if self._begun.is_set() and about.node in self._members:
            before = self._members[about.node]
            if before.about.host == about.host and time.monotonic() - before.line.heard > _SUSPECT:
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
        """A failure that is the consequence of another's end, with the hosts on which all had ended by then."""
        done = [member.about for member in self._members.values() if member.done]
        if self._own is not None and self._own_done:
            done.append(self._own)
        names = ", ".join(f"{about.host} (node {about.node})" for about in done[:8])
        if not names:
            return fault
        said = f"the processes of {names}{', ...' if len(done) > 8 else ''} had ended before, with exit code 0"
        return replace(fault, before="; ".join(filter(None, (fault.before, said))))

    def _lost(self, member: Member, what: str) -> None:
        fault = lost(member.about.node, member.about.host, what, member.doing)
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


class Spoke(Link):
    """Any other node's launcher. `connect` gives the line to the hub, or None to be asked again."""

    def __init__(
        self,
        about: About,
        hub: str,
        say: Say,
        connect: Callable[[], Line | None],
        lost_hub: Callable[[], Verdict] = Verdict.of_none,
        *,
        hub_node: int = -1,
        calls_again: bool = False,
    ) -> None:
        """`hub_node`: which node the hub is, -1 if it is none. `lost_hub` says what follows when it is lost.
        `calls_again`: a hub that hangs up before the run begins is called again."""
        super().__init__(about.host, say)
        self._about, self._hub, self._connect = about, hub, connect
        self._lost_hub, self._calls_again = lost_hub, calls_again
        self._hub_node = hub_node
        self._hub_doing: Mapping[str, list[Any]] = {}
        self._line: Line | None = None
        self._refusal: EvenstepError | None = None
        self._carrying: set[int] = set()
        self._hold = False  # the hub takes no output now
        self.carried = threading.Event()  # all output has been sent
        self._on_order: Callable[[Message], None] = lambda order: None

    def obey(self, on_order: Callable[[Message], None]) -> None:
        """Call `on_order` for {"stop": signal} and {"kill": true}, by which a hub passes on what it was told."""
        self._on_order = on_order

    def carry(self, descriptor: int, to: int) -> None:
        """Send what comes out of `descriptor` to the hub's own descriptor `to`. Before `join`."""
        self._carrying.add(descriptor)
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._carry(descriptor, to))

    def give_up(self, error: EvenstepError) -> None:
        """This host cannot begin: all of them learn why. Before `join`, which raises it."""
        self._refusal = error

    def tell_hub(self, **message: object) -> None:
        """Something that the hub's `_take` understands."""
        self._post(**message)

    def _carry(self, descriptor: int, to: int) -> None:
        hold = self._hold and not self._over.is_set()
        if self._line is None or self._line.is_full or hold:
            time.sleep(BEAT / 10)  # it stays in the pipe
            return
        data = os.read(descriptor, 1 << 16)
        if data:
            self._line.send(out=base64.b64encode(data).decode(), to=to)
        else:
            self._selector.unregister(descriptor)
            self._carrying.discard(descriptor)
            if not self._carrying:
                self.carried.set()

    def _call(self) -> None:
        """Reach the hub and say what this host has. `_line` is None if this launcher is to leave before."""
        line = self._connect()
        while line is None and not self._closing:
            time.sleep(0.1)
            line = self._connect()
        if line is None:
            return
        self._line = line
        about = self._opened(replace(self._about, address=self._about.address or self.interface))
        if self._refusal is not None:
            line.send(unable=[self._refusal.message, self._refusal.do], code=self._refusal.exit_code, host=self.host)
        else:
            line.send(hello=asdict(about))
        self._listen_to(line, lambda: self._hear(line))

    def _run(self) -> None:
        self._call()
        while not self._closing:
            self._turn(BEAT)
            if self._line is None:
                self._call()
                continue
            line = self._line
            self._send_mail(line)
            line.send(**self._beat())
            if not self._begun.is_set() and self._is_silent(line):
                raise MachineError(f"nothing was heard from {self._hub} for {SILENCE:.0f} s", do="see the network")
            if self._begun.is_set() and not self._over.is_set() and self._is_silent(line):
                self._lose_hub(_SILENT)
        if self._line is None:
            return
        line = self._line
        self._send_mail(line)
        if self._begun.is_set() and not self._over.is_set():
            line.send(fault=asdict(Fault(self._about.node, self.host, _STOPPED)))
        until = time.monotonic() + 2 * _FAREWELL
        self._turn(0.0)
        self._send_mail(line)
        while line.waits and line.flush() and time.monotonic() < until:
            time.sleep(BEAT / 10)

    def _lose_hub(self, what: str) -> None:
        self.verdict = self._lost_hub()
        self._failed(self._cause(lost(self._hub_node, self._hub, what, self._hub_doing), self._about.node))
        self._over.set()

    def _send_mail(self, line: Line) -> None:
        for message in self._mail():
            line.send(**message)

    def _hear(self, line: Line) -> None:
        messages = line.receive()
        if messages is None:
            self._selector.unregister(line)
            if self._begun.is_set():
                if not self._over.is_set():
                    self._lose_hub("its launcher has ended")
                return
            if not self._calls_again:
                raise MachineError(f"the launcher on {self._hub} has ended before the run began", do="see what it said")
            line.close()
            self._line = None
            return
        for message in messages:
            if "beat" in message:
                self._hub_doing = message["beat"] or self._hub_doing
                self._hold = message.get("hold", False)
            elif "later" in message:
                self._say("the run is under way without this host, which takes part if it starts again")
                self._calls_again = True
            elif "begin" in message:
                self._begin(Start(**message["begin"]))
            elif "refused" in message:
                said, do = message["refused"]
                raise (UsageError if message["code"] == UsageError.exit_code else MachineError)(said, do=do)
            elif "fault" in message:
                fault = Fault(**message["fault"])
                taken_for_lost = (fault.rank, fault.node) == (None, self._about.node) and fault.what != self._told
                self.verdict = self._lost_hub() if taken_for_lost else Verdict(**message["verdict"])
                self._failed(fault)
                self._over.set()
            elif "over" in message:
                self._over.set()
            else:
                self._on_order(message)


def lost(node: int, host: str, what: str, doing: Mapping[str, list[Any]]) -> Fault:
    """A host that is gone, with what its processes were doing as it said last."""
    last = {int(rank): Doing(*said) for rank, said in doing.items()}
    step = max((one.step for one in last.values()), default=None)
    return Fault(node, host, what, doing=doing_text(last), step=step)


def doing_text(doings: Doings) -> str:
    """`rank 1 was in step 12, computing gradients; rank 2 ...`, of four at most."""
    said = [f"rank {rank} was {doing}" for rank, doing in sorted(doings.items())]
    return "; ".join(said[:4]) + (f"; and {len(said) - 4} more" if len(said) > 4 else "")


class Gate:
    """Where a hub listens. Who cannot prove that it knows the token is turned away, and said once."""

    def __init__(self, address: str, port: int, token: str, say: Say, patience: float = 0.0) -> None:
        self.where = f"{address}:{port}"
        self.listener = _listen(address, port, say, patience)
        self.address = str(self.listener.getsockname()[0])
        self._token, self._say = token, say
        self._strangers: Counter[str] = Counter()

    def accept(self, selector: selectors.BaseSelector, welcome: Callable[[Line], None]) -> None:
        """Take a connection that waits; give it to `welcome` once it is proven."""
        unproven = [key.fileobj for key in selector.get_map().values() if isinstance(key.fileobj, Knock)]
        if len(unproven) >= _UNPROVEN:  # who belongs here proves it in a moment
            self._turn_away(selector, min(unproven, key=lambda one: one.deadline), "it said nothing")
        try:
            sock, _ = self.listener.accept()
        except OSError:
            return
        try:
            knock = Knock(sock, self._token)
        except OSError:
            sock.close()
            return

        def read() -> None:
            try:
                if not knock.read():
                    return
            except StrangerError as error:
                self._turn_away(selector, knock, str(error))
                return
            selector.unregister(knock)
            try:
                line = socket_line(knock.sock)
            except OSError:  # it has gone
                knock.close()
                return
            welcome(line)

        selector.register(knock, selectors.EVENT_READ, read)

    def turn_away_late(self, selector: selectors.BaseSelector) -> None:
        """Those that have not proved themselves in time."""
        for key in list(selector.get_map().values()):
            if isinstance(key.fileobj, Knock) and time.monotonic() > key.fileobj.deadline:
                self._turn_away(selector, key.fileobj, "it said nothing")

    def _turn_away(self, selector: selectors.BaseSelector, knock: Knock, why: str) -> None:
        selector.unregister(knock)
        with suppress(OSError):
            where = knock.sock.getpeername()[0]
            self._strangers[where] += 1
            if self._strangers[where] == 1:  # a scanner knocks a thousand times
                self._say(f"turned away a connection from {where}: {why}")
        knock.close()


class Calling:
    """Calls node 0, which may be started later, until it answers."""

    def __init__(self, nodes: Nodes, say: Say, *, again: bool = False) -> None:
        """`again`: it has answered before, so that it may not be ready yet when it does not."""
        self.where = f"{nodes.address}:{nodes.port}"
        self.interface = ""
        self._nodes, self._say, self._again = nodes, say, again
        self._began = time.monotonic()
        self._next_word = self._began + _SAY_AFTER

    def __call__(self) -> Line | None:
        nodes = self._nodes
        try:
            sock = call(nodes.address, nodes.port, nodes.token, 2.0)
            self.interface = sock.getsockname()[0]
            return socket_line(sock)
        except SilentError as error:
            if not self._again and time.monotonic() > self._began + _BUSY:
                raise self._refused(error) from error
            why = str(error)
        except StrangerError as error:
            raise self._refused(error) from error
        except OSError as error:
            why = str(error.strerror or error)
            if isinstance(error, ConnectionRefusedError) and _is_own(nodes.address):
                why += f", and {nodes.address} is this very host"
        now = time.monotonic()
        if now > self._began + nodes.patience:
            raise MachineError(
                f"node 0 did not answer at {self.where} within {nodes.patience:.0f} s: {why}",
                do="see that node 0 was started, that this is its address, and that no firewall is between",
            )
        if now > self._next_word:
            self._say(f"waiting for node 0 at {self.where}: {why}")
            self._next_word = now + _SAY_EVERY
        return None

    def _refused(self, error: StrangerError) -> UsageError:
        return UsageError(
            f"{self.where}: {error}",
            do="see --master-addr and --master-port, and that EVENSTEP_TOKEN is the same",
        )


def tell_node_0(nodes: Nodes, host: str) -> None:
    """A node whose number cannot be says so to node 0, which would wait for it or train without it, and never know."""
    until = time.monotonic() + _TELL
    while time.monotonic() < until:
        try:
            line = socket_line(call(nodes.address, nodes.port, nodes.token, 1.0))
        except StrangerError:
            return
        except OSError:
            time.sleep(BEAT)  # node 0 may be a little later
            continue
        line.send(hello=asdict(About(host, 0, {}, nodes.rank, nodes.count)))
        time.sleep(BEAT)
        line.close()
        return


def _listen(address: str, port: int, say: Say, patience: float) -> socket.socket:
    """Listen on the one address that was named."""
    family, place = _find(address, port, say, patience)
    _refuse_loopback(address, place[0])
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(
                f"--master-addr {address} is not an address of this host ({socket.gethostname()}), and this is node 0",
                do="node 0 listens there: give one of its own addresses, or start --node-rank 0 on that host",
            ) from error
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} of {address} is taken (by another run, perhaps)",
                do="give another --master-port on every node, or see who has it: ss -ltnp",
            ) from error
        raise MachineError(f"cannot listen at {address}:{port}: {error.strerror}") from error
    return listener


def _refuse_loopback(name: str, address: str) -> None:
    """A host's own name is often one of its loopback interface in its own /etc/hosts, and no other host gets there."""
    if not ip_address(address).is_loopback or name in (address, "localhost"):
        return
    have = [f"{own} ({name})" for name, own in interfaces().items() if not own.startswith("127.")]
    raise UsageError(
        f"--master-addr {name} is {address} on this host (see /etc/hosts), where no other host can reach it",
        do=f"give an address that the others reach: {', '.join(have) or 'this host has none'}",
    )


def _is_own(address: str) -> bool:
    with suppress(OSError):
        found = socket.gethostbyname(address)
        return found.startswith("127.") or found in interfaces().values()
    return False


def _find(address: str, port: int, say: Say, patience: float) -> tuple[socket.AddressFamily, Any]:
    """Where that is. A name may be known a little later than its host is there: a pod's, in Kubernetes."""
    began = time.monotonic()
    next_word = began + _SAY_AFTER
    while True:
        try:
            family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            return family, place
        except socket.gaierror as error:
            why = error.strerror
        now = time.monotonic()
        if now > began + patience:
            raise UsageError(f"--master-addr {address} is no host that this one knows: {why}", do="give its address")
        if now > next_word:
            say(f"waiting for the name {address} to be known here, which is node 0's: {why}")
            next_word = now + _SAY_EVERY
        time.sleep(BEAT)
