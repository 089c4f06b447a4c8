"""Steps, epochs and the cursor: integers that every layout agrees on."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import UsageError
from evenstep.plan.schedule import Schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    samples = draw(st.integers(1, 300))
    micro = draw(st.integers(1, samples))
    drop_last = draw(st.booleans())
    batch = draw(st.integers(micro, samples if drop_last else 2 * samples + 1))
    if draw(st.booleans()):
        return Schedule(samples, batch, micro, epochs=draw(st.integers(1, 4)), drop_last=drop_last)
    return Schedule(samples, batch, micro, steps=draw(st.integers(1, 40)), drop_last=drop_last)


@given(schedules())
def test_steps_cover_each_epoch_once_and_in_order(schedule: Schedule) -> None:
    cursor, epoch, position = 0, 0, 0
    for number in range(len(schedule)):
        step = schedule.step(number)
        assert (step.number, step.epoch, step.start, step.cursor_before) == (number, epoch, position, cursor)
        assert 0 < step.samples <= schedule.global_batch
        assert step.samples == schedule.global_batch or (step.ends_epoch and not schedule.drop_last)
        cursor, position = cursor + step.samples, step.stop
        assert step.cursor_after == cursor
        assert step.ends_epoch == (position == schedule.samples_per_epoch)
        if step.ends_epoch:
            epoch, position = epoch + 1, 0
    if schedule.epochs is not None:
        assert (epoch, position) == (schedule.epochs, 0)
        assert len(schedule) == schedule.epochs * schedule.steps_per_epoch
    else:
        assert len(schedule) == schedule.steps
    unused = schedule.samples - schedule.samples_per_epoch
    assert 0 <= unused < schedule.global_batch
    assert schedule.drop_last or unused == 0


@given(schedules())
def test_micro_batches_cover_a_step(schedule: Schedule) -> None:
    for number in {0, len(schedule) // 2, len(schedule) - 1}:
        step = schedule.step(number)
        cuts = [step.micro(i) for i in range(step.micro_batches)]
        assert [start for start, _ in cuts] == [step.start, *(stop for _, stop in cuts[:-1])]
        assert cuts[-1][1] == step.stop
        sizes = [stop - start for start, stop in cuts]
        assert all(size == schedule.micro_batch for size in sizes[:-1])
        assert 0 < sizes[-1] <= schedule.micro_batch
        with pytest.raises(IndexError):
            step.micro(step.micro_batches)


@given(schedules())
def test_a_cursor_leads_back_to_its_step(schedule: Schedule) -> None:
    for number in range(len(schedule)):
        step = schedule.step(number)
        assert schedule.step_at(step.cursor_before) == number
        assert schedule.step_at(step.cursor_after) == number + 1
        if step.samples > 1:
            with pytest.raises(UsageError, match="not at the start of a step"):
                schedule.step_at(step.cursor_before + 1)
    with pytest.raises(IndexError):
        schedule.step(len(schedule))


def test_a_longer_run_goes_on_where_a_shorter_one_ended() -> None:
    short, long = Schedule(10, 4, 2, epochs=2), Schedule(10, 4, 2, epochs=5)
    end = short.step(len(short) - 1).cursor_after
    assert short.step_at(end) == len(short)
    assert long.step(long.step_at(end)).epoch == 2
    assert short.step_at(long.step(len(long) - 1).cursor_after) == len(short)


def test_a_schedule_is_plain_data() -> None:
    schedule = Schedule(10, 4, 2, epochs=2)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert pickle.loads(pickle.dumps(schedule.step(2))) == schedule.step(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "data set is empty"),
        ({"global_batch": 4, "micro_batch": 5}, "global_batch=4 is smaller than micro_batch=5"),
        ({"samples": 7, "micro_batch": 8}, "micro_batch=8 is larger than an epoch, which has 7 samples"),
        ({"samples": 15, "drop_last": True}, "drop_last=True leaves no step"),
        ({"steps": 3}, "epochs=2 and steps=3"),
        ({"epochs": None}, "got neither"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": None, "steps": -1}, "steps=-1"),
        ({"global_batch": 0}, "global_batch=0"),
        ({"micro_batch": 2.0}, "micro_batch=2.0"),
        ({"epochs": True}, "epochs=True"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"samples": 100, "global_batch": 16, "micro_batch": 8, "epochs": 2}
    with pytest.raises(UsageError, match=message):
        Schedule(**{**given, **arguments})
