"""What a training process tells: events and metrics into the run directory, progress and notes to the person."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import torch

from evenstep.errors import UsageError
from evenstep.record.activity import Activity
from evenstep.record.events import EventWriter
from evenstep.record.metrics import MetricsWriter
from evenstep.record.paths import RunPaths
from evenstep.train.progress import Progress

Listener = Callable[[int, Mapping[str, float]], None]


class Journal:
    """Every process writes its events; metrics, progress and notes are rank 0's."""

    def __init__(self, paths: RunPaths, rank: int, own: RunPaths) -> None:
        """`own`: the run directory of this host's launcher, where hosts have one each."""
        self._rank = rank
        self.activity = Activity(own.activity(rank))
        self._events = EventWriter(paths.events(rank), rank, on_error=self.say)
        self._metrics = MetricsWriter(paths, on_error=self.say) if rank == 0 else None
        self._progress: Progress | None = None
        self._listeners: list[Listener] = []

    def emit(self, kind: str, **fields: object) -> None:
        """An event of this process."""
        self._events.emit(kind, **fields)

    def say(self, line: str) -> None:
        """A line for the person who runs this: on standard error, above the progress bar."""
        if self._rank == 0:
            self._tell(line)

    def waits(self, line: str) -> None:
        """What this process waits for: an event, and a line of its log whatever its rank."""
        self.emit("waiting", line=line)
        self._tell(line)

    def _tell(self, line: str) -> None:
        text = f"evenstep: {line}"
        if self._progress is not None:
            self._progress.note(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def listen(self, listener: Listener, replay: int | None) -> None:
        """Call `listener(step, values)` for whatever is logged from now on; before that, with `replay`, for what has
        been logged up to that step."""
        if self._metrics is not None and replay is not None:
            for row in self._metrics.rows(replay):
                listener(row["step"], row["values"])
        self._listeners.append(listener)

    def log(self, step: int, epoch: int, values: Mapping[str, float | torch.Tensor]) -> None:
        """Numbers of after `step` optimizer steps."""
        if self._metrics is None:
            return
        numbers = {}
        for name, value in values.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise UsageError(f"run.log got {name}={value!r:.80}, expected a number") from error
        self._metrics.write(step, epoch, numbers)
        for listener in self._listeners:
            listener(step, numbers)

    def begin(
        self, total: int | None, steps_per_epoch: int | None, done: int, first: int | None, plan: Sequence[str]
    ) -> None:
        """The loop begins with step `first` (None: nothing is left), after `done` steps. Rows of later steps, of a
        killed process, go. `total` steps, where that is known."""
        if self._metrics is not None:
            self._metrics.cut(done)
        if self._rank == 0 and first is not None:
            for line in plan:
                self.say(line)
            self._progress = Progress(total, start=first, steps_per_epoch=steps_per_epoch)

    def step_done(self, step: int, epoch: int, loss: float | None, samples: int, **fields: object) -> None:
        """The `step`-th optimizer step is done."""
        self.emit("step", step=step, epoch=epoch, loss=loss, **fields)
        if self._progress is not None:
            self._progress.update(step, epoch, loss, samples)

    def end_progress(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def close(self) -> None:
        """Close the files."""
        self.end_progress()
        if self._metrics is not None:
            self._metrics.close()
        self._events.close()
        self.activity.close()
