"""Which samples a step takes: steps, epochs, global batches and micro-batches, from integers alone.

A run consumes samples in one line: epoch 0, epoch 1, ... The *cursor* counts them; it is the whole data state.
A global batch never crosses the end of an epoch; the last one of an epoch is smaller unless it is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenstep.errors import UsageError


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: the positions [start, stop) of its epoch, cut into micro-batches."""

    number: int
    epoch: int
    start: int
    stop: int
    micro_batch: int
    ends_epoch: bool
    cursor_before: int
    cursor_after: int

    @property
    def samples(self) -> int:
        """How many samples this step takes."""
        return self.stop - self.start

    def among(self, leaves: range) -> Sequence[int]:
        """Those of some micro-batches that have any sample: all have."""
        return leaves

    @property
    def micro_batches(self) -> int:
        """V: how many micro-batches this step has, numbered 0..V-1."""
        return -(-self.samples // self.micro_batch)

    def micro(self, index: int) -> tuple[int, int]:
        """The positions [start, stop) of micro-batch `index` within the epoch; only the last one can be smaller."""
        if not 0 <= index < self.micro_batches:
            raise IndexError(f"micro-batch {index} of a step that has {self.micro_batches}")
        start = self.start + index * self.micro_batch
        return start, min(start + self.micro_batch, self.stop)


@dataclass(frozen=True, slots=True)
class Schedule:
    """All steps of a run over `samples` positions an epoch. Give either `epochs` or `steps`.

    `drop_last` leaves out the samples of an epoch that do not fill a global batch; the cursor does not count them.
    `len(schedule)` is the number of steps, on every layout the same.
    """

    samples: int
    global_batch: int
    micro_batch: int
    epochs: int | None = None
    steps: int | None = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name in ("global_batch", "micro_batch", "epochs", "steps"):
            check_count(name, getattr(self, name))
        if (self.epochs is None) == (self.steps is None):
            got = "neither" if self.epochs is None else f"epochs={self.epochs} and steps={self.steps}"
            raise UsageError(f"got {got}, expected either epochs= or steps=", do="say one of them: epochs=10")
        if self.samples <= 0:
            raise UsageError(
                "the data set is empty: there is nothing to train on",
                do="check its path and its filters; len(data) must be at least 1",
            )
        if self.global_batch < self.micro_batch:
            raise UsageError(
                f"global_batch={self.global_batch} is smaller than micro_batch={self.micro_batch}; "
                "a global batch is made of whole micro-batches",
                do=f"give micro_batch={self.global_batch} or less, or a larger global_batch",
            )
        if self.micro_batch > self.samples:
            raise UsageError(
                f"micro_batch={self.micro_batch} is larger than an epoch, which has {self.samples} samples",
                do=f"give micro_batch={self.samples} or less",
            )
        if self.steps_per_epoch == 0:
            raise UsageError(
                f"drop_last=True leaves no step: an epoch has {self.samples} samples, global_batch={self.global_batch}",
                do=f"give drop_last=False, or global_batch={self.samples} or less",
            )

    @property
    def total(self) -> int:
        """How many steps there are."""
        return len(self)

    @property
    def steps_per_epoch(self) -> int:
        if self.drop_last:
            return self.samples // self.global_batch
        return -(-self.samples // self.global_batch)

    @property
    def samples_per_epoch(self) -> int:
        """The samples of an epoch that are used: all, unless `drop_last` leaves some out."""
        return min(self.samples, self.steps_per_epoch * self.global_batch)

    def __len__(self) -> int:
        return self.steps if self.steps is not None else (self.epochs or 0) * self.steps_per_epoch

    def step(self, number: int) -> StepPlan:
        """The plan of step `number`, 0..len-1."""
        if not 0 <= number < len(self):
            raise IndexError(f"step {number} of a run that has {len(self)}")
        epoch, within = divmod(number, self.steps_per_epoch)
        start = within * self.global_batch
        stop = min(start + self.global_batch, self.samples_per_epoch)
        before = epoch * self.samples_per_epoch
        return StepPlan(
            number=number,
            epoch=epoch,
            start=start,
            stop=stop,
            micro_batch=self.micro_batch,
            ends_epoch=within == self.steps_per_epoch - 1,
            cursor_before=before + start,
            cursor_after=before + stop,
        )

    def step_at(self, cursor: int) -> int:
        """The number of the step that begins at `cursor` (len(schedule) at the end, or beyond it)."""
        epoch, position = divmod(cursor, self.samples_per_epoch)
        within, inside = divmod(position, self.global_batch)
        if cursor < 0 or inside:
            raise UsageError(
                f"cursor {cursor} is not at the start of a step: steps take {self.global_batch} samples, "
                f"an epoch {self.samples_per_epoch}",
                do="go on with the data set, global_batch and drop_last that the cursor was saved with",
            )
        return min(epoch * self.steps_per_epoch + within, len(self))


def check_count(name: str, value: object) -> None:
    """`value` must be None or an integer of at least 1."""
    if value is None and name in ("epochs", "steps"):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise UsageError(f"{name}={value!r}, expected an integer of at least 1", do=f"give {name}=1 or more")
