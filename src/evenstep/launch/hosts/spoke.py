"""A spoke: any other node's launcher. It says what it has, gets its part, and learns how the run ends, from the hub."""

from __future__ import annotations

import base64
import os
import selectors
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from evenstep.errors import EvenstepError, MachineError, UsageError
from evenstep.launch.hosts.line import Line
from evenstep.launch.hosts.link import FAREWELL, Link
from evenstep.launch.hosts.messages import BEAT, About, left, lost, read_start, silent_for
from evenstep.launch.others import Fault
from evenstep.launch.output import Say
from evenstep.launch.restarts import Verdict


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
        try:
            self._take_part()
        finally:
            if self._line is not None:
                self._line.close()

    def _take_part(self) -> None:
        self._call()
        while not self._closing:
            self._turn()
            if self._line is None:
                self._call()
                continue
            line = self._line
            self._send_mail(line)
            if self._is_due():
                line.send(**self._beat())
            else:
                line.flush()
            silence = self._silence(line)
            if silence is None:
                continue
            if not self._begun.is_set():
                raise MachineError(f"nothing was heard from {self._hub} for {silence:.1f} s", do="see the network")
            if not self._over.is_set():
                self._lose_hub(silent_for(silence))
        if self._line is None:
            return
        line = self._line
        self._send_mail(line)
        if self._begun.is_set() and not self._over.is_set():
            line.send(fault=asdict(left(self._about.node, self.host)))
        until = time.monotonic() + 2 * FAREWELL
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
                self._begin(read_start(message["begin"]))
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
