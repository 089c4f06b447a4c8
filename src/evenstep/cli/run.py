"""`evenstep run`: start a script on this host."""

from __future__ import annotations

from dataclasses import asdict, replace

import click

from evenstep.cli import exits, preflight
from evenstep.cli.report import say, tell_failure, tell_hosts, tell_signal
from evenstep.environment import AUTO, Settings, memory_size
from evenstep.errors import UsageError
from evenstep.launch.local import Script, run_alone
from evenstep.launch.remote import by_ssh, run_on_hosts
from evenstep.launch.several import run_on_nodes

_POSITIVE = click.IntRange(min=1)


def _processes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    """A number from 1, or torchrun's words."""
    if value is None or value in preflight.PROCESS_WORDS:
        return value
    if value.lstrip("-").isdigit():
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


def _nodes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A number from 1; torchrun's 2:2 is 2."""
    least, _, most = (value or "").partition(":")
    if value is None:
        return None
    if not least.isdigit() or int(least) < 1 or most not in ("", least):
        raise click.BadParameter(f"{value!r} is no number of hosts; a range cannot be given", ctx, param)
    return int(least)


def _elsewhere(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Refuse torchrun's rendezvous options."""
    if value is not None:
        raise click.UsageError(
            f"{param.opts[0]} is not needed: hosts find each other by --nodes, --node-rank, --master-addr and "
            "--master-port"
        )


@click.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Exit codes: 0 done; 1 the script failed; 2 wrong usage; 4 hosts, network or disk failed; "
    "128 + number for a signal (130: Ctrl-C).",
)
@click.option(
    "--processes",
    "--nproc-per-node",
    "--nproc_per_node",
    "processes",
    metavar="N",
    callback=_processes,
    help="Training processes; also gpu, cpu or auto. Default: all visible GPUs, else one.",
)
@click.option("--nodes", "--nnodes", "nodes", callback=_nodes, metavar="N", help="Hosts, each started by this command.")
@click.option(
    "--node-rank", "--node_rank", type=click.IntRange(min=0), metavar="K", help="Which of them this is, from 0."
)
@click.option("--master-addr", "--master_addr", metavar="ADDRESS", help="An address of node 0 that all hosts reach.")
@click.option(
    "--master-port", "--master_port", type=click.IntRange(1, 65535), metavar="PORT", help="A free port of node 0."
)
@click.option(
    "--join-timeout",
    type=click.FloatRange(min=1),
    default=600,
    show_default=True,
    metavar="S",
    help="Seconds to wait for the other hosts.",
)
@click.option("--hosts", metavar="A:4,B:4", help="Start processes on these hosts by ssh, so many on each.")
@click.option("--hostfile", type=click.Path(), metavar="FILE", help="The same from a file, a line a host.")
@click.option("--global-batch", type=_POSITIVE, metavar="B", help="Samples of one optimizer step, over all processes.")
@click.option(
    "--micro-batch",
    metavar="M",
    callback=_micro_batch,
    help="Samples of one forward and backward; auto: as many as fit the memory, by trial.",
)
@click.option("--memory", metavar="SIZE", callback=_memory, help="What a process may use, for auto: 2GiB.")
@click.option("--seed", type=click.IntRange(min=0), metavar="S", help="Seed of sample order and randomness.")
@click.option(
    "--run",
    "run_directory",
    type=click.Path(),
    metavar="DIR",
    help="Run directory: logs, checkpoints, metrics. One that has checkpoints is resumed. Default: a new one in runs/.",
)
@click.option(
    "--exact/--no-exact", default=None, help="Same bits on every layout (the default), or equal to rounding and faster."
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "gloo", "nccl", "mpi", "ucc"]),
    help="What processes talk through. auto: nccl where there are GPUs, else gloo.",
)
@click.option(
    "--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="What losses are computed in.  [default: fp32]"
)
@click.option("--stages", type=_POSITIVE, metavar="S", help="Cut the model into pipeline stages, one process each.")
@click.option("--shard", is_flag=True, default=None, help="Each process holds a part of every parameter (FSDP2).")
@click.option(
    "--replicas", type=_POSITIVE, metavar="R", help="With --shard: sharded copies of the model.  [default: 1]"
)
@click.option(
    "--thread-replicas", type=_POSITIVE, metavar="T", help="Replicas of the model in threads of each process."
)
@click.option(
    "--split", type=_POSITIVE, metavar="D", help="Spread the model of a process (or thread replica) over D devices."
)
@click.option(
    "--batchnorm",
    type=click.Choice(["exact", "sync"]),
    help="exact: over a micro-batch, the same on every layout. sync: over what the processes compute at one time.",
)
@click.option("--threads", type=_POSITIVE, metavar="T", help="Intra-op threads of each process.")
@click.option("--checkpoint-every", type=_POSITIVE, metavar="N", help="Optimizer steps between checkpoints.")
@click.option("--keep", type=_POSITIVE, metavar="K", help="Checkpoints to keep.")
@click.option("--fingerprints", is_flag=True, default=None, help="Record a fingerprint of the training at every step.")
@click.option(
    "--allow-other-identity",
    is_flag=True,
    default=None,
    help="Resume although the run directory was made under another identity (seed, torch version, ...).",
)
@click.option(
    "--output",
    type=click.Choice(["first", "all"]),
    default="first",
    show_default=True,
    help="Whose output to show: rank 0's, or everybody's, marked [rank]. Logs have everybody's.",
)
@click.option("-m", "--module", "as_module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.option("--standalone", is_flag=True, hidden=True)
@click.option("--rdzv-backend", "--rdzv_backend", hidden=True, expose_value=False, callback=_elsewhere)
@click.option("--rdzv-endpoint", "--rdzv_endpoint", hidden=True, expose_value=False, callback=_elsewhere)
@click.option("--rdzv-id", "--rdzv_id", hidden=True, expose_value=False, callback=_elsewhere)
@click.option("--rdzv-conf", "--rdzv_conf", hidden=True, expose_value=False, callback=_elsewhere)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def run(
    words: list[str],
    processes: int | str | None,
    nodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    join_timeout: float,
    hosts: str | None,
    hostfile: str | None,
    global_batch: int | None,
    micro_batch: int | str | None,
    memory: int | None,
    seed: int | None,
    run_directory: str | None,
    exact: bool | None,
    backend: str | None,
    precision: str | None,
    stages: int | None,
    shard: bool | None,
    replicas: int | None,
    thread_replicas: int | None,
    split: int | None,
    batchnorm: str | None,
    threads: int | None,
    checkpoint_every: int | None,
    keep: int | None,
    fingerprints: bool | None,
    allow_other_identity: bool | None,
    output: str,
    as_module: bool,
    standalone: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Run SCRIPT with its own ARGUMENTS as several processes, of this host or (--nodes) of several.

    SCRIPT is a training script, as for python: one that uses evenstep, or any that reads RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR and MASTER_PORT.
    """
    preflight.refuse_nested()
    if not as_module:
        preflight.check_script(script)
    count = preflight.process_count(processes, thread_replicas or 1, split or 1)
    there = preflight.hosts(hosts, hostfile, nodes, processes)
    asked = None if there else preflight.nodes(nodes, node_rank, master_addr, master_port, join_timeout)
    wanted = Script(script, as_module, arguments)
    settings = Settings(
        run=run_directory,
        global_batch=global_batch,
        micro_batch=micro_batch,
        memory=memory,
        seed=seed,
        exact=exact,
        backend=backend,
        threads=threads,
        checkpoint_every=checkpoint_every,
        keep=keep,
        fingerprints=fingerprints or None,
        allow_other_identity=allow_other_identity or None,
        precision=precision,
        stages=stages,
        shard=shard or None,
        replicas=replicas,
        thread_replicas=thread_replicas,
        split=split,
        batchnorm=batchnorm,
    )
    if there is not None:
        paths, made = preflight.run_paths(run_directory, script)
        told = {
            "script": script,
            "as_module": as_module,
            "arguments": arguments,
            "settings": asdict(settings),
            "show": output,
            "address": master_addr,
        }
        ended = run_on_hosts(there, by_ssh, paths, told, patience=join_timeout, say=say)
        if ended.signal is not None:
            tell_signal(ended.signal, paths, words)
            return exits.by_signal(ended.signal)
        return tell_hosts(ended.fault, paths, words)
    if asked is None:
        paths, made = preflight.run_paths(run_directory, script)
        outcome = run_alone(
            wanted, paths, count, replace(settings, run=str(paths.root)), made=made, show=output, say=say
        )
    else:
        outcome, paths = run_on_nodes(
            asked,
            wanted,
            count,
            settings,
            lambda name: preflight.run_paths(run_directory or name, script),
            show=output,
            say=say,
        )
    if outcome.stopped_by is not None:
        tell_signal(outcome.stopped_by, paths, words)
        return exits.by_signal(outcome.stopped_by)
    return tell_failure(outcome, paths, words, show_all=output == "all")
