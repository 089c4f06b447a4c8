"""The hosts of a launch, as the user names them."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from evenstep.errors import UsageError

_FORM = "a host file has a line for each host with its number of processes, as in `node1:4` or `node1 slots=4`"


@dataclass(frozen=True)
class Host:
    """A host, and how many processes it gets (None: as many as it has GPUs, else one)."""

    name: str
    processes: int | None

    @property
    def is_here(self) -> bool:
        """Whether it is this very host."""
        return self.name in ("localhost", "127.0.0.1", socket.gethostname(), os.environ.get("SLURMD_NODENAME"))


def parse_hosts(text: str) -> list[Host]:
    """`a:4,b:4`, `user@a,b`. UsageError for what makes no sense."""
    return _checked([_host(part.strip(), text) for part in text.split(",") if part.strip()], text)


def read_hostfile(path: Path) -> list[Host]:
    """A line a host: `a:4`, `a 4` or, as for mpirun, `a slots=4`; # begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read the host file {path}: {error.strerror}", do=f"see its name; {_FORM}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the host file {path} is no text: {error}", do=_FORM) from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            rest = [re.sub(r"^slots=", "", word) for word in words[1:] if not re.match("max[-_]slots=", word)]
            hosts.append(_host(":".join([words[0], *rest]), f"{path}, line {number}"))
    return _checked(hosts, str(path))


def _host(text: str, where: str) -> Host:
    match = re.fullmatch(r"([^\s:,]+|\[[0-9a-fA-F:]+\])(?::(\d+))?", text)
    if match is None or match[1].startswith("-") or match[2] == "0":
        raise UsageError(
            f"{text!r} (in {where!r}) is no host",
            do="write host:processes, as in a:4,b:4, or user@host:4; an IPv6 address in brackets, as in [fd00::1]:4",
        )
    return Host(match[1].strip("[]"), None if match[2] is None else int(match[2]))


def _checked(hosts: list[Host], where: str) -> list[Host]:
    if not hosts:
        raise UsageError(f"there is no host in {where!r}", do="write host:processes, as in a:4,b:4")
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice} stands twice in {where}", do="name each host once, with all its processes")
    return hosts
