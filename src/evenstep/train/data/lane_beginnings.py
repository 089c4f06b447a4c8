"""The beginnings of lanes, read before the loop: what processes, and a resume, compare."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from functools import partial
from typing import Any

from evenstep.errors import EvenstepError
from evenstep.train.data.lane import BEGINNING, Lane
from evenstep.train.data.lane_reader import LaneTask, failed, failed_with, no_worker, refuse_failed
from evenstep.train.data.loading import LoaderGone, Loading
from evenstep.train.data.reading import say_of_rank
from evenstep.train.data.stream import Stream
from evenstep.train.data.stream_identity import hash_of
from evenstep.train.randomness import kept_generators


class Beginnings:
    """Reads the first records of a lane and returns their hash; LaneFailed for what goes wrong."""

    def __init__(self, stream: Stream, lanes: int, seed: int) -> None:
        self.data = Stream(stream.source, min(BEGINNING, stream.block))
        self.at: MutableSequence[int] = [-1]
        self._lanes, self._seed = lanes, seed

    def __call__(self, task: LaneTask, keep_error: bool = False) -> Any:
        no_worker()
        self.at[0] = -1
        try:
            lane = Lane(self.data, task.lane, self._lanes, task.epoch, seed=self._seed, shuffle=False, at=self.at)
            next(lane.take(1), None)
            lane.close()
        except EvenstepError as error:
            return failed_with(error)
        except Exception as error:
            return failed(error, task, self.at[0], keep_error)
        return hash_of(lane.mark)


def begin(
    stream: Stream,
    lanes: int,
    which: Sequence[tuple[int, int]],
    *,
    seed: int,
    rank: int,
    loaders: int,
    say: Callable[[str], None],
) -> list[str]:
    """The hashes of the beginnings of some (lane, epoch). The generators are kept. DataError for what cannot be read.

    With `loaders` a process of its own reads, unless only evenstep's code does: what the stream opens and keeps is then
    not open when loader processes begin, which would share its place in a file.
    """
    beginnings, tasks = Beginnings(stream, lanes, seed), [LaneTask(lane, epoch, 0, 0) for lane, epoch in which]
    if not loaders or stream.source.draws_nothing:
        with kept_generators():
            return [refuse_failed(beginnings(task, keep_error=True), f"on rank {rank}") for task in tasks]
    loading = Loading(beginnings, tasks, count=1, prefetch=2, pin=False, seed=seed, say=partial(say_of_rank, say, rank))
    try:
        return [refuse_failed(read, f"on rank {rank}") for _, _, read in (next(loading) for _ in tasks)]
    except LoaderGone as gone:
        raise gone.told(rank, "leave it out in make(lane, lanes, epoch)") from None
    finally:
        loading.close()
