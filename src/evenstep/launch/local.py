"""Start a script on this host through the fork server, carry its output, and see it to its end."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenstep.environment import LAUNCH, Settings
from evenstep.errors import MachineError, UsageError
from evenstep.launch import fork_server, kinship
from evenstep.launch.failures import Exit, Failure, ended_before
from evenstep.launch.job import Job, Part, Script, all_of_it, to_json
from evenstep.launch.others import Fault, Others, doing_text
from evenstep.launch.outcome import Outcome, Tell
from evenstep.launch.output import Log, Say, Stream, open_streams, resize
from evenstep.launch.port import reserve_port
from evenstep.launch.prepare import environment_for, locked, prepare_logs, see_descriptors
from evenstep.launch.restarts import Restarts, Verdict
from evenstep.launch.standstill import AFTER, Standstill
from evenstep.launch.taking import Echo, signals_to
from evenstep.launch.undo import taken_back_if_refused
from evenstep.launch.warm import Server, Warm, spared
from evenstep.record.activity import Doing, read_activity
from evenstep.record.events import EventWriter
from evenstep.record.paths import RunPaths
from evenstep.record.uncaught import error_path, read_uncaught

_VERDICT = 3.0  # seconds in which it is learned whose failure was the first, of several hosts
_LAST_WORDS = 0.5  # seconds to read what is left in the pipes, once every process has ended
_TICK = 0.2  # seconds
_LOOK = 1.0  # seconds between two looks at what the processes are doing
_LATE = 5.0  # seconds after a request to stop until it is told who has not stopped yet
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGWINCH, signal.SIGTSTP)
_LAUNCHER_RANK = -1  # in the launcher's own events


@dataclass(frozen=True)
class Work:
    """What this host is to run, and how it is shown."""

    script: Script
    processes: int
    settings: Settings
    show: str  # whose output reaches the terminal: first, all or none
    say: Say


def run_here(work: Work, paths: RunPaths, *, made: Sequence[Path], restarts: int, tell: Tell) -> int:
    """`run_alone`, after a failure again, up to `restarts` times. `tell` is told how each start ended; what it returns
    for the last is returned."""
    again = Restarts(restarts, f"{work.processes} process{'' if work.processes == 1 else 'es'}")
    while True:
        outcome = run_alone(work, paths, made=made, restart=again.done, restarts=restarts)
        verdict = Verdict(False)
        failure = outcome.failure
        if outcome.stopped_by is None and (failure is not None or outcome.server_died is not None):
            doing = read_activity(paths.activity(0 if failure is None else failure.exit.rank))
            step = failed_step(doing, foreign=outcome.foreign)
            verdict = again.decide(paths, step, lasting=failure is not None and failure.lasting)
        code = tell(outcome, paths, verdict)
        if not verdict.again:
            return code
        made = ()


def run_alone(
    work: Work,
    paths: RunPaths,
    *,
    made: Sequence[Path],
    warm: Warm | None = None,
    tick: Callable[[], None] | None = None,
    restart: int = 0,
    restarts: int = 0,
) -> Outcome:
    """Do work that no other host has to do with. See `run_part`."""
    port, keeper = reserve_port()
    with keeper, locked(paths) as held:
        part = all_of_it(work.processes, port, secrets.token_hex(8), restart=restart, restarts=restarts)
        return run_part(work, paths, part, None, held=(held,), made=made, warm=warm, tick=tick)


def run_part(
    work: Work,
    paths: RunPaths,
    part: Part,
    others: Others | None,
    *,
    held: tuple[int, ...],
    made: Sequence[Path],
    warm: Warm | None = None,
    tick: Callable[[], None] | None = None,
) -> Outcome:
    """Do this host's part of a launch, and wait for its end (and that of the `others`' parts).

    UsageError before the first process starts, for what cannot work; MachineError if this host does not let us start.
    `made` are folders that were made for this launch, innermost first; after such an error they are removed again,
    if nobody has put anything into them. `held`: descriptors that keep the run directory locked, the hub of this launch
    has one for all hosts. `warm` saves the imports. `tick` is called a few times a second.
    """
    with ExitStack() as stack:
        stack.enter_context(taken_back_if_refused(paths, made))
        see_descriptors(part.processes)
        prepare_logs(paths, part.ranks)
        script = work.script
        logs = [Log(paths.log(rank), f"rank {rank} of {part.world_size}: {script}", work.say) for rank in part.ranks]
        for log in logs:
            stack.callback(log.close)
        streams, outputs = open_streams(logs, first=part.first_rank, show=work.show)
        for stream in streams:
            stack.callback(os.close, stream.source)
        environment = environment_for(replace(work.settings, run=str(paths.root)), part, others)
        backend = work.settings.backend
        job = Job(script, part, str(paths.root), environment, backend, tuple(outputs), held, os.getpid())
        events = EventWriter(paths.node_events(part.node), _LAUNCHER_RANK, on_error=work.say)
        stack.callback(events.close)
        arguments = list(script.arguments)
        events.emit("launch", script=script.name, arguments=arguments, processes=part.processes, tag=part.tag)
        return _Launch(job, others, logs, streams, events, work.say, warm, tick).run()


class _Launch:
    """One fork server from its start to its end, and what became of the processes."""

    def __init__(
        self,
        job: Job,
        others: Others | None,
        logs: Sequence[Log],
        streams: Sequence[Stream],
        events: EventWriter,
        say: Say,
        warm: Warm | None,
        tick: Callable[[], None] | None,
    ) -> None:
        self._job = job
        self._others = others
        self._logs = logs
        self._streams = list(streams)
        self._events = events
        self._say = say
        self._warm, self._tick = warm, tick
        self._exits: list[Exit] = []
        self._frozen: list[int] = []
        self._felled = False  # another host has failed
        self._foreign = False
        self._started = False
        self._done = False
        self._signal: int | None = None
        self._late: float | None = None  # when it is told who has not stopped yet
        self._next_look = 0.0
        self._standstill = Standstill()
        self._echo = Echo()
        self._server: Server | None = None
        self._refusal: UsageError | None = None

    def run(self) -> Outcome:
        kinship.adopt_orphans()  # should the fork server be killed, its processes become ours to end
        with signals_to(self._on_signal, *_SIGNALS):
            if self._others is not None:
                self._others.report(self._doings)
                self._others.watch(self._on_fault)
                self._others.obey(self._on_order)
            events_end = self._start()
            try:
                self._follow(events_end)
            finally:
                os.close(events_end)
                server_died = self._end()
            self._part_from_others(server_died)
        if self._refusal is not None:
            raise self._refusal
        uncaught = (read_uncaught(error_path(self._job.paths().log(rank))) for rank in self._job.part.ranks)
        return Outcome(
            tuple(self._exits),
            tuple(one for one in uncaught if one),
            self._signal,
            server_died,
            {rank: log.start for rank, log in zip(self._job.part.ranks, self._logs, strict=True)},
            None if self._others is None else self._others.fault,
            tuple(self._frozen),
            None if self._others is None or self._others.fault is None else self._others.verdict,
            self._foreign,
        )

    # ---- other hosts

    def _on_fault(self, fault: Fault) -> None:
        """In a thread of the others': the run has failed somewhere."""
        self._felled = True
        if self._started:
            self._command(fail=True)
        elif self._server is not None:
            self._server.kill()  # it is importing, which can take long

    def _on_order(self, order: Mapping[str, Any]) -> None:
        """In a thread of the others': the launcher that started this one was told to stop."""
        if "stop" in order or "kill" in order:
            os.kill(os.getpid(), order.get("stop", signal.SIGINT))

    def _doings(self) -> dict[int, Doing]:
        """In a thread of the others': what the processes are doing."""
        paths = self._job.paths()
        seen = {rank: read_activity(paths.activity(rank)) for rank in self._job.part.ranks}
        return {rank: doing for rank, doing in seen.items() if doing is not None}

    def _tell(
        self,
        rank: int,
        what: str,
        *,
        code: int = 1,
        secondary: bool = False,
        lasting: bool = False,
        before: str = "",
    ) -> None:
        if self._others is None:
            return
        doing = read_activity(self._job.paths().activity(rank))
        self._others.tell(
            Fault(
                self._job.part.node,
                self._others.host,
                what,
                rank,
                log=str(self._job.paths().log(rank)),
                exit_code=code,
                secondary=secondary,
                lasting=lasting,
                doing="" if doing is None else doing_text({rank: doing}),
                step=failed_step(doing, foreign=self._foreign),
                before=before,
            )
        )

    def _part_from_others(self, server_died: str | None) -> None:
        """Once all has ended here: tell the other hosts, and wait until it is known how they ended."""
        others = self._others
        if others is None:
            return
        in_order = bool(self._exits) and all(one.orderly for one in self._exits)
        if self._refusal is not None or (self._signal is not None and not in_order):
            return  # leaving tells them
        if server_died is not None:
            what = f"and all others there were ended: their parent, the fork server, {server_died}"
            self._tell(self._job.part.first_rank, what, code=4)
        if any(one.failed for one in self._exits) or server_died is not None:
            others.wait(_VERDICT)
            return
        others.done(self._exits[0].code - 128 if in_order else None)
        while not others.wait(0.1) and (self._signal is None or in_order):
            pass

    def _start(self) -> int:
        """Start the fork server; its events are read from the returned descriptor."""
        job = os.memfd_create("evenstep-job")
        os.write(job, to_json(self._job))
        events_end, events = os.pipe()
        outputs = {descriptor for pair in self._job.outputs for descriptor in pair}
        passed = {job, events, *self._job.held, *outputs}
        environment = {**self._job.environment, **fork_server.QUIET, LAUNCH: self._job.part.tag}
        if self._job.part.processes == 1:
            environment = {**self._job.environment, LAUNCH: self._job.part.tag}
        try:
            while self._warm is not None and not self._warm.wait(_TICK):
                if self._is_over:
                    return events_end
            if self._warm is not None and self._warm.refusal() is None:
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
        if self._is_over:
            self._server.kill()
        return events_end

    @property
    def _is_over(self) -> bool:
        """Whether this host is to end whatever it has begun."""
        return self._felled or self._signal is not None

    def _follow(self, events_end: int) -> None:
        """Carry output and take in events until the fork server is done, then what is left in the pipes."""
        with selectors.DefaultSelector() as selector:
            selector.register(events_end, selectors.EVENT_READ, None)
            for stream in self._streams:
                selector.register(stream.source, selectors.EVENT_READ, stream)
            pending = b""
            last: float | None = None
            while selector.get_map() and (last is None or time.monotonic() < last):
                wait = _LOOK if last is None else max(0.0, last - time.monotonic())
                self._tell_who_waits()
                if self._tick is not None:
                    self._tick()
                    wait = min(_TICK, wait)
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

    def _tell_who_waits(self) -> None:
        """Of processes that do not go on: where each is."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK
        ended = {one.rank for one in self._exits}
        doings = {rank: doing for rank, doing in self._doings().items() if rank not in ended}
        if self._late is not None and now > self._late and doings:
            self._late = None
            name = signal.Signals(self._signal or signal.SIGINT).name
            self._say(f"{_LATE:.0f} s after {name}: {doing_text(doings)}; once more ends all at once")
        if self._standstill.look(doings, now):
            self._say(f"nothing has moved for {AFTER:.0f} s: {doing_text(doings)}")

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "exit":
            one = Exit(**event)
            self._exits.append(one)
            if self._others is not None and one.code == 0 and not one.stopped:
                self._others.ended(one.rank)
            if one.failed and not one.stopped:
                error = read_uncaught(error_path(self._job.paths().log(one.rank)))
                said = one.describe() if error is None else f"failed: {error.type}: {error.message}"
                self._tell(
                    one.rank,
                    said,
                    code=1 if error is None else error.exit_code,
                    secondary=error is not None and error.secondary,
                    lasting=Failure(one, error).lasting,
                    before=ended_before(self._exits, Failure(one, error)),
                )
            self._events.emit("exit", of_rank=event["rank"], code=event["code"], stopped=event["stopped"])
        elif kind == "started":
            self._started = True
            for log in self._logs:
                log.begin()
            self._events.emit("started", pids=event["pids"])
            if self._signal is not None:
                self._command(stop=self._signal)
            elif self._felled:
                self._command(fail=True)
        elif kind == "frozen":
            self._frozen.append(event["rank"])
            self._tell(
                event["rank"],
                f"stands still: somebody stopped it (SIGSTOP) {event['seconds']:.0f} s ago",
            )
        elif kind == "done":
            self._done = True
            if event["left"] and self._signal is None and not any(one.failed for one in self._exits):
                many = f"{len(event['left'])} processes" if len(event["left"]) > 1 else "a process"
                self._say(f"ended {many} that the script left running: {'; '.join(event['left'])}")
        elif kind == "refused":
            self._refusal = UsageError(event["message"], do=event["do"])
        elif kind == "plain":
            self._events.emit("plain_start", reason=event["reason"])
            self._say(
                f"{event['reason']}, so no process can be forked from one that has it: each imports all for itself, "
                "and the start takes longer; nothing else changes. To avoid it, import it in the function that uses it"
            )
        elif kind == "foreign":
            self._foreign = True
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
        if number == int(signal.SIGTSTP) and self._job.part.nodes > 1:
            with suppress(OSError):
                os.write(2, b"\nevenstep: Ctrl-Z is for one host: the others would take this one for lost\n")
            return
        if number == int(signal.SIGTSTP):  # Ctrl-Z, and `fg` after it
            self._command(tell=int(signal.SIGSTOP))
            os.kill(os.getpid(), signal.SIGSTOP)
            self._command(tell=int(signal.SIGCONT))
            return
        if self._echo.is_one(number):
            return
        again = self._signal is not None
        self._signal = number if self._signal is None else self._signal
        if not self._started:
            if self._server is not None:
                self._server.kill()  # it is importing; its processes, if there are some by now, die with it
        elif again:
            self._command(kill=True)
        else:
            self._late = time.monotonic() + _LATE
            self._command(stop=int(number))
            with suppress(OSError):
                os.write(2, b"\nevenstep: stopping (once more: at once)\n" if number == signal.SIGINT else b"")

    def _command(self, **command: object) -> None:
        if self._started and self._server is not None and self._server.stdin is not None:
            with suppress(OSError, ValueError):  # it is gone, and its pipe may be closed
                os.write(self._server.stdin.fileno(), json.dumps(command).encode() + b"\n")

    def _sweep(self) -> None:
        kinship.sweep(self._job.part.tag, spare=spared())

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
        if self._signal is not None or (self._felled and not self._started):
            return None
        return Exit(0, code, stopped=False, time=time.time()).describe()


def failed_step(doing: Doing | None, *, foreign: bool) -> int | None:
    """The step of a failure, 0 before the first; None for a script that does not use evenstep."""
    return None if foreign else 0 if doing is None else doing.step
