"""Start a script on this host through the fork server, carry its output, and see it to its end."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep.environment import LAUNCH, Settings, write_settings
from evenstep.errors import EvenstepError, MachineError, UsageError
from evenstep.launch import fork_server, kinship
from evenstep.launch.failures import Exit, Failure, Uncaught, error_path, first_failure, read_uncaught
from evenstep.launch.job import Job, to_json
from evenstep.launch.output import Log, Stream, open_streams, resize
from evenstep.launch.port import reserve_port
from evenstep.launch.undo import take_back
from evenstep.launch.warm import Server, Warm, spared
from evenstep.record.events import EventWriter
from evenstep.record.paths import RunPaths

_LAST_WORDS = 0.5  # seconds to read what is left in the pipes, once every process has ended
_TICK = 0.2  # seconds
_LOCK_PATIENCE = 3.0  # seconds for a killed launcher's processes to be gone
_LAUNCHER_RANK = -1  # in the launcher's own events

Say = Callable[[str], None]


@dataclass(frozen=True)
class Script:
    """What to run, as the user wrote it."""

    name: str
    as_module: bool
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        """As on a command line."""
        return shlex.join([*(["-m"] if self.as_module else []), self.name, *self.arguments])


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    exits: tuple[Exit, ...]  # in the order in which they were seen
    uncaught: tuple[Uncaught, ...]
    signal: int | None  # the one that the launcher itself got
    server_died: str | None  # how the fork server ended, if before its time
    log_starts: tuple[int, ...]  # by rank: bytes that the log held before this launch's output

    @property
    def failure(self) -> Failure | None:
        """The failure that led, None if every process ended well."""
        return first_failure(self.exits, self.uncaught)


def run_local(
    script: Script,
    paths: RunPaths,
    processes: int,
    settings: Settings,
    *,
    made: Sequence[Path],
    show: str,
    say: Say,
    warm: Warm | None = None,
    tick: Callable[[], None] | None = None,
) -> Outcome:
    """Run `script` as `processes` processes of this host and wait for their end.

    UsageError before the first process starts, for what cannot work; MachineError if this host does not let us start.
    `made` are folders that were made for this launch, innermost first; after such an error they are removed again,
    if nobody has put anything into them. `show`: whose output reaches the terminal: first, all or none. `say`
    prints one of our own lines for the user. `warm` saves the imports. `tick` is called a few times a second.
    """
    tag = secrets.token_hex(8)
    with ExitStack() as stack:
        lock = _lock(paths)
        stack.callback(os.close, lock)
        stack.push(lambda kind, error, trace: _take_back_refused(error, paths, made))
        port, keeper = reserve_port()
        stack.enter_context(keeper)
        _prepare_logs(paths, processes)
        logs = [Log(paths.log(rank), f"rank {rank} of {processes}: {script}", say) for rank in range(processes)]
        for log in logs:
            stack.callback(log.close)
        streams, outputs = open_streams(logs, show=show)
        for stream in streams:
            stack.callback(os.close, stream.source)
        job = Job(
            script=script.name,
            as_module=script.as_module,
            arguments=script.arguments,
            run=str(paths.root),
            processes=processes,
            environment=_environment(settings, processes),
            tag=tag,
            port=port,
            backend=settings.backend,
            outputs=tuple(outputs),
            held=(lock,),
            launcher=os.getpid(),
        )
        events = EventWriter(paths.launcher_events, _LAUNCHER_RANK, on_error=say)
        stack.callback(events.close)
        events.emit("launch", script=script.name, arguments=list(script.arguments), processes=processes, tag=tag)
        return _Launch(job, logs, streams, events, say, warm, tick).run()


def _take_back_refused(error: BaseException | None, paths: RunPaths, made: Sequence[Path]) -> None:
    if isinstance(error, EvenstepError):  # all of them come before the first process
        take_back(paths, made)


class _Launch:
    """One fork server from its start to its end, and what became of the processes."""

    def __init__(
        self,
        job: Job,
        logs: Sequence[Log],
        streams: Sequence[Stream],
        events: EventWriter,
        say: Say,
        warm: Warm | None,
        tick: Callable[[], None] | None,
    ) -> None:
        self._job = job
        self._logs = logs
        self._streams = list(streams)
        self._events = events
        self._say = say
        self._warm, self._tick = warm, tick
        self._exits: list[Exit] = []
        self._started = False
        self._done = False
        self._signal: int | None = None
        self._server: Server | None = None
        self._refusal: UsageError | None = None

    def run(self) -> Outcome:
        kinship.adopt_orphans()  # should the fork server be killed, its processes become ours to end
        with _signals_to(self._on_signal):
            events_end = self._start()
            try:
                self._follow(events_end)
            finally:
                os.close(events_end)
                server_died = self._end()
        if self._refusal is not None:
            raise self._refusal
        uncaught = (read_uncaught(error_path(self._job.paths().log(rank))) for rank in range(self._job.processes))
        return Outcome(
            tuple(self._exits),
            tuple(one for one in uncaught if one),
            self._signal,
            server_died,
            tuple(log.start for log in self._logs),
        )

    def _start(self) -> int:
        """Start the fork server; its events are read from the returned descriptor."""
        job = os.memfd_create("evenstep-job")
        os.write(job, to_json(self._job))
        events_end, events = os.pipe()
        outputs = {descriptor for pair in self._job.outputs for descriptor in pair}
        passed = {job, events, *self._job.held, *outputs}
        environment = {**self._job.environment, **fork_server.QUIET, LAUNCH: self._job.tag}
        if self._job.processes == 1:
            environment = {**self._job.environment, LAUNCH: self._job.tag}
        try:
            if self._warm is not None:
                self._server = self._warm.start(job, events, sorted(outputs), self._job.held)
            else:
                self._server = subprocess.Popen(
                    fork_server.command("server", job, events),
                    stdin=subprocess.PIPE,
                    env=environment,
                    pass_fds=tuple(passed),
                    start_new_session=True,  # Ctrl-C is ours to pass on
                )
        except OSError as error:
            raise MachineError(f"cannot start a process: {error}", do="see `ulimit -u` and free memory") from error
        finally:
            for descriptor in {job, events, *outputs}:
                os.close(descriptor)
        if self._signal is not None:
            self._server.kill()
        return events_end

    def _follow(self, events_end: int) -> None:
        """Carry output and take in events until the fork server is done, then what is left in the pipes."""
        with selectors.DefaultSelector() as selector:
            selector.register(events_end, selectors.EVENT_READ, None)
            for stream in self._streams:
                selector.register(stream.source, selectors.EVENT_READ, stream)
            pending = b""
            last: float | None = None
            while selector.get_map() and (last is None or time.monotonic() < last):
                wait = None if last is None else max(0.0, last - time.monotonic())
                if self._tick is not None:
                    self._tick()
                    wait = min(_TICK, _TICK if wait is None else wait)
                for key, _ in selector.select(wait):
                    if key.data is not None:
                        if not key.data.carry():
                            selector.unregister(key.fd)
                        continue
                    data = os.read(events_end, 1 << 16)
                    if not data:  # the fork server is gone, and by now so are all that it started
                        selector.unregister(events_end)
                        if not self._done:
                            self._sweep()
                        last = time.monotonic() + _LAST_WORDS
                    *lines, pending = (pending + data).split(b"\n")
                    for line in lines:
                        self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "exit":
            self._exits.append(Exit(**event))
            self._events.emit("exit", of_rank=event["rank"], code=event["code"], stopped=event["stopped"])
        elif kind == "started":
            self._started = True
            for log in self._logs:
                log.begin()
            self._events.emit("started", pids=event["pids"])
            if self._signal is not None:
                self._command(stop=self._signal)
        elif kind == "done":
            self._done = True
            if event["left"] and self._signal is None and not any(one.failed for one in self._exits):
                many = f"{len(event['left'])} processes" if len(event["left"]) > 1 else "a process"
                self._say(f"ended {many} that the script left running: {'; '.join(event['left'])}")
        elif kind == "refused":
            self._refusal = UsageError(event["message"], do=event["do"])
        elif kind == "plain":
            self._events.emit("plain_start", reason=event["reason"])
            self._say(f"{event['reason']}, so every process imports for itself; the start takes longer")
        elif kind == "foreign":
            self._say(
                "the script does not use evenstep: its sums, sample order and checkpoints are its own; "
                "starting, stopping and logs are evenstep's"
            )

    def _on_signal(self, number: int) -> None:
        """Runs between two instructions of anything above, also while a terminal that stands still is written to."""
        if number == int(signal.SIGWINCH):
            resize(self._streams)
            self._command(tell=int(number))
            return
        if number == int(signal.SIGTSTP):  # Ctrl-Z, and `fg` after it
            self._command(tell=int(signal.SIGSTOP))
            os.kill(os.getpid(), signal.SIGSTOP)
            self._command(tell=int(signal.SIGCONT))
            return
        again = self._signal is not None
        self._signal = number if self._signal is None else self._signal
        if not self._started:
            if self._server is not None:
                self._server.kill()  # it is importing; its processes, if there are some by now, die with it
        elif again:
            self._command(kill=True)
        else:
            self._command(stop=int(number))
            with suppress(OSError):
                os.write(2, b"\nevenstep: stopping (once more: at once)\n" if number == signal.SIGINT else b"")

    def _command(self, **command: object) -> None:
        if self._started and self._server is not None and self._server.stdin is not None:
            with suppress(OSError):
                os.write(self._server.stdin.fileno(), json.dumps(command).encode() + b"\n")

    def _sweep(self) -> None:
        kinship.sweep(self._job.tag, spare=spared())

    def _end(self) -> str | None:
        """See that nothing is left; how the fork server ended, if before its time."""
        server = self._server
        if server is None:
            return None
        assert server.stdin is not None
        server.stdin.close()
        try:
            code = server.wait(timeout=2)
        except subprocess.TimeoutExpired:
            server.kill()
            code = server.wait()
        if self._done or self._refusal is not None:
            return None
        self._sweep()
        if self._signal is not None:
            return None
        return Exit(0, code, stopped=False, time=time.time()).describe()


@contextmanager
def _signals_to(handler: Callable[[int], None]) -> Iterator[None]:
    """Have a terminal's signals call `handler`; those that were ignored (nohup) stay ignored."""
    before: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH, signal.SIGTSTP):
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, lambda received, _: handler(received))
    try:
        yield
    finally:
        for caught, was in before.items():
            signal.signal(caught, was)


