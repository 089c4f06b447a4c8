"""`evenstep node`: what `evenstep run --hosts` starts on each host. It is told what to do over its standard input."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from evenstep.cli import exits, preflight
from evenstep.cli.doctor import be_examined
from evenstep.cli.report import say, tell_own_failure
from evenstep.environment import Settings
from evenstep.errors import EvenstepError
from evenstep.interfaces import address_towards
from evenstep.launch.hosts import copies
from evenstep.launch.hosts.for_hub import Post, run_for_hub
from evenstep.launch.hosts.line import GREETING, Line
from evenstep.launch.hosts.transport import ssh_meaning
from evenstep.launch.job import Script
from evenstep.launch.local import Work
from evenstep.record.paths import RunPaths

_PATIENCE = 30.0  # seconds to be told what to do; the connection may be cut


@click.command(hidden=True)
def node() -> int:
    """Do one host's part of a launch."""
    os.write(1, GREETING)
    told = json.loads(_first_line())
    if copies.serve(told):
        return exits.DONE
    os.environ.update(told["environment"])
    line = Line(os.dup(0), os.dup(1), lambda: None)
    if "doctor" in told:
        os.dup2(2, 1)
        be_examined(line, told, _address(told))
        return exits.DONE
    outputs = _own_outputs()
    script = Script(told["script"], told["as_module"], tuple(told["arguments"]))

    def make_paths(_: str | None) -> tuple[RunPaths, tuple[Path, ...]]:
        if not script.as_module:
            preflight.check_script(script.name)
        return preflight.run_paths(told["run"], script.name)

    try:
        settings = told["settings"]
        work = Work(
            script,
            preflight.process_count(told["processes"], settings["thread_replicas"] or 1, settings["split"] or 1),
            Settings(**{f.name: settings.get(f.name) for f in fields(Settings)}),
            show="none" if told["node"] and told["show"] != "all" else told["show"],
            say=say,
        )
        outcome = run_for_hub(
            line,
            outputs,
            work,
            Post(told["node"], told["nodes"], _address(told), Path(told["probe"]).exists(), told["run_id"]),
            make_paths,
            lambda outcome, paths: tell_own_failure(outcome, paths, told["node"], show_all=told["show"] == "all"),
        )
    except EvenstepError as error:
        return error.exit_code  # the hub says it
    return exits.DONE if outcome.failure is None else exits.SCRIPT_FAILED


def _first_line() -> bytes:
    """Byte by byte, since what follows belongs to the line of messages."""
    found = b""
    while not found.endswith(b"\n"):
        ready, _, _ = select.select([0], [], [], _PATIENCE)
        byte = os.read(0, 1) if ready else b""
        if not byte:
            sys.exit(exits.WRONG_USAGE)
        found += byte
    return found


def _own_outputs() -> tuple[int, int]:
    """From now on descriptors 1 and 2 are pipes, and 0 is empty; the pipes' other ends."""
    ends = []
    for descriptor in (1, 2):
        source, end = os.pipe()
        os.dup2(end, descriptor)
        os.close(end)
        ends.append(source)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return ends[0], ends[1]


def _address(told: dict[str, Any]) -> str:
    """This host's own address, as the others reach it: as ssh did, or else on the way to another host."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if told["address"] and told["node"] == 0:
        return str(told["address"])
    if len(connection) == 4 and told["nodes"] > 1:
        return connection[2]
    return address_towards(told["peer"]) or address_towards(ssh_meaning(told["peer"])) or socket.gethostname()
