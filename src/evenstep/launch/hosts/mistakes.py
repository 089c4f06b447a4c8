"""A node, started by hand, that cannot begin says why to the others, which would wait for it."""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import suppress
from dataclasses import asdict

from evenstep.errors import EvenstepError
from evenstep.launch.hosts.calling import Nodes
from evenstep.launch.hosts.gate import Gate
from evenstep.launch.hosts.line import Line, socket_line
from evenstep.launch.hosts.messages import BEAT, About
from evenstep.launch.hosts.proof import Knock, StrangerError, call

_SECONDS = 3.0  # in which those that try already are reached; who comes later waits until this node is started again


def tell_others(nodes: Nodes, error: EvenstepError, gate: Gate | None = None) -> None:
    """Node 0 refuses those that call it (at `gate`, if it listens already); any other node tells node 0."""
    if nodes.count == 1:
        return
    host = f"{socket.gethostname()} (node {nodes.rank})"
    if nodes.rank > 0:
        _tell(nodes, {"unable": [error.message, error.do], "code": error.exit_code, "host": host})
        return
    with suppress(EvenstepError, OSError, UnicodeError):  # it cannot listen there, perhaps that is the mistake
        gate = gate or Gate(nodes.address, nodes.port, nodes.token, lambda line: None)
        try:
            _refuse(gate, nodes.count - 1, {"refused": [f"{host}: {error.message}", error.do], "code": error.exit_code})
        finally:
            gate.listener.close()


def tell_node_0(nodes: Nodes, host: str) -> None:
    """A node whose number cannot be says so to node 0, which would wait for it or train without it, and never know."""
    _tell(nodes, {"hello": asdict(About(host, 0, {}, nodes.rank, nodes.count))})


def _tell(nodes: Nodes, message: dict[str, object]) -> None:
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        try:
            line = socket_line(call(nodes.address, nodes.port, nodes.token, 1.0))
        except (StrangerError, UnicodeError):
            return
        except OSError:
            time.sleep(BEAT)  # node 0 may be a little later
            continue
        line.send(**message)
        time.sleep(BEAT)
        line.close()
        return


def _refuse(gate: Gate, count: int, message: dict[str, object]) -> None:
    """Say it to so many nodes, if they come."""
    told: set[int] = set()  # nodes
    until = time.monotonic() + _SECONDS
    with selectors.DefaultSelector() as selector:

        def welcome(line: Line) -> None:
            selector.register(line, selectors.EVENT_READ, lambda: hear(line))

        def hear(line: Line) -> None:
            said = line.receive()
            for one in said or []:
                if "hello" in one:
                    line.send(**message)
                    told.add(one["hello"]["node"])
            if said is None:
                selector.unregister(line)
                line.close()

        selector.register(gate.listener, selectors.EVENT_READ, lambda: gate.accept(selector, welcome))
        while time.monotonic() < until:
            left = [key.fileobj for key in selector.get_map().values() if isinstance(key.fileobj, (Line, Knock))]
            if len(told) >= count and not left:  # all have heard it, and hung up
                break
            for key, _ in selector.select(BEAT):
                key.data()
        for key in list(selector.get_map().values()):
            if isinstance(key.fileobj, (Line, Knock)):
                key.fileobj.close()