def _environment(settings: Settings, processes: int) -> Mapping[str, str]:
    """What every process gets: ours with the options' variables."""
    environment = {**os.environ, **write_settings(settings)}
    if settings.threads is not None:
        environment["OMP_NUM_THREADS"] = str(settings.threads)
    elif processes > 1:
        # As torchrun does: else every process would take all cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _lock(paths: RunPaths) -> int:
    """Keep other launchers out of the run directory for as long as the descriptor is open, here or in the server."""
    descriptor = os.open(paths.root, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + _LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise UsageError(
                    f"run directory {paths.root} is in use by another `evenstep run`",
                    do="wait for it, stop it, or give another --run DIR",
                ) from None
            time.sleep(0.05)
        except OSError:
            return descriptor  # a file system without locks


def _prepare_logs(paths: RunPaths, processes: int) -> None:
    """Make the logs' folder, see that the disk takes something, and remove what an earlier start said of its end."""
    folder = paths.log(0).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.error.json"):
            old.unlink()
        probe = folder / f"probe-{os.getpid()}"
        try:
            with open(probe, "wb") as file:
                file.write(b"\0" * (1 << 16))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(
            f"cannot write into the run directory {paths.root}: {error.strerror}",
            do="free space there, or give another --run DIR",
        ) from error
