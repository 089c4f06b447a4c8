"""How a host's part of a launch begins, once the hosts are to find each other."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from evenstep.errors import EvenstepError, MachineError, UsageError
from evenstep.launch.hosts.link import Link
from evenstep.launch.hosts.messages import Start
from evenstep.launch.hosts.ways import check_way
from evenstep.launch.others import Fault
from evenstep.launch.taking import signals_to
from evenstep.record.paths import RunPaths

LAST_WORDS = 5.0  # seconds for what is said last to be heard
_NEWS = 0.5  # seconds for what has happened elsewhere to be heard of

MakePaths = Callable[[str | None], tuple[RunPaths, tuple[Path, ...]]]
"""A run directory by name (None: a new one), and the folders that were made for it, innermost first."""


def join(link: Link) -> Start:
    """`link.join()`, which Ctrl-C and SIGTERM end."""
    got: list[int] = []
    with signals_to(got.append, signal.SIGINT, signal.SIGTERM):
        start = link.join(lambda: bool(got))
    if start is None:
        raise KeyboardInterrupt
    return start


@contextmanager
def told(link: Link, start: Start) -> Iterator[None]:
    """What keeps this host from its part (a firewall, a full disk) is told to the others, too."""
    try:
        _check_ways(link, start)
        yield
    except EvenstepError as error:
        lasting = isinstance(error, UsageError)  # a disk or a network may be well the next time
        fault = Fault(start.part.node, link.host, error.message, exit_code=error.exit_code, lasting=lasting, step=0)
        link.tell(fault)
        link.wait(LAST_WORDS)
        raise


def _check_ways(link: Link, start: Start) -> None:
    """To all other hosts. MachineError where one is closed, unless the run has failed already: they may be gone."""
    for place, (address, port) in enumerate(zip(start.addresses, start.open_ports, strict=True)):
        if port and place != start.part.place:
            try:
                check_way(address, port)
            except MachineError:
                link.wait(_NEWS)
                if link.fault is None:
                    raise
                return
