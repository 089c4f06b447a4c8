"""Slurm: the nodes of an allocation, a launcher on each of them, and a job's life from submission to its end."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from evenstep.environment import task_counts
from evenstep.errors import MachineError, UsageError
from evenstep.launch.hosts.hostfile import Host

# These ask for tasks or a part of the node, and srun would read them from the job's environment.
_OF_THE_JOB = (
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_CORE", "SLURM_GPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_DISTRIBUTION",
    "SLURM_HOSTFILE", "SLURM_EXACT", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_LABELIO",
)  # fmt: skip
_SRUN = (
    "srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--overlap", "--cpu-bind=none", "--mpi=none",
    "--export=ALL", "--unbuffered",
)  # fmt: skip
_OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip
_TIME_LIMIT = r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|-1|infinite|unlimited"
_NEAR = timedelta(minutes=10)
_LOOK = 0.5  # seconds between two looks at the log
_SLOWEST = 5.0  # seconds between two questions to the controller, when nothing has changed for long
_BATCH_AND_INTERACTIVE = 4294967290  # the numbers of such steps begin here


def allocation(environ: Mapping[str, str]) -> list[Host] | None:
    """The nodes of the Slurm job (or srun step) that this process belongs to; None: it belongs to none.

    A node's number of processes is that of its tasks where the job has asked for several, else it is left open.
    """
    if "SLURM_JOB_ID" not in environ or "SLURM_JOB_NODELIST" not in environ:
        return None
    in_step = "SLURM_STEP_NUM_TASKS" in environ and int(environ.get("SLURM_STEP_ID", "0")) < _BATCH_AND_INTERACTIVE
    if in_step and "SLURM_STEP_NODELIST" in environ:
        names, counts = environ["SLURM_STEP_NODELIST"], "SLURM_STEP_TASKS_PER_NODE"
    else:  # without SLURM_NTASKS the job named no tasks, and Slurm may count CPUs
        names, counts = environ["SLURM_JOB_NODELIST"], "SLURM_TASKS_PER_NODE" if "SLURM_NTASKS" in environ else ""
    found = [names] if re.fullmatch(r"[^,\[]+", names) else _names(names)
    tasks = task_counts(environ, counts) if counts in environ else [1] * len(found)
    several = max(tasks) > 1
    return [Host(name, count if several else None) for name, count in zip(found, tasks, strict=True)]


def _names(nodes: str) -> list[str]:
    """Of host[02-04,7],other."""
    if shutil.which("scontrol") is None:
        raise UsageError(
            f"this is in a Slurm job on several nodes ({nodes}), and Slurm's commands (scontrol, srun) are not here",
            do="start it where they are, outside of a container; or on this node alone: --hosts localhost:4",
        )
    return _ask("scontrol", "show", "hostnames", nodes).split()


def by_srun(host: Host) -> list[str]:
    """One task on this node, beside what runs there, with all that the job has of it."""
    forget = [word for name in _OF_THE_JOB for word in ("-u", name)]
    return ["env", *forget, *_SRUN, f"--nodelist={host.name}", "sh", "-c"]


@dataclass(frozen=True)
class Job:
    """A batch job, as Slurm shows it."""

    number: str
    state: str  # RUNNING, ...
    reason: str  # why it waits
    nodes: str
    exit_code: int
    ends: datetime | None  # at its time limit; None: it has none, or does not run

    @property
    def is_near_its_end(self) -> bool:
        """Whether little time is left of what it was given."""
        return self.ends is not None and self.ends - datetime.now() < _NEAR

    @property
    def is_over(self) -> bool:
        return self.state in _OVER

    def __str__(self) -> str:
        where = f" on {self.nodes}" if self.state == "RUNNING" else ""
        why = f" ({self.reason})" if self.state == "PENDING" and self.reason not in ("None", "") else ""
        return f"job {self.number} is {self.state.lower().replace('_', ' ')}{where}{why}"


def is_time_limit(text: str) -> bool:
    """Whether sbatch takes it: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS, or a word for no limit."""
    return re.fullmatch(_TIME_LIMIT, text, re.IGNORECASE | re.ASCII) is not None


def submit(script: str) -> str:
    """Submit a batch script; the job's number."""
    said = _ask("sbatch", "--parsable", stdin=script)
    return said.strip().splitlines()[-1].partition(";")[0]


def show(number: str) -> Job | None:
    """The job as it is now; None: Slurm has forgotten it."""
    try:
        said = _ask("scontrol", "show", "job", "-o", number)
    except MachineError as error:
        if "Invalid job id" in error.message:
            return None
        raise

    def value(name: str) -> str:
        match = re.search(rf"(?:^|\s){name}=(\S*)", said)
        return "" if match is None else match[1]

    ends = None
    with suppress(ValueError):  # Unknown
        ends = datetime.fromisoformat(value("EndTime"))
    code = int(value("ExitCode").partition(":")[0] or 0)
    return Job(number, value("JobState"), value("Reason"), value("NodeList"), code, ends)


def follow(number: str, log: Path, show_log: Callable[[bytes], object], say: Callable[[str], None]) -> Job | None:
    """Show what the job writes, and say how it fares, until it is over. None: Slurm has forgotten it."""
    job: Job | None = None
    said = ""
    over = 0  # how often it was seen to be: a requeued job passes such states for a moment
    read = 0
    pause, ask_at = _LOOK, 0.0
    while True:
        if time.monotonic() >= ask_at:
            try:
                job = show(number)
                line = str(job)
            except MachineError as error:  # the controller is busy, or restarts
                line = error.message.partition("\n")[0]
            else:
                if job is None:
                    return None
            over = over + 1 if job is not None and job.is_over else 0
            pause = _LOOK if line != said else min(pause * 1.5, _SLOWEST)
            if line != said and not over:
                say(line)
            said, ask_at = line, time.monotonic() + pause
        data = _from(log, read)
        read += len(data)
        if data:
            show_log(data)
        elif over > 1:
            return job
        time.sleep(_LOOK)


def _from(path: Path, start: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except OSError:
        return b""  # it is not there yet


def requeue(number: str) -> None:
    """Have the job start again. MachineError where Slurm does not let us."""
    _ask("scontrol", "requeue", number)


def _ask(*words: str, stdin: str | None = None) -> str:
    """What a Slurm command says. UsageError where it is not there, MachineError where it fails."""
    if shutil.which(words[0]) is None:
        raise UsageError(f"there is no {words[0]} on this host", do="start it where Slurm's commands are installed")
    done = subprocess.run(words, input=stdin or "", capture_output=True, text=True)
    if done.returncode != 0:
        raise MachineError(f"{words[0]} failed: {done.stderr.strip() or done.stdout.strip()}", do="see what it says")
    return done.stdout
