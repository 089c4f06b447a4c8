"""A port for the processes' rendezvous that nobody else is given meanwhile."""

from __future__ import annotations

import socket

from evenstep.errors import MachineError


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
