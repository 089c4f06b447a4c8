"""The fork server: imports once what every process needs, forks the processes, and is their parent.

A process of its own, so that the command line stays light. It lives between the launcher, whose end it notices at its
pipe, and the training processes, which the kernel kills when it ends.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from evenstep.launch import imports, kinship
from evenstep.launch.job import Job, from_json
from evenstep.launch.preload import preload
from evenstep.launch.script import run_and_leave
from evenstep.launch.supervise import watch

# Started as `python -c BOOT package-root role job-descriptor events-descriptor [rank]`: with -c, unlike -m, nothing
# of the current directory can be imported by mistake before the first entry of the path is gone.
BOOT = (
    "import sys; bare = frozenset(sys.modules); sys.flags.safe_path or sys.path.pop(0); "
    "root = sys.argv[1]; root in sys.path or sys.path.append(root); "
    "from evenstep.launch.fork_server import main; main(bare, *sys.argv[2:])"
)

# So that libraries start no threads when they are imported, and counting GPUs starts no CUDA.
QUIET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator; pandas and scikit-learn import it
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


def command(role: str, *descriptors: int) -> list[str]:
    """The command line of a process that starts in `main`."""
    root = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-c", BOOT, root, role, *map(str, descriptors)]


def title(run: str) -> str:
    """What `ps` shows of the fork server for this run directory."""
    return f"evenstep: fork server for {run}"


def main(bare: Collection[str], role: str, *numbers: str) -> None:
    """Begin as the server, as one that only starts interpreters ("plain"), as a training process ("process"), or as the
    one that servers are forked off ("warm")."""
    given = dict(os.environ)
    job_descriptor, other, *rest = map(int, numbers)
    job = from_json(_read_all(job_descriptor))
    if role == "process":
        os.close(job_descriptor)
        os.set_inheritable(other, False)
        _name_process(["python", *job.script.words])
        run_and_leave(job, rank=rest[0], bare=bare, failed=other)
    if role == "warm":
        os.close(job_descriptor)
        _serve_servers(job, bare, given, other)
        return
    _name_process([title(job.run)])
    kinship.die_with(job.launcher)  # until there are processes to clean up after
    kinship.adopt_orphans()
    emit = _emitter(other)
    if role == "server":
        _prepare(job, emit, job_descriptor, other)
    _serve(job, bare, _set_since(given), emit, other, job_descriptor, fork=role == "server")


def _prepare(job: Job, emit: Callable[..., None], job_descriptor: int, events: int) -> None:
    """Look at the script, refuse what cannot work, and import; or become a server that starts processes plainly."""
    found = _scan(job)
    if imports.is_foreign(found):
        emit("foreign")
    if job.backend not in (None, "auto"):
        refusal = _refuse_backend(str(job.backend), job.part.processes)
        if refusal is not None:
            emit("refused", message=refusal[0], do=refusal[1])
            sys.exit(0)
    reason = None
    if job.part.processes > 1:
        reason = preload(_names(found))
        if reason is not None:
            emit("plain", reason=reason)
    if job.part.processes == 1 or reason is not None:
        # One process gains nothing from a fork. An exec ends all threads; pid, pipes and orphans stay ours.
        os.set_inheritable(job_descriptor, True)
        os.set_inheritable(events, True)
        sys.stdout.flush()
        environment = {**job.environment, "EVENSTEP_LAUNCH": job.part.tag}
        os.execve(sys.executable, command("plain", job_descriptor, events), environment)


def _scan(job: Job) -> imports.Imports:
    script = job.script
    return imports.scan_module(script.name, Path.cwd()) if script.as_module else imports.scan_script(Path(script.name))


def _names(found: imports.Imports) -> list[str]:
    """What is imported once for all processes."""
    return [*found.installed, *(["torch", "evenstep"] if found.uses_evenstep else [])]


def _serve(
    job: Job,
    bare: Collection[str],
    set_since: Mapping[str, str],
    emit: Callable[..., None],
    events: int,
    job_descriptor: int,
    *,
    fork: bool,
) -> None:
    """Start the processes and watch them to their end. Without `fork`, each in an interpreter of its own.

    `set_since`: what imports have added to the environment.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    failed, fail = os.pipe2(os.O_CLOEXEC)
    gc.freeze()  # so that a collection in a process does not copy every page that it shares
    outputs = {descriptor for pair in job.outputs for descriptor in pair}
    private = {woken, wake, failed, events, job_descriptor, *job.held, *outputs}
    me = os.getpid()
    pids: dict[int, int] = {}
    for rank in job.part.ranks:
        pid = os.fork()
        if pid == 0:
            try:
                _become(job, rank, me, private if fork else private - {job_descriptor})
                if not fork:
                    _start_interpreter(job, rank, job_descriptor, fail)
                os.environ.update(set_since)
                _refresh(job)
                _name_process(["python", *job.script.words])
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(4)
            run_and_leave(job, rank, bare, fail)
        with suppress(OSError):
            os.setpgid(pid, pid)  # here too: whoever comes first
        pids[pid] = rank
    for descriptor in outputs:
        os.close(descriptor)  # so that an output ends with the last process that has it
    for number in (signal.SIGTERM, signal.SIGUSR1):  # Slurm sends them to every process
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    os.kill(me, signal.SIGCHLD)  # for those that ended before
    emit("started", pids={str(rank): pid for pid, rank in pids.items()})
    kinship.outlive_parent()  # from now on the end of the launcher's pipe says so, and there is more to do
    watch(job, pids, commands=0, failed=failed, woken=woken, emit=emit)


