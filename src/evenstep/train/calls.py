"""Calls of a function of the user's on all samples of a data set or a stream, each once, shared out among processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from evenstep.plan.grid import Grid
from evenstep.plan.lanes import Lanes
from evenstep.plan.order import Natural
from evenstep.plan.schedule import Schedule
from evenstep.train.batch import to_device
from evenstep.train.data.dataset import checked_dataset
from evenstep.train.data.lane_reader import Found, LaneReader, LaneSamples
from evenstep.train.data.reading import Reader, shares
from evenstep.train.data.samples import Collate, MicroBatch
from evenstep.train.data.stream import Stream
from evenstep.train.data.stream_identity import beginnings
from evenstep.train.lockstep import Alone, Lockstep
from evenstep.train.loss import evaluating
from evenstep.train.meeting import Meeting, call_site
from evenstep.train.randomness import Randomness, key

Take = Callable[[MicroBatch, Any], None]


@dataclass
class Calls:
    """`fn(*models, batch)` for the micro-batches of this process, beside those that hold a model together with it.

    Models are in eval mode without gradients; afterwards each module is in the mode that it was in. `fn` is called
    inside `computing()`. A stream is cut into `lanes`, of which each micro-batch has the number as its index.
    """

    data: Any
    fn: Callable[..., Any]
    models: Sequence[nn.Module]
    micro_batch: int
    randomness: Randomness
    meeting: Meeting
    grid: Grid | None = None  # without: every process has whole models
    lockstep: Lockstep | None = None
    device: torch.device | str = "cpu"
    step: int = 0
    collate: Collate | None = None
    loaders: int = 0
    computing: Callable[[], AbstractContextManager[object]] = nullcontext
    lanes: Lanes | None = None

    name: str = field(init=False)
    """Of the function."""
    count: int = field(init=False)
    """How many micro-batches a data set has, or how many lanes a stream."""
    signature: str = field(init=False)
    """What must be the same on every process."""
    beginnings: dict[str, str] = field(init=False, default_factory=dict)
    """Of the lanes of a stream that this process has read."""

    def __post_init__(self) -> None:
        self.name = getattr(self.fn, "__name__", type(self.fn).__name__)
        self._grid, self._lockstep = (
            self.grid or Grid(self.meeting.world_size),
            self.lockstep or Alone(self.meeting.rank),
        )
        self._pin = torch.device(self.device).type == "cuda"
        if isinstance(self.data, Stream):
            self._lanes = self.lanes or Lanes(self.micro_batch, self.micro_batch)
            self.count, self.signature = self._lanes.count, f"a stream of {self._lanes.count} lanes"
            return
        length = len(checked_dataset(self.data))
        # One step over the whole data set.
        self._schedule = Schedule(length, length, min(self.micro_batch, length), steps=1)
        self.count = self._schedule.step(0).micro_batches
        self.signature = f"{length} samples, micro-batches of {self._schedule.micro_batch}"

    @property
    def mine(self) -> range:
        """The micro-batches, or the lanes, of this process."""
        return self._grid.leaves(self.count, self.meeting.rank)

    def where(self, m: MicroBatch) -> str:
        """The function and a micro-batch, for people."""
        if isinstance(self.data, Stream):
            return f"{self.name}, samples {m.start}..{m.stop - 1} of lane {m.index}"
        return f"{self.name}, micro-batch {m.index}"

    def run(self, kind: str, take: Take) -> None:
        """Hands to `take` what `fn` returns for each micro-batch."""
        if isinstance(self.data, Stream):
            self._run_over_lanes(self.data, kind, take)
        else:
            self._run_over_data_set(kind, take)

    def _begin(self, kind: str, signature: str) -> None:
        if len(self._lockstep.ranks) > 1:  # all must have come before some wait for each other
            self.meeting.exchange(f"{kind}, its beginning", signature=signature)

    def _call(self, kind: str, m: MicroBatch, batch: Any, take: Take, *turn: int) -> None:
        self.randomness.begin(kind, self.step, m.index, *turn)
        with self.computing():
            returned = self.fn(*self.models, to_device(batch, self.device))
        self._lockstep.check(returned)
        take(m, returned)

    def _run_over_data_set(self, kind: str, take: Take) -> None:
        with Reader(
            self.data,
            Natural(self._schedule.samples),
            shares(self._schedule, self._grid, self.meeting.rank),
            seed=key(self.randomness.seed, kind),
            rank=self.meeting.rank,
            collate=self.collate,
            loaders=self.loaders,
            pin=self._pin,
            set_epoch=False,  # the training's epoch, or the one that the script has set
        ) as reader:
            self._begin(kind, f"{self.count} micro-batches")

            def compute() -> None:
                self._call(kind, *next(reader), take)

            counts = {rank: len(self._grid.leaves(self.count, rank)) for rank in self._lockstep.ranks}
            with evaluating(self.models), self.randomness.keyed():
                passes = self._lockstep.passes(self.models, f"{kind} {self.name}", call_site())
                for number in range(max(counts.values())):
                    passes.run(compute if number < counts[self.meeting.rank] else None)
                passes.check()

    def _run_over_lanes(self, stream: Stream, kind: str, take: Take) -> None:
        """How long a lane is, nobody knows before: so the processes that hold the models together agree before each
        turn on how many passes it has, and on whether one of them has failed."""
        self._begin(kind, f"{self.count} lanes")
        lanes, seed, site = self._lanes, key(self.randomness.seed, kind), call_site()
        samples = LaneSamples(
            stream, lanes, seed=seed, shuffle=False, collate=self.collate, marks={}, epoch=0, ended=[]
        )
        rank, loaders = self.meeting.rank, self.loaders
        reader = LaneReader(samples, lanes, self.mine, seed=seed, rank=rank, loaders=loaders, pin=self._pin)
        try:
            failed: Exception | None = None
            turn = 0
            while True:
                read: dict[int, tuple[Found, Any]] = {}
                try:
                    read = {} if failed else _read(reader, turn)
                    self.beginnings.update(beginnings({lane: found for lane, (found, _) in read.items()}))
                except Exception as error:
                    failed = error
                answers = self._lockstep.agree({"passes": len(read), "failed": failed is not None}, site)
                most = max(answer["passes"] for answer in answers)
                if any(answer["failed"] for answer in answers) or not most:
                    break
                with evaluating(self.models), self.randomness.keyed():
                    passes = self._lockstep.passes(self.models, f"{kind} {self.name}", site)
                    left = sorted(read.items())

                    def compute(turn: int = turn, left: list[Any] = left) -> None:
                        lane, (found, batch) = left.pop(0)
                        start = turn * lanes.size(lane)
                        self._call(kind, MicroBatch(0, 0, lane, start, start + found.size), batch, take, turn)

                    for number in range(most):
                        passes.run(compute if number < len(read) else None)
                    failed = passes.failed
                turn += 1
            if failed is not None:
                raise failed
        finally:
            reader.close()


def _read(reader: LaneReader, turn: int) -> dict[int, tuple[Found, Any]]:
    return {lane: (found, batch) for lane, (found, batch) in reader.read(0, turn).items() if found.size}
