"""The network between two hosts: whether one can connect to the other, how long a word takes, how much goes through."""

from __future__ import annotations

import socket
import statistics
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from evenstep.launch.hosts.proof import PROVE_SECONDS, Knock, StrangerError, call

_CONNECT = 3.0  # seconds
_SILENCE = 20.0
_WORDS = 20
_PIECE = bytes(1 << 18)
_COUNT = struct.Struct("!Qd")


@dataclass(frozen=True)
class Measured:
    """One direction between two hosts."""

    error: str | None  # why there is no connection
    latency: float = 0.0  # seconds to the other host and back
    bandwidth: float = 0.0  # bytes a second


class Listener:
    """Answers those hosts that know the secret, at a port that the system chose, as for gloo and NCCL."""

    def __init__(self, address: str, secret: str) -> None:
        self._secret = secret
        self._listener = socket.create_server((address, 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="evenstep-doctor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(1.0)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        with sock, suppress(OSError, StrangerError):
            knock = Knock(sock, self._secret)
            sock.settimeout(PROVE_SECONDS)
            while not knock.read():
                pass
            sock.settimeout(_SILENCE)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_WORDS):
                sock.sendall(sock.recv(1))
            count, began = len(sock.recv(1 << 20)), time.perf_counter()
            last = began
            while data := sock.recv(1 << 20):
                count, last = count + len(data), time.perf_counter()
            sock.sendall(_COUNT.pack(count, last - began))


def measure(address: str, port: int, secret: str, seconds: float) -> Measured:
    """Measure the way to a `Listener`, sending for so many seconds."""
    try:
        with call(address, port, secret, _CONNECT) as sock:
            sock.settimeout(_SILENCE)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(_WORDS):
                began = time.perf_counter()
                sock.sendall(b".")
                if not sock.recv(1):
                    return Measured("it hung up")
                times.append(time.perf_counter() - began)
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                sock.sendall(_PIECE)
            sock.shutdown(socket.SHUT_WR)
            said = b""
            while len(said) < _COUNT.size and (data := sock.recv(_COUNT.size)):
                said += data
            count, took = _COUNT.unpack(said)
            return Measured(None, statistics.median(times), count / max(took, 1e-9))
    except StrangerError as error:
        return Measured(str(error))
    except (OSError, struct.error) as error:
        return Measured(getattr(error, "strerror", None) or str(error))


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of `count` hosts, in rounds in which no host is in two pairs (the circle method)."""
    places = [*range(count), *([-1] if count % 2 else [])]
    half = len(places) // 2
    found = []
    for _ in range(len(places) - 1):
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in found if pairs]