def _set_since(given: Mapping[str, str]) -> dict[str, str]:
    """What imports have added to the environment: some libraries set variables then, and read them later."""
    return {name: value for name, value in os.environ.items() if given.get(name) != value}


def _serve_servers(job: Job, bare: Collection[str], given: Mapping[str, str], end: int) -> None:
    """Import, then fork fork servers as asked (see warm.py), until the launcher is gone. `given`: the environment."""
    kinship.die_with(job.launcher)
    found = _scan(job)
    plain = preload(_names(found))
    since = _set_since(given)
    asked = socket.socket(fileno=end)
    asked.send(json.dumps({"foreign": imports.is_foreign(found), "plain": plain}).encode())
    while True:
        said, descriptors, _, _ = socket.recv_fds(asked, 1 << 16, 250)
        if not said:
            return
        read, write = os.pipe()
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid != 0:  # the fork server becomes the launcher's child, when this one ends
                os.write(write, str(pid).encode())
                os._exit(0)
            try:
                asked.close()
                os.close(read)
                os.close(write)
                _become_server(job.launcher, json.loads(said), descriptors, bare, since)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            os._exit(4)
        os.close(write)
        pid_text = os.read(read, 64)
        os.close(read)
        os.waitpid(middle, 0)
        for descriptor in descriptors:
            os.close(descriptor)
        asked.send(pid_text)


def _become_server(
    launcher: int,
    names: Mapping[str, list[int]],
    descriptors: list[int],
    bare: Collection[str],
    set_since: Mapping[str, str],
) -> None:
    """Go on as the fork server of one launch. `names`: what the launcher calls the later descriptors."""
    while os.getppid() != launcher:
        if os.getppid() == 1:
            os._exit(4)  # the launcher is gone
        select.select([], [], [], 0.001)
    kinship.die_with(launcher)
    kinship.adopt_orphans()
    os.setsid()
    job_descriptor, events, commands, *rest = descriptors
    os.dup2(commands, 0)
    os.close(commands)
    here = dict(zip([*names["outputs"], *names["held"]], rest, strict=True))
    job = from_json(_read_all(job_descriptor))
    job = replace(
        job,
        outputs=tuple((here[out], here[err]) for out, err in job.outputs),
        held=tuple(here[one] for one in job.held),
    )
    _name_process([title(job.run)])
    emit = _emitter(events)
    _serve(job, bare, set_since, emit, events, job_descriptor, fork=True)


