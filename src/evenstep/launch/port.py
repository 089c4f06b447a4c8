"""A port for the processes' rendezvous that nobody else is given meanwhile, and whether other hosts get to it."""

from __future__ import annotations

import socket
from ipaddress import ip_address

from evenstep.errors import MachineError

_ANSWER = 5.0  # seconds
_WAITING = 4096  # connections that nobody takes


def reserve_port() -> tuple[int, socket.socket]:
    """A free port, and the socket that keeps it ours for as long as it is open.

    The socket is bound and does not listen, with SO_REUSEADDR. So the kernel gives the port to no one who asks for any
    free port, while rank 0's store, which sets SO_REUSEADDR too, can bind this very port and listen, more than once.
    """
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            keeper = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # a kernel without IPv6
        try:
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                keeper.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            keeper.bind((address, 0))
        except OSError:
            keeper.close()  # IPv6 switched off
            continue
        return keeper.getsockname()[1], keeper
    raise MachineError("no free TCP port on this host", do="see which process holds them with `ss -tan`")


def open_to_others(address: str) -> socket.socket:
    """Listens at a free port of this host's `address`, so that the others can try the way; nothing is ever read.

    On all addresses where that is a forwarded one, or a name that means the loopback interface on its own host.
    MachineError where it cannot.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        if address in (place[0], "localhost") or not ip_address(place[0]).is_loopback:
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.bind(place)
                listener.listen(_WAITING)
                return listener
            except OSError:
                listener.close()
    except OSError:
        pass
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_WAITING)
        return socket.create_server(("", 0), backlog=_WAITING)
    except OSError as error:
        raise MachineError(
            f"cannot listen on this host: {error.strerror}", do="see `ss -tan` and `ulimit -n`"
        ) from error


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
