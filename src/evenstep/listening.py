"""Listening on the one address of this host that is needed, not on all."""

from __future__ import annotations

import socket
from ipaddress import ip_address

WAITING = 4096  # connections that may wait to be taken; the kernel allows fewer, perhaps


def listen_at(address: str, port: int, *, loopback: bool) -> socket.socket | None:
    """A socket that listens there; None where only one on all addresses would do.

    That is where the address is none of this host's own (it is forwarded to it), and, unless `loopback`, where a name
    means the loopback interface here and something else on other hosts.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if not loopback and ip_address(place[0]).is_loopback:
            return None
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(WAITING)
    except OSError:
        listener.close()
        return None
    return listener
