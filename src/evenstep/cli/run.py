"""`evenstep run`: start a script, on this host or on several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from evenstep.cli import exits, kubernetes, preflight, slurm
from evenstep.cli.options import Launch, launch_options, read_launch
from evenstep.cli.report import say, tell_failure, tell_hosts, tell_signal
from evenstep.errors import UsageError
from evenstep.launch.hosts.by_hand import run_on_nodes
from evenstep.launch.hosts.remote import Ended, run_on_hosts
from evenstep.launch.local import Work, run_here
from evenstep.launch.outcome import Outcome
from evenstep.launch.restarts import Verdict
from evenstep.record.paths import RunPaths


@click.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Exit codes: 0 done; 1 the script failed; 2 wrong usage; 4 hosts, network or disk failed; "
    "128 + number for a signal (130: Ctrl-C).",
)
@launch_options
@slurm.options
@kubernetes.options
@click.option(
    "--dry-run",
    is_flag=True,
    help="With --slurm or --kubernetes: print what would be submitted, and submit nothing.",
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def run(words: list[str], /, script: str, arguments: tuple[str, ...], **options: Any) -> int:
    """Run SCRIPT with its own ARGUMENTS as several processes, of this host or (--nodes) of several.

    SCRIPT is a training script, as for python: one that uses evenstep, or any that reads RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR and MASTER_PORT.

    In a pod of Kubeflow's operators, what is not said here is read from PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR,
    PET_MASTER_PORT and PET_NPROC_PER_NODE, as torchrun does. In a Slurm allocation it runs on all nodes of that, with a
    process for each task where there are several.
    """
    if kubernetes.is_asked():
        return kubernetes.launch()
    if slurm.is_asked():
        return slurm.launch()
    if options["dry_run"]:
        raise UsageError("--dry-run is for --slurm and --kubernetes, and neither was given", do="give one of them")
    preflight.refuse_nested()
    with preflight.told_to_other_nodes(options):
        if not options["as_module"]:
            preflight.check_script(script)
        _tell_of_misplaced(arguments)
        launch = read_launch(options, script, arguments)
    shown = [word for word in words if word != slurm.REQUEUE]  # in what is shown for doing it again
    return slurm.keep_going(lambda: _run(launch, shown), launch.settings.run, os.environ)


_EASILY_MISPLACED = ("--processes", "--nproc-per-node", "--nodes", "--hosts", "--stages", "--shard", "--restarts")


def _tell_of_misplaced(arguments: Sequence[str]) -> None:
    """An option of ours that stands behind the script is the script's, which may well have one of that name."""
    for word in arguments:
        if word.partition("=")[0] in _EASILY_MISPLACED:
            say(f"{word} stands behind the script, so it is the script's own; evenstep's options go before it")


def _run(launch: Launch, words: list[str]) -> int:
    script = launch.script.name
    if launch.hosts is not None:
        return _on_hosts(launch, words)
    wanted = launch.settings.run
    work = Work(launch.script, launch.processes, launch.settings, launch.output, say)

    def tell(outcome: Outcome, paths: RunPaths, verdict: Verdict) -> int:
        if outcome.stopped_by is not None:
            tell_signal(outcome.stopped_by, paths, words)
            return exits.by_signal(outcome.stopped_by)
        return tell_failure(outcome, paths, words, verdict, show_all=launch.output == "all")

    if launch.nodes is None:
        paths, made = preflight.run_paths(wanted, script)
        return run_here(work, paths, made=made, restarts=launch.restarts, tell=tell)
    return run_on_nodes(
        launch.nodes,
        work,
        lambda name: preflight.run_paths(wanted or name, script),
        restarts=launch.restarts,
        tell=tell,
    )


def _on_hosts(launch: Launch, words: list[str]) -> int:
    """By ssh or srun, from here."""
    assert launch.hosts is not None
    paths, made = preflight.run_paths(launch.settings.run, launch.script.name)
    told = {
        "script": launch.script.name,
        "as_module": launch.script.as_module,
        "arguments": launch.script.arguments,
        "settings": asdict(launch.settings),
        "show": launch.output,
        "address": launch.address,
    }

    def tell(ended: Ended) -> int:
        if ended.signal is not None:
            tell_signal(ended.signal, paths, words)
            return exits.by_signal(ended.signal)
        return tell_hosts(ended.fault, paths, words, ended.verdict)

    return run_on_hosts(
        launch.hosts,
        launch.transport,
        paths,
        told,
        made=made,
        patience=launch.patience,
        say=say,
        restarts=launch.restarts,
        least=launch.least,
        tell=tell,
    )
