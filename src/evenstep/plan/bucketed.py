"""Samples of similar length in one micro-batch, so that little is padded: an order within another order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenstep.errors import UsageError
from evenstep.plan.order import Indices, Order, array_digest, sorted_permutation
from evenstep.plan.schedule import Schedule

_WINDOW = 64  # micro-batches that are sorted together, at least
_WINDOWS = 4  # of an epoch, at least: else the same samples would meet in each (transformers' LengthGroupedSampler)


class Bucketed:
    """The positions of `order`, sorted by length within windows of some steps.

    The sorted samples of a window are cut into its micro-batches, which then come in a keyed order. So each sample that
    `order` has in a window is in it once, and who computes a micro-batch does not matter.
    """

    def __init__(self, order: Order, lengths: NDArray[np.generic], schedule: Schedule, seed: int) -> None:
        """`lengths`: one number for each index. `schedule`: whose steps and micro-batches these are."""
        self._order, self._lengths, self._seed = order, lengths, seed
        self._global_batch, self._micro_batch = schedule.global_batch, schedule.micro_batch
        self._used = schedule.samples_per_epoch
        steps = -(-_WINDOW // schedule.step(0).micro_batches)
        self._span = max(1, min(steps, schedule.steps_per_epoch // _WINDOWS)) * schedule.global_batch
        self._kept: tuple[int, int, Indices] = -1, -1, np.empty(0, np.int64)

    @property
    def length(self) -> int:
        return self._order.length

    @property
    def name(self) -> str:
        return f"{self._order.name}, lengths= {array_digest(self._lengths)}"

    def digest(self, epoch: int) -> str:
        return self._order.digest(epoch)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        parts = []
        for number in range(start // self._span, -(-min(stop, self._used) // self._span)):
            begin = number * self._span
            parts.append(self._window(epoch, number)[max(start - begin, 0) : stop - begin])
        if stop > self._used:  # what drop_last leaves out
            parts.append(self._order.indices(epoch, max(start, self._used), stop))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _window(self, epoch: int, number: int) -> Indices:
        if self._kept[:2] != (epoch, number):
            self._kept = epoch, number, self._sorted(epoch, number)
        return self._kept[2]

    def _sorted(self, epoch: int, number: int) -> Indices:
        begin = number * self._span
        end = min(begin + self._span, self._used)
        found = self._order.indices(epoch, begin, end)
        by_length = found[np.argsort(self._lengths[found], kind="stable")]
        steps = range(0, end - begin, self._global_batch)
        starts = np.concatenate(
            [np.arange(step, min(step + self._global_batch, end - begin), self._micro_batch) for step in steps]
        )
        sizes = np.diff(np.append(starts, end - begin))
        places = sorted_permutation(len(starts), self._seed, epoch, number, "buckets")
        starts, sizes = starts[places], sizes[places]
        result = np.empty_like(found)
        result[np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(end - begin)] = by_length
        return result


def bucketed(order: Order, lengths: object, samples: int, schedule: Schedule, seed: int) -> Bucketed:
    """`order` with samples of similar length sharing a micro-batch. `lengths`: 1-d, one number for each sample."""
    values = np.array(lengths)  # a copy: the script may change its own
    if values.dtype.kind not in "iuf":
        raise UsageError(
            f"lengths= is {type(lengths).__name__} of {values.dtype}, expected {samples} numbers, one for each sample",
            do="give a list, array or tensor of numbers, such as [len(text) for text in texts]",
        )
    if values.shape != (samples,):
        raise UsageError(
            f"lengths= has shape {values.shape}, expected ({samples},): one number for each sample",
            do="give one length for each index of the data set",
        )
    bad = np.flatnonzero(~np.isfinite(values) | (values < 0))
    if len(bad):
        raise UsageError(f"lengths[{bad[0]}] is {values[bad[0]]}, expected a finite number of at least 0")
    return Bucketed(order, values, schedule, seed)
