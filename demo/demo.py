"""make demo: one model from 1, 2 and 3 processes and through a kill; then the same training in hand-written DDP.

Every figure is measured here and now. Exit code 1 if evenstep's fingerprints are not all equal, or one is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from evenstep.record.events import read_events
from evenstep.record.identity import read_identity
from evenstep.record.metrics import read_metrics
from evenstep.record.paths import RunPaths

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "digits.py"
BY_HAND = HERE / "digits_ddp.py"
EVENSTEP = [sys.executable, "-m", "evenstep", "run"]


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    layout: str
    global_batch: int
    steps_per_second: float
    accuracy: float
    fingerprint: str


class Failed(Exception):
    """A run that did not end as it should; the message shows what it printed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    console = Console()
    started = time.monotonic()
    console.print(
        "examples/digits.py on 1, 2 and 3 processes, then killed on 2 and resumed on 3.\n"
        "demo/digits_ddp.py, hand-written DistributedDataParallel, on 1, 2 and 3.\n"
        "It takes a minute and a half on two idle cores.\n",
        highlight=False,
    )
    with tempfile.TemporaryDirectory(prefix="evenstep-demo-") as folder:
        try:
            ours, by_hand = train_all(console, Path(folder), options.epochs)
        except Failed as failure:
            console.print(str(failure), markup=False, highlight=False)
            return 1
    console.print()
    show(console, "evenstep", ours)
    equal = len({row.fingerprint for row in ours}) == 1
    console.print(
        f"[bold green]{len(ours)} layouts, one fingerprint: the same model, bit for bit.[/]"
        if equal
        else "[bold red]the fingerprints differ: this is a bug in evenstep, please report it.[/]"
    )
    console.print()
    show(console, "hand-written DistributedDataParallel", by_hand)
    different = len({row.fingerprint for row in by_hand})
    each = ": another model on each" if different == len(by_hand) else ""
    console.print(f"{len(by_hand)} layouts, {different} fingerprint{'s' if different != 1 else ''}{each}.")
    console.print(
        "\n3 processes cannot share 8 micro-batches of 16 evenly: by hand the batch is 144.\n"
        "steps/s: evaluation counts, with evenstep logs and checkpoints too.\n"
        f"{time.monotonic() - started:.0f} s on {os.cpu_count()} cores",
        style="dim",
        highlight=False,
    )
    return 0 if equal else 1


def train_all(console: Console, folder: Path, epochs: int) -> tuple[list[Row], list[Row]]:
    """Runs everything, one after the other, with a bar for each."""
    unit = TextColumn("{task.fields[unit]}")
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), unit, TimeElapsedColumn())
    ours, by_hand = [], []
    with Progress(*columns, console=console) as progress:
        for processes in (1, 2, 3):
            layout = plural(processes)
            bar = bar_of(console, progress, f"evenstep, {layout}")
            ours.append(train(RunPaths(folder / f"run-{processes}"), processes, epochs, layout, bar))
        bar = bar_of(console, progress, "evenstep, 2 processes, killed, then 3")
        ours.append(train_and_kill(RunPaths(folder / "run-killed"), epochs, console, bar))
        for ranks in (1, 2, 3):
            bar = bar_of(console, progress, f"DDP by hand, {plural(ranks)}", "epochs")
            by_hand.append(train_by_hand(folder / f"ddp-{ranks}", ranks, epochs, bar))
    return ours, by_hand


def bar_of(console: Console, progress: Progress, description: str, unit: str = "steps") -> Callable[[int, int], None]:
    """A new bar that counts `unit`s; returns what moves it: (done, total) -> None."""
    task = progress.add_task(f"{description:<38}", total=None, unit=unit)
    if not console.is_terminal:
        console.print(description, highlight=False)
    return lambda done, total: progress.update(task, completed=done, total=total)


def train(paths: RunPaths, processes: int, epochs: int, layout: str, bar: Callable[[int, int], None]) -> Row:
    """One undisturbed run."""
    with Job([*evenstep_run(paths, processes), str(EXAMPLE), "--epochs", str(epochs)], paths.root) as job:
        while job.running():
            bar(*done_of_total(paths))
        job.check()
    bar(*done_of_total(paths))
    return row_of(paths, layout)


