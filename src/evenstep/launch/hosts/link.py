"""This launcher's connection to those of the other hosts; the hub's and a spoke's side are made of it.

Each says what it has; once all are there and agree the hub sends each its part. From then on everybody sends a beat
several times a second: a host that falls silent has failed, and what fails anywhere is told everywhere. A thread does
all this, so that a terminal that stands still makes no host look dead.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace

from evenstep.errors import EvenstepError, MachineError
from evenstep.launch.hosts.line import Line, Message
from evenstep.launch.hosts.messages import BEAT, SILENCE, About, Start
from evenstep.launch.hosts.proof import Knock
from evenstep.launch.hosts.ways import open_to_others
from evenstep.launch.others import Doings, Fault
from evenstep.launch.output import Say
from evenstep.launch.restarts import Verdict

FAREWELL = 2.0  # seconds for the last words
SUSPECT = 1.0  # seconds of silence after which another launcher of the same host is believed to replace it


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
        self._on_order: Callable[[Message], None] = lambda order: None
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
        self._next_beat = 0.0
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

    def obey(self, on_order: Callable[[Message], None]) -> None:
        """Call `on_order` for {"stop": signal} and {"kill": true}, by which a hub passes on what it was told."""
        self._on_order = on_order

    def tell(self, fault: Fault) -> None:
        """A failure on this node."""
        self._told = fault.what
        self._post(fault=asdict(fault))

    def ended(self, rank: int) -> None:
        """A process of this node has ended by itself, with exit code 0."""
        self._post(ended=rank)

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
            self._thread.join(2 * FAREWELL)
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

    def _is_due(self) -> bool:
        """Whether to send a beat now. Not whenever something comes: each side would answer the other."""
        now = time.monotonic()
        if now < self._next_beat:
            return False
        self._next_beat = now + BEAT
        return True

    def _turn(self, seconds: float | None = None) -> None:
        """Take in what comes within `seconds`, by default until the next beat is due."""
        if seconds is None:
            seconds = max(0.0, self._next_beat - time.monotonic())
        for key, _ in self._selector.select(seconds):
            key.data()
        before, self._turned = self._turned, time.monotonic()
        stood = self._turned - (before or self._turned) - seconds
        if stood > SUSPECT:  # somebody has stopped this very process: what came meanwhile is not late
            self._stood = self._turned, stood
            for key, _ in self._selector.select(0.0):
                key.data()

    def _silence(self, line: Line) -> float | None:
        """For how many seconds nothing has come over the line, if that is too long, and this process was listening."""
        now = time.monotonic()
        silence = now - line.heard
        return silence if silence > SILENCE and now - self._turned < SUSPECT else None

    def _cause(self, fault: Fault, node: int) -> Fault:
        """Of a host that is lost: this one, `node`, if it is this launcher that others have lost."""
        until, stood = self._stood
        if time.monotonic() > until + SUSPECT or stood < SILENCE - 2 * BEAT:
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