def _become(job: Job, rank: int, server: int, private: Collection[int]) -> None:
    """Turn a fresh fork into the training process of this rank: group, descriptors, environment."""
    os.setpgid(0, 0)
    kinship.die_with(server)
    out, err = job.outputs[rank - job.part.first_rank]
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for descriptor in {nothing, *private} - {0, 1, 2}:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(job.environment_of(rank))


def _start_interpreter(job: Job, rank: int, job_descriptor: int, fail: int) -> NoReturn:
    """Go on in an interpreter of its own."""
    os.set_inheritable(fail, True)
    os.set_inheritable(job_descriptor, True)
    words = [*command("process", job_descriptor, fail), str(rank)]
    os.execve(sys.executable, words, job.environment_of(rank))


def _refresh(job: Job) -> None:
    """What a fork inherits, and an interpreter of its own would have anew: random states, buffering, threads."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
        threads = job.threads()
        if threads is None and job.part.processes == 1:
            threads = len(os.sched_getaffinity(0))  # what torch takes where nothing says otherwise
        if threads is not None and threads != 1:
            torch.set_num_threads(threads)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def _refuse_backend(backend: str, processes: int) -> tuple[str, str] | None:
    """Why this torch, on this host, cannot use the backend, and what to do; None if it can."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        torch = importlib.import_module("torch")
        distributed = importlib.import_module("torch.distributed")
    except ImportError as error:
        return f"--backend {backend} needs torch, which cannot be imported: {error}", "install torch"
    names = ("gloo", "nccl", "mpi", "ucc")
    available = [name for name in names if _has_backend(distributed, name)]
    if backend not in available:
        has = ", ".join(available) or "none"
        return (
            f"--backend {backend}: torch {torch.__version__} was built without it; it has: {has}",
            "leave --backend out: nccl is taken where there are GPUs, else gloo"
            + ("; for nccl install a CUDA build of torch" if backend == "nccl" else ""),
        )
    gpus = torch.cuda.device_count() if backend == "nccl" else processes
    if gpus < processes:
        return (
            f"--backend nccl needs one GPU for each process: {processes} processes, {gpus} visible GPUs",
            f"use --processes {gpus}, or --backend gloo" if gpus else "use --backend gloo",
        )
    return None


def _has_backend(distributed: object, name: str) -> bool:
    available = getattr(distributed, f"is_{name}_available", None)
    return available is not None and bool(available())


def _name_process(words: Sequence[str]) -> None:
    """Let `ps` show this command line: written over our own, which the kernel reads from memory."""
    with suppress(OSError, ValueError, IndexError):
        stat = Path("/proc/self/stat").read_text()
        fields = stat[stat.rindex(")") + 2 :].split()
        start, end = int(fields[45]), int(fields[46])
        room = end - start
        if start > 0 and room > 0:
            text = b"\0".join(os.fsencode(word) for word in words)[: room - 1]
            ctypes.memmove(start, text.ljust(room, b"\0"), room)


def _emitter(descriptor: int) -> Callable[..., None]:
    """What reports an event of this process to the launcher."""

    def emit(event: str, **fields: object) -> None:
        with suppress(BrokenPipeError):  # the launcher is gone; the other pipe's end says so too
            os.write(descriptor, json.dumps({"event": event, **fields}).encode() + b"\n")

    return emit


def _read_all(descriptor: int) -> bytes:
    """All of a file, whatever the offset is: processes that share the descriptor read at the same time."""
    pieces: list[bytes] = []
    while piece := os.pread(descriptor, 1 << 20, sum(map(len, pieces))):
        pieces.append(piece)
    return b"".join(pieces)
