"""How a stream is cut into lanes, and which samples each step takes of them: from integers alone.

A step has V micro-batches, and a stream V lanes. Micro-batch i of every step takes the next samples of lane i, so what
it reads does not depend on who computes it. A lane that has ended adds nothing to a step, until all have ended: that
is the end of the epoch. The place in a stream is the epoch and one integer, the turn: how many of its steps are done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from evenstep.errors import UsageError
from evenstep.plan.order import Indices, Shuffled
from evenstep.plan.schedule import StepPlan, check_count


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of a stream. They follow from the batch, and from nothing else."""

    global_batch: int
    micro_batch: int

    @property
    def count(self) -> int:
        """V: how many lanes there are, numbered 0..V-1."""
        return -(-self.global_batch // self.micro_batch)

    def size(self, lane: int) -> int:
        """How many samples a step takes of `lane`, while it has so many. Only the last lane's number can be smaller."""
        return min(self.micro_batch, self.global_batch - lane * self.micro_batch)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run stands in a stream: before step `number`, with `turn` steps of `epoch` done."""

    number: int = 0
    epoch: int = 0
    turn: int = 0
    cursor: int = 0  # samples since the start of the run


@dataclass(frozen=True, slots=True)
class LaneStep:
    """One step: `sizes[i]` samples of lane i, which is micro-batch i; 0 of a lane that has ended."""

    number: int
    epoch: int
    turn: int
    sizes: tuple[int, ...]
    ends_epoch: bool
    cursor_before: int

    @property
    def samples(self) -> int:
        """How many samples this step takes."""
        return sum(self.sizes)

    @property
    def micro_batches(self) -> int:
        """V: how many micro-batches this step has, those of ended lanes included."""
        return len(self.sizes)

    @property
    def cursor_after(self) -> int:
        return self.cursor_before + self.samples

    def micro(self, index: int) -> tuple[int, int]:
        """The places [start, stop) of micro-batch `index` among the samples of this step."""
        start = sum(self.sizes[:index])
        return start, start + self.sizes[index]

    def among(self, leaves: range) -> Sequence[int]:
        """Those of some micro-batches that have any sample."""
        return [i for i in leaves if self.sizes[i]]

    @property
    def after(self) -> Place:
        """The place after this step."""
        if self.ends_epoch:
            return Place(self.number + 1, self.epoch + 1, 0, self.cursor_after)
        return Place(self.number + 1, self.epoch, self.turn + 1, self.cursor_after)


Plan = StepPlan | LaneStep
"""A step: of a map-style data set, or of a stream."""


class NoLength(UsageError, TypeError):
    """The number of steps is asked for, and nobody knows it. A TypeError, as for any object without a length."""


@dataclass(frozen=True, slots=True)
class LaneSchedule:
    """The steps of a run over a stream: for `epochs`, or for a number of `steps`."""

    lanes: Lanes
    epochs: int | None = None
    steps: int | None = None

    samples: ClassVar[None] = None  # what nobody knows of a stream
    samples_per_epoch: ClassVar[None] = None
    steps_per_epoch: ClassVar[None] = None

    def __post_init__(self) -> None:
        for name in ("epochs", "steps"):
            check_count(name, getattr(self, name))
        if (self.epochs is None) == (self.steps is None):
            got = "neither" if self.epochs is None else f"epochs={self.epochs} and steps={self.steps}"
            raise UsageError(f"got {got}, expected either epochs= or steps=", do="say one of them: steps=1000")

    @property
    def total(self) -> int | None:
        """How many steps there are, where that is known."""
        return self.steps

    def __len__(self) -> int:
        if self.steps is None:
            raise NoLength(
                f"a stream has no length: how many steps {self.epochs} epochs are is known when they have been read",
                do="give the number of steps in place of epochs, run.steps(stream, steps=1000): a scheduler's "
                "total_steps=len(steps) is then known",
            )
        return self.steps

    def over(self, place: Place) -> bool:
        """Whether nothing is left to do at `place`."""
        return self.done(place.number, place.epoch)

    def done(self, steps: int, epochs: int) -> bool:
        """Whether so many steps, and whole epochs, are all."""
        if self.steps is not None:
            return steps >= self.steps
        return epochs >= (self.epochs or 0)

    def step(self, place: Place, found: Mapping[int, tuple[int, bool]]) -> LaneStep:
        """The step at `place`, from what was found in each lane: how many samples, and whether more come after them.

        A lane that is not in `found` has ended. UsageError where the epoch has no sample at all.
        """
        sizes = tuple(found.get(lane, (0, False))[0] for lane in range(self.lanes.count))
        if not any(sizes):
            raise UsageError(
                f"epoch {place.epoch} of the stream has no sample in any of its {self.lanes.count} lanes",
                do="return a new iterator from make(lane, lanes, epoch) each time it is called"
                if place.epoch
                else "check what it reads: paths, filters, and how make(lane, lanes, epoch) uses lane and lanes",
            )
        more = any(more for _, more in found.values())
        return LaneStep(place.number, place.epoch, place.turn, sizes, not more, place.cursor)


def block_order(count: int, *, seed: int, epoch: int, lane: int, block: int) -> Indices:
    """The order in which the `count` samples of a block are taken: a permutation keyed by its place in the stream."""
    digest = hashlib.blake2b(repr(("block", seed, lane, block)).encode(), digest_size=8).digest()
    return Shuffled(count, int.from_bytes(digest, "little") >> 1).indices(epoch, 0, count)


@dataclass(frozen=True, slots=True)
class Piece:
    """What a lane reads of one file: record number `part`, part + `parts`, part + 2 * parts, ..."""

    file: int
    part: int = 0
    parts: int = 1


def pieces(files: int, lanes: int, lane: int) -> list[Piece]:
    """What `lane` reads of `files` files. Where there are fewer files than lanes, several lanes read one."""
    if files >= lanes:
        return [Piece(file) for file in range(lane, files, lanes)]
    file, part = lane % files, lane // files
    return [Piece(file, part, len(range(file, lanes, files)))]
