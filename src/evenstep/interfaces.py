"""The network interfaces of this host."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915
_GLOBAL = "00"  # the scope of an IPv6 address that other hosts may use


def interface_of(address: str) -> str | None:
    """The name of the interface with this IPv4 address (`eth0`), None if there is none."""
    return next((name for name, own in interfaces().items() if own == address), None)


def interfaces() -> dict[str, str]:
    """The first IPv4 address of each interface that has one, by name."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def address_towards(host: str) -> str | None:
    """This host's own IPv4 address on the way to another (nothing is sent). None where there is no way."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host.rpartition("@")[2], 9))
        return str(asking.getsockname()[0])
    return None


def only_address() -> str | None:
    """This host's one IPv4 address besides the loopback interface's; None where others may use another (or IPv6)."""
    own = [address for address in interfaces().values() if not address.startswith("127.")]
    try:
        scopes = [line.split()[3] for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:  # a kernel without IPv6
        scopes = []
    return own[0] if len(own) == 1 and _GLOBAL not in scopes else None


def own_address() -> str:
    """The IPv4 address by which other hosts are likeliest to reach this one: that of its name, unless that means the
    loopback interface here."""
    with suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        if not named.startswith("127."):
            return named
    return next((address for address in interfaces().values() if not address.startswith("127.")), "127.0.0.1")
