"""The steps of a run over a stream: what each lane has left, agreed on by all processes before each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from evenstep.errors import EvenstepError, UsageError
from evenstep.plan.grid import Grid
from evenstep.plan.lanes import LaneSchedule, LaneStep, Place
from evenstep.train.data.lane import Mark
from evenstep.train.data.lane_beginnings import begin
from evenstep.train.data.lane_reader import Found, LaneReader, LaneSamples
from evenstep.train.data.samples import Collate
from evenstep.train.data.stream import Stream
from evenstep.train.data.stream_identity import (
    ALIKE,
    beginnings,
    changes,
    hash_of,
    of_stream,
    packed,
    refuse_alike,
    refuse_other,
    refuse_unlike,
    unpacked,
)
from evenstep.train.data.training_data import Turns
from evenstep.train.meeting import Meeting, peer_failed
from evenstep.train.options import Options

_SLOW = 1.0  # seconds of reading again that are worth a line


class Streaming:
    """A run's stream, on this process, as TrainingData."""

    def __init__(
        self,
        stream: Stream,
        schedule: LaneSchedule,
        *,
        seed: int,
        shuffle: bool,
        meeting: Meeting,
        grid: Grid,
        collate: Collate | None,
        loaders: int,
        pin: bool,
        say: Callable[[str], None],
    ) -> None:
        self.data = stream
        self.schedule = schedule
        self._seed, self._shuffle, self._meeting = seed, shuffle, meeting
        self._grid, self._mine = grid, grid.leaves(schedule.lanes.count, meeting.rank)
        self._collate, self._loaders, self._pin, self._say = collate, loaders, pin, say
        self._place = Place()
        self._finished = False  # before this start
        self._ended: set[int] = set()  # lanes that have ended in the epoch of the place
        self._marks: dict[int, Mark] = {}  # of all lanes that have not, as far as they have been read
        self._saved: dict[str, Any] = {}
        self._last: LaneStep | None = None  # the step that was read last
        self._after = self._place  # the steps that are done
        self._first = ""  # a hash of the first samples of lane 0, once they have been read
        self._seen: dict[int, str] = {}  # the same of lanes that others read, at the place
        self._parts = packed(stream.source.parts())

    # ---- before the loop

    def _check(self, about: Mapping[str, Any] | None) -> None:
        """Goes to the place that a checkpoint names in `about`, or to the beginning.

        UsageError on every process where they would read different streams, or one that is not the same again;
        IdentityError where it is another than the checkpoint's.
        """
        said: dict[str, Any] = {"failed": None}
        error: EvenstepError | None = None
        try:
            before = None if about is None else of_stream(about)
            refuse_other(before, self._known(), self._parts)  # before it is read: a file that is gone is named as such
            if about is not None and before is not None:
                self._go_on(before, int(about["step"]), int(about["cursor"]))
            self._begin_lanes()
            said |= self._identity()
            refuse_other(before, self._identity(), self._parts)
        except EvenstepError as caught:
            error, said = caught, {"failed": caught.message}
        answers = self._meeting.say("run.steps", said, site="")
        if error is not None:
            raise error
        for rank, answer in enumerate(answers):
            if answer["failed"] is not None:
                raise peer_failed(rank, f"cannot begin: {answer['failed']}")
        for rank in [rank for rank, answer in enumerate(answers) if answer != answers[0]][:1]:
            said_parts = self._meeting.say("run.steps, what differs", self._parts, site="")
            first, other = unpacked(said_parts[0]), unpacked(said_parts[rank])
            different = [f"rank {rank} has {answers[rank]}, rank 0 has {answers[0]}"]
            different += changes(first, other, "only on rank 0", f"only on rank {rank}")
            raise UsageError(f"{'; '.join(different)}: the stream is not the same on all processes", do=ALIKE)

    def _begin_lanes(self) -> None:
        """Lane 0, twice, and where an epoch begins, one lane that another replica reads: its own is to be the same."""
        begins = not self._place.turn and not self.over
        others = [(lane, self._place.epoch) for lane in self._elsewhere()] if begins else []
        first, again, *seen = begin(
            self.data,
            self.schedule.lanes.count,
            [(0, 0), (0, 0), *others],
            seed=self._seed,
            rank=self._meeting.rank,
            loaders=self._loaders,
            say=self._say,
        )
        if first != again:
            raise UsageError(
                "the stream does not give the same samples again: lane 0 of epoch 0 was begun twice, and the hash "
                f"of its first samples was {first}, then {again}",
                do="make(lane, lanes, epoch) must return a new iterator each time, over the same records: sort "
                "what it lists, draw from the global generators of torch, numpy and random, which are keyed, or "
                "seed others from `epoch`",
            )
        self._first = first
        self._seen = {lane: found for (lane, _), found in zip(others, seen, strict=True)}

    def _elsewhere(self) -> list[int]:
        """The last lane that the replica after this one reads."""
        grid, count = self._grid, self.schedule.lanes.count
        away = grid.processes // grid.replicas if grid.replicas > 1 else 1
        lanes = grid.leaves(count, (self._meeting.rank + away) % grid.processes)
        return [lane for lane in lanes if lane not in self._mine][-1:]

    def _known(self) -> dict[str, Any]:
        """What is known of the stream before it is read."""
        return {
            "source": self.data.source.about(),
            "lanes": self.schedule.lanes.count,
            "block": self.data.block,
            "shuffle": self._shuffle,
        }

    def _identity(self) -> dict[str, Any]:
        return {**self._known(), "first samples": self._first}

    def has_done(self, before: Mapping[str, Any]) -> bool:
        return "stream" in before and self.schedule.done(**before["stream"])

    def begin(self, about: Mapping[str, Any] | None) -> int:
        self._check(about)
        return self._place.number

    def _go_on(self, saved: Mapping[str, Any], done: int, cursor: int) -> None:
        self._place = self._after = Place(done, saved["epoch"], saved["turn"], cursor)
        self._ended = set(saved["ended"])
        self._marks = {int(lane): Mark(*values) for lane, values in saved["marks"].items()}
        self._saved = dict(saved)

    def go_to_end(self, done: int) -> int:
        self._finished = True
        return done

    @property
    def over(self) -> bool:
        return self._finished or self.schedule.over(self._place)

    @property
    def micro_batches(self) -> int:
        return self.schedule.lanes.count

    def lines(self) -> list[str]:
        lanes, source = self.schedule.lanes, self.data.source
        shuffled = f"shuffled in blocks of {self.data.block}" if self._shuffle else "in order"
        what = f"stream {source.about()}: {lanes.count} lanes of {lanes.micro_batch} samples a step, {shuffled}"
        if self._loaders > len(self._mine):
            what += f"; {len(self._mine)} loader processes of {self._loaders}: one for each lane of this process"
        return [what] if self._finished else [what, *source.notes(lanes.count), *self._cost()]

    def _cost(self) -> list[str]:
        """What going on costs."""
        turn = self._place.turn
        if not turn:
            return []
        left = [lane for lane in range(self.schedule.lanes.count) if lane not in self._ended]
        block, size = self.data.block, self.schedule.lanes.micro_batch
        again = [self._again(lane, turn) for lane in left]
        seeks = sum(lane in self._marks and self._marks[lane].state is not None for lane in left)
        how = f"{seeks} of {len(left)} lanes go on from a mark" if seeks else "the source cannot seek"
        return [
            f"the stream goes on at turn {turn} of epoch {self._place.epoch}: {how}, up to "
            f"{max(again, default=0)} records of a lane are read again (a block is {block}, a step takes {size})"
        ]

    def _again(self, lane: int, turn: int) -> int:
        position, block = turn * self.schedule.lanes.size(lane), self.data.block
        whole = -(-position // block) * block
        mark = self._marks.get(lane)
        return whole - (mark.block * block if mark is not None and mark.state is not None else 0)

    # ---- in the loop

    @contextmanager
    def turns(self) -> Iterator[Turns]:
        samples = LaneSamples(
            self.data,
            self.schedule.lanes,
            seed=self._seed,
            shuffle=self._shuffle,
            collate=self._collate,
            marks=dict(self._marks),
            epoch=self._place.epoch,
            ended=sorted(self._ended),
        )
        reader = LaneReader(
            samples,
            self.schedule.lanes,
            self._mine,
            seed=self._seed,
            rank=self._meeting.rank,
            loaders=self._loaders,
            pin=self._pin,
            say=self._say,
        )
        try:
            yield self._turns(reader)
        finally:
            reader.close()

    def _turns(self, reader: LaneReader) -> Turns:
        place = self._place
        while not self._finished and not self.schedule.over(place):
            began = time.monotonic()
            read, found = self._read(reader, place)
            self._tell_cost(read, began)
            self._last = step = self.schedule.step(place, found)
            self._take_ended(step, found)
            yield step, iter([read[i][1] for i in step.among(self._mine)])
            place = step.after

    def _read(
        self, reader: LaneReader, place: Place
    ) -> tuple[dict[int, tuple[Found, Any]], dict[int, tuple[int, bool]]]:
        """This process's micro-batches, and what all processes have found in the lanes. Where one cannot read, all
        raise."""
        read: dict[int, tuple[Found, Any]] = {}
        error: Exception | None = None
        try:
            read = reader.read(place.epoch, place.turn)
        except Exception as caught:
            error = caught
        said: dict[str, Any] = {"failed": None if error is None else f"{type(error).__name__}: {error}"}
        said["lanes"] = {lane: self._news(lane, found) for lane, (found, _) in read.items()}
        if not place.turn:
            said["beginnings"] = beginnings({lane: found for lane, (found, _) in read.items()})
            said["begun"] = {lane: hash_of(found.beginning) for lane, (found, _) in read.items()}
            if place == self._place:
                said["begun"].update(self._seen)
        answers = self._meeting.say("run.steps, its next batch", said, signature=f"step {place.number}", site="")
        if error is not None:
            raise error
        for rank, answer in enumerate(answers):
            if answer["failed"] is not None:
                raise peer_failed(rank, f"could not read the batch of step {place.number}: {answer['failed']}")
        lanes = {int(lane): values for answer in answers for lane, values in answer["lanes"].items()}
        for lane, (_, _, mark) in lanes.items():
            if mark is not None:
                self._marks[lane] = Mark(*mark)
        if not place.turn:
            refuse_unlike([answer["begun"] for answer in answers], place.epoch)
            refuse_alike(answer["beginnings"] for answer in answers)
        return read, {lane: (size, more) for lane, (size, more, _) in lanes.items()}

    def _news(self, lane: int, found: Found) -> list[Any]:
        """What others do not know of a lane yet."""
        known = self._marks.get(lane)
        new = found.mark is not None and found.mark != known
        return [found.size, found.more, found.mark.said() if new and found.mark is not None else None]

    def _take_ended(self, step: LaneStep, found: Mapping[int, tuple[int, bool]]) -> None:
        self._ended = {lane for lane in range(self.schedule.lanes.count) if not found.get(lane, (0, False))[1]}

    def _tell_cost(self, read: Mapping[int, tuple[Found, Any]], began: float) -> None:
        again = [found.again for found, _ in read.values() if found.again is not None]
        if again and time.monotonic() - began > _SLOW:
            self._say(
                f"{sum(a.records for a in again)} records of {len(again)} lanes were read again in "
                f"{time.monotonic() - began:.1f} s"
            )

    def done(self) -> None:
        assert self._last is not None
        place = self._after = self._last.after
        inside = place.turn > 0
        self._saved = {
            **self._identity(),
            "parts": self._parts,
            "epoch": place.epoch,
            "turn": place.turn,
            "ended": sorted(self._ended) if inside else [],
            "marks": {str(lane): m.said() for lane, m in sorted(self._marks.items()) if lane not in self._ended}
            if inside
            else {},
        }

    @property
    def place(self) -> dict[str, Any]:
        return {"stream": self._saved}

    @property
    def left_early(self) -> bool:
        return not self.schedule.over(self._after)

    @property
    def ended(self) -> dict[str, Any]:
        return {"stream": {"steps": self._after.number, "epochs": self._after.epoch}}


def refuse_with_stream(options: Options, **given: object) -> None:
    """UsageError for arguments of `run.steps` (None: not given) and options that do not go with a stream."""
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"{name}= is for data sets with a length, and data is a stream",
                do="leave it out; give steps= for a number of steps, and filter in make(lane, lanes, epoch)",
            )
    if isinstance(options.micro_batch, str):
        raise UsageError(
            'micro_batch="auto" with a stream: it is cut into as many lanes as a step has micro-batches',
            do="give a number (--micro-batch N)",
        )
    if options.batchnorm == "sync":
        raise UsageError(
            'batchnorm="sync" with a stream is not offered: lanes end at different steps',
            do='use batchnorm="exact" (the default)',
        )
