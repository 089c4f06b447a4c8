"""Whether the hosts of a launch get to each other, as their processes will have to."""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address

from evenstep.errors import MachineError
from evenstep.listening import WAITING, listen_at

_ANSWER = 5.0  # seconds


def open_to_others(address: str) -> socket.socket:
    """Listens at a free port of this host's `address`, so that the others can try the way; nothing is ever read.

    On all addresses where that is a forwarded one, or a name that means the loopback interface on its own host.
    MachineError where it cannot.
    """
    listener = listen_at(address, 0, loopback=_is_meant(address))
    if listener is not None:
        return listener
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=WAITING)
        return socket.create_server(("", 0), backlog=WAITING)
    except OSError as error:
        raise MachineError(
            f"cannot listen on this host: {error.strerror}", do="see `ss -tan` and `ulimit -n`"
        ) from error


def _is_meant(address: str) -> bool:
    """Whether the loopback interface is what it says itself, not what this host alone takes it for."""
    with suppress(ValueError):
        return bool(ip_address(address))
    return address == "localhost"


def check_way(address: str, port: int) -> None:
    """MachineError where a firewall is before the port of another host, at which that one listens."""
    try:
        socket.create_connection((address, port), timeout=_ANSWER).close()
    except OSError as error:
        raise MachineError(
            f"{socket.gethostname()} cannot connect to {address}:{port}, as its processes will: "
            f"{error.strerror or error}",
            do="let TCP through to every port between the hosts (torch's store, gloo and NCCL take free ones); "
            "`evenstep doctor` with the same options tries each way",
        ) from error
