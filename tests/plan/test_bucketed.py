"""Samples of similar length share a micro-batch: each once, on any layout, and little is padded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import UsageError
from evenstep.plan.bucketed import bucketed
from evenstep.plan.order import Natural, Shuffled
from evenstep.plan.schedule import Schedule
from evenstep.plan.weighted import weighted


def micro_batches(schedule: Schedule, order: Any, epoch: int = 0) -> list[Any]:
    steps = [schedule.step(number) for number in range(schedule.steps_per_epoch)]
    return [order.indices(epoch, *step.micro(i)) for step in steps for i in range(step.micro_batches)]


@given(st.data())
def test_each_position_of_the_order_once_in_its_window_and_any_part_alone(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 700))
    micro = data.draw(st.integers(1, samples))
    drop_last = data.draw(st.booleans())
    schedule = Schedule(
        samples,
        data.draw(st.integers(micro, samples if drop_last else samples + 9)),
        micro,
        epochs=2,
        drop_last=drop_last,
    )
    seed, epoch = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 3))
    lengths = np.random.default_rng(seed).integers(0, 20, samples)
    base = data.draw(st.sampled_from([Shuffled(samples, seed), Natural(samples), weighted(lengths + 1, samples, seed)]))
    order = bucketed(base, lengths, samples, schedule, seed)
    whole = order.indices(epoch, 0, samples)
    assert order.length == len(whole) == samples
    used = schedule.samples_per_epoch
    given_ = base.indices(epoch, 0, samples)
    for begin in range(0, used, order._span):
        end = min(begin + order._span, used)
        assert sorted(whole[begin:end]) == sorted(given_[begin:end])
    assert np.array_equal(whole[used:], given_[used:])
    start = data.draw(st.integers(0, samples))
    stop = data.draw(st.integers(start, samples))
    assert np.array_equal(order.indices(epoch, start, stop), whole[start:stop])


def test_little_is_padded_and_neither_steps_nor_epochs_are_alike() -> None:
    lengths = np.random.default_rng(0).integers(1, 513, 20_000)
    schedule = Schedule(len(lengths), 256, 32, epochs=3)
    order = bucketed(Shuffled(len(lengths), 5), lengths.tolist(), len(lengths), schedule, 5)
    batches = micro_batches(schedule, order)
    wasted = 1 - lengths.sum() / sum(len(b) * lengths[b].max() for b in batches)
    plain = micro_batches(schedule, Shuffled(len(lengths), 5))
    assert wasted < 0.02 < 0.45 < 1 - lengths.sum() / sum(len(b) * lengths[b].max() for b in plain)
    means = np.array([lengths[order.indices(0, s * 256, s * 256 + 256)].mean() for s in range(78)])
    assert means.std() < 512 / np.sqrt(12) / np.sqrt(8) * 1.3  # as that of 8 independent micro-batches
    assert abs(means[:39].mean() - means[39:].mean()) < 30
    position = np.array([lengths[b].mean() for b in batches[:-1]])
    assert abs(np.corrcoef(position[:-1], position[1:])[0, 1]) < 0.2
    again = {frozenset(b.tolist()) for b in micro_batches(schedule, order, epoch=1)}
    assert not again & {frozenset(b.tolist()) for b in batches}


def test_a_small_epoch_is_not_sorted_as_a_whole() -> None:
    lengths = np.arange(400)
    schedule = Schedule(400, 20, 10, epochs=2)
    order = bucketed(Shuffled(400, 0), lengths, 400, schedule, 0)
    first, second = ({frozenset(b.tolist()) for b in micro_batches(schedule, order, epoch)} for epoch in (0, 1))
    assert not first & second


def test_the_order_is_the_same_on_every_machine_and_for_ever() -> None:
    order = bucketed(Shuffled(20, 1), [i % 5 for i in range(20)], 20, Schedule(20, 8, 3, epochs=1), 1)
    assert order.indices(0, 0, 20).tolist() == [5, 0, 6, 2, 13, 3, 11, 17, 10, 16, 1, 9, 4, 19, 18, 8, 15, 7, 12, 14]
    assert order.name.startswith("shuffled, lengths= ")
    other = bucketed(Shuffled(20, 1), [i % 4 for i in range(20)], 20, Schedule(20, 8, 3, epochs=1), 1)
    assert other.name != order.name
    assert order.digest(1) == ""


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1] * 9, r"shape \(9,\), expected \(10,\)"),
        ([[1]] * 10, r"shape \(10, 1\)"),
        (["a"] * 10, "expected 10 numbers, one for each sample"),
        ([1] * 9 + [-1], r"lengths\[9\] is -1"),
        ([1.0] * 9 + [float("nan")], r"lengths\[9\] is nan"),
        ([True] * 10, "list of bool"),
    ],
)
def test_lengths_that_cannot_work_are_refused(lengths: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bucketed(Natural(10), lengths, 10, Schedule(10, 4, 2, epochs=1), 0)
