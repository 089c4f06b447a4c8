"""`evenstep doctor`: examine what a launch would meet, before it costs anything."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import click
from click.core import ParameterSource

from evenstep.cli import exits, preflight
from evenstep.cli.doctor_page import show
from evenstep.cli.options import Launch, launch_options, read_launch
from evenstep.cli.report import say
from evenstep.doctor.facts import Asked
from evenstep.doctor.judge import judge, token_missing
from evenstep.doctor.reach import gathered, join, started
from evenstep.doctor.report import report_of
from evenstep.doctor.survey import Survey, survey
from evenstep.doctor.talk import Examined, Host, answer_all
from evenstep.errors import EvenstepError
from evenstep.launch.hosts.calling import Nodes
from evenstep.launch.hosts.line import Line
from evenstep.launch.hosts.transport import forwarded
from evenstep.launch.job import Script

_PATIENCE = 60.0  # seconds to wait for other nodes, where --join-timeout is not given


@click.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Exit codes: 0 a launch would start (see the warnings); 2 wrong usage; 4 it would fail.",
)
@launch_options
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON; without it, as tables.")
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def doctor(ctx: click.Context, /, script: str | None, arguments: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Examine the hosts of a launch: what `evenstep run` with the same options would meet.

    Looks at versions, the script and what it imports, disks, memory, clocks, limits and network interfaces of every
    host, whether each reaches each other, and how much goes through between them. By hand, start it on every node.
    """
    preflight.refuse_nested()
    launch = read_launch(options, script or "", arguments)
    if ctx.get_parameter_source("join_timeout") == ParameterSource.DEFAULT and launch.nodes is not None:
        launch = replace(launch, nodes=replace(launch.nodes, patience=_PATIENCE))
    report = _examine(launch)
    if as_json:
        click.echo(json.dumps(report, indent=1))
    else:
        show(report)
    return exits.DONE if report["would_start"] else exits.MACHINE_FAILED


def _examine(launch: Launch) -> dict[str, Any]:
    found = Survey(backend=launch.settings.backend, by_hand=launch.nodes is not None)
    if launch.hosts is not None:
        told = {
            "doctor": True,
            "environment": forwarded(),
            "script": launch.script.name,
            "as_module": launch.script.as_module,
            "arguments": launch.script.arguments,
            "run": launch.settings.run,
            "backend": launch.settings.backend,
            "address": launch.address,
            "devices": [launch.settings.thread_replicas or 1, launch.settings.split or 1],
        }
        with started(launch.hosts, launch.transport, told) as hosts:
            return _report(hosts, found, launch)
    if launch.nodes is None:
        with ExitStack() as stack:
            own = _examined(launch, "127.0.0.1", alone=True)
            stack.callback(own.close)
            return _report({socket.gethostname(): own}, found, launch)
    return _by_hand(launch, launch.nodes, found)


def _by_hand(launch: Launch, nodes: Nodes, found: Survey) -> dict[str, Any]:
    own = _examined(launch, nodes.address)
    with ExitStack() as stack:
        stack.callback(own.close)
        try:
            if nodes.rank == 0:
                with gathered(nodes, own, found, say) as hosts:
                    return _report(hosts, found, launch)
            line, address = join(nodes, say)
            stack.callback(line.close)
            last = answer_all(line, _examined(launch, address))
            if "report" in last:
                return dict(last["report"])
            found.untold.append(str(last["refused"][0]))
        except EvenstepError as error:
            found.untold.append(error.message)
        return _report({socket.gethostname(): own}, found, launch)


def _report(hosts: Mapping[str, Host], found: Survey, launch: Launch) -> dict[str, Any]:
    survey(hosts, found, launch.settings.run, say)
    findings = judge(found)
    if launch.nodes is not None and not launch.nodes.token:
        findings.append(token_missing())
    found.report = report_of(found, findings)
    return found.report


def _examined(launch: Launch, address: str, *, alone: bool = False) -> Examined:
    script = launch.script if launch.script.name else None
    asked = Asked(script, launch.settings.run, launch.processes, launch.settings.backend, address, alone, None)
    return Examined(asked, _problems(script))


def _problems(script: Script | None) -> tuple[str, ...]:
    try:
        if script is not None and not script.as_module:
            preflight.check_script(script.name)
    except EvenstepError as error:
        return (error.message,)
    return ()


def be_examined(line: Line, told: Mapping[str, Any], address: str) -> None:
    """One host's part, where `evenstep node` was started for it."""
    script = Script(told["script"], told["as_module"], tuple(told["arguments"])) if told["script"] else None
    problems, processes = _problems(script), 1
    try:
        processes = preflight.process_count(told["processes"], *told["devices"])
    except EvenstepError as error:
        problems += (error.message,)
    alone = told["nodes"] == 1
    asked = Asked(script, told["run"], processes, told["backend"], "127.0.0.1" if alone else address, alone, None)
    answer_all(line, Examined(asked, problems))
