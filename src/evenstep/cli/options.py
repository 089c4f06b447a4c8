"""The options that say what is to be started, where and how: declared once, for every verb that starts a launch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import click

from evenstep.cli import preflight
from evenstep.cli.elsewhere import Verb, given
from evenstep.environment import AUTO, Settings, memory_size
from evenstep.errors import UsageError
from evenstep.launch.hosts.calling import Nodes
from evenstep.launch.hosts.hostfile import Host
from evenstep.launch.hosts.transport import Transport, by_ssh
from evenstep.launch.job import Script
from evenstep.launch.schedulers.slurm import by_srun

_POSITIVE = click.IntRange(min=1)


class Finite(click.FloatRange):
    """A number within limits; click itself takes nan, which is within all of them, and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


def _processes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    """A number from 1, or torchrun's words."""
    if value is None or value in preflight.PROCESS_WORDS:
        return value
    if value.lstrip("-").isdecimal():
        if int(value) >= 1:
            return int(value)
        raise click.BadParameter(f"{value} is too few: at least 1 process is needed", ctx, param)
    raise click.BadParameter(f"{value!r} is neither a number nor {' nor '.join(preflight.PROCESS_WORDS)}", ctx, param)


def _micro_batch(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    """A number from 1, or auto."""
    if value is None or value == AUTO:
        return value
    number: int = _POSITIVE.convert(value, param, ctx)  # type: ignore[arg-type]
    return number


def _memory(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Bytes."""
    try:
        return None if value is None else memory_size(value, "--memory")
    except UsageError as error:
        raise click.BadParameter(error.message, ctx, param) from None


def _nodes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """A number from 1, or the least and the most: 2:4."""
    if value is None:
        return None
    least, colon, most = value.partition(":")
    most = most if colon else least
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise click.BadParameter(f"{value!r} is no number of hosts; write N, or MIN:MAX", ctx, param)
    return int(least), int(most)


def _elsewhere(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Refuse torchrun's rendezvous options."""
    if value is not None:
        raise click.UsageError(
            f"{param.opts[0]} is not needed: hosts find each other by --nodes, --node-rank, --master-addr and "
            "--master-port"
        )


def _else(default: str) -> str:
    """What an option's help shows as its default where the script's own choice, in evenstep.start, comes first."""
    return f"the script's, else {default}"


_OPTIONS = (
    click.option(
        "--processes",
        "--nproc-per-node",
        "--nproc_per_node",
        "processes",
        envvar="PET_NPROC_PER_NODE",
        metavar="N",
        callback=_processes,
        show_default="one for each visible GPU, else one",
        help="Training processes of each host. gpu: one for each GPU; cpu: one for each core; "
        "auto: gpu where there are any, else cpu.",
    ),
    click.option(
        "--nodes",
        "--nnodes",
        "nodes",
        envvar="PET_NNODES",
        callback=_nodes,
        metavar="N",
        show_default="this host alone; in a Slurm allocation all of its nodes",
        help="Hosts, each started by this command; MIN:MAX: go on with MIN of MAX if others do not come (again).",
    ),
    click.option(
        "--node-rank",
        "--node_rank",
        envvar="PET_NODE_RANK",
        type=click.IntRange(min=0),
        metavar="K",
        help="Which of them this is, from 0; needed with --nodes.",
    ),
    click.option(
        "--master-addr",
        "--master_addr",
        envvar="PET_MASTER_ADDR",
        metavar="ADDRESS",
        help="An address of node 0 that all hosts reach; needed with --nodes.",
    ),
    click.option(
        "--master-port",
        "--master_port",
        envvar="PET_MASTER_PORT",
        type=click.IntRange(1, 65535),
        metavar="PORT",
        help="A free port of node 0; needed with --nodes.",
    ),
    click.option(
        "--join-timeout",
        type=Finite(min=1),
        default=600,
        show_default="600; of doctor 60",
        metavar="S",
        help="Seconds to wait for the other hosts.",
    ),
    click.option(
        "--hosts",
        metavar="A:4,B:4",
        show_default="this host alone",
        help="Start processes on these hosts by ssh, so many on each; one without a number has --processes.",
    ),
    click.option(
        "--min-hosts",
        type=_POSITIVE,
        metavar="M",
        show_default="all of them",
        help="With --hosts and --restarts: M of them are enough.",
    ),
    click.option(
        "--restarts",
        "--max-restarts",
        "--max_restarts",
        "restarts",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        metavar="N",
        help="After a failure start again from the last checkpoint, up to N times.",
    ),
    click.option("--hostfile", type=click.Path(), metavar="FILE", help="In place of --hosts: a file, a line a host."),
    click.option(
        "--global-batch",
        type=_POSITIVE,
        metavar="B",
        show_default="the script's",
        help="Samples of one optimizer step, over all processes.",
    ),
    click.option(
        "--micro-batch",
        metavar="M",
        callback=_micro_batch,
        show_default=_else("the global batch"),
        help="Samples of one forward and backward; auto: as many as fit the memory, by trial.",
    ),
    click.option(
        "--memory",
        metavar="SIZE",
        callback=_memory,
        show_default=_else("the GPU's; the CPU needs it"),
        help="With --micro-batch auto: what a process may use, as in 2GiB.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        metavar="S",
        show_default=_else("0"),
        help="Seed of sample order and randomness.",
    ),
    click.option(
        "--run",
        "run_directory",
        type=click.Path(),
        metavar="DIR",
        show_default="a new one in runs/",
        help="Run directory: logs, checkpoints, metrics. One that has checkpoints is resumed.",
    ),
    click.option(
        "--exact/--no-exact",
        default=None,
        show_default=_else("exact"),
        help="Same bits on every layout, or equal to rounding and any kernel.",
    ),
    click.option(
        "--backend",
        type=click.Choice(["auto", "gloo", "nccl", "mpi", "ucc"]),
        show_default=_else("auto"),
        help="What processes talk through. auto: nccl where there are GPUs, else gloo.",
    ),
    click.option(
        "--precision",
        type=click.Choice(["fp32", "bf16", "fp16"]),
        show_default=_else("fp32"),
        help="What losses are computed in.",
    ),
    click.option(
        "--stages",
        type=_POSITIVE,
        metavar="S",
        show_default=_else("1"),
        help="Cut the model into pipeline stages, one process each; processes that are left make replicas.",
    ),
    click.option(
        "--shard",
        is_flag=True,
        default=None,
        help="Each process holds a part of every parameter (FSDP2); without it, a whole model (or stage).",
    ),
    click.option(
        "--replicas",
        type=_POSITIVE,
        metavar="R",
        show_default=_else("1"),
        help="With --shard: sharded copies of the model.",
    ),
    click.option(
        "--thread-replicas",
        type=_POSITIVE,
        metavar="T",
        show_default=_else("1"),
        help="Replicas of the model in threads of each process.",
    ),
    click.option(
        "--split",
        type=_POSITIVE,
        metavar="D",
        show_default=_else("1"),
        help="Spread the model of a process (or thread replica) over D devices.",
    ),
    click.option(
        "--batchnorm",
        type=click.Choice(["exact", "sync"]),
        show_default=_else("exact"),
        help="exact: over a micro-batch, the same on every layout. sync: over what the processes compute at one time.",
    ),
    click.option(
        "--threads",
        type=_POSITIVE,
        metavar="T",
        show_default=_else("1"),
        help="Intra-op threads of each process.",
    ),
    click.option(
        "--checkpoint-every",
        type=_POSITIVE,
        metavar="N",
        show_default=_else("at each epoch's end"),
        help="Optimizer steps between checkpoints.",
    ),
    click.option(
        "--keep",
        type=_POSITIVE,
        metavar="K",
        show_default=_else("2"),
        help="How many checkpoints stay, the newest ones.",
    ),
    click.option(
        "--fingerprints",
        is_flag=True,
        default=None,
        help="Record a fingerprint of the training at every step; without it, at checkpoints and the end.",
    ),
    click.option(
        "--allow-other-identity",
        is_flag=True,
        default=None,
        help="Resume although the run directory was made under another identity (seed, torch version, ...); without it "
        "that is refused.",
    ),
    click.option(
        "--output",
        type=click.Choice(["first", "all"]),
        default="first",
        show_default=True,
        help="Whose output to show: rank 0's, or everybody's, marked [rank]. Logs have everybody's.",
    ),
    click.option(
        "-m",
        "--module",
        "as_module",
        is_flag=True,
        help="SCRIPT is a module's name, as in python -m; without it, a file.",
    ),
    click.option("--standalone", is_flag=True, hidden=True),
    click.option("--rdzv-backend", "--rdzv_backend", hidden=True, expose_value=False, callback=_elsewhere),
    click.option("--rdzv-endpoint", "--rdzv_endpoint", hidden=True, expose_value=False, callback=_elsewhere),
    click.option("--rdzv-id", "--rdzv_id", hidden=True, expose_value=False, callback=_elsewhere),
    click.option("--rdzv-conf", "--rdzv_conf", hidden=True, expose_value=False, callback=_elsewhere),
)


def launch_options(verb: Verb) -> Verb:
    """Give a verb the options of a launch; what they say comes as keywords, for `read_launch`."""
    for option in reversed(_OPTIONS):
        verb = option(verb)
    return verb


@dataclass(frozen=True)
class Launch:
    """What the command line said of a launch."""

    script: Script
    processes: int  # of this host
    hosts: list[Host] | None  # to be started from here
    transport: Transport  # how
    nodes: Nodes | None  # started by hand on each
    settings: Settings
    address: str | None  # --master-addr
    patience: float  # seconds to wait for other hosts
    output: str
    restarts: int  # after failures
    least: int  # hosts that are enough


def read_launch(options: Mapping[str, Any], script: str, arguments: Sequence[str]) -> Launch:
    """What was said. UsageError for what does not go together."""
    count = preflight.process_count(options["processes"], options["thread_replicas"] or 1, options["split"] or 1)
    there = preflight.hosts(options["hosts"], options["hostfile"], options["nodes"], options["processes"])
    places = (options["nodes"], options["node_rank"], options["master_addr"], options["master_port"])
    transport: Transport = by_ssh
    by_mpirun = preflight.nodes_of_mpirun(options["join_timeout"]) if there is None and places == (None,) * 4 else None
    if there is None and by_mpirun is None and places[1:3] == (None, None):
        there, transport = preflight.allocated_hosts(options["nodes"], options["processes"]), by_srun
        if there is not None and len(there) == 1 and there[0].is_here:
            count, there, places = there[0].processes or count, None, (None, None, None, None)
    asked = None if there else by_mpirun or preflight.nodes(*places, options["join_timeout"])
    settings = Settings(
        run=options["run_directory"],
        **{
            field.name: options[field.name]
            for field in fields(Settings)
            # A switch that was not given leaves the choice to the script.
            if field.name in options and (options[field.name] is not False or field.name == "exact")
        },
    )
    return Launch(
        Script(script, options["as_module"], tuple(arguments)),
        count,
        there,
        transport,
        asked,
        settings,
        options["master_addr"],
        options["join_timeout"],
        options["output"],
        options["restarts"],
        preflight.least_hosts(options["min_hosts"], options["nodes"], there),
    )


def given_options(ctx: click.Context, *, without: Collection[str]) -> list[str]:
    """The options that were given on the command line, as words, for a command that is to have them too."""
    words: list[str] = []
    for param in ctx.command.params:
        name = param.name
        if not isinstance(param, click.Option) or name not in ctx.params or name in without:
            continue
        if not given(ctx, name):
            continue
        value = ctx.params[name]
        if param.is_flag:
            words.append(param.opts[0] if value else param.secondary_opts[0])
        else:
            words += [param.opts[0], str(value)]
    return words
