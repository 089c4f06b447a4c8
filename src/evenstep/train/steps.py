"""The training loop's iterator: one optimizer step after the other, from the cursor to the end."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from evenstep.errors import UsageError
from evenstep.plan.lanes import Plan
from evenstep.train.data.training_data import TrainingData
from evenstep.train.step import Step


@dataclass(frozen=True)
class Loop:
    """What a run does around each step."""

    begin: Callable[[], None]
    step: Callable[[Plan, Iterator[Any]], Step]
    after: Callable[[Plan, Step], None]
    finish: Callable[[], None]


class Steps:
    """The steps of a run, to be looped over once. `len()` is their number in the whole run, on every layout the same;
    epochs of a stream have none.

    A resumed run goes on at its cursor, so the loop has fewer turns than `len()`. `break` is safe.
    """

    def __init__(self, data: TrainingData, loop: Loop) -> None:
        self._data, self._loop = data, loop
        self._begun = False
        self.left_by_break = False

    def __len__(self) -> int:
        return len(self._data.schedule)

    def by_epoch(self) -> Iterator[tuple[int, Iterator[Step]]]:
        """The same steps in two loops: (epoch from 0, the steps of it that are left).

            for epoch, steps_of_epoch in steps.by_epoch():
                for step in steps_of_epoch:
                    ...
                accuracy = run.evaluate(test_set, correct_fn)

        What stands behind the inner loop still belongs to the epoch's last step, and comes before its checkpoint.
        UsageError where the inner loop is left before the epoch's end and the outer one goes on.
        """
        steps = iter(self)
        try:
            for step in steps:
                left = _Epoch(step, steps, self._data.schedule.total)
                yield step.epoch, iter(left)
                left.refuse_rest()
        finally:
            steps.close()

    def __iter__(self) -> Generator[Step]:
        if self._begun:
            raise UsageError(
                "run.steps was looped over twice", do="one run has one loop: give it more epochs= or steps="
            )
        self._begun = True
        self._loop.begin()
        return self._steps()

    def _steps(self) -> Generator[Step]:
        with self._data.turns() as turns:
            for plan, batches in turns:
                step = self._loop.step(plan, batches)
                try:
                    yield step
                except GeneratorExit:
                    self.left_by_break = _left_by_break()
                    raise
                step._close()
                self._loop.after(plan, step)
        self._loop.finish()


class _Epoch:
    """The steps of one epoch, from `step` on. The last of them stays open: only the outer loop asks for the next."""

    def __init__(self, step: Step, steps: Iterator[Step], total: int | None) -> None:
        self._step, self._steps, self._total = step, steps, total

    def __iter__(self) -> Iterator[Step]:
        yield self._step
        while not self._is_last():
            self._step = next(self._steps)
            yield self._step

    def refuse_rest(self) -> None:
        if not self._is_last():
            raise UsageError(
                f"the inner loop was left in step {self._step.number}, before the end of epoch {self._step.epoch}, "
                "and the outer loop goes on",
                do="break the outer loop too, or end the run earlier: run.steps(data, steps=1000)",
            )

    def _is_last(self) -> bool:
        return self._step.ends_epoch or self._step.number + 1 == self._total


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
