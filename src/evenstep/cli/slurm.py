"""`evenstep run --slurm`: its options, the batch script that they become, and the job until its end."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from evenstep.cli import exits, preflight
from evenstep.cli.elsewhere import Elsewhere
from evenstep.cli.options import given_options
from evenstep.cli.report import say
from evenstep.errors import MachineError, UsageError
from evenstep.launch.output import write_all
from evenstep.launch.schedulers import slurm
from evenstep.launch.undo import take_back
from evenstep.record.paths import RunPaths, newest_checkpoint

REQUEUE = "--requeue"
_WARNING = "B:USR1@90"  # seconds before the time limit, to the batch script's process alone: it passes it on
_ASKED = (exits.by_signal(signal.SIGTERM), exits.by_signal(signal.SIGUSR1))

_SLURM = Elsewhere(
    "--slurm",
    refused=("node_rank", "master_addr", "master_port", "hosts", "hostfile", "standalone"),
    why=": Slurm chooses the hosts",
    alone=("requeue",),
)
_option = _SLURM.option
_option("--slurm", is_flag=True, help="Submit it as a Slurm job on --nodes nodes (1 without it), and follow that.")
_option(
    "--time",
    metavar="LIMIT",
    show_default="the partition's",
    help="With --slurm: the time limit, as for sbatch. Shortly before it the run "
    "writes a checkpoint, and the job goes on in a new turn.",
)
_option("--partition", metavar="NAME", show_default="Slurm's", help="With --slurm: where the job runs.")
_option("--account", metavar="NAME", show_default="Slurm's", help="With --slurm: who pays for it.")
_option(
    "--slurm-option",
    multiple=True,
    metavar="NAME=VALUE",
    help="With --slurm: any other option of sbatch, as in gpus-per-node=4, without which there are no GPUs; may be "
    "repeated.",
)
_option(REQUEUE, is_flag=True, hidden=True, help="In the batch script: have the job start again if need be.")
options, is_asked = _SLURM.options, _SLURM.is_asked


def launch() -> int:
    """Print the batch script, or submit it and follow the job."""
    ctx = click.get_current_context()
    params = ctx.params
    _SLURM.refuse_others()
    if not params["as_module"]:
        preflight.check_script(params["script"])
    paths, made = preflight.run_paths(params["run_directory"], params["script"])
    number = None
    try:
        text = _script(ctx, paths)
        if params["dry_run"]:
            click.echo(text, nl=False)
            return exits.DONE
        number = slurm.submit(text)
    finally:
        if number is None:
            take_back(paths, made)
    return _follow(number, paths)


def keep_going(launch: Callable[[], int], run: str | None, environ: Mapping[str, str]) -> int:
    """What `launch` returns. A job of --slurm that was to stop (preempted, or near its time limit) or has lost a host
    is requeued, unless it has got no further in this turn and would do no better in the next."""
    if not _SLURM.said["requeue"] or run is None or "SLURM_JOB_ID" not in environ:
        return launch()
    paths, number = RunPaths(Path(run)), environ["SLURM_JOB_ID"]
    before = newest_checkpoint(paths)
    try:
        code = launch()
    except MachineError as error:
        click.echo(f"evenstep: {error}", err=True)
        code = error.exit_code
    if code != exits.MACHINE_FAILED and code not in _ASKED:
        return code
    job = slurm.show(number)
    if job is None or job.state != "RUNNING":  # it was cancelled, or Slurm itself has other plans
        return code
    now = newest_checkpoint(paths)
    again = job.is_near_its_end if code in _ASKED else environ.get("SLURM_RESTART_COUNT", "0") != "0"
    if now == before and again:
        say(f"job {number} is not requeued: this turn of it has written no checkpoint")
        return code
    say(f"job {number} is requeued" + ("" if now is None else f", to go on from step {now}"))
    slurm.requeue(number)
    return code


def _script(ctx: click.Context, paths: RunPaths) -> str:
    params, given = ctx.params, _SLURM.said
    asked: dict[str, str | None] = {
        "job-name": Path(params["script"]).stem or "evenstep",
        "nodes": str(preflight.one_number(params["nodes"], "--slurm")),
        "ntasks-per-node": str(params["processes"]) if isinstance(params["processes"], int) else None,
        "time": given["time"],
        "partition": given["partition"],
        "account": given["account"],
        "chdir": os.getcwd(),
        "output": str(paths.root / "slurm-%j.log"),
        "open-mode": "append",
        "requeue": "",
        "signal": _WARNING,
    }
    for option in given["slurm_option"]:
        name, _, value = option.lstrip("-").partition("=")
        if not name:
            raise UsageError(f"--slurm-option {option!r} is no option of sbatch", do="as in gpus-per-node=4")
        asked[name] = value
    limit = asked["time"]
    if limit is not None and not slurm.is_time_limit(limit):
        raise UsageError(
            f"{limit!r} is no time limit for sbatch",
            do="write minutes, minutes:seconds, hours:minutes:seconds, or days-hours:minutes, as in --time 1:00:00",
        )
    if "no-requeue" in asked:
        del asked["requeue"]
    command = [sys.executable, "-P", "-m", "evenstep", "run", REQUEUE, "--run", str(paths.root)]
    command += given_options(ctx, without={"nodes", "run_directory", "dry_run"})
    command += [params["script"], *params["arguments"]]
    lines = [
        f"#SBATCH --{name}" + (f"={_quoted(value)}" if value else "")
        for name, value in asked.items()
        if value is not None
    ]
    # exec: the signal before the time limit goes to the batch script's own process.
    text = "\n".join(["#!/bin/sh", *lines, "", f"exec {shlex.join(command)}", ""])
    if any("\n" in line for line in lines):
        raise UsageError("an option for sbatch has a line break", do="sbatch cannot take it in a script: leave it out")
    return text


def _quoted(value: str) -> str:
    """As sbatch reads its lines in a script."""
    if value and all(letter.isalnum() or letter in "%+-./:@_,=[]*" for letter in value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _follow(number: str, paths: RunPaths) -> int:
    log = paths.root / f"slurm-{number}.log"
    say(f"submitted job {number}; its run directory: {paths.root}")
    try:
        job = slurm.follow(number, log, lambda data: write_all(1, data), say)
    except KeyboardInterrupt:
        say(f"job {number} goes on. To look at it: squeue -j {number}; tail -f {shlex.quote(str(log))}")
        say(f"to cancel it: scancel {number}")
        return exits.by_signal(signal.SIGINT)
    if job is None:
        say(f"Slurm has forgotten job {number}; see {log}")
        return exits.MACHINE_FAILED
    if job.state == "COMPLETED":
        say(f"job {number} is done; its run directory: {paths.root}")
        return exits.DONE
    say(f"{job}" + (f" with exit code {job.exit_code}" if job.exit_code else "") + f"; its log: {log}")
    if job.state == "CANCELLED":
        return exits.by_signal(signal.SIGTERM)
    ours = job.exit_code in (exits.SCRIPT_FAILED, exits.WRONG_USAGE, exits.MACHINE_FAILED) or job.exit_code > 128
    return job.exit_code if job.state == "FAILED" and ours else exits.MACHINE_FAILED
