"""A line of JSON messages between two launchers."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

GREETING = b"\nevenstep node\n"  # of a process that another launcher has started
_THIN_LINEAR_TIMEOUTS = 16  # TCP_THIN_LINEAR_TIMEOUTS of Linux, tcp(7)
_LONGEST = 1 << 20  # bytes that may wait to be sent

Message = dict[str, Any]


class Line:
    """Lines of JSON both ways, over a proven connection or a pair of pipes. Never blocks."""

    def __init__(self, incoming: int, outgoing: int, close: Callable[[], object], greeting: bytes = b"") -> None:
        """`greeting`: what comes before it is not for us (a login shell may print something first)."""
        self._in, self._out, self._close, self._greeting = incoming, outgoing, close, greeting
        os.set_blocking(incoming, False)
        os.set_blocking(outgoing, False)
        self.heard = time.monotonic()  # when something last came in
        self._incoming = b""
        self._outgoing = b""

    def fileno(self) -> int:
        return self._in

    def send(self, **message: object) -> bool:
        """Send a message, or keep what is not taken yet for the next call. False: the connection is broken."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        return self.flush()

    @property
    def waits(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._outgoing)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that no more should be said for now."""
        return len(self._outgoing) > _LONGEST // 4

    def flush(self) -> bool:
        """Send what waits, as far as it is taken. False: the connection is broken."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._out, self._outgoing) :]
        except BlockingIOError:
            return True
        except OSError:
            self._outgoing = b""
            return False
        return True

    def receive(self) -> list[Message] | None:
        """The messages that have come whole; None once the other side has gone."""
        closed = False
        try:
            while data := os.read(self._in, 1 << 16):
                self._incoming += data
                self.heard = time.monotonic()
            closed = True
        except BlockingIOError:
            pass
        except OSError:
            closed = True
        if self._greeting:
            before, greeted, after = self._incoming.partition(self._greeting)
            if not greeted:
                self._incoming = before[-len(self._greeting) :]
                return None if closed else []
            self._greeting, self._incoming = b"", after
        *lines, self._incoming = self._incoming.split(b"\n")
        messages = [json.loads(line) for line in lines]
        return messages or (None if closed else [])

    def close(self) -> None:
        """Close the connection."""
        self._close()


def socket_line(sock: socket.socket) -> Line:
    """A line over a connected socket, which it owns from now on."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(OSError):  # after a short cut of the cable: try again at once, not after ever longer waits
        sock.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)
    return Line(sock.fileno(), sock.fileno(), sock.close)
