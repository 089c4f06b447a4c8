"""One command for several hosts: a launcher for each is started by ssh, srun or the like, and spoken to over its pipes.

No port of this host is needed, and nothing that is secret or hard to quote stands on a command line: what a host is to
do goes over the pipe. When this launcher ends, or the connection, the pipe does too, and the hosts stop.
"""

from __future__ import annotations

import base64
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep.errors import EvenstepError, MachineError
from evenstep.launch.hosts.copies import Copy, run_id
from evenstep.launch.hosts.home import Home
from evenstep.launch.hosts.hostfile import Host
from evenstep.launch.hosts.hub import Hub, Member
from evenstep.launch.hosts.line import GREETING, Line, Message
from evenstep.launch.hosts.transport import Transport, command_on, forwarded
from evenstep.launch.others import Fault
from evenstep.launch.output import Say, Writer
from evenstep.launch.restarts import Restarts, Verdict
from evenstep.launch.taking import Echo, signals_to
from evenstep.launch.undo import taken_back_if_refused
from evenstep.record.paths import RunPaths
from evenstep.record.publish import write_whole

_TRY_AGAIN = 5.0  # seconds before a host that is gone is tried again
_MOST_OUTPUT = 1 << 22  # bytes that wait for the terminal, above which the hosts are to keep theirs
_LAST_WORDS = 30.0  # seconds for logs to come back


@dataclass(frozen=True)
class Ended:
    """How a launch on several hosts ended."""

    fault: Fault | None
    signal: int | None
    verdict: Verdict  # what follows
    missing: MachineError | None  # what hosts that do not share the run directory have left there


class HostError(MachineError):
    """No launcher could be started on a host."""

    def __init__(self, host: Host, message: str, *, do: str) -> None:
        super().__init__(message, do=do)
        self.host = host


def run_on_hosts(
    hosts: Sequence[Host],
    transport: Transport,
    paths: RunPaths,
    job: Mapping[str, Any],
    *,
    made: Sequence[Path],
    patience: float,
    say: Say,
    restarts: int,
    least: int,
    tell: Callable[[Ended], int],
) -> int:
    """Start a launcher on every host, give it its part, carry output and logs here, and wait for the end.

    `job` is what every host is told (see cli/node.py). UsageError and MachineError for what keeps them from beginning;
    then the folders that were `made` for this launch are removed again. After a failure it starts again, up to
    `restarts` times, on all hosts but those that are lost, if `least` are left; else it waits for them to come back.
    `tell` is told how each start ended; what it returns for the last is returned.
    """
    again = Restarts(restarts)
    there = list(hosts)
    until = time.monotonic() + patience
    while True:
        try:
            ended = _run_once(there, transport, paths, job, made=made, patience=patience, say=say, again=again)
        except HostError as error:
            if again.done == 0:
                raise
            if len(there) > least:
                there.remove(error.host)
                say(f"{error.message}: going on without it")
            elif time.monotonic() > until:
                raise
            else:
                say(f"{error.message}; trying again for {until - time.monotonic():.0f} s")
                time.sleep(_TRY_AGAIN)
            continue
        code = tell(ended)
        if ended.missing is not None:
            say(str(ended.missing))
            code = code or ended.missing.exit_code
        if ended.signal is not None or not ended.verdict.again:
            return code
        if ended.fault is not None and ended.fault.silent and len(there) > least:
            left = there.pop(ended.fault.node)
            say(f"going on without {left.name}")
        until = time.monotonic() + patience
        made = ()


