"""Reaches the hosts of a launch: by what starts a process there (ssh, srun), or by a port, where people start it."""

from __future__ import annotations

import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from evenstep.doctor.survey import Survey
from evenstep.doctor.talk import Distant, Examined, Host
from evenstep.launch.hosts.calling import Calling, Nodes
from evenstep.launch.hosts.gate import Gate
from evenstep.launch.hosts.hostfile import Host as Named
from evenstep.launch.hosts.line import GREETING, Line, Message
from evenstep.launch.hosts.transport import Transport, command_on
from evenstep.launch.output import Say

_LEAVE = 3.0  # seconds


@contextmanager
def started(hosts: Sequence[Named], transport: Transport, told: Mapping[str, Any]) -> Iterator[dict[str, Distant]]:
    """The hosts by name, each with a process of its own, which has been `told` what it is about."""
    children: list[subprocess.Popen[bytes]] = []
    reached: dict[str, Distant] = {}
    try:
        for node, host in enumerate(hosts):
            errors = tempfile.TemporaryFile()  # closed below, with its process
            child = subprocess.Popen(
                command_on(host, transport),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            children.append(child)
            assert child.stdin is not None
            assert child.stdout is not None
            peer = hosts[1 if node == 0 and len(hosts) > 1 else 0].name
            about = {**told, "node": node, "nodes": len(hosts), "processes": host.processes, "peer": peer}
            line = Line(child.stdout.fileno(), child.stdin.fileno(), _closing(child, errors), GREETING)
            reached[host.name] = Distant(line, _why_gone(child, errors))
            line.send(**about)
        yield reached
    except BaseException:
        for child in children:
            child.kill()
        raise
    finally:
        for distant in reached.values():
            distant.close()
        until = time.monotonic() + _LEAVE
        for child in children:
            try:
                child.wait(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _closing(child: subprocess.Popen[bytes], errors: Any) -> Any:
    def close() -> None:
        for pipe in (child.stdin, child.stdout, errors):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()

    return close


def _why_gone(child: subprocess.Popen[bytes], errors: Any) -> Any:
    def why() -> str:
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_LEAVE)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"its process ended with code {child.returncode}"

    return why


# ---- by hand


@contextmanager
def gathered(nodes: Nodes, own: Examined, found: Survey, say: Say) -> Iterator[dict[str, Host]]:
    """On node 0: the nodes that have come within the time, by name. Those that have not are told in `found`."""
    lines: dict[int, tuple[str, Line]] = {}
    gate = Gate(nodes.address, nodes.port, nodes.token, say)
    reached: dict[str, Host] = {}
    distant: list[Distant] = []
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(gate.listener, selectors.EVENT_READ, lambda: gate.accept(selector, welcome))

            def welcome(line: Line) -> None:
                selector.register(line, selectors.EVENT_READ, lambda: hear(line))

            def hear(line: Line) -> None:
                messages = line.receive()
                if messages == []:
                    return
                selector.unregister(line)
                refusal = _refusal(messages[0], nodes, lines) if messages else "it hung up"
                if refusal is None and messages:
                    lines[messages[0]["doctor"]["node"]] = (messages[0]["doctor"]["host"], line)
                    return
                line.send(
                    refused=[refusal, "start `evenstep doctor` on every node, each with its own --node-rank"], code=2
                )
                line.close()
                if messages and "doctor" in messages[0]:
                    found.untold.append(str(refusal))

            until = time.monotonic() + nodes.patience
            while len(lines) < nodes.count - 1 and time.monotonic() < until:
                for key, _ in selector.select(0.1):
                    key.data()
                gate.turn_away_late(selector)
        reached[socket.gethostname()] = own
        for node in range(1, nodes.count):
            if node not in lines:
                found.unreached[f"node {node}"] = f"it did not come to {gate.where} within {nodes.patience:.0f} s"
                continue
            host, line = lines[node]
            one = Distant(line, lambda: "its `evenstep doctor` has ended")
            distant.append(one)
            reached[host if host not in reached else f"{host} (node {node})"] = one
        yield reached
    finally:
        gate.listener.close()
        for one in distant:
            one.close(report=found.report)


def _refusal(message: Message, nodes: Nodes, lines: Mapping[int, object]) -> str | None:
    """Why a node cannot belong here."""
    said = message.get("doctor")
    if said is None:
        return f"`evenstep doctor` listens at {nodes.address}:{nodes.port}, not a run"
    node, host = said["node"], said["host"]
    if said["nodes"] != nodes.count or not 0 < node < nodes.count:
        return f"{host} was started with --nodes {said['nodes']} --node-rank {node}, node 0 with --nodes {nodes.count}"
    return f"two nodes have --node-rank {node}" if node in lines else None


def join(nodes: Nodes, say: Say) -> tuple[Line, str]:
    """On any other node: the line to node 0, and this host's own address on the way there."""
    calling = Calling(nodes, say)
    line = calling()
    while line is None:
        time.sleep(0.1)
        line = calling()
    line.send(doctor={"host": socket.gethostname(), "node": nodes.rank, "nodes": nodes.count})
    return line, calling.interface
