"""The training loop's iterator: one optimizer step after the other, from the cursor to the end."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from types import FrameType
from typing import Any

from evenstep.errors import UsageError
from evenstep.plan.order import Order
from evenstep.plan.schedule import Schedule, StepPlan
from evenstep.train.step import Step


@dataclass(frozen=True)
class Loop:
    """What a run does around each step."""

    begin: Callable[[Schedule, Order], int]  # returns the first step to do
    read: Callable[[int], Any]  # a Reader of this process's micro-batches, from that step on
    step: Callable[[StepPlan, Iterator[Any]], Step]
    after: Callable[[StepPlan, Step], None]
    finish: Callable[[], None]


class Steps:
    """The steps of a run, to be looped over once. `len()` is their number in the whole run, on every layout the same.

    A resumed run goes on at its cursor, so the loop has fewer turns than `len()`. `break` is safe.
    """

    def __init__(self, schedule: Schedule, order: Order, loop: Loop) -> None:
        self.schedule, self.order = schedule, order
        self._loop = loop
        self._begun = False
        self.left_by_break = False

    def __len__(self) -> int:
        return len(self.schedule)

    def __iter__(self) -> Iterator[Step]:
        if self._begun:
            raise UsageError(
                "run.steps was looped over twice", do="one run has one loop: give it more epochs= or steps="
            )
        self._begun = True
        first = self._loop.begin(self.schedule, self.order)
        return self._steps(first)

    def _steps(self, first: int) -> Iterator[Step]:
        with self._loop.read(first) as reader:
            batches = map(itemgetter(1), reader)  # unlike a generator's, its end is not that of the first error
            for number in range(first, len(self.schedule)):
                plan = self.schedule.step(number)
                reader.begin_epoch(plan.epoch)
                step = self._loop.step(plan, batches)
                try:
                    yield step
                except GeneratorExit:
                    self.left_by_break = _left_by_break()
                    raise
                step._close()
                self._loop.after(plan, step)
        self._loop.finish()


def _left_by_break() -> bool:
    """Whether the loop around the generator that is being closed was left by break or return, not by an exception.

    Both close it, and nothing says which. But after a break the loop's frame stands at the instruction that drops the
    iterator; with an exception it stands where that was raised. A generator in between (tqdm's) is passed over.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if dis.opname[frame.f_code.co_code[frame.f_lasti]] in ("POP_TOP", "POP_ITER"):
            return True
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return False
        frame = frame.f_back
    return False
