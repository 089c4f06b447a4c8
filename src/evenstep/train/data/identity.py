"""What of a run's map-style data must be the same on every process, and again after a resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from evenstep.errors import IdentityError, UsageError
from evenstep.plan.order import Order
from evenstep.plan.schedule import Schedule
from evenstep.train.data.probing import probe
from evenstep.train.meeting import Meeting
from evenstep.train.randomness import key

_SAMPLE = 64  # how many indices, from both ends of an epoch, processes compare
_LOOKED_AT = 16  # how many samples, from all over an epoch, a resume reads again
_SECONDS = 1.0  # how long a process reads for that, at most
_EPOCHS_ORDER = "order in this epoch"
_CONTENTS = "some samples"
_ORDERS = ("order", "first and last indices", _EPOCHS_ORDER)


class DataIdentity:
    """That of `data`, read in `order`. `check` comes first; then, at a checkpoint's place, `go_on`."""

    def __init__(
        self,
        data: Any,
        order: Order,
        *,
        seed: int,
        meeting: Meeting,
        allow_other: bool,
        loaders: int,
        say: Callable[[str], None],
    ) -> None:
        self._data, self._order, self._seed, self._meeting = data, order, seed, meeting
        self._loaders, self._say = loaders, say
        self._allow_other = allow_other  # another order, or other samples, than the checkpoint's
        self._about: dict[str, object] = {}
        self._contents: dict[str, list[Any]] = {}  # position in epoch 0 -> index and digest of the sample there
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
        seen = self._look()
        said = {**self._about, "steps": len(schedule), "first sample": seen.get(0, ["", ""]), _CONTENTS: seen}
        answers = self._meeting.say("run.steps", said, site="")
        self._contents = {at: found for answer in answers for at, found in answer.pop(_CONTENTS).items()}
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
        self._refuse_other_contents(about.get(_CONTENTS, {}))
        first = schedule.step_at(cursor)
        if first < len(schedule) and schedule.step(first).start > 0:
            self._refuse_other(_EPOCHS_ORDER, about.get(_EPOCHS_ORDER), self._order.digest(schedule.step(first).epoch))
        return first

    def _look(self) -> dict[int, list[Any]]:
        """At this process's part of the samples that a resume compares: by position, index and digest."""
        length, rank, world_size = self._order.length, self._meeting.rank, self._meeting.world_size
        count = min(_LOOKED_AT, length)
        positions = [k * length // count for k in range(rank + 1, count, world_size)]  # all look at the first
        found = probe(
            self._data,
            self._order,
            positions,
            seed=self._seed,
            rank=rank,
            loaders=self._loaders,
            seconds=_SECONDS,
            say=self._say,
        )
        return {at: [int(self._order.indices(0, at, at + 1)[0]), digest] for at, digest in found.items()}

    def _refuse_other_contents(self, before: Mapping[str, list[Any]]) -> None:
        compared, changed = 0, []
        for position, (index, digest) in before.items():
            now_index, now = self._contents.get(position, (index, ""))
            if index == now_index and digest and now:
                compared += 1
                if digest != now:
                    changed.append(index)
        if changed and not self._allow_other:
            raise IdentityError(
                f"{len(changed)} of {compared} samples that were looked at are not what they were when the checkpoint "
                f"was made, sample {changed[0]} for one: the data, or how it is read, has changed",
                do="go on with the data set as it was, start another run directory (--run DIR), or say "
                "--allow-other-identity, if what has changed is not trained on (the path of a file, say)",
            )
        self._contents = {**before, **self._contents}  # each start may have had the time for others

    def _refuse_other(self, name: str, before: object, now: object) -> None:
        if before != now and not (name in _ORDERS and self._allow_other):
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
        return {**self._about, _CONTENTS: self._contents, _EPOCHS_ORDER: self._order.digest(epoch)}
