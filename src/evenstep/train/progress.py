"""What a person sees: how far the training is."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

_BAR_SECONDS = 0.25  # between two drawings of the bar
_WINDOW_SECONDS = 30.0  # that samples/s and the time left look back
_MARKS = 64


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


def _duration(seconds: float) -> str:
    """0:07, 12:34, 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
