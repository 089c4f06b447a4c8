"""Reaching node 0, which may be started later."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from evenstep.errors import MachineError, UsageError
from evenstep.interfaces import interfaces
from evenstep.launch.hosts.line import Line, socket_line
from evenstep.launch.hosts.messages import SAY_AFTER, SAY_EVERY
from evenstep.launch.hosts.proof import SilentError, StrangerError, call
from evenstep.launch.output import Say

_BUSY = 10.0  # seconds for node 0 to end one start of a run and come to the next


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


class Calling:
    """Calls node 0, which may be started later, until it answers."""

    def __init__(self, nodes: Nodes, say: Say, *, again: bool = False) -> None:
        """`again`: it has answered before, so that it may not be ready yet when it does not."""
        self.where = f"{nodes.address}:{nodes.port}"
        self.interface = ""
        self._nodes, self._say, self._again = nodes, say, again
        self._began = time.monotonic()
        self._next_word = self._began + SAY_AFTER
        self._silent: float | None = None  # since when it is reached and says nothing

    def __call__(self) -> Line | None:
        nodes = self._nodes
        try:
            sock = call(nodes.address, nodes.port, nodes.token, 2.0)
            self.interface = sock.getsockname()[0]
            return socket_line(sock)
        except SilentError as error:
            self._silent = self._silent or time.monotonic()
            if not self._again and time.monotonic() > self._silent + _BUSY:
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
            self._next_word = now + SAY_EVERY
        return None

    def _refused(self, error: StrangerError) -> UsageError:
        return UsageError(
            f"{self.where}: {error}",
            do="see --master-addr and --master-port, and that EVENSTEP_TOKEN is the same",
        )


def _is_own(address: str) -> bool:
    with suppress(OSError):
        found = socket.gethostbyname(address)
        return found.startswith("127.") or found in interfaces().values()
    return False
