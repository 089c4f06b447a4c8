"""python -m bench: measures everything and prints one table with the targets. A few minutes on two quiet cores."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import sides
from tests.hosts import Hosts, hosts, why_no_hosts

HERE = Path(__file__).resolve().parent
LAUNCH_PROCESSES = 8
LAUNCH_ROUNDS = 3
HOST_PROCESSES = 4  # of each of two hosts
LINK = 100  # Mbit/s between two hosts
PATIENCE = 300.0  # seconds for a command on hosts


@dataclass(frozen=True)
class Measured:
    """A line of the table: what was measured (a number; its spread) and what it may be at most."""

    what: str
    value: float
    target: float
    unit: str = ""
    note: str = ""


def main() -> int:
    console = Console()
    started = time.monotonic()
    table = Table(title="evenstep against hand-written DDP and torchrun", title_justify="left", title_style="bold")
    for name in ("measured here", "value", "target", "", "note"):
        table.add_column(name, justify="right" if name in ("value", "target") else "left")
    missed = 0
    measures = [order, launch, step, threads, stages, memory, shard]
    if reason := why_no_hosts():
        console.print(f"[yellow]not measured: two hosts: {reason}[/]")
    else:
        measures += [launch_on_hosts, step_on_hosts]
    for measure in measures:
        with console.status(f"measuring: {measure.__name__}"):
            for line in measure():
                met = line.value <= line.target
                missed += not met
                console.print(f"{line.what}: {line.value:.3g}{line.unit}", highlight=False)
                table.add_row(
                    line.what,
                    f"{line.value:.3g}{line.unit}",
                    f"<= {line.target:g}{line.unit}",
                    "[green]met[/]" if met else "[red]missed[/]",
                    line.note,
                )
    console.print(table)
    console.print(f"[dim]{missed} missed, {time.monotonic() - started:.0f} s[/]")
    return 0


def order() -> Iterator[Measured]:
    found = last_json([sys.executable, str(HERE / "order.py")])
    note = f"DistributedSampler: {found['listed_seconds']:.2f} s for {found['listed']:.0e} samples"
    yield Measured("first batch of 10^9 samples", 1000 * found["seconds"], 10, " ms", note)
    yield Measured("its memory", found["bytes"] / 1e6, 1, " MB")


def launch() -> Iterator[Measured]:
    """From the command to the first optimizer step of a plain DDP script, turn about."""
    script = str(HERE / "first_step.py")
    count = str(LAUNCH_PROCESSES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, script]
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(LAUNCH_ROUNDS):
            evenstep = evenstep_run(LAUNCH_PROCESSES, f"{folder}/{number}", script)
            for command, times in ((evenstep, ours), (torchrun, theirs)):
                began = time.time()
                times.append(last_json(command)["time"] - began)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    note = f"{statistics.median(ours):.2f} s and {statistics.median(theirs):.2f} s; {spread(ratios)}"
    yield Measured(f"launch to first step, {count} processes, / torchrun", statistics.median(ratios), 0.3, "", note)


def launch_on_hosts() -> Iterator[Measured]:
    """The same on two hosts, on each of which the command is given at once."""
    script = str(HERE / "first_step.py")
    times: dict[str, list[float]] = {"evenstep": [], "torchrun": []}
    with hosts(2) as two, tempfile.TemporaryDirectory() as folder:
        for number in range(LAUNCH_ROUNDS):
            for launcher, seconds in times.items():
                began = time.time()
                words = ("--run", f"{number}") if launcher == "evenstep" else ()
                seconds.append(on_hosts(two, Path(folder), launcher, *words, script)["time"] - began)
    ratios = [a / b for a, b in zip(*times.values(), strict=True)]
    ours, theirs = map(statistics.median, times.values())
    note = f"{ours:.2f} s and {theirs:.2f} s; {spread(ratios)}"
    what = f"launch to first step, 2 hosts of {HOST_PROCESSES} processes, / torchrun"
    yield Measured(what, statistics.median(ratios), 0.5, "", note)


def step_on_hosts() -> Iterator[Measured]:
    """What a step costs over a slow link."""
    with hosts(2) as two, tempfile.TemporaryDirectory() as folder:
        two.slow_down(LINK)
        script = [str(HERE / "step.py"), "transformer", "--turns", "16"]
        found = on_hosts(two, Path(folder), "evenstep", "--run", "run", *script, processes=1)
    note = f"{spread(found['ratios'])}; fastest / fastest {found['fastest']:.2f}"
    what = f"step, transformer, 2 hosts with {LINK} Mbit/s, / DDP"
    yield Measured(what, statistics.median(found["ratios"]), 1.05, "", note)


def step() -> Iterator[Measured]:
    script = str(HERE / "step.py")
    for name, exact_target in (("transformer", 1.05), ("mlp", 1.10)):
        for option, target in ((), exact_target), (("--no-exact",), 1.02):
            with tempfile.TemporaryDirectory() as folder:
                found = last_json(evenstep_run(2, folder, *option, script, name))
            what = f"step, {name}{', ' if option else ''}{' '.join(option)}, / DDP"
            note = f"{spread(found['ratios'])}; fastest / fastest {found['fastest']:.2f}"
            yield Measured(what, statistics.median(found["ratios"]), target, "", note)


def threads() -> Iterator[Measured]:
    found = last_json([sys.executable, str(HERE / "threads.py"), "transformer"])
    note = f"{spread(found['ratios'])}; fastest / fastest {found['fastest']:.2f}"
    yield Measured(
        "step, transformer, 2 thread replicas, / threads", statistics.median(found["ratios"]), 1.10, "", note
    )


def stages() -> Iterator[Measured]:
    with tempfile.TemporaryDirectory() as folder:
        found = last_json(evenstep_run(2, folder, str(HERE / "stages.py")))
    note = f"{spread(found['ratios'])}; fastest / fastest {found['fastest']:.2f}"
    yield Measured("step, transformer, 2 stages, / Schedule1F1B", statistics.median(found["ratios"]), 1.10, "", note)


def memory() -> Iterator[Measured]:
    found = {}
    for side in ("evenstep", "ddp"):
        with tempfile.TemporaryDirectory() as folder:
            found[side] = last_json(evenstep_run(2, folder, str(HERE / "memory.py"), side))
    gradients = found["ddp"]["gradients"]
    copies = math.log2(sides.SHARE)
    ours, theirs = found["evenstep"]["peak"], found["ddp"]["peak"]
    note = f"{ours / 1e6:.0f} MB and {theirs / 1e6:.0f} MB; a gradient copy is {gradients / 1e6:.0f} MB"
    what = f"peak memory less {copies:g} gradient copies, / DDP"
    yield Measured(what, (ours - copies * gradients) / theirs, 1.05, "", note)


def shard() -> Iterator[Measured]:
    script = str(HERE / "shard.py")
    with tempfile.TemporaryDirectory() as folder:
        found = last_json(evenstep_run(2, folder, "--shard", script, "time"))
    note = f"{spread(found['ratios'])}; fastest / fastest {found['fastest']:.2f}"
    yield Measured("step, transformer, --shard, / fully_shard", statistics.median(found["ratios"]), 1.10, "", note)
    peaks: list[float] = []
    for processes in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            found = last_json(evenstep_run(processes, folder, "--shard", script, "memory"))
        peaks.append(found["peak"])
    note = ", ".join(f"{peak / 1e6:.0f}" for peak in peaks) + " MB for 1, 2, 4 processes"
    yield Measured("memory of a process, --shard, of 4 / of 1", peaks[-1] / peaks[0], 0.75, "", note)


def evenstep_run(processes: int, run: str, *script: str) -> list[str]:
    return [sys.executable, "-m", "evenstep", "run", "--processes", str(processes), "--run", run, *script]


def on_hosts(two: Hosts, folder: Path, launcher: str, *words: str, processes: int = HOST_PROCESSES) -> dict[str, Any]:
    """What the first of two hosts prints, when a launcher is given the same words on both."""
    module = {"evenstep": ["evenstep", "run"], "torchrun": ["torch.distributed.run"]}[launcher]
    place = ["--nnodes", "2", "--master-addr", two.address(1), "--master-port", "1234"]
    place += ["--nproc-per-node", str(processes)]
    env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "EVENSTEP_TOKEN": "a secret"}
    commands = [
        two.start(node + 1, sys.executable, "-m", *module, *place, "--node-rank", node, *words, folder=folder, env=env)
        for node in range(2)
    ]
    results = [command.wait(PATIENCE) for command in commands]
    for result in results:
        if result.code != 0:
            raise SystemExit(f"{launcher} {' '.join(words)} ended with {result.code}:\n{result.out}\n{result.err}")
    return json_in(results[0].out)


def last_json(command: list[str]) -> dict[str, Any]:
    """The last line of JSON that a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return json_in(done.stdout)


def json_in(out: str) -> dict[str, Any]:
    """The last line of JSON in it."""
    lines = [line for line in out.splitlines() if line.lstrip().startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def spread(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} pairs"


if __name__ == "__main__":
    sys.exit(main())
