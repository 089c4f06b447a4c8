"""Where node 0's launcher listens for the others."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from evenstep.errors import MachineError, UsageError
from evenstep.interfaces import interfaces
from evenstep.launch.hosts.line import Line, socket_line
from evenstep.launch.hosts.messages import BEAT, SAY_AFTER, SAY_EVERY
from evenstep.launch.hosts.proof import Knock, StrangerError
from evenstep.launch.output import Say

_UNPROVEN = 64  # connections that may be open without having proved themselves


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


def _find(address: str, port: int, say: Say, patience: float) -> tuple[socket.AddressFamily, Any]:
    """Where that is. A name may be known a little later than its host is there: a pod's, in Kubernetes."""
    began = time.monotonic()
    next_word = began + SAY_AFTER
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
            next_word = now + SAY_EVERY
        time.sleep(BEAT)
