"""The plan of a stream: the same steps for any number of processes, and each sample once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import UsageError
from evenstep.plan.grid import Grid
from evenstep.plan.lanes import Lanes, LaneSchedule, LaneStep, NoLength, Piece, Place, block_order, pieces

PROCESSES = (1, 2, 3, 4, 5, 7, 12)


def walk(schedule: LaneSchedule, lengths: list[list[int]], processes: int) -> tuple[list[LaneStep], Counter[object]]:
    """The steps that so many processes agree on, each knowing its own lanes alone, and how often samples were taken.

    `lengths[epoch][lane]` samples are there."""
    grid, place, steps, taken = Grid(processes), Place(), [], Counter[object]()
    while not schedule.over(place):
        found: dict[int, tuple[int, bool]] = {}
        there = lengths[place.epoch % len(lengths)]
        for rank in range(processes):
            for lane in grid.leaves(schedule.lanes.count, rank):
                size = schedule.lanes.size(lane)
                start = place.turn * size
                stop = min(start + size, there[lane])
                if stop > start:
                    found[lane] = stop - start, stop < there[lane]
                    taken.update((place.epoch, lane, k) for k in range(start, stop))
        steps.append(schedule.step(place, found))
        place = steps[-1].after
    return steps, taken


@st.composite
def streams(draw: st.DrawFn) -> tuple[Lanes, list[list[int]]]:
    lanes = Lanes(draw(st.integers(12, 40)), draw(st.integers(1, 3)))
    if lanes.count < 12:
        lanes = Lanes(lanes.global_batch, 1)
    one = st.lists(st.integers(0, 11), min_size=lanes.count, max_size=lanes.count).filter(any)
    return lanes, draw(st.lists(one, min_size=1, max_size=2))


@given(streams())
def test_the_plan_is_the_same_for_any_number_of_processes_and_takes_each_sample_once(
    stream: tuple[Lanes, list[list[int]]],
) -> None:
    lanes, lengths = stream
    schedule = LaneSchedule(lanes, epochs=len(lengths))
    alone, taken = walk(schedule, lengths, 1)
    expected = {(e, lane, k) for e, there in enumerate(lengths) for lane, n in enumerate(there) for k in range(n)}
    assert set(taken) == expected
    assert set(taken.values()) == {1}
    assert [step.number for step in alone] == list(range(len(alone)))
    assert all(step.samples for step in alone)
    assert sum(step.ends_epoch for step in alone) == len(lengths)
    assert alone[-1].cursor_after == len(expected)
    for processes in PROCESSES[1:]:
        assert walk(schedule, lengths, processes) == (alone, taken)


def test_a_number_of_steps_goes_through_as_many_epochs_as_it_takes() -> None:
    steps, _ = walk(LaneSchedule(Lanes(4, 2), steps=7), [[3, 2]], 1)
    assert [(s.epoch, s.turn, s.samples, s.ends_epoch) for s in steps] == [
        (0, 0, 4, False), (0, 1, 1, True), (1, 0, 4, False), (1, 1, 1, True), (2, 0, 4, False), (2, 1, 1, True),
        (3, 0, 4, False),
    ]  # fmt: skip
    assert len(LaneSchedule(Lanes(4, 2), steps=7)) == 7


def test_the_last_lane_takes_what_is_left_of_a_global_batch() -> None:
    lanes = Lanes(10, 4)
    assert [lanes.size(lane) for lane in range(lanes.count)] == [4, 4, 2]


def test_a_step_names_the_micro_batches_that_there_are() -> None:
    step = LaneStep(0, 0, 0, (2, 0, 3), False, 5)
    assert step.among(range(3)) == [0, 2]
    assert [step.micro(i) for i in range(3)] == [(0, 2), (2, 2), (2, 5)]
    assert (step.samples, step.micro_batches, step.cursor_after) == (5, 3, 10)


def test_epochs_have_no_length_and_an_empty_epoch_is_named() -> None:
    schedule = LaneSchedule(Lanes(4, 2), epochs=2)
    assert schedule.total is None
    with pytest.raises(NoLength, match=r"give the number of steps.*steps=1000"):
        len(schedule)
    with pytest.raises(TypeError):
        len(schedule)
    with pytest.raises(UsageError, match=r"epoch 1 of the stream has no sample in any(.|\n)*a new iterator"):
        schedule.step(Place(3, 1), {0: (0, False), 1: (0, False)})
    for wrong in ({}, {"epochs": 1, "steps": 1}, {"steps": 0}):
        with pytest.raises(UsageError):
            LaneSchedule(Lanes(4, 2), **wrong)


@given(st.integers(1, 40), st.integers(1, 40))
def test_each_record_of_each_file_is_in_one_lane(files: int, lanes: int) -> None:
    records = 60
    taken = Counter(
        (piece.file, k)
        for lane in range(lanes)
        for piece in pieces(files, lanes, lane)
        for k in range(piece.part, records, piece.parts)
    )
    assert set(taken) == {(file, k) for file in range(files) for k in range(records)}
    assert set(taken.values()) == {1}


def test_pieces_are_spread_evenly() -> None:
    assert pieces(5, 2, 1) == [Piece(1), Piece(3)]
    assert [pieces(2, 5, lane) for lane in range(5)] == [
        [Piece(0, 0, 3)], [Piece(1, 0, 2)], [Piece(0, 1, 3)], [Piece(1, 1, 2)], [Piece(0, 2, 3)]
    ]  # fmt: skip


def test_the_order_of_a_block_depends_on_its_place_and_the_seed() -> None:
    place = {"seed": 1, "epoch": 0, "lane": 2, "block": 3}
    first = block_order(50, **place).tolist()
    assert sorted(first) == list(range(50))
    assert first == block_order(50, **place).tolist()
    for name in place:
        assert block_order(50, **{**place, name: 9}).tolist() != first
