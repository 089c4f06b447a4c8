"""Evaluation and prediction over a stream: its lanes, each in order, as many as training has, on any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from evenstep.plan.grid import Grid
from evenstep.plan.lanes import Lanes
from evenstep.plan.tree import tree_sum
from evenstep.train.batch import to_device
from evenstep.train.data.lane_reader import Found, LaneReader, LaneSamples
from evenstep.train.data.samples import Collate, MicroBatch
from evenstep.train.data.stream import Stream
from evenstep.train.data.stream_identity import beginnings
from evenstep.train.lockstep import Alone, Lockstep
from evenstep.train.loss import evaluating
from evenstep.train.meeting import Meeting, call_site
from evenstep.train.randomness import Randomness, key

Pair = tuple[float, float]


def run_over_lanes(
    stream: Stream,
    lanes: Lanes,
    fn: Callable[..., Any],
    models: Sequence[nn.Module],
    take: Callable[[MicroBatch, Any], None],
    *,
    kind: str,
    name: str,
    randomness: Randomness,
    meeting: Meeting,
    grid: Grid,
    lockstep: Lockstep | None,
    device: torch.device | str,
    step: int,
    collate: Collate | None,
    loaders: int,
    computing: Callable[[], AbstractContextManager[object]],
) -> dict[str, str]:
    """Hands to `take` what `fn` returns for each micro-batch of this process's lanes, of which index is the lane.
    Returns the `beginnings` of these, which are to be compared with the other processes'.

    How long a lane is, nobody knows before: so the processes that hold a model together agree before each turn on how
    many passes it has, and on whether one of them has failed."""
    lockstep = lockstep or Alone(meeting.rank)
    if len(lockstep.ranks) > 1:  # all must have come before some wait for each other
        meeting.exchange(f"{kind}, its beginning", signature=f"{lanes.count} lanes")
    seed, mine, site = key(randomness.seed, kind), grid.leaves(lanes.count, meeting.rank), call_site()
    samples = LaneSamples(stream, lanes, seed=seed, shuffle=False, collate=collate, marks={}, epoch=0, ended=[])
    pin = torch.device(device).type == "cuda"
    reader = LaneReader(samples, lanes, mine, seed=seed, rank=meeting.rank, loaders=loaders, pin=pin)
    try:
        failed: Exception | None = None
        begun: dict[str, str] = {}
        turn = 0
        while True:
            read: dict[int, tuple[Found, Any]] = {}
            try:
                read = {} if failed else _read(reader, turn)
                begun.update(beginnings({lane: found for lane, (found, _) in read.items()}))
            except Exception as error:
                failed = error
            said = {"passes": len(read), "failed": failed is not None}
            answers = lockstep.agree(said, site)
            most = max(answer["passes"] for answer in answers)
            if any(answer["failed"] for answer in answers) or not most:
                break
            with evaluating(models), randomness.keyed():
                passes = lockstep.passes(models, f"{kind} {name}", site)
                left = sorted(read.items())

                def compute(turn: int = turn, left: list[Any] = left) -> None:
                    lane, (found, batch) = left.pop(0)
                    randomness.begin(kind, step, lane, turn)
                    with computing():
                        returned = fn(*models, to_device(batch, device))
                    lockstep.check(returned)
                    start = turn * lanes.size(lane)
                    take(MicroBatch(0, 0, lane, start, start + found.size), returned)

                for number in range(most):
                    passes.run(compute if number < len(read) else None)
                failed = passes.failed
            turn += 1
        if failed is not None:
            raise failed
        return begun
    finally:
        reader.close()


def _read(reader: LaneReader, turn: int) -> dict[int, tuple[Found, Any]]:
    return {lane: (found, batch) for lane, (found, batch) in reader.read(0, turn).items() if found.size}


def sums_of_lanes(values: Sequence[tuple[int, Mapping[str, Pair]]]) -> list[tuple[str, int, int, float, float]]:
    """The sums of each lane, in the fixed tree over its turns: (name, 0, lane, sum, weight)."""
    rows = []
    for lane in sorted({lane for lane, _ in values}):
        turns = [pairs for of, pairs in values if of == lane]
        for name in dict.fromkeys(name for pairs in turns for name in pairs):
            there = [pairs.get(name) for pairs in turns]
            total = tree_sum(None if pair is None else pair[0] for pair in there)
            weight = tree_sum(None if pair is None else pair[1] for pair in there)
            rows.append((name, 0, lane, total, weight))
    return rows
