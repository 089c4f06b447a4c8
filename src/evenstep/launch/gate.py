"""Connections between launchers: who cannot prove that it knows the run's token is turned away.

Both sides prove it before anything else is said, by HMAC-SHA256 over random numbers of both; the token itself is never
sent. After that each side sends lines of JSON.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

MAGIC = b"evenstep 1\n"
GREETING = b"\nevenstep node\n"  # of a process that another launcher has started
PROVE_SECONDS = 3.0  # to prove oneself in
_NONCE = 16
_PROOF = 32
_LONGEST = 1 << 20  # bytes that may wait to be sent

Message = dict[str, Any]


class StrangerError(Exception):
    """What connected does not know the token, or speaks something else."""


class SilentError(StrangerError):
    """What answers has said nothing: perhaps it is not ready yet."""


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
    return Line(sock.fileno(), sock.fileno(), sock.close)


class Knock:
    """A connection that has not proved itself yet. Never blocks."""

    def __init__(self, sock: socket.socket, token: str) -> None:
        sock.setblocking(False)
        self.sock, self._token = sock, token
        self.deadline = time.monotonic() + PROVE_SECONDS
        self._nonce = secrets.token_bytes(_NONCE)
        self._got = b""
        sock.send(MAGIC + self._nonce)

    def fileno(self) -> int:
        return self.sock.fileno()

    def read(self) -> bool:
        """Take in what has come. True: it is proven. StrangerError: it never will be."""
        try:
            data = self.sock.recv(_NONCE + _PROOF - len(self._got))
        except BlockingIOError:
            return False
        except OSError as error:
            raise StrangerError("it hung up") from error
        if not data:
            raise StrangerError("it hung up without a word" if not self._got else "it hung up in the middle")
        self._got += data
        if len(self._got) < _NONCE + _PROOF:
            return False
        theirs, given = self._got[:_NONCE], self._got[_NONCE:]
        if not hmac.compare_digest(given, _proof(self._token, b"join", self._nonce, theirs)):
            raise StrangerError("it does not know the token of this run, or it is no evenstep")
        try:
            self.sock.send(_proof(self._token, b"welcome", theirs, self._nonce))
        except OSError as error:
            raise StrangerError("it hung up") from error
        return True

    def close(self) -> None:
        """Hang up."""
        self.sock.close()


def call(address: str, port: int, token: str, seconds: float) -> socket.socket:
    """Connect to the gate of another launcher. OSError where nobody answers; StrangerError where somebody else does."""
    sock = socket.create_connection((address, port), timeout=seconds)
    try:
        sock.settimeout(PROVE_SECONDS)
        said = _exactly(sock, len(MAGIC) + _NONCE)
        if not said.startswith(MAGIC):
            raise StrangerError("what listens there is not a launcher of this evenstep")
        theirs, nonce = said[len(MAGIC) :], secrets.token_bytes(_NONCE)
        sock.sendall(nonce + _proof(token, b"join", theirs, nonce))
        try:
            answer = _exactly(sock, _PROOF)
        except SilentError as error:
            raise StrangerError("it refused the token (EVENSTEP_TOKEN must be the same on every node)") from error
        if not hmac.compare_digest(answer, _proof(token, b"welcome", nonce, theirs)):
            raise StrangerError("it does not know the token of this run")
        return sock
    except BaseException:
        sock.close()
        raise


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        try:
            piece = sock.recv(count - len(data))
        except TimeoutError:
            raise SilentError(f"what listens there says nothing in {PROVE_SECONDS:.0f} s") from None
        except ConnectionResetError:
            piece = b""
        if not piece:
            kind = StrangerError if data else SilentError
            raise kind("what listens there is not a launcher of evenstep")
        data += piece
    return data


def _proof(token: str, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token.encode(), role + first + second, "sha256")
