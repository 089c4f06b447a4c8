"""What a process is doing now: one word of memory, in a file, that survives whatever ends the process.

It costs a store to memory, so it can be kept up to date all the time, and is read by the launcher of the same host.
"""

from __future__ import annotations

import mmap
import os
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

# In this order they are numbered in the file.
STARTING = "starting"
LOADING = "loading the checkpoint"
SCRIPT = "in the script's own code"
READING = "reading data"
COMPUTING = "computing gradients"
MEETING = "waiting for the other processes"
EVALUATING = "evaluating"
SAVING = "writing a checkpoint"
ENDING = "ending"
_PHASES = (STARTING, LOADING, SCRIPT, READING, COMPUTING, MEETING, EVALUATING, SAVING, ENDING)
_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}
_SIZE = 8  # bytes: the step in progress (0: before the first), times 256, plus the phase's number


@dataclass(frozen=True)
class Doing:
    """What a process was doing when it was looked at. `step` counts from 1, as progress and checkpoints do."""

    step: int
    phase: str

    def __str__(self) -> str:
        """As in "rank 1 was killed in step 12, computing gradients"."""
        return f"in step {self.step}, {self.phase}" if self.step else f"before the first step, {self.phase}"


class Activity:
    """This process's word. A disk that does not take the file costs the word, not the training."""

    def __init__(self, path: Path) -> None:
        self._word = _nowhere()
        self._map: mmap.mmap | None = None
        self._step = self._phase = 0
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.pwrite(descriptor, bytes(_SIZE), 0)  # so that the disk has room for it from the start
                self._map = mmap.mmap(descriptor, _SIZE)
                self._word = memoryview(self._map).cast("q")
            finally:
                os.close(descriptor)

    def begin_step(self, step: int) -> None:
        """Step `step`, from 1, is in progress; the script's code runs."""
        self._step = step
        self.now(SCRIPT)

    def now(self, phase: str) -> None:
        """From now on the process is in `phase`."""
        self._phase = _NUMBERS[phase]
        self._word[0] = self._step << 8 | self._phase

    def close(self) -> None:
        """Leave the file as it is."""
        self._word.release()
        self._word = _nowhere()
        if self._map is not None:
            self._map.close()

    def during(self, phase: str) -> AbstractContextManager[None]:
        """It is in `phase` inside, and afterwards, if nothing is raised, in what it was before."""
        return _During(self, phase, _PHASES[self._phase])


class _During(AbstractContextManager[None]):
    """Written out, since it is entered several times a step: a generator takes twice as long."""

    __slots__ = ("_activity", "_after", "_phase")

    def __init__(self, activity: Activity, phase: str, after: str) -> None:
        self._activity, self._phase, self._after = activity, phase, after

    def __enter__(self) -> None:
        self._activity.now(self._phase)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._activity.now(self._after)


def _nowhere() -> memoryview[int]:
    return memoryview(bytearray(_SIZE)).cast("q")


def read_activity(path: Path) -> Doing | None:
    """What the process of this file did last; None where there is no such file."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _SIZE:
        return None
    word = memoryview(data).cast("q")[0]
    step, phase = word >> 8, word & 255
    return Doing(step, _PHASES[phase]) if phase < len(_PHASES) else None
