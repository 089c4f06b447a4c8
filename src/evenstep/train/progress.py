"""What a person sees: the plan, once, and then how far the training is."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from evenstep.plan.schedule import Schedule
from evenstep.plan.tree import share

_BAR_SECONDS = 0.25  # between two drawings of the bar
_WINDOW_SECONDS = 30.0  # that samples/s and the time left look back
_MARKS = 64


def plan_lines(
    schedule: Schedule,
    world_size: int,
    *,
    stages: int = 1,
    device: str | None = None,
    backend: str | None = None,
    exact: bool = True,
) -> list[str]:
    """Who computes what, in two lines: the batch and the steps, then the processes' shares and how idle they are.

    With `stages`, so many processes make a pipeline, which has one share. `device` (cuda:0 is said as cuda), `backend`
    and `exact=False` are named if they are given.
    """
    first = schedule.step(0)
    whole, rest = divmod(first.samples, first.micro_batch)
    batch = f"{_count(whole, 'micro-batch')} of {first.micro_batch}" + (f" and one of {rest}" if rest else "")
    several = f", {schedule.steps_per_epoch} an epoch" if len(schedule) > schedule.steps_per_epoch else ""
    lines = [f"global batch {first.samples}: {batch}; {_count(len(schedule), 'step')}{several}"]
    where = "" if device is None else f" on {device.split(':')[0]}"
    where += "" if backend is None else f" over {backend}"
    where += "" if exact else ", equal to rounding"
    micro_batches = first.micro_batches
    if world_size == 1:
        return [*lines, f"1 process{where} computes all of them"]

    workers = world_size // stages
    shares = [len(share(micro_batches, workers, worker)) for worker in range(workers)]
    one, noun = ("rank", "processes") if stages == 1 else ("pipeline", f"pipelines of {stages} stages")
    said = []
    for size, group in groupby(range(workers), key=shares.__getitem__):
        found = list(group)
        if workers == 1:
            said.append(f"it computes all {_count(size, 'micro-batch')}")
        elif len(found) == workers:
            said.append(f"each computes {_count(size, 'micro-batch')}")
        elif len(found) == 1:
            said.append(f"{one} {found[0]} computes {size}")
        else:
            said.append(f"{one}s {found[0]}-{found[-1]} compute {size} each")
    idle = 1 - micro_batches / (workers * max(shares))
    if idle > 0:
        none_idle = [str(n) for n in range(2, 2 * workers + 1) if micro_batches % n == 0]
        said[-1] += f"; {_percent(idle)} idle" + (f" (none with {_either(none_idle)} {noun})" if none_idle else "")
    elif stages == 1:
        said[-1] += "; none is idle"
    if stages > 1:
        waiting = (stages - 1) / (max(shares) + stages - 1)
        said[-1] += f"; stages wait for {_percent(waiting)} of a step, while it fills and empties"
    what = f"{world_size} processes" if stages == 1 else _count(workers, "pipeline") + f" of {stages} stages"
    return [*lines, f"{what}{where}: {', '.join(said)}"]


class Progress:
    """A bar on a terminal, a plain line every so often elsewhere. Starts no thread.

    `total` and `start` count steps: all of the run (None: nobody knows), and those done before this start. Without
    `steps_per_epoch` the epoch is shown alone. A stream that takes no more (a closed pipe, a full disk) never stops
    training.
    """

    def __init__(
        self,
        total: int | None,
        *,
        start: int = 0,
        steps_per_epoch: int | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ) -> None:
        self._total = total
        self._epochs = -(-total // steps_per_epoch) if steps_per_epoch and total is not None else None
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._console = console if console is not None else Console(file=self._stream)
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # No refresh thread. What the script prints on this terminal appears above the bar; what it prints into a
            # file or a pipe goes there.
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                redirect_stdout=_is_terminal(sys.stdout),
                redirect_stderr=_is_terminal(sys.stderr),
            )
        self._started = clock()
        self._due = self._started
        self._marks: deque[tuple[float, int, int]] = deque([(self._started, start, 0)], _MARKS)  # time, step, samples
        self._step = start
        self._epoch = 0
        self._samples = 0
        self._loss: float | Callable[[], float] | None = None
        self._shown = start
        self._closed = False

    def update(self, step: int, epoch: int, loss: float | Callable[[], float] | None, samples: int) -> None:
        """`step` steps are done; the last was in `epoch` (from 0), on `samples` samples.

        A `loss` that would have to wait for the device is given as a function: it is called only when it is shown.
        """
        self._step = step
        self._epoch = epoch
        self._loss = loss
        self._samples += samples
        if self._clock() >= self._due:
            self._show()

    def note(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._live is not None and self._live.is_started:
            self._try(lambda: self._console.print(line, markup=False, highlight=False, soft_wrap=True))
        else:
            self._try(lambda: print(line, file=self._stream, flush=True))

    def close(self) -> None:
        """Show where it ended, and leave the terminal as it was. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._step > self._shown:
            self._show()
        if self._live is not None:
            self._try(self._live.stop)

    def _show(self) -> None:
        now = self._clock()
        self._shown = self._step
        if self._live is None:
            self._due = now + min(max(10.0, (now - self._started) / 20), 60.0)
            self.note(", ".join([f"step {self._step_text()}", self._epoch_text(), *self._facts(now)]))
            return
        self._due = now + _BAR_SECONDS
        self._try(lambda: self._draw(now))

    def _draw(self, now: float) -> None:
        assert self._live is not None
        if not self._live.is_started:
            self._live.start()
        before = f"{self._epoch_text()} "
        after = " " + "  ".join([self._step_text(), *self._facts(now)])
        width = min(max(self._console.width - len(before) - len(after), 5), 40)
        done = width if self._total is None else width * self._step // max(self._total, 1)
        bar = Text.assemble(before, ("━" * done, "green"), ("━" * (width - done), "bright_black"), after)
        bar.no_wrap, bar.overflow = True, "ellipsis"
        self._live.update(bar, refresh=True)

    def _step_text(self) -> str:
        return str(self._step) + ("" if self._total is None else f"/{self._total}")

    def _epoch_text(self) -> str:
        return f"epoch {self._epoch + 1}" + (f"/{self._epochs}" if self._epochs is not None else "")

    def _facts(self, now: float) -> list[str]:
        """Loss, samples a second and time left, as far as they are known."""
        loss = self._loss() if callable(self._loss) else self._loss
        facts = [] if loss is None else [f"loss {loss:.4g}"]
        while len(self._marks) > 1 and now - self._marks[1][0] >= _WINDOW_SECONDS:
            self._marks.popleft()
        then, step, samples = self._marks[0]
        if now > then and self._step > step:
            facts.append(f"{(self._samples - samples) / (now - then):.4g} samples/s")
            if self._total is not None and self._step < self._total:
                left = (self._total - self._step) * (now - then) / (self._step - step)
                facts.append(f"{_duration(left)} left")
            else:
                facts.append(_duration(now - self._started))
        self._marks.append((now, self._step, self._samples))
        return facts

    def _try(self, write: Callable[[], object]) -> None:
        with suppress(OSError, ValueError):  # ValueError: the stream was closed
            write()


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.01 else "under 1 %"


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def _duration(seconds: float) -> str:
    """0:07, 12:34, 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