def train_and_kill(paths: RunPaths, epochs: int, console: Console, bar: Callable[[int, int], None]) -> Row:
    """A run one of whose processes is killed after two thirds of it; then the rest, on another number of processes."""
    script = [str(EXAMPLE), "--epochs", str(epochs)]
    with Job([*evenstep_run(paths, 2), *script], paths.root) as job:
        killed_at = 0
        while job.running():
            done, total = done_of_total(paths)
            bar(done, total)
            if not killed_at and total and done >= min(2 * total // 3 + 4, total - 1):  # in the middle of an epoch
                os.kill(pid_of(paths, rank=1), signal.SIGKILL)
                killed_at = done
        if job.code() == 0 or not killed_at:
            raise Failed(f"the run that was to be killed was not:\n{job.printed()}")
    with Job([*evenstep_run(paths, 3), *script], paths.root) as job:
        while job.running():
            bar(*done_of_total(paths))
        job.check()
    bar(*done_of_total(paths))
    gone_on = [event["step"] for event in read_events(paths.events(0)) if event["kind"] == "resume"]
    if not gone_on:
        raise Failed("the killed run began anew: it did not go on from a checkpoint")
    console.print(
        f"kill -9 of a process after step {killed_at}; gone on from step {gone_on[-1]} on 3 processes",
        highlight=False,
    )
    return row_of(paths, "2 processes, killed, then 3")


def train_by_hand(folder: Path, ranks: int, epochs: int, bar: Callable[[int, int], None]) -> Row:
    """The DDP script; it reports each epoch, and its figures at the end."""
    launch = [*EVENSTEP, "--processes", str(ranks), "--run", str(folder)]
    with Job([*launch, str(BY_HAND), "--epochs", str(epochs)], folder) as job:
        while job.running():
            bar(job.printed().count(": accuracy"), epochs)
        job.check()
        printed = job.printed()
    bar(epochs, epochs)
    result = json.loads(next(line for line in printed.splitlines() if line.lstrip().startswith("{")))
    return Row(layout=plural(ranks), **result)


class Job:
    """A command in a process of its own, killed on leaving if it is still there. Its output goes to a file."""

    def __init__(self, command: list[str], run: Path) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self._output = tempfile.TemporaryFile(mode="w+", dir=run.parent)
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._output.close()

    def running(self) -> bool:
        """Whether it still runs, after a short wait for its end."""
        try:
            self._process.wait(0.05)
        except subprocess.TimeoutExpired:
            return True
        return False

    def code(self) -> int:
        return self._process.wait()

    def printed(self) -> str:
        return os.pread(self._output.fileno(), 1 << 24, 0).decode(errors="replace")

    def check(self) -> None:
        if self.code() != 0:
            raise Failed(f"{' '.join(map(str, self._process.args))} ended with {self.code()}:\n{self.printed()}")  # type: ignore[arg-type]


def evenstep_run(paths: RunPaths, processes: int) -> list[str]:
    return [*EVENSTEP, "--processes", str(processes), "--run", str(paths.root)]


def done_of_total(paths: RunPaths) -> tuple[int, int]:
    """How many steps the run has done, and how many there are; 0, 0 before its loop begins."""
    done = total = 0
    if paths.events(0).exists():
        for event in read_events(paths.events(0)):
            total = event["steps"] if event["kind"] == "loop" else total
            done = event["step"] if event["kind"] == "step" else done
    return done, total


def pid_of(paths: RunPaths, rank: int) -> int:
    """The training process of this rank, as the launcher recorded it."""
    started = [event for event in read_events(paths.launcher_events) if event["kind"] == "started"]
    return int(started[-1]["pids"][str(rank)])


def row_of(paths: RunPaths, layout: str) -> Row:
    """What a finished run left in its directory. Steps a second: from the (last) start of the loop to its end."""
    begun, first, speed = 0.0, 0, 0.0
    for event in read_events(paths.events(0)):
        if event["kind"] == "loop":
            begun, first = event["time"], event["first"]
        if event["kind"] == "finished":
            speed = (event["step"] - first) / (event["time"] - begun)
    finished = json.loads(paths.finished.read_text())
    accuracies = [row["values"]["accuracy"] for row in read_metrics(paths.metrics_jsonl) if "accuracy" in row["values"]]
    identity = read_identity(paths.identity)
    assert identity is not None
    return Row(layout, int(str(identity["global_batch"])), speed, accuracies[-1], finished["fingerprint"])


def show(console: Console, title: str, rows: list[Row]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("layout")
    for name in ("batch", "steps/s", "accuracy", "fingerprint"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.layout,
            str(row.global_batch),
            f"{row.steps_per_second:.1f}",
            f"{100 * row.accuracy:.2f} %",
            row.fingerprint,
        )
    console.print(table)


def plural(processes: int) -> str:
    return f"{processes} process{'es' if processes != 1 else ''}"


if __name__ == "__main__":
    sys.exit(main())
