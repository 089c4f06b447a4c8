"""What the launcher says at the end: the first failure, where the logs are, and how to go on."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import click

from evenstep.cli import exits
from evenstep.launch import fork_server
from evenstep.launch.failures import Failure, ended_before
from evenstep.launch.others import Fault, doing_text
from evenstep.launch.outcome import Outcome
from evenstep.launch.restarts import Verdict
from evenstep.record.activity import read_activity
from evenstep.record.paths import RunPaths, newest_checkpoint

_LAST_LINES = 15


def say(line: str) -> None:
    """Print one of our own lines, apart from the script's."""
    click.echo(f"evenstep: {line}", err=True)


def tell_failure(outcome: Outcome, paths: RunPaths, words: list[str], verdict: Verdict, *, show_all: bool) -> int:
    """Report a launch that came to its end by itself, and return the command's exit code."""
    failure = outcome.failure
    fault = outcome.fault
    if fault is not None and (failure is None or fault.rank != failure.exit.rank):
        _tell_fault(fault)
        if fault.log:
            say(f"its log there: {fault.log}")
        say("all processes of this host were stopped")
        _tell_where(paths, words, verdict, again=not fault.lasting)
        return fault.exit_code
    if outcome.server_died is not None and (failure is None or failure.exit.stopped):
        where = f"`{fork_server.title(str(paths.root))}` in ps"
        say(f"the fork server, the parent of all processes ({where}), {outcome.server_died}; every process was ended")
        _tell_where(paths, words, verdict)
        return exits.MACHINE_FAILED
    if failure is None:
        return exits.DONE
    start = outcome.log_starts[failure.exit.rank]
    frozen = failure.exit.rank in outcome.frozen
    shown = failure.exit.rank == min(outcome.log_starts) or show_all  # the first of this host is
    _tell_cause(failure, paths.log(failure.exit.rank), start, shown=shown, frozen=frozen)
    before = ended_before(outcome.exits, failure) if fault is None else fault.before
    if before:
        say(before)
    if len(outcome.exits) > 1 or fault is not None:
        say("the other processes were stopped")
    error = failure.uncaught
    doing = read_activity(paths.activity(failure.exit.rank))
    if doing is not None:
        say(doing_text({failure.exit.rank: doing}))
    _tell_where(paths, words, verdict, again=not failure.lasting)
    if error is not None:
        return error.exit_code
    # evenstep itself leaves like this where only the end of the script showed the failure.
    return failure.exit.code if failure.exit.code in (exits.WRONG_USAGE, exits.MACHINE_FAILED) else exits.SCRIPT_FAILED


def tell_own_failure(outcome: Outcome, paths: RunPaths, node: int, *, show_all: bool) -> None:
    """One host's part of the report, where another launcher tells the rest: what the process itself said."""
    failure = outcome.failure
    if failure is not None and outcome.fault is not None and outcome.fault.node == node:
        rank = failure.exit.rank
        shown = rank == 0 or show_all
        frozen = rank in outcome.frozen
        _tell_cause(failure, paths.log(rank), outcome.log_starts[rank], shown=shown, frozen=frozen)


def tell_hosts(fault: Fault | None, paths: RunPaths, words: list[str], verdict: Verdict) -> int:
    """Report a launch that started the launchers of several hosts."""
    if fault is None:
        return exits.DONE
    _tell_fault(fault)
    say("the processes of all hosts were stopped")
    _tell_where(paths, words, verdict, again=not fault.lasting)
    return fault.exit_code


def _tell_fault(fault: Fault) -> None:
    rank = "" if fault.rank is None else f"rank {fault.rank} "
    node = f" (node {fault.node})" if fault.node >= 0 else ""
    say(f"the run failed on {fault.host}{node}: {rank}{fault.what}")
    if fault.before:
        say(fault.before)
    if fault.doing:
        say(fault.doing)


def tell_signal(number: int, paths: RunPaths, words: list[str]) -> None:
    """Report a launch that a signal to the launcher ended."""
    name = signal.Signals(number).name
    say(f"stopped by {'Ctrl-C (SIGINT)' if number == signal.SIGINT else name}; no process is left")
    _tell_where(paths, words, Verdict(False))


def _tell_cause(failure: Failure, log: Path, start: int, *, shown: bool, frozen: bool) -> None:
    """The process's own words first, unless they are on the terminal already; then which process it was.

    In `log`, its log, this launch's output begins at byte `start`.
    """
    error = failure.uncaught
    rank = failure.exit.rank
    if error is None:
        if not shown:
            _show_tail(log, start)
        say(f"rank {rank} {'stood still, stopped by a signal (SIGSTOP)' if frozen else failure.exit.describe()}")
    elif error.type == "SystemExit":
        if not shown:
            _show_tail(log, start)
        say(f"rank {rank} called sys.exit({error.message})")
    else:
        if not (shown and error.shown):
            click.echo(error.traceback, err=True, nl=False)
        first = error.message.partition("\n")[0].rstrip(":")
        say(f"rank {rank} failed: {error.type}{': ' if first else ''}{first}")


def _show_tail(log: Path, start: int) -> None:
    try:
        with log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(start if start <= size else 0, size - (1 << 14)))  # somebody may have emptied it meanwhile
            lines = file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
    except OSError:
        return
    if lines:
        click.echo(f"the end of {_short(log)}:", err=True)
        for line in lines:
            click.echo(f"  {line}", err=True)


def _tell_where(paths: RunPaths, words: list[str], verdict: Verdict, *, again: bool = True) -> None:
    """Where the logs are, what follows, and, where it makes sense to start the same command `again`, how to go on."""
    say(f"logs of every process: {_short(paths.log(0).parent)}/")
    if verdict.line:
        say(verdict.line)
    newest = newest_checkpoint(paths)
    if verdict.again or not again or (newest is None and not verdict.checkpoint):
        return
    if newest is not None:
        say(f"the last checkpoint: {_short(paths.checkpoint(newest))}")
        say(f"to go on from step {newest}: {resume_command(words, paths)}")
    else:
        say(f"the last checkpoint, as node 0 sees it: {verdict.checkpoint}")
        say(f"to go on from it, on every node: {resume_command(words, paths)}")


def resume_command(words: list[str], paths: RunPaths) -> str:
    """The same command with the run directory named. `words` are what follows `evenstep`."""
    options = words[1:]
    named = any(word == "--run" or word.startswith("--run=") for word in _before_script(options))
    directory = [] if named else ["--run", _short(paths.root)]
    return shlex.join(["evenstep", "run", *directory, *options])


def _before_script(options: list[str]) -> list[str]:
    """The launcher's own options, and their values; the script's may have a --run of its own."""
    switches = {
        "--exact",
        "--no-exact",
        "--fingerprints",
        "--allow-other-identity",
        "--shard",
        "-m",
        "--module",
        "--standalone",
    }
    end = 0
    while end < len(options) and options[end].startswith("-"):
        if options[end] == "--":
            break
        end += 1 if options[end] in switches or "=" in options[end] else 2
    return options[:end]


def _short(path: Path) -> str:
    """Relative to here, if it is below."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
