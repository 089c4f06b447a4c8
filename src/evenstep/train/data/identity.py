"""What of a run's map-style data must be the same on every process, and again after a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenstep.errors import IdentityError, UsageError
from evenstep.plan.order import Order
from evenstep.plan.schedule import Schedule
from evenstep.train.data.samples import probe
from evenstep.train.meeting import Meeting
from evenstep.train.randomness import key

_SAMPLE = 64  # how many indices, from both ends of an epoch, processes compare
_EPOCHS_ORDER = "order in this epoch"
_ORDERS = ("order", "first and last indices", _EPOCHS_ORDER)


class DataIdentity:
    """That of `data`, read in `order`. `check` comes first; then, at a checkpoint's place, `go_on`."""

    def __init__(self, data: Any, order: Order, *, seed: int, meeting: Meeting, allow_other_order: bool) -> None:
        self._data, self._order, self._seed, self._meeting = data, order, seed, meeting
        self._allow_other_order = allow_other_order
        self._about: dict[str, object] = {}
        self._agreed_epoch = -1  # the last one on whose order processes have agreed

    def check(self, schedule: Schedule) -> None:
        """UsageError on every process where they would read different data."""
        order = self._order
        begin, end = min(_SAMPLE, order.length), max(0, order.length - _SAMPLE)
        sample = [*order.indices(0, 0, begin).tolist(), *order.indices(0, end, order.length).tolist()]
        self._about = {
            "samples": schedule.samples,
            "drop_last": schedule.drop_last,
            "order": order.name,
            "first and last indices": f"{key(*sample):x}",
        }
        first = probe(self._data, order, seed=self._seed)
        said = {**self._about, "steps": len(schedule), "first sample": first}
        answers = self._meeting.say("run.steps", said, site="")
        for rank, answer in enumerate(answers):
            if answer != answers[0]:
                raise UsageError(
                    f"rank {rank} has {answer}, rank 0 has {answers[0]}: "
                    "the data set, its length, its samples or its order differs between processes",
                    do="give every process the whole data set, in one order; evenstep chooses what each one reads",
                )

    def go_on(self, about: Mapping[str, Any], schedule: Schedule, cursor: int) -> int:
        """The step at `cursor`. IdentityError where the rest would be another than that of the run whose checkpoint
        says `about`."""
        for name, now in self._about.items():
            self._refuse_other(name, about.get(name), now)
        first = schedule.step_at(cursor)
        if first < len(schedule) and schedule.step(first).start > 0:
            self._refuse_other(_EPOCHS_ORDER, about.get(_EPOCHS_ORDER), self._order.digest(schedule.step(first).epoch))
        return first

    def _refuse_other(self, name: str, before: object, now: object) -> None:
        if before != now and not (name in _ORDERS and self._allow_other_order):
            raise IdentityError(
                f"the checkpoint was made with {name}: {before}; now it is {now}: the rest would be another",
                do="go on with the same data set and options, or start another run directory (--run DIR)",
            )

    def agree_on_order(self, epoch: int) -> None:
        """UsageError on every process where a function of the script gave them different orders for `epoch`."""
        digest = self._order.digest(epoch)
        if epoch == self._agreed_epoch or not digest:
            return
        answers = self._meeting.say(f"the order of epoch {epoch}", digest, site="")
        for rank, answer in enumerate(answers):
            if answer != answers[0]:
                raise UsageError(
                    f"order= gave rank {rank} another order for epoch {epoch} than rank 0",
                    do="let it follow from the epoch alone, not from the rank, the time or the order of a set",
                )
        self._agreed_epoch = epoch

    def at(self, epoch: int) -> dict[str, object]:
        """What a checkpoint in `epoch` keeps of it."""
        return {**self._about, _EPOCHS_ORDER: self._order.digest(epoch)}
