"""`evenstep prove`: is it the same model on every layout? If not, which step, which tensor, and why."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from evenstep.cli import exits, preflight
from evenstep.cli.options import Finite
from evenstep.cli.proof_page import Table, finding_lines, proof_json
from evenstep.cli.prove_weights import prove_weights
from evenstep.errors import UsageError
from evenstep.launch.job import Script
from evenstep.launch.warm import Warm
from evenstep.prove.attempts import Interrupted, Starter
from evenstep.prove.layouts import LAYOUTS, Layout
from evenstep.prove.proof import Proof
from evenstep.prove.proof import prove as run_proof

_SEEDS = (1, 2)  # of hashes: for all starts but the one that is to have another


def _layouts(ctx: click.Context, param: click.Parameter, value: str | None) -> list[Layout]:
    """Names separated by commas; all of them by default."""
    if value is None:
        return list(LAYOUTS.values())
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if name not in LAYOUTS:
            raise click.BadParameter(f"{name!r} is unknown; there are {', '.join(LAYOUTS)}", ctx, param)
    return [LAYOUTS[name] for name in dict.fromkeys(names)]


@click.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Exit codes: 0 identical; 1 the script fails on one process, or a command fails; 2 wrong usage; 3 not "
    "identical; 4 hosts, network or disk failed; 130: Ctrl-C.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=8, show_default=True, metavar="N", help="Steps to compare."
)
@click.option(
    "--layouts",
    callback=_layouts,
    metavar="A,B,...",
    show_default="all",
    help=f"Which to compare with one process: {', '.join(LAYOUTS)}.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; without it, a table.")
@click.option(
    "--keep-runs",
    type=click.Path(),
    metavar="DIR",
    help="Keep the run directories, with logs and traces, in DIR; without it they are temporary.",
)
@click.option(
    "-m", "--module", "as_module", is_flag=True, help="SCRIPT is a module's name, as in python -m; without it, a file."
)
@click.option(
    "--tolerance",
    type=Finite(min=0),
    metavar="T",
    help='Compare the weights that two commands write: evenstep prove --tolerance 1e-6 "cmd A" "cmd B" '
    "--weights a.pt b.pt; without it, the fingerprints of one script.",
)
@click.option(
    "--weights", nargs=2, type=click.Path(), metavar="A B", help="Needed with --tolerance: the files they write."
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def prove(
    steps: int,
    layouts: list[Layout],
    as_json: bool,
    keep_runs: str | None,
    as_module: bool,
    tolerance: float | None,
    weights: tuple[str, str] | None,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Show that SCRIPT trains the same model on every layout, or say what differs first, and why.

    SCRIPT is run for a few steps with one process, with two and three, with thread replicas, shards, stages and loader
    processes, twice with one process, and once resumed in the middle. The fingerprints after every step are compared.
    A layout that SCRIPT cannot have is shown as refused.

    SCRIPT needs no change. It is ended after its N-th step: what stands after its loop does not run. Its own run
    directory is not touched. Whatever else it writes by itself (files of its own, trackers), it writes on every layout.
    """
    preflight.refuse_nested()
    try:
        with _terminating():
            if tolerance is not None:
                return prove_weights(tolerance, [script, *arguments], weights, as_json=as_json)
            if weights is not None:
                raise UsageError("--weights is for two commands", do="give --tolerance T too")
            if not as_module:
                preflight.check_script(script)
            return _prove(Script(script, as_module, arguments), layouts, steps, keep_runs, as_json=as_json)
    except Interrupted as interrupted:
        return exits.by_signal(interrupted.number)


def _prove(script: Script, layouts: list[Layout], steps: int, keep_runs: str | None, *, as_json: bool) -> int:
    table = Table(steps, quiet=as_json)
    with ExitStack() as stack:
        stack.callback(table.close)
        proof = _proof(script, _folder(keep_runs, stack), layouts, steps, table, stack)
    if as_json:
        click.echo(json.dumps(proof_json(str(script), steps, proof), indent=2))
    else:
        for line in finding_lines(proof):
            click.echo(line)
        if keep_runs is not None:
            click.echo(f"run directories: {keep_runs}")
        click.echo(proof.summary())
    return exits.SCRIPT_FAILED if not proof.works else exits.DONE if proof.identical else exits.FOUND


def _proof(script: Script, folder: Path, layouts: list[Layout], steps: int, table: Table, stack: ExitStack) -> Proof:
    """Start two processes that import, one for each order of hashes, and do it."""
    first, second = (None, None) if "PYTHONHASHSEED" in os.environ else _SEEDS  # the user's word stands
    warm = stack.enter_context(Warm(script, hash_seed=first))
    table.begins("importing what the script needs")
    if warm.is_foreign():
        raise UsageError(
            f"{script.name} does not use evenstep, so it has no steps to compare",
            do='compare the weights that two commands write: evenstep prove --tolerance 1e-6 "cmd A" "cmd B" '
            "--weights a.pt b.pt",
        )
    other: list[Warm] = []

    def another() -> Warm:
        if not other:
            other.append(stack.enter_context(Warm(script, hash_seed=second)))
        return other[0]

    if any(layout.again for layout in layouts):
        another()  # it imports while other layouts run
    starter = Starter(script, folder, warm, another, table.watches)
    return run_proof(starter, layouts, steps, begins=table.begins, ended=table.ended)


def _folder(keep: str | None, stack: ExitStack) -> Path:
    if keep is None:
        place = tempfile.TemporaryDirectory(prefix="evenstep-prove-", ignore_cleanup_errors=True)
        return Path(stack.enter_context(place))
    folder = Path(keep).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"--keep-runs {keep} is not empty", do="name a new directory")
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}", do="name a writable place") from error
    return folder


@contextmanager
def _terminating() -> Iterator[None]:
    """SIGTERM between two launches ends this as Ctrl-C does, with everything tidied up."""
    before: Callable[..., object] | int | None = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: object) -> None:
    raise Interrupted(number)
