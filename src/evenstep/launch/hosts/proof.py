"""Both sides of a connection prove that they know the run's token, before anything else is said.

By HMAC-SHA256 over random numbers of both; the token itself is never sent.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

MAGIC = b"evenstep 1\n"
PROVE_SECONDS = 3.0  # to prove oneself in
_NONCE = 16
_PROOF = 32


class StrangerError(Exception):
    """What connected does not know the token, or speaks something else."""


class SilentError(StrangerError):
    """What answers has said nothing: perhaps it is not ready yet."""


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
