"""A run over a map-style data set: its order, its steps, and what this process reads of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

from evenstep.plan.grid import Grid
from evenstep.plan.order import Order
from evenstep.plan.schedule import Schedule, StepPlan
from evenstep.train.data.identity import DataIdentity
from evenstep.train.data.reading import Reader, shares
from evenstep.train.data.samples import Collate, MicroBatch
from evenstep.train.data.training_data import Turns
from evenstep.train.meeting import Meeting
from evenstep.train.plan_lines import batch_line


class MapStyle:
    """`data`, read in `order`, as TrainingData. Its `schedule` may get another micro-batch in the first step."""

    def __init__(
        self,
        data: Any,
        order: Order,
        schedule: Schedule,
        *,
        seed: int,
        meeting: Meeting,
        grid: Grid,
        collate: Collate | None,
        loaders: int,
        pin: bool,
        say: Callable[[str], None],
        allow_other: bool,
    ) -> None:
        self.data, self.schedule = data, schedule
        self._order, self._seed, self._rank, self._grid = order, seed, meeting.rank, grid
        self._collate, self._loaders, self._pin, self._say = collate, loaders, pin, say
        self._identity = DataIdentity(
            data, order, seed=seed, meeting=meeting, allow_other=allow_other, loaders=loaders, say=say
        )
        self._first = self._done = 0  # the step with which `turns` begins; the steps that are done
        self._last: StepPlan | None = None  # that was read

    # ---- before the loop

    def has_done(self, before: Mapping[str, Any]) -> bool:
        return "stream" not in before and before["steps"] >= len(self.schedule)

    def begin(self, about: Mapping[str, Any] | None) -> int:
        self._identity.check(self.schedule)
        if about is not None:
            self._first = self._done = self._identity.go_on(about, self.schedule, int(about["cursor"]))
        return self._first

    def go_to_end(self, done: int) -> int:
        self._identity.check(self.schedule)
        self._first, self._done = len(self.schedule), done
        return self._first

    @property
    def over(self) -> bool:
        return self._first >= len(self.schedule)

    @property
    def micro_batches(self) -> int:
        return self.schedule.step(0).micro_batches

    def lines(self) -> list[str]:
        return [batch_line(self.schedule)]

    # ---- in the loop

    @contextmanager
    def turns(self) -> Iterator[Turns]:
        with self._reader(self._share(), self._loaders) as reader:
            yield self._turns(reader)

    def _share(self) -> Iterator[MicroBatch]:
        """What this process reads. Nothing is cut before the first of it is asked for."""
        yield from shares(self.schedule, self._grid, self._rank, self._first)

    def _turns(self, reader: Reader) -> Turns:
        batches = map(itemgetter(1), reader)  # unlike a generator's, its end is not that of the first error
        for number in range(self._first, len(self.schedule)):
            self._last = plan = self.schedule.step(number)
            reader.begin_epoch(plan.epoch)
            self._identity.agree_on_order(plan.epoch)
            yield plan, batches

    def _reader(self, mine: Iterable[MicroBatch], loaders: int) -> Reader:
        return Reader(
            self.data,
            self._order,
            mine,
            seed=self._seed,
            rank=self._rank,
            collate=self._collate,
            loaders=loaders,
            pin=self._pin,
            say=self._say,
        )

    def read_first(self, plan: StepPlan, size: int) -> Any:
        """The first `size` samples of a step as one batch, beside what `turns` reads."""
        first = MicroBatch(plan.number, plan.epoch, 0, plan.start, plan.start + size)
        # Not here where loader processes read: what the data set opens would be open before they begin.
        with self._reader([first], min(self._loaders, 1)) as reader:
            return next(reader)[1]

    def done(self) -> None:
        assert self._last is not None
        self._done = self._last.number + 1

    @property
    def place(self) -> dict[str, Any]:
        return self._identity.at(0 if self._last is None else self._last.epoch)

    @property
    def left_early(self) -> bool:
        return self._done < len(self.schedule)

    @property
    def ended(self) -> dict[str, Any]:
        return {}