def _run_once(
    hosts: Sequence[Host],
    transport: Transport,
    paths: RunPaths,
    job: Mapping[str, Any],
    *,
    made: Sequence[Path],
    patience: float,
    say: Say,
    again: Restarts,
) -> Ended:
    """One start on all hosts, to its end."""
    with ExitStack() as stack:
        stack.enter_context(taken_back_if_refused(paths, made))
        probe = paths.root / f"probe-{secrets.token_hex(4)}"
        probe.touch()
        stack.callback(probe.unlink, missing_ok=True)
        name = run_id(paths) or secrets.token_hex(8)
        write_whole(paths.run_id, name.encode())
        hub = _Hub(hosts, transport, paths, name, say, patience, again)
        stack.callback(hub.close)
        stack.callback(hub.home.stop)
        for node, host in enumerate(hosts):
            told = {
                **job,
                "node": node,
                "nodes": len(hosts),
                "processes": host.processes,
                "peer": hosts[1 if node == 0 and len(hosts) > 1 else 0].name,
                "run": str(paths.root),
                "run_id": name,
                "probe": str(probe),
                "environment": forwarded(),
            }
            hub.start(host, told)
        with signals_to(hub.on_signal, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            hub.join(lambda: hub.stopped is not None)
            while not hub.wait(0.2):
                if hub.stopped is not None and not hub.begun:
                    break
            hub.close()
            missing = hub.home.finish()
        return Ended(hub.fault, hub.ended_by if hub.stopped is None else hub.stopped, hub.verdict, missing)


class _Hub(Hub):
    """The hub of hosts that it has started itself."""

    def __init__(
        self,
        hosts: Sequence[Host],
        transport: Transport,
        paths: RunPaths,
        name: str,
        say: Say,
        patience: float,
        again: Restarts,
    ) -> None:
        super().__init__(
            len(hosts),
            None,
            socket.gethostname(),
            say,
            str(paths.root),
            patience,
            lambda fault: again.decide(paths, fault.step, lasting=fault.lasting),
            restart=again.done,
            restarts=again.most,
        )
        self.farewell = _LAST_WORDS
        self.stopped: int | None = None  # by which signal
        self._hosts, self._transport = hosts, transport
        self._echo = Echo()
        self._output = Writer()
        self._holds = False  # the hosts were told to keep their output
        self._ends_now = False  # it was told so twice
        self._children: list[tuple[Host, subprocess.Popen[bytes]]] = []
        self._errors: dict[int, bytes] = {}  # what the transport itself said, by node
        self.home = Home(
            paths, name, lambda node: command_on(hosts[node], transport), [host.name for host in hosts], say
        )

    @property
    def begun(self) -> bool:
        return self._start is not None or self._begun.is_set()

    def start(self, host: Host, told: Mapping[str, Any]) -> None:
        """Start the launcher of one host."""
        node = int(told["node"])
        child = subprocess.Popen(
            command_on(host, self._transport),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        self._children.append((host, child))
        self._errors[node] = b""
        error = child.stderr
        os.set_blocking(error.fileno(), False)
        self._selector.register(error, 1, lambda: self._take_error(node, error))
        stdin, stdout = child.stdin, child.stdout

        def close() -> None:
            with suppress(OSError):
                stdin.close()
            stdout.close()

        pipe = Line(stdout.fileno(), stdin.fileno(), close, GREETING)
        pipe.send(**told)
        self.welcome(pipe)

    def _gone_before(self, line: Line) -> None:
        node = next(n for n, (_, c) in enumerate(self._children) if c.stdout and c.stdout.fileno() == line.fileno())
        host, child = self._children[node]
        code = child.wait()
        self._take_error(node, child.stderr)
        said = self._errors[node].decode(errors="replace").strip() or f"it ended with code {code}"
        self._end_all(
            HostError(
                host,
                f"no launcher could be started on {host.name}: {said}",
                do=f"see that it can be reached without a password, that {os.getcwd()} and {sys.executable} are "
                "there too, with the same packages",
            )
        )

    def _lost_early(self, member: Member, what: str) -> None:
        self._drop(member)
        host = self._hosts[member.about.node]
        self._end_all(HostError(host, f"{host.name} was lost before the run began: {what}", do="see what it said"))

    def _missing(self) -> str:
        return ", ".join(host.name for node, (host, _) in enumerate(self._children) if node not in self._members)

    def _take_error(self, node: int, stream: Any) -> None:
        with suppress(OSError, ValueError, KeyError):  # it was closed, or read to its end already
            data = os.read(stream.fileno(), 1 << 16)
            if not data:
                self._selector.unregister(stream)
            self._errors[node] = (self._errors[node] + data)[-4096:]

    def _prepared(self) -> bool:
        copies = {node: Copy(**member.about.copy) for node, member in self._members.items()}
        try:
            return self.home.prepared(copies)
        except EvenstepError as error:
            self._end_all(error)
            raise

    def _lost(self, member: Member, what: str, *, silent: bool = False) -> None:
        super()._lost(member, what, silent=silent)
        self._children[member.about.node][1].kill()  # it would wait for what never comes
        self.home.lost(member.about.node)

    def _take(self, message: Message) -> None:
        if "out" in message:
            self._output.put(message["to"], base64.b64decode(message["out"]))
        elif "written" in message:
            self.home.begins(message["node"], message["written"])
        elif "checkpoints" in message:
            self.home.has(message["checkpoints"])

    def on_signal(self, number: int) -> None:
        """Pass it on: the first asks, the second ends at once."""
        if self._echo.is_one(number):
            return
        again = self.stopped is not None
        self.stopped = number if self.stopped is None else self.stopped
        self._post(all={"kill": True} if again else {"stop": number})
        if again:
            self._ends_now = True
            self.home.stop()

    def _beat(self) -> Message:
        self._holds = self._output.waits > _MOST_OUTPUT
        return {**super()._beat(), "hold": self._holds}

    def _is_due(self) -> bool:
        return super()._is_due() or self._holds != (self._output.waits > _MOST_OUTPUT)

    def close(self) -> None:
        super().close()
        self._output.finish(lambda: self._ends_now)
        for _, child in self._children:
            with suppress(OSError, ValueError):
                assert child.stdin is not None
                child.stdin.close()  # the host's launcher ends with it
            try:
                child.wait(timeout=2)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
